"""Adapters beside a packed cache."""

import json
from pathlib import Path

import pytest

pytest.importorskip("vllm.config")

import torch
from safetensors.torch import save_file
from server_processes import run_script
from serving_models import prompts

SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

if __name__ == "__main__":
    path, adapter, asked, options = json.loads(sys.argv[1])
    extra = {} if options is None else {"additional_config": {"oscarkv": options}}
    llm = LLM(
        path, dtype="float32", skip_tokenizer_init=True, enforce_eager=True, max_model_len=2048,
        max_num_seqs=8, enable_lora=True, max_lora_rank=8, **extra,
    )
    sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    for lora in (None, LoRARequest("a", 1, adapter)):
        out = llm.generate(
            [{"prompt_token_ids": p} for p in asked], sampling, use_tqdm=False, lora_request=lora
        )
        print("TOKENS", json.dumps([list(o.outputs[0].token_ids) for o in out]), flush=True)
"""


def make_adapter(folder: Path, model) -> Path:
    """A random adapter of all projections of attention, large enough to change answers."""
    folder.mkdir()
    rng = torch.Generator().manual_seed(0)
    tensors, targets = {}, ["q_proj", "k_proj", "v_proj", "o_proj"]
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in targets:
            rows, columns = module.weight.shape
            prefix = f"base_model.model.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(8, columns, generator=rng) * 0.2
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(rows, 8, generator=rng) * 0.2
    save_file(tensors, folder / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return folder


def test_adapters_give_stock_tokens_with_exact_windows(tiny_model, tmp_path: Path):
    adapter = make_adapter(tmp_path / "adapter", tiny_model.model)
    asked = prompts(5, 300)
    found = []
    for options in (None, {"artifact": str(tiny_model.artifact), "recent": 4096}):
        arguments = [str(tiny_model.path), str(adapter), asked, options]
        done = run_script(tmp_path, SCRIPT, arguments, {})
        lines = [line for line in done.stdout.splitlines() if line.startswith("TOKENS ")]
        assert len(lines) == 2, done.stderr[-3000:]
        found.append(lines)
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]
