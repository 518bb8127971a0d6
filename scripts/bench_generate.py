"""Decoding speed of a Transformers model, with the stock cache and with a packed one.

    python scripts/bench_generate.py --json out.json       # on a GPU, under a minute
    python scripts/bench_generate.py --tiny                # anywhere, to see that it runs

The model has random weights, made on the device; the packed cache has the default recipe's format
with transforms that need no calibration (Hadamard). Speed and bytes depend on neither. Contexts are
not prefilled: both caches are filled with the same random keys and values. Then both read the same
tokens, one at a time, and the device is waited for after each, as generate() does. The stock cache
is `DynamicCache`, which copies all it holds when a token is added; attention over it is SDPA, as
PyTorch chooses it and with flash attention alone: the first may take tens of milliseconds a token
whatever the length, presumably cuDNN's preparation for each new one. The faster counts, and the
record has both.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.cache_utils import Cache, DynamicCache

from oscarkv import Artifact, OscarCache, Recipe, attach
from oscarkv.artifact import reader_of
from oscarkv.benchmark import machine
from oscarkv.integrations.transformers.batch import real_tokens
from oscarkv.integrations.transformers.cache import OscarLayer
from oscarkv.integrations.transformers.calibrate import data_free
from oscarkv.integrations.transformers.geometry import describe

FORMAT = "oscarkv-generate-1"
#: How the stock cache's attention is computed.
SDPA_KERNELS = {"PyTorch's choice": [], "flash": [SDPBackend.FLASH_ATTENTION]}
#: Tokens that are filled in at a time.
CHUNK = 4096


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--contexts", default="8192,32768,131072", help="tokens in the cache")
    add("--layers", type=int, default=16)
    add("--query-heads", type=int, default=32)
    add("--kv-heads", type=int, default=8)
    add("--head-dim", type=int, default=128)
    add("--hidden", type=int, default=4096)
    add("--intermediate", type=int, default=14336)
    add("--vocabulary", type=int, default=32000)
    add("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    add("--batch", type=int, default=1)
    add("--steps", type=int, default=32, help="tokens timed")
    add("--warm-up", type=int, default=8, help="tokens before those")
    add("--backend", default="auto", help="auto, cuda, triton or torch")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--json", type=Path, metavar="OUT", help="write the figures here")
    add("--tiny", action="store_true", help="a tiny model and short contexts, on the CPU too")
    chosen = parser.parse_args(words)
    if chosen.tiny:
        chosen.contexts, chosen.steps, chosen.warm_up = "512,1024", 4, 1
        chosen.layers, chosen.query_heads, chosen.kv_heads, chosen.head_dim = 2, 4, 2, 64
        chosen.hidden, chosen.intermediate, chosen.vocabulary = 128, 128, 256
    return chosen


def make_model(chosen: argparse.Namespace, longest: int) -> Any:
    config = LlamaConfig(
        vocab_size=chosen.vocabulary,
        hidden_size=chosen.hidden,
        intermediate_size=chosen.intermediate,
        num_hidden_layers=chosen.layers,
        num_attention_heads=chosen.query_heads,
        num_key_value_heads=chosen.kv_heads,
        head_dim=chosen.head_dim,
        max_position_embeddings=longest,
    )
    torch.manual_seed(0)
    with torch.device(chosen.device):  # random numbers are made there: no time to speak of
        model = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, chosen.dtype), attn_implementation="sdpa"
        )
    return model.eval()


def make_artifact(model: Any) -> Artifact:
    """The default recipe's format, with transforms of a recipe that needs no text."""
    geometry = describe(model)
    free = data_free(geometry, range(geometry.identity.layers), Recipe.named("quarot-int2"))
    recipe = Recipe()
    for layer in free.layers.values():
        layer.query = reader_of(layer.key, recipe)
    return Artifact(free.model, recipe, free.layers, {"tokens": 0})


def random_chunk(
    model: Any, layer: int, batch: int, start: int, context: int
) -> tuple[Tensor, Tensor]:
    """Keys and values [B, H, n, d] of one layer from a position on, the same for every cache."""
    config = model.config
    rng = torch.Generator(model.device).manual_seed(start * config.num_hidden_layers + layer)
    shape = (2, batch, config.num_key_value_heads, min(CHUNK, context - start), config.head_dim)
    made = torch.randn(shape, generator=rng, dtype=model.dtype, device=model.device)
    keys, values = made.unbind(0)
    return keys, values


def fill_stock(cache: DynamicCache, model: Any, batch: int, context: int) -> None:
    config = model.config
    shape = (2, batch, config.num_key_value_heads, context, config.head_dim)
    for layer in range(config.num_hidden_layers):
        whole = torch.empty(shape, dtype=model.dtype, device=model.device)
        for start in range(0, context, CHUNK):
            for side, rows in enumerate(random_chunk(model, layer, batch, start, context)):
                whole[side, :, :, start : start + CHUNK] = rows
        cache.update(*whole.unbind(0), layer)


def fill_packed(cache: OscarCache, model: Any, batch: int, context: int) -> None:
    """What a prompt in chunks does, without attention."""
    for start in range(0, context, CHUNK):
        for index, layer in enumerate(cache.layers):
            assert isinstance(layer, OscarLayer)
            k, v = random_chunk(model, index, batch, start, context)
            new = k.shape[2]
            layer.update(k, v)
            step = cache.step(layer, batch, new, None)
            k, v = (real_tokens(x, cache.padding, layer.seen) for x in (k, v))
            cache.backend.write(k, v, step.history_slots, step.window_slots, layer.store)
            cache.after(layer)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.no_grad()
def time_steps(model: Any, cache: Cache, ids: Tensor, warm_up: int) -> dict[str, Any]:
    """Milliseconds a token, and of those the part in which Python still had work to give out."""
    totals, hosts = [], []
    wait(model.device)
    for index in range(ids.shape[1]):
        began = time.perf_counter()
        logits = model(ids[:, index : index + 1], past_key_values=cache, use_cache=True).logits
        hosts.append(time.perf_counter() - began)
        wait(model.device)
        totals.append(time.perf_counter() - began)
    if not bool(torch.isfinite(logits).all()):
        raise SystemExit("the model's output is not finite: the cache or a kernel is wrong")
    totals, hosts = totals[warm_up:], hosts[warm_up:]
    median = statistics.median(totals)
    return {
        "ms_per_token": 1e3 * median,
        "mean_ms_per_token": 1e3 * statistics.mean(totals),
        "host_ms_per_token": 1e3 * statistics.median(hosts),
        "tokens_per_second": ids.shape[0] / median,
    }


def bench_context(
    model: Any, artifact: Artifact, context: int, chosen: argparse.Namespace
) -> dict[str, Any]:
    rng = torch.Generator().manual_seed(1)
    shape = (chosen.batch, chosen.warm_up + chosen.steps)
    ids = torch.randint(chosen.vocabulary, shape, generator=rng).to(model.device)

    row: dict[str, Any] = {"context": context, "stock_kernels": {}}
    for name, kernels in SDPA_KERNELS.items():
        stock = DynamicCache(config=model.config)
        fill_stock(stock, model, chosen.batch, context)
        with sdpa_kernel(kernels) if kernels and model.device.type == "cuda" else nullcontext():
            figures = time_steps(model, stock, ids, chosen.warm_up)
        figures["cache_bytes"] = sum(x.keys.nbytes + x.values.nbytes for x in stock.layers)
        row["stock_kernels"][name] = figures
        del stock
        release()
    row["stock_kernel"] = min(SDPA_KERNELS, key=lambda x: row["stock_kernels"][x]["ms_per_token"])
    row["stock"] = row["stock_kernels"][row["stock_kernel"]]

    packed = OscarCache(model, artifact, backend=chosen.backend)
    try:
        fill_packed(packed, model, chosen.batch, context)
        row["packed"] = time_steps(model, packed, ids, chosen.warm_up)
        row["packed"] |= {"cache_bytes": packed.nbytes(), "backend": packed.backend.name}
    finally:
        attach(model, artifact).detach()  # the stock cache runs on an untouched model
    del packed
    release()
    row["speedup"] = row["stock"]["ms_per_token"] / row["packed"]["ms_per_token"]
    row["bytes_ratio"] = row["stock"]["cache_bytes"] / row["packed"]["cache_bytes"]
    return row


def release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def run(chosen: argparse.Namespace) -> dict[str, Any]:
    began = time.perf_counter()
    if torch.device(chosen.device).type == "cpu":
        torch.set_num_threads(1)  # small models' threads only wait for each other
        print("no GPU: this shows that everything runs; the times say nothing")
    contexts = [int(part) for part in str(chosen.contexts).split(",")]
    with torch.no_grad():
        model = make_model(chosen, max(contexts) + chosen.warm_up + chosen.steps)
        artifact = make_artifact(model)
        print("context     stock ms  packed ms  (host)   faster  stock MB  packed MB  smaller")
        rows = []
        for context in contexts:
            row = bench_context(model, artifact, context, chosen)
            rows.append(row)
            stock, packed = row["stock"], row["packed"]
            print(
                f"{context:7d}  {stock['ms_per_token']:11.3f}{packed['ms_per_token']:11.3f}"
                f"  ({packed['host_ms_per_token']:5.2f})  x{row['speedup']:5.2f}"
                f"{stock['cache_bytes'] / 1e6:10.1f}{packed['cache_bytes'] / 1e6:11.1f}"
                f"   x{row['bytes_ratio']:.2f}  (stock: {row['stock_kernel']})",
                flush=True,
            )
    on_gpu = model.device.type == "cuda"
    knobs = "layers query_heads kv_heads head_dim hidden intermediate vocabulary dtype batch"
    return {
        "format": FORMAT,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": machine.gpu(model.device.index or 0).name if on_gpu else machine.processor(),
        "driver": machine.driver() if on_gpu else None,
        "gpu": asdict(machine.gpu(model.device.index or 0)) if on_gpu else None,
        "versions": machine.versions(),
        "geometry": {name: getattr(chosen, name) for name in knobs.split()},
        "recipe": f"{artifact.recipe.name}; Hadamard transforms, uncalibrated; random weights",
        "context_filled": "with random keys and values, not by a prompt",
        "steps": chosen.steps,
        "warm_up": chosen.warm_up,
        "contexts": rows,
        "seconds": round(time.perf_counter() - began, 1),
    }


def main(words: Sequence[str] | None = None) -> None:
    chosen = arguments(words)
    record = run(chosen)
    print(f"{record['device']}, {record['contexts'][0]['packed']['backend']} backend; "
          f"{record['seconds']} s in all")  # fmt: skip
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
