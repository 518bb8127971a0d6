"""Text files -> token sequences of a given length, each cut from one document."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oscarkv.errors import CalibrationError, OscarError


def read_texts(paths: Sequence[str | Path]) -> list[str]:
    """The documents in some UTF-8 files; a file is one document."""
    texts = []
    for path in map(Path, paths):
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise OscarError(f"cannot read {path}: {error.strerror or error}") from None
        except UnicodeDecodeError as error:
            raise OscarError(
                f"{path} is not UTF-8 text ({error.reason} at {error.start})"
            ) from None
        if not text.strip():
            raise OscarError(f"{path} is empty")
        texts.append(text)
    return texts


def text_sha256(texts: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode())
    return digest.hexdigest()


def cut_sequences(
    texts: Sequence[str], tokenizer: Any, length: int, *, shortest: int | None = None
) -> list[Tensor]:
    """All sequences of `length` tokens [1, length] in reading order; a document's rest is kept if
    it has `shortest` tokens or more. Starts with BOS where the model wants one."""
    prefix = bos_prefix(tokenizer)
    body = length - len(prefix)
    shortest = length if shortest is None else shortest
    sequences = []
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        for start in range(0, len(ids), body):
            piece = prefix + ids[start : start + body]
            if len(piece) >= shortest:
                sequences.append(torch.tensor([piece]))
    return sequences


def bos_prefix(tokenizer: Any) -> list[int]:
    """[BOS] if the tokenizer puts one before a text, else nothing."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and tokenizer("a")["input_ids"][:1] == [bos] else []


def calibration_sequences(
    texts: Sequence[str], tokenizer: Any, tokens: int, length: int, shortest: int
) -> list[Tensor]:
    """About `tokens` tokens, spread evenly over the text."""
    available = cut_sequences(texts, tokenizer, length, shortest=shortest)
    found = sum(sequence.shape[1] for sequence in available)
    wanted = max(2, round(tokens / length))
    least = min(tokens, 2 * length)
    if found < least or not available:
        size = sum(len(text) for text in texts)
        per_token = size / max(found, 1) if found else 4
        raise CalibrationError(
            f"too little calibration text: {found} usable tokens in sequences of at least "
            f"{shortest}, but at least {least} are needed (--tokens {tokens} --length {length}); "
            f"add about {round((least - found) * per_token / 1000) + 1} KB of text, or use a "
            "shorter --length"
        )
    return _evenly(available, wanted)


def general_sequences(
    texts: Sequence[str], tokenizer: Any, tokens: int, length: int, shortest: int
) -> list[Tensor]:
    """The bundled documents cut to sequences, at most about `tokens` tokens."""
    return spread_sequences(texts, tokenizer, max(len(texts), tokens // length), length, shortest)


def echoes(texts: Sequence[str], tokenizer: Any, length: int) -> list[Tensor]:
    """A sequence [1, length] for each text: its beginning, twice."""
    prefix = bos_prefix(tokenizer)
    half = (length - len(prefix)) // 2
    beginnings = [
        tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][:half]
        for text in texts
    ]
    return [torch.tensor([prefix + ids + ids]) for ids in beginnings]


def again(sequence: Tensor, tokenizer: Any) -> Tensor:
    """A sequence [1, T] whose last third is its first third once more."""
    start, third = len(bos_prefix(tokenizer)), sequence.shape[1] // 3
    passage = sequence[:, start : start + third]
    return torch.cat([sequence[:, : sequence.shape[1] - third], passage], 1)


def spread_sequences(
    texts: Sequence[str], tokenizer: Any, count: int, length: int, shortest: int
) -> list[Tensor]:
    """At most `count` sequences, spread over the text."""
    return _evenly(cut_sequences(texts, tokenizer, length, shortest=shortest), count)


def _evenly(sequences: list[Tensor], wanted: int) -> list[Tensor]:
    """So many of them, spread over all."""
    if len(sequences) <= wanted:
        return sequences
    picks = torch.linspace(0, len(sequences) - 1, wanted).round().long().tolist()
    return [sequences[i] for i in picks]
