"""Every accuracy figure of docs/accuracy.md for one model: writes as it goes, and can be resumed.

    python scripts/accuracy.py MODEL --plan gpu --texts DIR --json docs/results/accuracy-qwen.json

The directory holds plain text: `wiki-calibration.txt` to calibrate on; `wiki.txt`, `botchan.txt`,
`essays.txt` to measure on; `long.txt` for windows of 16K and more; `prose.txt`, `code.txt` and
`chat.txt`, to calibrate on in turn. `scripts/accuracy_texts.py` makes it. Without a directory, the
two bundled books are used: one to calibrate on, the other to measure on.

Finished windows and artifacts are kept beside the JSON, in OUT.parts; run the same command again to
go on. `--budget` stops cleanly after so many seconds. Sections come in order of importance.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import logging
import math
import platform
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accuracy_plan import (
    BUDGETS,
    COMPACT,
    FP8_WINDOWS,
    MIXTURES,
    PLANS,
    UNIFORM,
    WINDOWS,
    Calibration,
    Plan,
    paper_ablation,
    parts_of_uniform,
)
from torch import Tensor

from oscarkv import load_model
from oscarkv.artifact import Artifact
from oscarkv.artifact.files import library_version, write_atomically
from oscarkv.calibration.budget import affordable
from oscarkv.demo.run import book
from oscarkv.evaluation.checkpoint import Checkpoint
from oscarkv.evaluation.fidelity import Fidelity, evaluation_windows, measure_windows
from oscarkv.evaluation.prepare import fit_artifacts, fit_methods
from oscarkv.evaluation.sensitivity import measure_sensitivity
from oscarkv.evaluation.subjects import Packed, Subject, simulate_artifact
from oscarkv.integrations.transformers import passes
from oscarkv.integrations.transformers.geometry import describe
from oscarkv.integrations.transformers.simulate import Windows
from oscarkv.integrations.transformers.text import text_sha256
from oscarkv.methods import named, needs, presets, simulations
from oscarkv.methods.simulation import Simulation
from oscarkv.recipe import Recipe


class OutOfTime(Exception):
    pass


@dataclass
class Lab:
    model: Any
    tokenizer: Any
    texts: Path | None
    out: Path
    plan: Plan
    deadline: float
    backend: str  # of the packed cache, in which the table of methods is measured; "": simulate
    only: tuple[str, ...] = ()  # of methods and lengths: these rows, beside those there are
    machine: Mapping[str, str] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)
    references: dict[str, Tensor] = field(default_factory=dict)
    sequences: list[Tensor] = field(default_factory=list)
    windows_of: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        self.parts = self.out.with_suffix(".parts")
        self.done = Checkpoint(self.parts)
        self.heads = self.model.config.get_text_config().num_key_value_heads
        self.started = time.time()

    def text(self, *names: str) -> list[str]:
        if self.texts is None:
            return [book("alice.txt" if "calibration" in name else "botchan.txt") for name in names]
        return [(self.texts / f"{name}.txt").read_text(encoding="utf-8") for name in names]

    def fit(
        self, recipes: Mapping[str, Recipe], to: Calibration | None = None
    ) -> dict[str, Artifact]:
        to = to or Calibration("wiki-calibration", self.plan.tokens, self.plan.length)
        found = fit_artifacts(
            self.model,
            self.tokenizer,
            self.text(to.text),
            recipes,
            tokens=to.tokens,
            length=to.length or self.plan.length,
            general=to.general,
            keep=self.parts,
            progress=self._progress,
        )
        self.say(f"fitted {len(found)} recipes")
        return found

    def subject(self, artifact: Artifact, backend: str = "") -> Subject:
        if backend or artifact.recipe.exact:
            return Packed(artifact, backend=backend or "torch")
        return simulate_artifact(artifact, self.model.device)

    def measure(
        self, section: str, subjects: Mapping[str, Subject], size: tuple[int, int], *texts: str
    ) -> Fidelity:
        """Measure one recipe after the other, so that what is done is in the file; the last pass
        puts them together from the checkpoint."""
        found: Fidelity | None = None
        names = texts or ("wiki", "botchan", "essays")
        if self.windows_of != (size, names):  # of one kind at a time: references take memory
            self.windows_of = (size, names)
            self.sequences = evaluation_windows(
                self.model, self.tokenizer, self.text(*names), *size
            )
            self.references.clear()
        known: dict[str, Subject] = {}
        for name, subject in subjects.items():
            known[name] = subject
            found = measure_windows(
                self.model,
                self.sequences,
                text_sha256(self.text(*names)),
                known,
                progress=self._progress,
                checkpoint=self.done,
                references=self.references,
            )
            self.results[section] = self._beside(self.results.get(section), _plain(found))
            self.save()
            score = found.recipes[name]
            self.say(f"{section}: {name:40} {score.bits_128k:.3f} {score.kl:.5f} {score.top1:.4f}")
        assert found is not None
        return found

    def _beside(self, old: Any, new: Any) -> Any:
        """With --only, rows that are there stay: those of the same windows."""
        if not self.only or old is None:
            return new
        same = ("model", "text_sha256", "length", "windows", "strict")
        if differing := [key for key in same if old[key] != new[key]]:
            raise SystemExit(f"the file's rows have another {', '.join(differing)}")
        first = old["recipes"][old["paired_with"]]["kl_by_window"]
        for score in new["recipes"].values():
            score["measured_on"] = self.machine
            differences = [a - b for a, b in zip(score["kl_by_window"], first, strict=True)]
            score["kl_difference"] = statistics.fmean(differences)
            error = statistics.stdev(differences) / len(differences) ** 0.5 if first[1:] else None
            score["kl_difference_se"] = error
        rows = old["recipes"] | new["recipes"]
        order = [*self.plan.packed, *self.plan.simulated]
        return old | {"recipes": {name: rows[name] for name in sorted(rows, key=order.index)}}

    def _asked(self, names: tuple[str, ...]) -> list[str]:
        return [name for name in names if not self.only or name in self.only]

    def _progress(self, *_: Any) -> None:
        if time.time() > self.deadline:
            raise OutOfTime

    def say(self, what: str) -> None:
        print(f"{time.time() - self.started:7.1f} s  {what}", flush=True)

    def save(self) -> None:
        text = json.dumps(self.results, indent=1, allow_nan=False) + "\n"
        write_atomically(self.out, lambda part: _write(part, text))

    # -- sections ----------------------------------------------------------------------------

    def methods(self) -> None:
        # Groups of 64 are the head where that is no larger.
        grouped = self.dim() % 64 == 0 and self.dim() > 64
        names = [n for n in self._asked(self.plan.packed) if grouped or n != "paper-softmax"]
        artifacts = self.fit({name: Recipe.named(name) for name in names})
        subjects = {n: self.subject(a, self.backend) for n, a in artifacts.items()}
        simulated = fit_methods(
            self.model,
            self.tokenizer,
            self.text("wiki-calibration"),
            [simulations()[name] for name in self._asked(self.plan.simulated)],
        )
        self.measure("methods", subjects | simulated, self.plan.methods)

    def alone(self) -> None:
        """Without our windows: the methods' own, or none."""
        wanted = [named(f"{name}-alone") for name in (*presets(), *simulations())]
        recipes = {
            r.name: r for r in wanted if isinstance(r, Recipe) and not needs(r) and not r.exact
        }
        methods = [m for m in wanted if isinstance(m, Simulation)]
        fitted = {n: self.subject(a) for n, a in self.fit(recipes).items()}
        texts = self.text("wiki-calibration")
        simulated = fit_methods(self.model, self.tokenizer, texts, methods)
        self.measure("alone", fitted | simulated, self.plan.alone)

    def lengths(self) -> None:
        names = self._asked(self.plan.long_recipes)
        artifacts = self.fit({n: Recipe.named(n) for n in names if n in presets()})
        methods = [simulations()[n] for n in names if n in simulations()]
        simulated = fit_methods(self.model, self.tokenizer, self.text("wiki-calibration"), methods)
        subjects = {n: self.subject(a) for n, a in artifacts.items()} | simulated
        context = self.model.config.get_text_config().max_position_embeddings
        for length, windows in self.plan.lengths:
            if length <= context:
                self.measure(f"length-{length}", subjects, (length, windows), "long")

    def ablation(self) -> None:
        """The paper's ordering: U·H·P over U·H over H over none, queries over keys."""
        fitted = self.fit(paper_ablation(self.dim()))
        subjects = {n: self.subject(a) for n, a in fitted.items()}
        self.measure("ablation", subjects, self.plan.ablation)

    def robustness(self) -> None:
        """One recipe, calibrated on other text and on less of it."""
        subjects = {}
        for one in self.plan.calibrations:
            fitted = self.fit({"uniform": UNIFORM}, one)
            subjects[str(one)] = self.subject(fitted["uniform"])
        self.measure("robustness", subjects, self.plan.robustness)

    def shares(self) -> None:
        """The same of `balanced`, whose bits by layer come from the text as well."""
        fitted = {
            str(one): self.fit({"balanced": Recipe.named("balanced")}, one)["balanced"]
            for one in self.plan.calibrations
            if one.general
        }
        self.results["shares-bits"] = {name: bits_by_layer(a) for name, a in fitted.items()}
        subjects = {name: self.subject(artifact) for name, artifact in fitted.items()}
        self.measure("shares", subjects, self.plan.robustness)

    def split(self) -> None:
        """Keys and values apart, layer by layer (and head by head)."""
        artifact = self.fit({"uniform": UNIFORM})["uniform"]
        length, windows = self.plan.split
        parts = ["sides", "layers"] + (["heads"] if self.plan.heads else [])
        found = measure_sensitivity(
            self.model,
            self.tokenizer,
            self.text("wiki", "botchan", "essays"),
            simulate_artifact(artifact, self.model.device),
            parts=parts,
            length=length,
            windows=windows,
            checkpoint=self.done,
            progress=self._progress,
        )
        self.results["split"] = _plain(found)
        self.save()
        self.say(f"split: keys {found.of(sides='keys'):.5f}, values {found.of(sides='values'):.5f}")

    def tuned(self) -> None:
        """Bits by layer: what the same memory buys when it goes where it helps."""
        recipes = {"compact": COMPACT}
        for budget in BUDGETS:
            name = f"tuned to {budget} bits"
            if affordable(COMPACT, self.dim(), self.layers(), budget) > 0:
                recipes[name] = COMPACT.replace(budget=budget, name=name)
        fitted = self.fit(recipes)
        self.results["tuned-bits"] = {n: bits_by_layer(a) for n, a in fitted.items() if a.mixed}
        subjects = {name: self.subject(artifact) for name, artifact in fitted.items()}
        self.measure("tuned", subjects, self.plan.parts)

    def parts_section(self) -> None:
        """What each part of `uniform` buys."""
        recipes = parts_of_uniform()
        half = recipes.pop("groups of half a head").replace(group_size=self.dim() // 2)
        recipes["groups of half a head"] = half
        subjects = {n: self.subject(a) for n, a in self.fit(recipes).items()}
        self.measure("parts", subjects, self.plan.parts)

    def windows(self) -> None:
        artifact = self.fit({"uniform": UNIFORM})["uniform"]
        subjects = {}
        for sink, recent in ((64, 256), *WINDOWS):
            recipe = artifact.recipe.replace(sink=sink, recent=recent)
            changed = dataclasses.replace(artifact, recipe=recipe)
            subjects[f"sink {sink}, recent {recent}"] = self.subject(changed)
        whole = simulate_artifact(artifact, self.model.device)
        for sink, recent in FP8_WINDOWS:
            windows = Windows(sink, recent, bits=8)
            subjects[f"FP8, sink {sink}, recent {recent}"] = dataclasses.replace(
                whole, windows=windows
            )
        self.measure("windows", subjects, self.plan.parts)

    def positions(self) -> None:
        """Other mixtures of positions, at the short and at the longest length."""
        library = passes.position_offsets
        artifacts = self.fit({"by context length": UNIFORM})
        for name, offsets in MIXTURES.items():
            passes.position_offsets = offsets
            try:  # the name is part of what is kept
                recipe = UNIFORM.replace(name=f"uniform, {name}")
                artifacts |= self.fit({name: recipe})
            finally:
                passes.position_offsets = library
        artifacts |= self.fit({"not averaged": UNIFORM.replace(average_positions=False)})
        subjects = {n: self.subject(a) for n, a in artifacts.items()}
        self.measure("positions", subjects, self.plan.parts)
        for length, windows in self.plan.lengths[:1]:
            self.measure(f"positions-{length}", subjects, (length, windows), "long")

    def layers(self) -> int:
        return len(
            describe(self.model).select(
                quantize_sliding=False, skip_layers=(), skip_unsupported=True
            )
        )

    def dim(self) -> int:
        config = self.model.config.get_text_config()
        found = getattr(config, "head_dim", None)
        return int(found or config.hidden_size // config.num_attention_heads)


def bits_by_layer(artifact: Artifact) -> dict[str, list[int]]:
    return {str(layer): list(bits) for layer, bits in sorted(artifact.layer_bits.items())}


def _plain(found: Any) -> Any:
    """JSON has no NaN: what is unknown is null."""
    value = dataclasses.asdict(found) if dataclasses.is_dataclass(found) else found
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="as oscarkv's commands take it: a directory, a .gguf file")
    parser.add_argument("--plan", choices=sorted(PLANS), default="cpu")
    parser.add_argument("--texts", type=Path, help="directory of text files")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--sections", default="", help="only these, comma-separated")
    parser.add_argument(
        "--only", default="", help="of the sections methods and lengths, these rows alone"
    )
    parser.add_argument("--budget", type=float, default=math.inf, help="stop after seconds")
    parser.add_argument(
        "--backend",
        default="torch",
        help="of the packed cache that the table of methods is measured in; '' simulates it, as "
        "the other sections do: the same figures, sooner",
    )
    parser.add_argument("--device")
    arguments = parser.parse_args()
    plan = PLANS[arguments.plan]
    logging.getLogger("oscarkv").setLevel(logging.ERROR)
    deadline = time.time() + arguments.budget
    model, tokenizer = load_model(arguments.model, dtype=plan.dtype, device=arguments.device)
    machine = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else processor(),
        "torch": torch.__version__,
        "oscarkv": library_version(),
    }
    lab = Lab(
        model,
        tokenizer,
        arguments.texts,
        arguments.json,
        plan,
        deadline,
        arguments.backend,
        tuple(filter(None, arguments.only.split(","))),
        machine,
    )
    if arguments.json.exists():
        lab.results = json.loads(arguments.json.read_text())
        require_same(lab.results.get("about", {}), model.oscarkv_name, arguments.plan)
    about = {
        "model": model.oscarkv_name,
        "plan": arguments.plan,
        **machine,
        "dtype": plan.dtype,
        "texts_sha256": {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(arguments.texts.glob("*.txt") if arguments.texts else ())
        },
    }
    if not lab.only or "about" not in lab.results:
        lab.results["about"] = about
    lab.say(f"loaded {model.oscarkv_name} on {model.device}")
    wanted = arguments.sections.split(",") if arguments.sections else plan.sections
    finished = []
    try:
        for section in wanted:
            run = lab.parts_section if section == "parts" else getattr(lab, section)
            run()
            lab.results.setdefault("seconds", {})[section] = round(time.time() - lab.started, 1)
            lab.save()
            finished.append(section)
            lab.say(f"{section} done")
    except OutOfTime:
        lab.say("out of time; run the same command again to go on")
    checked = arguments.plan == "ci" and "methods" in finished
    if checked and (wrong := regressions(lab.results["methods"]["recipes"])):
        raise SystemExit("\n".join(wrong))


def processor() -> str:
    found = Path("/proc/cpuinfo")
    lines = found.read_text().splitlines() if found.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} cores of {names[0]}" if names else platform.processor() or "CPU"


def require_same(about: Mapping[str, Any], model: str, plan: str) -> None:
    """Figures of another plan or model are not to be relabelled."""
    for what, now in (("model", model), ("plan", plan)):
        if about.get(what, now) != now:
            raise SystemExit(
                f"the file given with --json was made with {what} {about[what]}, not {now}; "
                "give another name"
            )


def regressions(scores: dict[str, Any]) -> list[str]:
    """What must hold on any model, with a wide margin."""
    paper, wrong = scores["paper"]["kl"], []
    for name, bits in (("balanced", 2.3), ("compact", 2.2)):
        score = scores[name]
        if not score["kl"] < paper / 10:
            wrong.append(f"{name}: KL {score['kl']:.4f} is not a tenth of paper's {paper:.4f}")
        if not score["bits_128k"] <= bits:
            wrong.append(f"{name}: {score['bits_128k']:.3f} bits, over {bits}")
    return wrong


if __name__ == "__main__":
    main()
