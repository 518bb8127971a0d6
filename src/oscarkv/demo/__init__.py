"""The embedded demo: calibrate, measure and generate with SmolLM2, and a report in one HTML file.

`generation.py` is also what `oscarkv generate` runs. Imports everything but the command line.
"""
