"""Questions with known answers: does a model with a packed cache still solve them?

data.py     rows from local files, or from the hub
task.py     what a task is; one file each: gsm8k.py, math500.py, ...; registry.py lists them
answers.py  finding an answer in a text      sandbox.py  running code, in a process of its own
run.py      every setting answers the same prompts; record.py keeps them, report.py compares
engines     transformers_engine.py, vllm_engine.py with vllm_worker.py
harness.py  the same engines under lm-eval   plan.py     protocols, checked in under plans/
"""
