"""Tiny random models of every supported architecture, a byte tokenizer, and text for them."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from oscarkv.artifact import Artifact
from oscarkv.integrations.transformers.calibrate import calibrate
from oscarkv.recipe import Recipe

VOCABULARY = ["<pad>", "<s>", "</s>", *sorted(ByteLevel.alphabet())]
#: Windows that a prompt of some dozen tokens outgrows.
SMALL = {"sink": 4, "recent": 8}
#: Windows that hold everything the tests ever feed.
LARGE = {"sink": 4, "recent": 512}


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte."""
    backend = Tokenizer(BPE({token: i for i, token in enumerate(VOCABULARY)}, []))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", padding_side="left"
    )


def text(size: int = 1500, seed: int = 0) -> str:
    """Random words that repeat, so that prompt lookup finds something."""
    chooser = random.Random(seed)
    words = ["".join(chooser.choices("abcdefghij", k=chooser.randint(2, 7))) for _ in range(40)]
    out = ""
    while len(out) < size:
        out += chooser.choice(words) + chooser.choice([" ", " ", ". "])
    return out[:size]


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, len(VOCABULARY), (batch, length), generator=generator)


# -- models --------------------------------------------------------------------------------------

#: name -> (transformers prefix, configuration). Ratios: GQA, MQA (Qwen2), MHA (Phi-3, OLMo 2).
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-scaled": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama-yarn": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 256,
            }
        },
    ),
    "llama-80": ("Llama", {"head_dim": 80, "num_attention_heads": 2, "num_key_value_heads": 1}),
    "llama-96": ("Llama", {"head_dim": 96, "num_attention_heads": 2, "num_key_value_heads": 2}),
    "llama-64": (
        "Llama",
        {"hidden_size": 96, "head_dim": 64, "num_attention_heads": 6, "num_key_value_heads": 2},
    ),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-sliding": ("Mistral", {"sliding_window": 24}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 1}),
    "qwen3": ("Qwen3", {}),
    "qwen3-moe": (
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "glm4": ("Glm4", {"head_dim": 32, "attention_bias": True}),
    "gemma3": (
        "Gemma3",
        {
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 24,
            "query_pre_attn_scalar": 32,
            "num_key_value_heads": 1,
        },
    ),
    "phi3": ("Phi3", {"num_key_value_heads": 4, "tie_word_embeddings": False}),
    "smollm3": (
        "SmolLM3",
        {"no_rope_layers": [1, 0, 1], "num_hidden_layers": 3, "layer_types": None},
    ),
    "cohere2": (  # interleaved RoPE, and none at all in full layers
        "Cohere2",
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24},
    ),
    "phi": ("Phi", {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 1e4}}),
    "olmo2": ("Olmo2", {"num_key_value_heads": 4}),
}
ARCHITECTURES = tuple(_CONFIGS)
#: Models of which only some layers have keys and values.
_CONFIGS["granite-hybrid"] = (
    "GraniteMoeHybrid",
    {
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "attention", "mamba", "attention"],
        "num_local_experts": 0,
        "shared_intermediate_size": 96,
        "position_embedding_type": "rope",
        "attention_multiplier": 0.3,
        "mamba_n_heads": 8,
        "mamba_d_head": 32,
        "mamba_n_groups": 1,
        "mamba_d_state": 64,
        "mamba_expand": 2,
    },
)


#: Their head_dim is always hidden / heads.
_DIVIDED = ("Phi", "Phi3", "Qwen2", "Olmo2", "GraniteMoeHybrid")


def model(name: str = "llama", *, seed: int = 0, dtype: torch.dtype = torch.float32, **over: Any):
    """A random model with attention that is far from uniform."""
    prefix, own = _CONFIGS[name]
    knobs: dict[str, Any] = {
        "vocab_size": len(VOCABULARY),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "initializer_range": 0.15,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    knobs |= own | over
    if prefix in _DIVIDED:
        knobs["hidden_size"] = knobs.pop("head_dim") * knobs["num_attention_heads"]
    config_class = "Gemma3TextConfig" if prefix == "Gemma3" else f"{prefix}Config"
    torch.manual_seed(seed)
    config = getattr(transformers, config_class)(**knobs)
    made = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    with torch.no_grad():  # biases start at zero: make them matter
        for parameter_name, parameter in made.named_parameters():
            if parameter_name.endswith("bias"):
                parameter.normal_(0, 0.5)
            elif parameter_name.endswith("norm.weight"):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    made.generation_config.eos_token_id = None  # every test generates its full length
    return made.to(dtype)


def quick_calibrate(made: Any, recipe: Recipe | None = None, **options: Any) -> Artifact:
    recipe = recipe or Recipe.named("uniform", **SMALL)
    knobs: dict[str, Any] = {"tokens": 400, "length": 96, "target_length": 512, "general": False}
    return calibrate(made, tokenizer(), [text()], recipe=recipe, **(knobs | options))


@cache
def calibrated(name: str = "llama", recipe: str = "uniform", windows: str = "small") -> Artifact:
    """One artifact per model and recipe; models of a name always have the same weights."""
    sizes = SMALL if windows == "small" else LARGE
    small = quick_calibrate(
        model(name),
        Recipe.named(recipe, **SMALL),
        quantize_sliding=name == "mistral-sliding",
    )
    return Artifact(
        small.model, small.recipe.replace(**sizes), small.layers, small.calibration, "test"
    )


def greedy(made: Any, ids: torch.Tensor, new: int = 12, **options: Any) -> torch.Tensor:
    options = {"do_sample": False} | options
    options.setdefault("attention_mask", torch.ones_like(ids))
    return made.generate(ids, max_new_tokens=new, min_new_tokens=new, **options)


@torch.no_grad()
def logits(made: Any, ids: torch.Tensor, cache: Any = None, **options: Any) -> torch.Tensor:
    return made(ids, past_key_values=cache, use_cache=cache is not None, **options).logits


@torch.no_grad()
def decode_logits(made: Any, ids: torch.Tensor, cache: Any, prompt: int) -> torch.Tensor:
    """Logits of a prompt read whole and the rest token by token."""
    parts = [logits(made, ids[:, :prompt], cache)]
    parts += [logits(made, ids[:, i : i + 1], cache) for i in range(prompt, ids.shape[1])]
    return torch.cat(parts, 1)


def assert_same_rows(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Logits that differ by fp32 rounding, and by what such rounding tips over: a code here and
    there, or a row's scale, whose 8-bit steps are of 4 %. Which ones depends on the processor."""
    assert found.shape == expected.shape
    errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.max() < 0.05, errors
    assert errors.median() < 1e-4, errors
