"""How fast the kernels are: against BF16 attention, and against what the memory allows.

`cases.py` says what is timed, `synthetic.py` makes its data, `timing.py` times it, `baseline.py`
has what it is compared with, `accuracy.py` checks that the result is right, `run.py` puts them
together and `report.py` writes it down. Imports `kernels` and below; knows no engine.
"""
