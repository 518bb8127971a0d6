"""Where `oscarkv eval tasks` runs: Transformers in this process, or vLLM in others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oscarkv.cli import gather, options
from oscarkv.cli.console import errors

if TYPE_CHECKING:
    from oscarkv.artifact import Artifact
    from oscarkv.evaluation.tasks.requests import Engine


class Place:
    """The model's tokenizer and context; its weights only where Transformers runs them."""

    def __init__(self, source: str, engine: str, device: str | None, dtype: str) -> None:
        self.source, self.model = source, None
        if engine == "transformers":
            from oscarkv.integrations.transformers.geometry import describe

            self.model, self.tokenizer = options.load(source, device, dtype)
            self.name = describe(self.model).identity.name
            config = self.model.config
        else:
            from transformers import AutoTokenizer

            from oscarkv.integrations.transformers.models import load_config

            options.quiet_transformers()
            config = load_config(source)
            self.tokenizer = AutoTokenizer.from_pretrained(source)
            self.name = Path(source).resolve().name if Path(source).is_dir() else source
        text = config.get_text_config(decoder=True)
        self.context = int(getattr(text, "max_position_embeddings", 0) or 0)

    def fit(
        self, files: Sequence[Path] | None, wanted: Sequence[Any], tokens: int
    ) -> dict[str, Artifact]:
        from oscarkv.integrations.transformers.text import read_texts

        return gather.fit(self.model, self.tokenizer, read_texts(files or []), wanted, tokens)

    def describe_settings(
        self,
        artifacts: Mapping[str, Artifact],
        strict: bool,
        backend: str,
        baseline: str,
        knobs: Mapping[str, Any],
    ) -> dict[str, dict[str, Any]]:
        """What a record says of every setting: all that its answers depend on."""
        from oscarkv.evaluation.tasks.record import REFERENCE

        if self.model is not None:
            packed = {"strict": strict, **gather.describe_backend(backend, self.model)}
            shared = gather.describe_weights(self.model)
            return gather.describe_settings(artifacts, shared=shared, packed=packed)
        # vLLM's weights are in another process, where they are held to those of the artifacts.
        known = (artifact.model.fingerprint for artifact in artifacts.values())
        shared = {
            "dtype": knobs.get("dtype", _vllm_dtype()),
            "weights": next(filter(None, known), ""),
            "engine_options": dict(knobs),
        }
        packed = {"strict": strict, "backend": backend}
        settings = gather.describe_settings(artifacts, shared=shared, packed=packed)
        settings[REFERENCE]["attention"] = _vllm_attention(baseline)
        return settings

    def engine(self, artifact: Artifact | None, batch: int, backend: str, strict: bool) -> Engine:
        from oscarkv.evaluation.tasks.transformers_engine import TransformersEngine

        return TransformersEngine(self.model, self.tokenizer, artifact, batch, backend, strict)

    def vllm(
        self,
        name: str,
        section: dict[str, Any],
        baseline: str,
        longest: int,
        knobs: dict[str, Any],
        log_file: Path | None,
    ) -> Engine:
        from oscarkv.evaluation.tasks.vllm_engine import VllmEngine

        settings = {"dtype": _vllm_dtype(), "max_model_len": longest} | knobs
        if section:
            settings["additional_config"] = {"oscarkv": section}
        if attention := _vllm_attention(baseline):
            settings["attention_backend"] = "CUSTOM" if section else attention

        def say(what: str) -> None:
            errors.print(f"{name}: {what}", markup=False, highlight=False, soft_wrap=True)

        return VllmEngine(self.source, settings, say, log_file)


def _vllm_dtype() -> str:
    from oscarkv.benchmark import machine

    return "auto" if machine.gpus() else "float32"


def _vllm_attention(baseline: str) -> str:
    """What full precision reads its cache with; without a GPU there is one only, which has no name
    here, and the plugin stands in for it."""
    from oscarkv.benchmark import machine

    return (baseline or "FLASH_ATTN") if machine.gpus() else ""
