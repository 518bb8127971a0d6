"""The `oscarkv` command. One file a command; torch is imported only once a command needs it.

Imports everything else in the package, and is imported by nothing.
"""

from oscarkv.cli.app import app, main

__all__ = ["app", "main"]
