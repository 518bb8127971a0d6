"""A GGUF file as a model directory of bfloat16 safetensors, which vLLM and Transformers can load.

    python scripts/convert_gguf.py model.gguf model-bf16

Weights are dequantised to float32 and rounded once to bfloat16. Where the `gguf` package is not
installed, put a copy of it on PYTHONPATH (it is plain Python).
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from oscarkv.integrations.transformers.models import load_model


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("gguf", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    begin = time.perf_counter()
    model, tokenizer = load_model(options.gguf, dtype=torch.bfloat16, device="cpu")
    options.folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(options.folder)
    tokenizer.save_pretrained(options.folder)
    size = sum(path.stat().st_size for path in options.folder.iterdir())
    print(f"{options.folder}: {size / 1e9:.2f} GB in {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
