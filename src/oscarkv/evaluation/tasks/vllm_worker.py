"""One vLLM engine that answers requests, in a process of its own, so that its memory goes with it.

    python -m oscarkv.evaluation.tasks.vllm_worker FILE

FILE holds the model, the engine's arguments and the requests, as JSON. Every answer is printed as
soon as it is there, as one line of JSON behind a mark.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from oscarkv.integrations.vllm.proof import implementations, require_plugin

MARK = "@oscarkv-task "


def emit(event: str, **figures: Any) -> None:
    print(MARK + json.dumps({"event": event, **figures}), flush=True)


def main() -> None:
    asked = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    try:
        _run(asked)
    except Exception as error:
        traceback.print_exc()
        reason = " ".join(str(error).split())[:400]
        emit("failed", reason=f"{type(error).__name__}: {reason}")
        sys.exit(1)


def _end_with_the_parent() -> None:
    """The parent never writes here, and the pipe ends with it: no engine is left holding a GPU."""
    sys.stdin.read()
    os.killpg(0, signal.SIGKILL)


def _run(asked: dict[str, Any]) -> None:
    from vllm import LLM

    begin = time.perf_counter()
    llm = LLM(asked["model"], **asked["engine"])
    engine = llm.llm_engine
    config = engine.vllm_config
    attention = implementations(config)
    if "additional_config" in asked["engine"]:
        require_plugin(attention)
    emit(
        "started",
        attention=attention,
        seconds=time.perf_counter() - begin,
        kv_tokens=config.cache_config.kv_cache_size_tokens,
        max_model_len=config.model_config.max_model_len,
        dtype=str(config.model_config.dtype).removeprefix("torch."),
    )
    for request in asked["requests"]:
        sampling = _sampling(request, asked["sampling"])
        engine.add_request(request["key"], {"prompt_token_ids": request["tokens"]}, sampling)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                made = output.outputs[0]
                emit(
                    "answer",
                    key=output.request_id,
                    text=made.text,
                    tokens=len(made.token_ids),
                    finish=made.finish_reason or "stop",
                )
    emit("done", seconds=time.perf_counter() - begin)


def _sampling(request: dict[str, Any], chosen: dict[str, Any]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    greedy = chosen["temperature"] == 0
    return SamplingParams(
        temperature=chosen["temperature"],
        top_p=1.0 if greedy else chosen["top_p"],
        top_k=0 if greedy else chosen["top_k"],
        seed=None if greedy else request["seed"],
        max_tokens=request["max_new_tokens"],
        stop=list(request["stop"]) or None,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


if __name__ == "__main__":
    main()
