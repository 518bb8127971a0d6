"""What the plugins of serving engines share. Imports no engine.

`settings.py` is what a user asks for; `windows.py` says which tokens are kept exact; `layers.py`
and `weights.py` turn an artifact into what the kernels need and check that it fits; `fit.py` is
`oscarkv ENGINE check`; `refusal.py` ends a server with one line.
"""
