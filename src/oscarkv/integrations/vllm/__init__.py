"""A vLLM plugin: the packed history and the exact windows as two of vLLM's own cache groups.

`plugin.py` is the entry point; `settings.py` reads `--additional-config`; `backend.py` tells vLLM
what a page is; `windows.py` is the group of exact tokens and its block manager; `metadata.py`,
`impl.py` and `layers.py` run a step. What is known of vLLM's interfaces: docs/vllm-notes.md.
"""
