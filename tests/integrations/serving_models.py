"""Models on disk for the serving engines' tests, their artifacts, and what `OscarCache` answers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
import transformers

import oscarkv
from oscarkv import Recipe

SINK, RECENT = 16, 64


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    chooser = random.Random(seed)
    return [[chooser.randrange(3, 259) for _ in range(length)] for length in lengths]


def twenty_prompts() -> list[list[int]]:
    """Of 1,000 to 4,000 tokens: nearly all of each is packed."""
    return prompts(*(1000 + 3000 * i // 19 for i in range(20)), seed=22)


class TinyModel:
    """A model directory and an artifact file."""

    def __init__(
        self, folder: Path, architecture: str = "llama", recipe: str = "uniform", **shape: Any
    ) -> None:
        import tiny

        self.path, self.artifact = folder / "model", folder / "model.oscarkv"
        sizes = {
            "head_dim": 64,
            "hidden_size": 128,
            "intermediate_size": 192,
            "max_position_embeddings": 4096,
        }
        model = tiny.model(architecture, **(sizes | shape))
        model.generation_config = transformers.GenerationConfig()
        model.save_pretrained(self.path)
        self.model = model
        knobs = Recipe.named(recipe, sink=SINK, recent=RECENT)
        made = tiny.quick_calibrate(model, knobs, skip_unsupported=True)
        oscarkv.save_artifact(made, self.artifact)

    def give_bits(self, layer_bits: dict[int, tuple[int, int]]) -> None:
        """Write the artifact anew, with these bits of keys and values in some layers."""
        made = oscarkv.load_artifact(self.artifact).with_bits(layer_bits)
        oscarkv.save_artifact(made, self.artifact)

    def oracle(
        self, prompts: list[list[int]], new: int = 24, artifact: Any = None
    ) -> list[list[int]]:
        """Tokens of `OscarCache` in strict mode, with another artifact than the model's own if one
        is given."""
        made = []
        for prompt in prompts:
            cache = oscarkv.OscarCache(self.model, artifact or self.artifact, strict=True)
            ids = torch.tensor([prompt])
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=cache,
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=False,
                eos_token_id=None,
            )
            made.append(out[0, len(prompt) :].tolist())
        return made

    def doubts(self, prompts: list[list[int]], answers: list[list[int]]) -> list[float]:
        """By how many nats each answer's worst token is less likely than `OscarCache`'s own choice
        after the same tokens, in strict mode.

        0 is the same greedy answer. Where two tokens are all but equally likely an engine's
        rounding decides, and then the rest of the answer is another one, yet as right.
        """
        worst = []
        for prompt, answer in zip(prompts, answers, strict=True):
            cache = oscarkv.OscarCache(self.model, self.artifact, strict=True)
            with torch.no_grad():
                logits = self.model(
                    torch.tensor([prompt + answer[:-1]]),
                    past_key_values=cache,
                    logits_to_keep=len(answer),
                ).logits[0]
            chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
            worst.append(float((logits.amax(-1) - chosen).max()))
        return worst
