"""A sample of what was served is rescored with full-precision attention, off the hot path.

`options.py` is the section `canary` of the settings; `attach.py` puts the two ends in place;
`watch.py`, beside the API server, chooses finished requests and has the workers rescore them;
`worker.py` runs the model twice, with the attention of `attention.py`; `report.py` is what becomes
of the scores: Prometheus metrics, and a line in the log when one crosses its threshold.
"""
