"""Whether a model, an artifact and this engine fit, and what the cache will hold and cost.

For `oscarkv ENGINE check`: reads a configuration and an artifact, no weights, and needs no engine.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from oscarkv.artifact.summary import summarise
from oscarkv.codec import PageLayout
from oscarkv.errors import (
    MissingDependencyError,
    ModelMismatchError,
    OscarError,
    UnsupportedModelError,
)
from oscarkv.integrations.serving.settings import Settings
from oscarkv.integrations.transformers.geometry import (
    FULL,
    SLIDING,
    STATES,
    ModelGeometry,
    describe_config,
)
from oscarkv.integrations.transformers.models import load_config
from oscarkv.recipe import Recipe

GIB = 1 << 30
GOOD, WARNING, PROBLEM = "good", "warning", "problem"
#: Kinds of RoPE with which a configuration states its context as it is after scaling.
SCALED_ALREADY = ("llama3", "longrope", "su", "yarn")
#: Types of tensors, in safetensors' words, that engines convert to the dtype they serve.
CONVERTED = {"F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True)
class Engine:
    """What differs between engines. `capacity` takes layers, KV heads of a rank, head_dim, dtype,
    recipe and longest request, and counts as the engine does."""

    name: str
    command: str  # of `oscarkv bench serving --engine`
    length_option: str
    version: Callable[[], str]
    check_version: Callable[[str], None]
    capacity: Callable[..., Any]
    mixes_caches: bool  # layers may keep the engine's own cache beside packed ones


@dataclass(frozen=True)
class Finding:
    """One line of the answer."""

    what: str
    verdict: str  # good, warning or problem
    text: str


@dataclass(frozen=True)
class Memory:
    """Bytes for the KV cache of one GPU, and how they were arrived at."""

    bytes: int
    how: str


@dataclass
class Fit:
    """The answer. `figures` are set as far as everything fits."""

    model: str
    artifact: str
    findings: list[Finding] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        return all(finding.verdict != PROBLEM for finding in self.findings)

    def say(self, what: str, text: str, verdict: str = GOOD) -> None:
        self.findings.append(Finding(what, verdict, text))

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "artifact": self.artifact,
            "fits": self.good,
            "findings": [vars(finding) for finding in self.findings],
            **self.figures,
        }


def examine(
    engine: Engine,
    model: str,
    settings: Settings,
    *,
    dtype: str = "auto",
    max_model_len: int | None = None,
    tensor_parallel_size: int = 1,
    memory: Memory | None = None,
) -> Fit:
    """`settings` are those of the server; OscarError: something cannot be read at all."""
    fit = Fit(model, settings.artifact)
    config = load_config(model)
    served = cache_dtype(config, dtype)
    _engine(fit, engine)
    try:
        geometry = geometry_of(config, model)
    except UnsupportedModelError as error:
        fit.say("model", str(error), PROBLEM)
        return fit
    _identity(fit, settings, geometry)
    settings = _bits_of_layers(fit, engine, settings, geometry)
    packed = _layers(fit, engine, settings, geometry)
    heads = _heads(fit, geometry, tensor_parallel_size)
    _length(fit, engine, max_model_len, longest_context(config, geometry.identity.context))
    if not fit.good:
        return fit
    length = max_model_len or geometry.identity.context
    if not length:
        raise OscarError(
            f"{model} does not say how long its context is; give {engine.length_option}"
        )
    capacity = engine.capacity(
        packed,
        heads,
        geometry.identity.head_dim,
        served,
        settings.recipe,
        length,
        *([settings.others] if settings.others else ()),
    )
    try:
        if set(STATES).isdisjoint(geometry.layer_types):
            _windows(fit, capacity)
        else:
            fit.say(
                "cache",
                f"pages of {capacity.layout.page_size} tokens, in blocks as large as a state: what "
                f"they reserve is known when {engine.name} starts. There is no prefix cache",
                WARNING,
            )
    except OscarError as error:  # a head_dim without pages
        fit.say("cache", str(error), PROBLEM)
        return fit
    if packed < geometry.identity.layers:
        text = f"not foretold: {engine.name} shares memory out among kinds of layers when it starts"
        fit.say("capacity", text, WARNING)
    elif memory is not None:
        _memory(fit, engine, capacity, memory)
    _cost(fit, engine, settings, capacity)
    return fit


def geometry_of(config: Any, model: str) -> ModelGeometry:
    architecture = (getattr(config, "architectures", None) or ["unknown"])[0]
    return describe_config(config, Path(model).name, architecture)


def cache_dtype(config: Any, asked: str) -> torch.dtype:
    """What engines keep windows in: the model's dtype, but bfloat16 for models in float32."""
    found = getattr(config.get_text_config(decoder=True), "dtype", None) or config.dtype
    if asked != "auto":
        found = getattr(torch, asked, None)
        if found not in (torch.float32, torch.float16, torch.bfloat16):
            raise OscarError(f"unknown dtype {asked!r}: use auto, float32, bfloat16 or float16")
        return found
    return torch.bfloat16 if found in (None, torch.float32) else found


def longest_context(config: Any, stated: int) -> int:
    """The longest request that engines take; some kinds of RoPE stretch the context that a
    configuration states. 0: it states none."""
    text = config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    factors = [
        part.get("factor") or 1
        for part in parts
        if part.get("rope_type") not in SCALED_ALREADY
        and "original_max_position_embeddings" not in part
        and not text.model_type.startswith("gemma3")  # states it scaled, whatever the kind
    ]
    return int(max(stated * max(factors, default=1), getattr(text, "model_max_length", 0) or 0))


def memory_of(
    engine: Engine,
    model: str,
    utilization: float,
    total: int,
    tensor_parallel_size: int,
    dtype: str = "auto",
) -> Memory:
    """What an engine would leave for the cache: a share of the GPU, less the weights."""
    weights = weight_bytes(model, cache_dtype(load_config(model), dtype))
    if weights is None:
        raise OscarError(f"no weights in {model} whose size could be taken off; give --memory")
    left = int(total * utilization) - weights // tensor_parallel_size
    if left <= 0:
        raise OscarError(
            f"{utilization:g} of {total / GIB:.1f} GiB does not hold the weights "
            f"({weights / tensor_parallel_size / GIB:.1f} GiB a GPU)"
        )
    how = (
        f"{utilization:g} of {total / GIB:.1f} GiB less {weights / tensor_parallel_size / GIB:.1f} "
        f"GiB of weights; {engine.name} also takes off what a step needs, seen when it starts"
    )
    return Memory(left, how)


def weight_bytes(model: str, served: torch.dtype) -> int | None:
    """What the weights take as they are served; None: there are none here."""
    files = weight_files(Path(model).expanduser())
    return sum(_served_bytes(file, served) for file in files) or None


def weight_files(folder: Path) -> list[Path]:
    """Those that engines load: a directory may hold the same weights in other forms too."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise OscarError(f"{index} is not a readable index of weights") from error
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise OscarError(f"{index} names {missing[0]}, which is not there; give --memory")
        return [folder / name for name in names]
    found = sorted(folder.glob("*.safetensors"))
    return [file for file in found if not file.name.startswith("consolidated")]


def _served_bytes(file: Path, served: torch.dtype) -> int:
    """The header of a safetensors file is its length, 8 bytes, and JSON."""
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(min(length, file.stat().st_size)))
        tensors = [entry for name, entry in header.items() if name != "__metadata__"]
        sizes = [(entry["dtype"], entry["data_offsets"]) for entry in tensors]
    except (ValueError, KeyError, AttributeError, struct.error) as error:
        raise OscarError(f"{file} is not a readable safetensors file") from error
    return sum(
        (end - start) * served.itemsize // CONVERTED.get(kind, served.itemsize)
        for kind, (start, end) in sizes
    )


# -- what is looked at -----------------------------------------------------------------------------


def _engine(fit: Fit, engine: Engine) -> None:
    try:
        found = engine.version()
    except MissingDependencyError as error:
        fit.say("engine", f"{error}; the rest holds for a version it knows", WARNING)
        return
    try:
        engine.check_version(found)
    except MissingDependencyError as error:
        fit.say("engine", str(error), PROBLEM)
    else:
        fit.say("engine", f"{engine.name} {found}")


def _identity(fit: Fit, settings: Settings, geometry: ModelGeometry) -> None:
    mine, theirs = settings.loaded.model, geometry.identity
    fit.say(
        "model",
        f"{theirs.architecture}, {theirs.layers} layers, {theirs.query_heads} query and "
        f"{theirs.kv_heads} KV heads of {theirs.head_dim}, context {theirs.context:,}",
    )
    try:
        mine.require_match(theirs)
    except ModelMismatchError as error:
        fit.say("artifact", str(error), PROBLEM)
        return
    try:
        recipe = settings.recipe
    except OscarError as error:  # windows that cannot be
        fit.say("artifact", str(error), PROBLEM)
        return
    fit.say(
        "artifact",
        f"{recipe.name} for {mine.name}, written by oscarkv {settings.loaded.library_version} "
        "(geometry and RoPE agree; weights are not looked at here)",
    )
    if recipe.exact:
        fit.say("artifact", f"recipe {recipe.name!r} packs nothing", PROBLEM)


def _bits_of_layers(
    fit: Fit, engine: Engine, settings: Settings, geometry: ModelGeometry
) -> Settings:
    """The artifact's bits by layer, or the same for all where others keep the engine's cache."""
    packed = set(settings.loaded.layers) - set(settings.skip)
    full = [i for i, kind in enumerate(geometry.layer_types) if kind == FULL and i in packed]
    if not settings.loaded.mixed or len(full) == geometry.identity.layers:
        return settings
    if not engine.mixes_caches:  # which `_layers` says
        return settings
    recipe = settings.recipe
    fit.say(
        "bits",
        f"{recipe.key_bits} a key and {recipe.value_bits} a value in all layers: beside layers "
        f"that keep {engine.name}'s cache none can have more, as the artifact gives some",
        WARNING,
    )
    return dataclasses.replace(settings, uniform=True)


def _layers(fit: Fit, engine: Engine, settings: Settings, geometry: ModelGeometry) -> int:
    """How many layers are packed; the others keep the engine's own cache, where it can."""
    total = geometry.identity.layers
    reasons = {i: kind for i, kind in enumerate(geometry.layer_types) if kind != FULL}
    for index in set(range(total)) - set(settings.loaded.layers):
        reasons.setdefault(index, "no transforms")
    reasons |= dict.fromkeys(settings.skip, "skipped")
    packed = total - len(reasons)
    if not reasons:
        fit.say("layers", f"all {total} are packed, none keeps {engine.name}'s cache")
        return packed
    parts = [
        f"{_numbers(i for i, why in reasons.items() if why == reason)} ({reason})"
        for reason in sorted(set(reasons.values()))
    ]
    text = f"{packed} of {total} are packed; {'; '.join(parts)}: {engine.name}'s own cache"
    other = set(geometry.layer_types) - {FULL, SLIDING, *STATES}  # chunks: not even skipped
    mixes = engine.mixes_caches and not other
    if not mixes:
        text += ", which it cannot have beside oscarkv's"
    fit.say("layers", text, WARNING if packed and mixes else PROBLEM)
    return packed


def _numbers(layers: Any) -> str:
    found = sorted(layers)
    noun = "layer" if len(found) == 1 else "layers"
    return f"{noun} {', '.join(map(str, found))}"


def _heads(fit: Fit, geometry: ModelGeometry, ranks: int) -> int:
    model = geometry.identity
    total = model.kv_heads
    if model.query_heads % ranks or (total % ranks and ranks % total):
        fit.say("ranks", f"{model.query_heads} query and {total} KV heads do not go into {ranks}",
                PROBLEM)  # fmt: skip
        return total
    heads = max(1, total // ranks)
    if ranks > 1:
        shared = f", each held by {ranks // total} of them" if ranks > total else ""
        fit.say("ranks", f"{ranks}, with {heads} of {total} KV heads each{shared}")
    return heads


def _length(fit: Fit, engine: Engine, asked: int | None, longest: int) -> None:
    if asked is not None and longest and asked > longest:
        text = f"{engine.length_option} {asked:,} is above the model's context, {longest:,} tokens"
        fit.say("length", text, PROBLEM)


def _recipes(capacity: Any) -> list[Recipe]:
    """Each packed layer's, in no order."""
    others = list(getattr(capacity, "others", ()))
    return [capacity.recipe] * (capacity.layers - len(others)) + others


def _history_bits(capacity: Any) -> float:
    recipes = _recipes(capacity)
    return sum(recipe.history_bits(capacity.head_dim) for recipe in recipes) / len(recipes)


def _windows(fit: Fit, capacity: Any) -> None:
    recipe, length = capacity.recipe, capacity.max_model_len
    fit.figures |= {
        "max_model_len": length,
        "page_tokens": capacity.layout.page_size,
        "bits_per_element": round(capacity.bits, 4),
        "history_bits_per_element": round(_history_bits(capacity), 4),
        "gain": round(capacity.gain, 4),
    }
    name = str(capacity.dtype).removeprefix("torch.")
    fit.say(
        "cache",
        f"pages of {capacity.layout.page_size} tokens, sink {recipe.sink} and recent "
        f"{recipe.recent} tokens in {name}: {capacity.bits:.2f} bits an element at {length:,} "
        "tokens, with parameters, padding, windows and the packed copies of window tokens",
    )
    if length <= recipe.sink + recipe.recent:
        fit.say("cache", f"all {length:,} tokens lie in the windows: nothing is gained", WARNING)


def _memory(fit: Fit, engine: Engine, capacity: Any, memory: Memory) -> None:
    length = capacity.max_model_len
    tokens, plain = capacity.tokens(memory.bytes), capacity.plain_tokens(memory.bytes)
    fit.figures |= {
        "memory_bytes": memory.bytes,
        "tokens": tokens,
        "plain_tokens": plain,
        "concurrency": round(tokens / length, 2),
        "plain_concurrency": round(plain / length, 2),
        **capacity.figures(memory.bytes),
    }
    name = str(capacity.dtype).removeprefix("torch.")
    fit.say("memory", f"{memory.bytes / GIB:.2f} GiB a GPU for the cache: {memory.how}")
    fit.say(
        "capacity",
        f"{tokens:,} tokens instead of {plain:,} in {name}, {capacity.gain:.2f}x: "
        f"{tokens / length:.1f} requests of {length:,} tokens instead of {plain / length:.1f}",
    )
    if capacity.request_bytes(length) > capacity.usable_bytes(memory.bytes):
        fit.say(
            "capacity",
            f"one request of {length:,} tokens needs {capacity.request_bytes(length) / GIB:.2f} "
            f"GiB while its prompt is read; give more memory or a smaller {engine.length_option}",
            PROBLEM,
        )


def _cost(fit: Fit, engine: Engine, settings: Settings, capacity: Any) -> None:
    summary = summarise(settings.loaded)
    error, values = summary.mean_logit_error, [layer.value_error for layer in summary.layers]
    known = [value for value in values if value is not None]
    fit.figures["mean_logit_error"] = error
    if error is None:
        fit.say("fidelity", "this artifact does not say what error to expect", WARNING)
    else:
        means = f", of values {sum(known) / len(known):.4f}" if known else ""
        fit.say(
            "fidelity",
            f"predicted relative error of packed logits {error:.4f}{means} (held-back text); "
            f"{summary.fallback_heads} of {summary.heads} heads fell back to Hadamard; what it "
            "does to answers is measured by oscarkv eval fidelity",
        )
    heads, dim, length = capacity.heads, capacity.head_dim, capacity.max_model_len
    rows = sum(_row_bytes(recipe, capacity) for recipe in _recipes(capacity))
    plain = 2 * dim * capacity.dtype.itemsize * capacity.layers
    exact = min(capacity.recipe.sink + capacity.recipe.recent, length)
    read, before = heads * ((length - exact) * rows + exact * plain), heads * length * plain
    matrices = 5 if capacity.recipe.metric_rounding else 4
    transforms = capacity.layers * heads * (matrices * dim * dim + 2 * dim) * 4
    fit.figures |= {"step_bytes": read, "plain_step_bytes": before, "transform_bytes": transforms}
    fit.say(
        "decoding",
        f"a step reads {read / 1e6:,.1f} MB of cache for a sequence of {capacity.max_model_len:,} "
        f"tokens instead of {before / 1e6:,.1f} MB, and adds the encoding of the new token and a "
        f"{dim} x {dim} transform a head of queries, keys, values and output; the transforms take "
        f"{transforms / 1e6:,.1f} MB beside the cache. Times: oscarkv bench serving --engine "
        f"{engine.command}",
    )


def _row_bytes(recipe: Recipe, capacity: Any) -> int:
    """A token's key and value in one head of a layer."""
    layout = PageLayout.of(recipe, capacity.head_dim, capacity.layout.page_size)
    return layout.key_row.bytes + layout.value_row.bytes + 2 * layout.parameter_bytes
