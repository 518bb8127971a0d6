"""What the command line tests share: a tiny model on disk."""

from collections.abc import Callable
from pathlib import Path

import torch
from click.testing import Result
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

Run = Callable[..., Result]
CONTEXT = 1024


def save_tiny_model(path: Path, layers: int = 2, kv_heads: int = 2) -> Path:
    """One character is one token, so texts of a known length are easily had."""
    torch.manual_seed(0)
    vocabulary = ["</s>", *sorted(ByteLevel.alphabet())]
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(vocabulary)}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(path)
    return path
