"""Everything measured of one model, on one page.

page.py     what pages share: style, figures as SVG, marked differences (the demo's, too)
sources.py  records of fidelity, needles and tasks, read from JSON and put together
plots.py    the figures      examples.py  the worst answers      report.py  the page
"""
