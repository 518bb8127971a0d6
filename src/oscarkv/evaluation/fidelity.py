"""How far a quantised cache moves a model's predictions from those with a full-precision cache.

All recipes and the reference run over the same token windows, so differences are paired. With
`strict`, every query reads the packed history just as it would when decoding; the packed cache
itself is measured, not a simulation of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oscarkv.artifact import Artifact
from oscarkv.artifact.files import write_atomically
from oscarkv.errors import OscarError
from oscarkv.integrations.transformers.attention import attention_implementation
from oscarkv.integrations.transformers.cache import OscarCache
from oscarkv.integrations.transformers.geometry import describe
from oscarkv.integrations.transformers.text import cut_sequences, text_sha256

FORMAT = "oscarkv-fidelity-1"
#: Positions before this are not scored: the windows cover most of their context.
FIRST_SCORED = 512
#: Positions whose logits are held at a time.
LOGITS_BLOCK = 256
#: Without `strict`, windows are fed in chunks of this many tokens, as a server would.
CHUNK = 512

#: Below this agreement with the full-precision cache, text is no longer text.
COLLAPSED = 0.5

Progress = Callable[[int, int, str], None]


@dataclass
class RecipeScore:
    """One recipe's distance from the full-precision cache. `_se`: standard errors."""

    kl: float = math.nan
    kl_se: float = math.nan
    top1: float = math.nan
    top1_se: float = math.nan
    ppl_ratio: float = math.nan
    ppl_ratio_se: float = math.nan
    bits_128k: float = math.nan
    bits_actual: float = math.nan  # at the length measured, windows counted as bf16
    layer_errors: dict[int, float] = field(default_factory=dict)
    kl_by_window: list[float] = field(default_factory=list)

    @property
    def collapsed(self) -> bool:
        """Whether the model no longer says what it would have said."""
        return self.top1 < COLLAPSED


@dataclass
class Fidelity:
    model: str
    text_sha256: str
    length: int
    windows: int
    strict: bool
    perplexity: float  # with the full-precision cache
    recipes: dict[str, RecipeScore]
    format: str = FORMAT

    def save(self, path: str | Path) -> None:
        text = json.dumps(_no_nan(asdict(self)), indent=2, allow_nan=False) + "\n"

        def write(part: Path) -> None:
            part.write_text(text, encoding="utf-8")

        write_atomically(Path(path), write)


@dataclass
class _WindowScore:
    kl: Tensor  # per scored position
    agrees: Tensor
    nll_change: Tensor


def measure_fidelity(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    artifacts: Mapping[str, Artifact],
    *,
    length: int = 4096,
    windows: int = 8,
    strict: bool = True,
    backend: str = "auto",
    progress: Progress | None = None,
) -> Fidelity:
    """Score artifacts on evenly spread windows of text, against the full-precision cache."""
    sequences = evaluation_windows(model, tokenizer, texts, length, windows)
    scores: dict[str, list[_WindowScore]] = {name: [] for name in artifacts}
    results = {name: RecipeScore() for name in artifacts}
    losses = []
    total, done = len(sequences) * (1 + len(artifacts)), 0

    def advance(what: str) -> None:
        nonlocal done
        done += 1
        if progress:
            progress(done, total, what)

    for index, sequence in enumerate(sequences):
        sequence = sequence.to(model.device)
        reference = _hidden_states(model, sequence, None, strict)
        losses.append(_loss(model, reference, sequence))
        advance("full precision")
        for name, artifact in artifacts.items():
            cache = OscarCache(model, artifact, strict=strict, backend=backend)
            errors = _LayerErrors()
            if index == 0:
                cache.observer = errors
            hidden = _hidden_states(model, sequence, cache, strict)
            scores[name].append(_compare(model, reference, hidden, sequence))
            result = results[name]
            result.bits_128k = artifact.recipe.bits(artifact.model.head_dim)
            result.bits_actual = cache.bits_per_element(window_bytes=2)
            result.layer_errors |= errors.relative()
            advance(name)
    for name, result in results.items():
        _summarise(result, scores[name])
    return Fidelity(
        model=describe(model).identity.name,
        text_sha256=text_sha256(texts),
        length=length,
        windows=len(sequences),
        strict=strict,
        perplexity=math.exp(sum(losses) / len(losses)),
        recipes=results,
    )


def evaluation_windows(
    model: Any, tokenizer: Any, texts: Sequence[str], length: int, windows: int
) -> list[Tensor]:
    context = getattr(model.config.get_text_config(), "max_position_embeddings", 0)
    if context and length > context:
        raise OscarError(f"--length {length} is beyond the model's context of {context} tokens")
    if length < FIRST_SCORED + 2:  # the last position has no next token to be scored by
        raise OscarError(f"--length {length}: positions from {FIRST_SCORED} on are scored")
    available = cut_sequences(texts, tokenizer, length)
    if len(available) < windows:
        raise OscarError(
            f"the text has {len(available)} windows of {length} tokens, {windows} were asked for; "
            "give more text or fewer --windows"
        )
    picks = torch.linspace(0, len(available) - 1, windows).round().long().tolist()
    return [available[i] for i in picks]


def _hidden_states(model: Any, sequence: Tensor, cache: OscarCache | None, strict: bool) -> Tensor:
    """Last hidden states [T, hidden] of one window."""
    decoder = model.base_model
    with torch.no_grad(), attention_implementation(model):
        if cache is None:
            return decoder(input_ids=sequence, use_cache=False).last_hidden_state[0]
        chunks = [sequence] if strict else sequence.split(CHUNK, 1)
        states = [
            decoder(input_ids=chunk, past_key_values=cache, use_cache=True).last_hidden_state[0]
            for chunk in chunks
        ]
        return torch.cat(states)


def _log_probabilities(model: Any, hidden: Tensor) -> Tensor:
    config = model.config.get_text_config()
    logits = model.get_output_embeddings()(hidden).float()
    logits = logits * (getattr(config, "logit_scale", None) or 1.0)  # Cohere
    logits = logits / (getattr(config, "logits_scaling", None) or 1.0)  # Granite
    cap = getattr(config, "final_logit_softcapping", None)
    if cap:
        logits = cap * torch.tanh(logits / cap)
    return torch.log_softmax(logits, -1)


@torch.no_grad()
def _compare(model: Any, reference: Tensor, hidden: Tensor, sequence: Tensor) -> _WindowScore:
    kl, agrees, change = [], [], []
    for start in range(FIRST_SCORED, sequence.shape[1] - 1, LOGITS_BLOCK):
        rows = slice(start, min(start + LOGITS_BLOCK, sequence.shape[1] - 1))
        target = sequence[0, rows.start + 1 : rows.stop + 1, None]
        p, q = _log_probabilities(model, reference[rows]), _log_probabilities(model, hidden[rows])
        kl.append((p.exp() * (p - q)).sum(-1))
        agrees.append((p.argmax(-1) == q.argmax(-1)).float())
        change.append((p.gather(1, target) - q.gather(1, target)).squeeze(1))
    return _WindowScore(*(torch.cat(x).double().cpu() for x in (kl, agrees, change)))


@torch.no_grad()
def _loss(model: Any, hidden: Tensor, sequence: Tensor) -> float:
    losses = []
    for start in range(FIRST_SCORED, sequence.shape[1] - 1, LOGITS_BLOCK):
        rows = slice(start, min(start + LOGITS_BLOCK, sequence.shape[1] - 1))
        target = sequence[0, rows.start + 1 : rows.stop + 1, None]
        losses.append(-_log_probabilities(model, hidden[rows]).gather(1, target).squeeze(1))
    return float(torch.cat(losses).double().mean())


def _summarise(result: RecipeScore, scores: Sequence[_WindowScore]) -> None:
    result.kl, result.kl_se = _mean_and_error([score.kl for score in scores])
    result.top1, result.top1_se = _mean_and_error([score.agrees for score in scores])
    change, error = _mean_and_error([score.nll_change for score in scores])
    result.ppl_ratio = math.exp(change)
    result.ppl_ratio_se = result.ppl_ratio * error
    result.kl_by_window = [float(score.kl.mean()) for score in scores]


def _mean_and_error(windows: Sequence[Tensor]) -> tuple[float, float]:
    """Mean over windows and its standard error; a lone window is cut into blocks for the error."""
    parts = list(windows) if len(windows) > 1 else list(windows[0].split(LOGITS_BLOCK))
    means = torch.stack([part.mean() for part in parts])
    error = means.std() / len(means) ** 0.5 if len(means) > 1 else torch.tensor(math.nan)
    return float(torch.cat(list(windows)).mean()), float(error)


def _no_nan(value: Any) -> Any:
    """JSON has no NaN: what is unknown becomes null."""
    if isinstance(value, dict):
        return {key: _no_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_no_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class _LayerErrors:
    """Relative error of each layer's attention output, against exact attention on its inputs."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[float, float]] = {}

    def __call__(self, layer: int, output: Tensor, exact: Tensor) -> None:
        difference = (output - exact)[:, FIRST_SCORED:].double()
        error, size = self._sums.get(layer, (0.0, 0.0))
        error += float(difference.square().sum())
        size += float(exact[:, FIRST_SCORED:].double().square().sum())
        self._sums[layer] = (error, size)

    def relative(self) -> dict[int, float]:
        return {i: (e / s) ** 0.5 for i, (e, s) in self._sums.items() if s > 0}
