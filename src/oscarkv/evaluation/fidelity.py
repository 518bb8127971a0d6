"""How far a quantised cache moves a model's predictions from those with a full-precision cache.

All recipes and the reference run over the same token windows, so differences are paired. With
`strict`, every query reads the packed history just as it would when decoding; of a recipe that can
be packed, the packed cache itself is measured, not a simulation of it.
"""

from __future__ import annotations

import hashlib
import itertools
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
from oscarkv.evaluation.checkpoint import Checkpoint
from oscarkv.evaluation.subjects import Packed, Simulated, Subject
from oscarkv.integrations.transformers.attention import attention_implementation
from oscarkv.integrations.transformers.geometry import describe
from oscarkv.integrations.transformers.predictions import log_probabilities
from oscarkv.integrations.transformers.text import cut_sequences, text_sha256
from oscarkv.recipe import NOMINAL_LENGTH

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
class PositionScore:
    """Mean KL of queries from position `start` to `stop` - 1."""

    start: int
    stop: int
    kl: float
    kl_se: float


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
    simulated: bool = False  # on dense tensors, and bits_actual by the formula
    layer_errors: dict[int, float] = field(default_factory=dict)
    kl_by_window: list[float] = field(default_factory=list)
    kl_by_position: list[PositionScore] = field(default_factory=list)
    #: KL minus that of the first recipe, window by window.
    kl_difference: float = math.nan
    kl_difference_se: float = math.nan

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
    paired_with: str = ""  # the recipe that kl_difference is against
    longer: list[Fidelity] = field(default_factory=list)  # the same at other lengths
    sensitivity: dict[str, Any] = field(default_factory=dict)  # by recipe; see sensitivity.py

    def save(self, path: str | Path) -> None:
        text = json.dumps(_no_nan(asdict(self)), indent=2, allow_nan=False) + "\n"

        def write(part: Path) -> None:
            part.write_text(text, encoding="utf-8")

        write_atomically(Path(path), write)


@dataclass
class _WindowScore:
    """Means over blocks of LOGITS_BLOCK scored positions of one window."""

    counts: list[int]
    kl: list[float]
    agrees: list[float]
    nll_change: list[float]
    bits_held: float = math.nan
    layer_errors: dict[str, float] = field(default_factory=dict)

    def mean(self, what: str) -> float:
        blocks: list[float] = getattr(self, what)
        return sum(c * x for c, x in zip(self.counts, blocks, strict=True)) / sum(self.counts)


def measure_fidelity(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    artifacts: Mapping[str, Artifact | Subject],
    *,
    length: int = 4096,
    windows: int = 8,
    strict: bool = True,
    backend: str = "auto",
    progress: Progress | None = None,
    checkpoint: Checkpoint | None = None,
) -> Fidelity:
    """Score artifacts on evenly spread windows of text, against the full-precision cache.

    What a checkpoint already holds is not measured again.
    """
    return measure_windows(
        model,
        evaluation_windows(model, tokenizer, texts, length, windows),
        text_sha256(texts),
        artifacts,
        strict=strict,
        backend=backend,
        progress=progress,
        checkpoint=checkpoint,
    )


def measure_windows(
    model: Any,
    sequences: Sequence[Tensor],
    texts_sha256: str,
    artifacts: Mapping[str, Artifact | Subject],
    *,
    strict: bool = True,
    backend: str = "auto",
    progress: Progress | None = None,
    checkpoint: Checkpoint | None = None,
    references: dict[str, Tensor] | None = None,
) -> Fidelity:
    """`measure_fidelity` on windows [1, T] of one length. `references` keeps the full-precision
    hidden states for calls to come."""
    length = sequences[0].shape[1]
    subjects = {
        name: Packed(x, strict, backend) if isinstance(x, Artifact) else x
        for name, x in artifacts.items()
    }
    for name, subject in subjects.items():
        if isinstance(subject, Simulated) and not strict:
            raise OscarError(f"{name} is simulated, which is measured strictly only")
    done = checkpoint if checkpoint is not None else Checkpoint()
    identity = describe(model).identity
    weights = f"{identity.name} {identity.fingerprint[:32]} {model.dtype}"
    place = f"{weights} {texts_sha256[:16]} length {length} strict {strict}"
    keys = {name: f"{subject.digest} {place}" for name, subject in subjects.items()}
    scores: dict[str, list[_WindowScore]] = {name: [] for name in subjects}
    losses = []
    total, count = len(sequences) * (1 + len(subjects)), 0

    def advance(what: str) -> None:
        nonlocal count
        count += 1
        if progress:
            progress(count, total, what)

    for index, sequence in enumerate(sequences):
        sequence = sequence.to(model.device)
        window = f"window {_digest(sequence)}"
        reference = None if references is None else references.get(f"{place} {window}")
        missing = [name for name in subjects if f"{keys[name]} {window}" not in done]
        if missing or f"{place} {window} loss" not in done:
            if reference is None:
                reference = _hidden_states(model, sequence, None, strict)
            if references is not None:
                references[f"{place} {window}"] = reference
            done[f"{place} {window} loss"] = _loss(model, reference, sequence)
        losses.append(done[f"{place} {window} loss"])
        advance("full precision")
        for name, subject in subjects.items():
            key = f"{keys[name]} {window}"
            if key not in done:
                assert reference is not None
                score = _score(model, sequence, subject, strict, reference, index == 0)
                done[key] = _no_nan(asdict(score))
            scores[name].append(_restored(done[key]))
            advance(name)
    results = {
        name: RecipeScore(
            bits_128k=subject.bits(NOMINAL_LENGTH),
            simulated=isinstance(subject, Simulated),
            bits_actual=scores[name][-1].bits_held,
            layer_errors={int(i): e for i, e in scores[name][0].layer_errors.items()},
        )
        for name, subject in subjects.items()
    }
    paired_with = next(iter(subjects), "")
    for name, result in results.items():
        _summarise(result, scores[name], scores[paired_with])
    return Fidelity(
        model=identity.name,
        text_sha256=texts_sha256,
        length=length,
        windows=len(sequences),
        strict=strict,
        perplexity=math.exp(sum(losses) / len(losses)),
        recipes=results,
        paired_with=paired_with,
    )


def _score(
    model: Any,
    sequence: Tensor,
    subject: Subject,
    strict: bool,
    reference: Tensor,
    with_layers: bool,
) -> _WindowScore:
    cache = subject.make_cache(model)
    errors = _LayerErrors()
    if with_layers:
        cache.observer = errors
    score = _compare(model, reference, _hidden_states(model, sequence, cache, strict), sequence)
    score.bits_held = subject.bits_held(cache, sequence.shape[1])
    score.layer_errors = {str(i): error for i, error in errors.relative().items()}
    return score


def _restored(saved: dict[str, Any]) -> _WindowScore:
    """A score as JSON keeps it; what is null there was not finite."""

    def number(value: Any) -> Any:
        return math.nan if value is None else value

    lists = {name: [number(x) for x in saved[name]] for name in ("kl", "agrees", "nll_change")}
    return _WindowScore(
        counts=saved["counts"],
        bits_held=number(saved["bits_held"]),
        layer_errors=saved["layer_errors"],
        **lists,
    )


def _digest(sequence: Tensor) -> str:
    return hashlib.sha256(sequence.cpu().numpy().tobytes()).hexdigest()[:16]


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


def _hidden_states(model: Any, sequence: Tensor, cache: Any, strict: bool) -> Tensor:
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


@torch.no_grad()
def _compare(model: Any, reference: Tensor, hidden: Tensor, sequence: Tensor) -> _WindowScore:
    score = _WindowScore([], [], [], [])
    for start in range(FIRST_SCORED, sequence.shape[1] - 1, LOGITS_BLOCK):
        rows = slice(start, min(start + LOGITS_BLOCK, sequence.shape[1] - 1))
        target = sequence[0, rows.start + 1 : rows.stop + 1, None]
        p, q = log_probabilities(model, reference[rows]), log_probabilities(model, hidden[rows])
        score.counts.append(rows.stop - rows.start)
        score.kl.append(float((p.exp() * (p - q)).sum(-1).double().mean()))
        score.agrees.append(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
        score.nll_change.append(float((p.gather(1, target) - q.gather(1, target)).double().mean()))
    return score


@torch.no_grad()
def _loss(model: Any, hidden: Tensor, sequence: Tensor) -> float:
    losses = []
    for start in range(FIRST_SCORED, sequence.shape[1] - 1, LOGITS_BLOCK):
        rows = slice(start, min(start + LOGITS_BLOCK, sequence.shape[1] - 1))
        target = sequence[0, rows.start + 1 : rows.stop + 1, None]
        losses.append(-log_probabilities(model, hidden[rows]).gather(1, target).squeeze(1))
    return float(torch.cat(losses).double().mean())


def _summarise(
    result: RecipeScore, scores: Sequence[_WindowScore], others: Sequence[_WindowScore]
) -> None:
    result.kl, result.kl_se = _mean_and_error(scores, "kl")
    result.top1, result.top1_se = _mean_and_error(scores, "agrees")
    change, error = _mean_and_error(scores, "nll_change")
    result.ppl_ratio = math.exp(change)
    result.ppl_ratio_se = result.ppl_ratio * error
    result.kl_by_window = [score.mean("kl") for score in scores]
    result.kl_by_position = _by_position(scores)
    differences = [
        _WindowScore(mine.counts, [a - b for a, b in zip(mine.kl, its.kl, strict=True)], [], [])
        for mine, its in zip(scores, others, strict=True)
    ]
    result.kl_difference, result.kl_difference_se = _mean_and_error(differences, "kl")


def _mean_and_error(scores: Sequence[_WindowScore], what: str) -> tuple[float, float]:
    """Mean over windows and its standard error; a lone window's is that over its blocks."""
    means = [score.mean(what) for score in scores]
    parts = means if len(means) > 1 else getattr(scores[0], what)
    return sum(means) / len(means), _standard_error(parts)


def _standard_error(parts: Sequence[float]) -> float:
    if len(parts) < 2:
        return math.nan
    return float(torch.tensor(parts, dtype=torch.float64).std()) / len(parts) ** 0.5


def _by_position(scores: Sequence[_WindowScore]) -> list[PositionScore]:
    """KL of queries in ranges of positions that grow with them: x 1.5 and x 1.33 in turn."""
    counts = scores[0].counts
    starts = [FIRST_SCORED + LOGITS_BLOCK * i for i in range(len(counts))]
    end = starts[-1] + counts[-1]
    edges, factor = [FIRST_SCORED], 1
    while edges[-1] < end:
        edges += [FIRST_SCORED * factor * 3 // 2, FIRST_SCORED * factor * 2]
        factor *= 2
    found = []
    for low, high in itertools.pairwise(edges):
        blocks = [i for i, start in enumerate(starts) if low <= start < high]
        if not blocks:
            continue
        parts = [
            _WindowScore([counts[i] for i in blocks], [score.kl[i] for i in blocks], [], [])
            for score in scores
        ]
        means = [part.mean("kl") for part in parts]
        stop = starts[blocks[-1]] + counts[blocks[-1]]
        error = _standard_error(means)
        found.append(PositionScore(starts[blocks[0]], stop, sum(means) / len(means), error))
    return found


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
