"""An SGLang plugin: packed history and exact windows in one pool of SGLang's own pages.

`plugin.py` is the entry point, `options.py` the command line, `hooks.py` where SGLang is entered;
`pool.py` is the memory, `allocator.py` hands out its pages, `windows.py` says which of them hold
exact tokens, `tree.py` is the radix cache; `backend.py` attends. What is known of SGLang's
interfaces: docs/sglang.md.
"""
