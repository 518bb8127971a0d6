"""vLLM engines in this process, one at a time."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # else SIGILL where AMX is barred
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import serving_models


class TinyModel(serving_models.TinyModel):
    @contextmanager
    def engine(self, options: dict[str, Any] | None = None, **knobs: Any) -> Iterator[Engine]:
        """An engine with oscarkv's options, or a stock one for None."""
        from vllm import LLM

        knobs = {
            "dtype": "float32",
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "max_model_len": 2048,
            "max_num_seqs": 8,
            "enable_prefix_caching": False,
        } | knobs
        if options is not None:
            section = {"artifact": str(self.artifact)} | options
            knobs["additional_config"] = {"oscarkv": section}
        engine = Engine(LLM(str(self.path), **knobs))
        try:
            yield engine
        finally:  # an engine that goes after the next one has come takes that one's groups along
            engine.close()


class Engine:
    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def generate(self, prompts: list[list[int]], new: int = 24) -> list[list[int]]:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self.llm.generate(asked, sampling, use_tqdm=False)
        self.cached = [output.num_cached_tokens for output in outputs]
        return [list(output.outputs[0].token_ids) for output in outputs]

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def manager(self) -> Any:
        return self.scheduler.kv_cache_manager

    @property
    def used_blocks(self) -> int:
        """Blocks that a request holds; vLLM keeps one back, the null block."""
        pool = self.manager.block_pool
        return pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()

    @property
    def layers(self) -> dict[str, Any]:
        config = self.llm.llm_engine.vllm_config
        return config.compilation_config.static_forward_context

    def close(self) -> None:
        self.llm = None
        gc.collect()
