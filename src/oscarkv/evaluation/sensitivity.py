"""Where the error comes from: keys or values, which layer, which head.

Each part is rounded by itself, with everything else exact, on the same windows. The parts are
rounded on dense tensors with the codec of the packed cache, which gives the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from oscarkv.calibration.budget import SIDES
from oscarkv.evaluation.checkpoint import Checkpoint
from oscarkv.evaluation.fidelity import Progress, measure_fidelity
from oscarkv.evaluation.subjects import Simulated, Subject

#: What can be asked for.
PARTS = ("sides", "layers", "heads")


@dataclass
class PartScore:
    """KL with one part rounded. `layer`, `head` None: all of them."""

    sides: str  # "keys", "values" or "keys+values"
    layer: int | None
    head: int | None
    kl: float
    kl_se: float


@dataclass
class Sensitivity:
    length: int
    windows: int
    parts: list[PartScore] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def of(self, *, sides: str = "keys+values", layer: int | None = None) -> float:
        return next(p.kl for p in self.parts if (p.sides, p.layer, p.head) == (sides, layer, None))


def measure_sensitivity(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    subject: Simulated,
    *,
    parts: Sequence[str] = ("sides", "layers"),
    length: int = 4096,
    windows: int = 4,
    checkpoint: Checkpoint | None = None,
    progress: Progress | None = None,
) -> Sensitivity:
    """KL of each part of a subject. "layers" rounds keys and values of each layer apart, "heads"
    both sides of one KV head of one layer."""
    both = "+".join(SIDES)
    wanted: dict[tuple[str, int | None, int | None], Subject] = {(both, None, None): subject}
    layers = sorted(subject.quantizers)
    if "sides" in parts:
        for side in SIDES:
            wanted[side, None, None] = subject.part(sides=[side])
    if "layers" in parts:
        for layer in layers:
            for side in SIDES:
                wanted[side, layer, None] = subject.part(layers=[layer], sides=[side])
    if "heads" in parts:
        for layer in layers:
            for head in range(_kv_heads(model)):
                wanted[both, layer, head] = subject.part(layers=[layer], heads=[head])
    names = {_name(*key): key for key in wanted}
    result = measure_fidelity(
        model,
        tokenizer,
        texts,
        {name: wanted[key] for name, key in names.items()},
        length=length,
        windows=windows,
        checkpoint=checkpoint,
        progress=progress,
    )
    return Sensitivity(
        result.length,
        result.windows,
        [
            PartScore(*names[name], kl=score.kl, kl_se=score.kl_se)
            for name, score in result.recipes.items()
        ],
    )


def _name(sides: str, layer: int | None, head: int | None) -> str:
    where = "all layers" if layer is None else f"layer {layer}"
    return f"{sides}, {where}" + ("" if head is None else f", head {head}")


def _kv_heads(model: Any) -> int:
    config = model.config.get_text_config(decoder=True)
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
