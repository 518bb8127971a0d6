"""Where oscarkv meets other software. Nothing outside this folder knows any engine."""
