"""`oscarkv vllm check`, which needs no vLLM."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from commandline import CONTEXT, Run, save_tiny_model
from safetensors.torch import load_file, save_file

import oscarkv
from oscarkv.artifact import reader_of
from oscarkv.errors import MissingDependencyError, OscarError
from oscarkv.integrations.serving.fit import weight_bytes
from oscarkv.integrations.vllm import fit


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "engine_version", lambda: "0.32.0")


def found(run: Run, *arguments: object, code: int = 0) -> dict:
    result = run("vllm", "check", *arguments, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def problems(answer: dict) -> list[str]:
    return [f["text"] for f in answer["findings"] if f["verdict"] == "problem"]


def test_what_fits_is_counted(run: Run, tiny: Path, artifact: Path) -> None:
    """The tiny model's head_dim is 16: a block is 2 KV heads x 2 layers x 16 tokens x 2 x 16 x 2
    bytes. A packed row is 4 bytes of codes and 2 of parameters, so a page of 16 unpacked tokens
    (1,024 bytes) holds 80 packed ones."""
    answer = found(run, tiny, "--artifact", artifact, "--memory", 1, "--max-model-len", 640,
                   "--sink", 64, "--recent", 256)  # fmt: skip
    assert answer["fits"]
    assert problems(answer) == []
    assert answer["page_tokens"] == 80
    assert answer["blocks"] == (1 << 30) // (2 * 2 * 1024)
    assert answer["plain_tokens"] == answer["blocks"] * 16
    request = 640 // 80 + 64 // 16 + (256 + 16) // 16 + 1 + 80 // 16
    assert answer["tokens"] == int(answer["blocks"] / request * 640)
    assert answer["gain"] == pytest.approx(40 / request, abs=1e-4)
    assert answer["bits_per_element"] == pytest.approx(16 * request / 40, abs=1e-4)
    assert answer["transform_bytes"] == 2 * 2 * (4 * 16 * 16 + 2 * 16) * 4
    row, plain = 12, 64
    assert answer["step_bytes"] == 2 * 2 * ((640 - 320) * row + 320 * plain)
    assert answer["plain_step_bytes"] == 2 * 2 * 640 * plain


def test_text(run: Run, tiny: Path, artifact: Path) -> None:
    result = run("vllm", "check", tiny, "--artifact", artifact, "--memory", 1, "--recent", 128)
    assert result.exit_code == 0
    for part in ("vLLM 0.32.0", "2 KV heads of 16", "uniform for tiny", "all 2 are packed",
                 "predicted relative error", "oscarkv bench serving"):  # fmt: skip
        assert part in result.stdout
    last = result.stdout.strip().splitlines()[-1]
    assert last.startswith(f"vllm serve {tiny} --attention-backend CUSTOM")
    assert '"recent": 128' in last
    assert last.endswith(f"--kv-cache-memory-bytes {1 << 30}")


def test_the_command_has_what_was_given(run: Run, tiny: Path, artifact: Path) -> None:
    given = ["--max-model-len", "640", "--tensor-parallel-size", "2", "--dtype", "float16",
             "--gpu-memory-utilization", "0.5"]  # fmt: skip
    result = run("vllm", "check", tiny, "--artifact", artifact, *given, "--gpu-memory", 2)
    assert result.stdout.strip().splitlines()[-1].endswith(" ".join(given))
    plain = run("vllm", "check", tiny, "--artifact", artifact)
    assert plain.stdout.strip().endswith("}}'")


def test_ranks(run: Run, tiny: Path, artifact: Path) -> None:
    common = (tiny, "--artifact", artifact, "--memory", 1)
    one, two, four = (found(run, *common, "--tensor-parallel-size", n) for n in (1, 2, 4))
    assert two["blocks"] == 2 * one["blocks"]
    assert four["blocks"] == two["blocks"]  # two KV heads on four ranks: each twice
    refused = found(run, *common, "--tensor-parallel-size", 3, code=1)
    assert "do not go into 3" in problems(refused)[0]


def test_another_model(run: Run, tmp_path: Path, artifact: Path) -> None:
    other = save_tiny_model(tmp_path / "other", layers=3)
    answer = found(run, other, "--artifact", artifact, code=1)
    assert not answer["fits"]
    assert "layers 2" in problems(answer)[0]
    assert "has layers 3" in problems(answer)[0]
    assert "tokens" not in answer


def test_layers_without_transforms(run: Run, tmp_path: Path, tiny: Path, artifact: Path) -> None:
    loaded = oscarkv.load_artifact(artifact)
    del loaded.layers[1]
    oscarkv.save_artifact(loaded, tmp_path / "part")
    answer = found(run, tiny, "--artifact", tmp_path / "part", "--memory", 1)
    said = {finding["what"]: finding["text"] for finding in answer["findings"]}
    assert said["layers"].startswith("1 of 2 are packed; layer 1 (no transforms)")
    assert "not foretold" in said["capacity"]
    assert "tokens" not in answer


def test_too_little_memory_for_one_request(run: Run, tiny: Path, artifact: Path) -> None:
    answer = found(run, tiny, "--artifact", artifact, "--memory", 0.0002, code=1)
    assert f"one request of {CONTEXT:,} tokens needs" in problems(answer)[0]
    enough = found(run, tiny, "--artifact", artifact, "--memory", 0.001)
    assert enough["concurrency"] > 1


def test_engines(run: Run, tiny: Path, artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "engine_version", lambda: "0.40.1")
    assert "this is 0.40.1" in problems(found(run, tiny, "--artifact", artifact, code=1))[0]

    def missing() -> str:
        raise MissingDependencyError("vLLM is not installed")

    monkeypatch.setattr(fit, "engine_version", missing)
    answer = found(run, tiny, "--artifact", artifact)
    assert "vLLM is not installed" in answer["findings"][0]["text"]
    assert answer["findings"][0]["verdict"] == "warning"


def test_memory_of_a_gpu(run: Run, tiny: Path, artifact: Path) -> None:
    """The checkpoint is in float32, and served in bfloat16 unless told otherwise."""
    common = (tiny, "--artifact", artifact, "--gpu-memory", 2, "--gpu-memory-utilization", 0.5)
    tensors = [load_file(file) for file in tiny.glob("*.safetensors")]
    elements = sum(tensor.numel() for part in tensors for tensor in part.values())
    answer = found(run, *common)
    assert answer["memory_bytes"] == (1 << 30) - 2 * elements
    assert "GiB of weights" in json.dumps(answer)
    assert found(run, *common, "--dtype", "float32")["memory_bytes"] == (1 << 30) - 4 * elements


def test_weights_are_counted_once(tmp_path: Path) -> None:
    save_file(
        {"w": torch.zeros(100), "codes": torch.zeros(7, dtype=torch.uint8)},
        tmp_path / "a.safetensors",
    )
    save_file({"w": torch.zeros(50, dtype=torch.bfloat16)}, tmp_path / "b.safetensors")
    save_file({"w": torch.zeros(999)}, tmp_path / "consolidated.safetensors")
    assert weight_bytes(str(tmp_path), torch.bfloat16) == 207 + 100
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "b.safetensors", "y": "b.safetensors"}}))
    assert weight_bytes(str(tmp_path), torch.float32) == 200
    index.write_text(json.dumps({"weight_map": {"x": "c.safetensors"}}))
    with pytest.raises(OscarError, match=r"names c\.safetensors, which is not there"):
        weight_bytes(str(tmp_path), torch.float32)
    index.write_text("[]")
    with pytest.raises(OscarError, match="not a readable index"):
        weight_bytes(str(tmp_path), torch.float32)
    index.unlink()
    (tmp_path / "a.safetensors").write_bytes(b"cut")
    with pytest.raises(OscarError, match="not a readable safetensors file"):
        weight_bytes(str(tmp_path), torch.float32)
    assert weight_bytes(str(tmp_path / "none"), torch.float32) is None


def test_windows_longer_than_the_context(run: Run, tiny: Path, artifact: Path) -> None:
    answer = found(run, tiny, "--artifact", artifact, "--max-model-len", 200)
    assert any("nothing is gained" in f["text"] for f in answer["findings"])


def test_refusals(refuses: Callable[..., str], tiny: Path, artifact: Path, tmp_path: Path) -> None:
    def line(*arguments: object, model: Path = tiny, file: Path = artifact) -> str:
        return refuses("vllm", "check", model, "--artifact", file, *arguments)

    assert "does not exist" in line(file=tmp_path / "none")
    assert "no config.json" in line(model=tmp_path)
    assert "neither a directory nor a hub id" in line(model=tmp_path / "none")
    assert "not both" in line("--memory", 1, "--gpu-memory-utilization", 0.5)
    assert "above 0" in line("--memory", -1)
    for number in ("nan", "inf"):
        assert f"--memory {number}: give a number of GiB" in line("--memory", number)
        share = ("--gpu-memory-utilization", 0.5)
        assert f"--gpu-memory {number}: give a number" in line("--gpu-memory", number, *share)
    assert "at most 1" in line("--gpu-memory-utilization", 1.5, "--gpu-memory", 80)
    assert "does not hold the weights" in line(
        "--gpu-memory-utilization", 0.1, "--gpu-memory", 0.001
    )
    assert "unknown dtype 'int3'" in line("--dtype", "int3")
    assert "goes with --gpu-memory-utilization" in line("--gpu-memory", 80)


def test_a_recipe_that_packs_nothing(run: Run, tiny: Path, artifact: Path, tmp_path: Path) -> None:
    loaded = oscarkv.load_artifact(artifact)
    for layer in loaded.layers.values():
        layer.query = reader_of(layer.key, oscarkv.Recipe.named("bf16"))
    plain = dataclasses.replace(loaded, recipe=oscarkv.Recipe.named("bf16"))
    oscarkv.save_artifact(plain, tmp_path / "plain")
    answer = found(run, tiny, "--artifact", tmp_path / "plain", code=1)
    assert "packs nothing" in problems(answer)[0]


# -- what a server would refuse, though it can be read ---------------------------------------------


def changed(tiny: Path, folder: Path, **entries: object) -> Path:
    """The tiny model's configuration with other entries; no weights."""
    folder.mkdir()
    shutil.copy(tiny / "config.json", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | entries))
    return folder


def test_a_request_beyond_the_context(run: Run, tiny: Path, artifact: Path) -> None:
    common = (tiny, "--artifact", artifact, "--max-model-len")
    assert found(run, *common, CONTEXT)["fits"]
    answer = found(run, *common, CONTEXT + 1, code=1)
    assert problems(answer) == ["--max-model-len 1,025 is above the model's context, 1,024 tokens"]


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 4 * CONTEXT),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, CONTEXT),
    ],
    ids=["linear", "yarn"],
)
def test_a_context_that_rope_stretches(
    run: Run, tiny: Path, artifact: Path, tmp_path: Path, rope: dict, longest: int
) -> None:
    entries = {"rope_parameters": rope | {"rope_theta": 10000.0}}
    model = changed(tiny, tmp_path / "model", **entries)
    for length, above in ((longest, False), (longest + 1, True)):
        answer = found(run, model, "--artifact", artifact, "--max-model-len", length, code=1)
        said = any("above the model's context" in text for text in problems(answer))
        assert said == above  # beside another RoPE's artifact


def test_layers_that_cannot_be_kept(run: Run, tiny: Path, artifact: Path, tmp_path: Path) -> None:
    for kind, code in (("sliding_attention", 0), ("chunked_attention", 1)):
        kinds = {"layer_types": [kind, "full_attention"], "sliding_window": 64}
        model = changed(tiny, tmp_path / kind, attention_chunk_size=64, **kinds)
        answer = found(run, model, "--artifact", artifact, code=code)
        assert f"layer 0 ({kind})" in json.dumps(answer)
        assert len(problems(answer)) == code


def test_an_artifact_of_tune(run: Run, tiny: Path, artifact: Path, tmp_path: Path) -> None:
    """Values of 4 bits in one layer: its pages are larger, and so is every block."""
    loaded = oscarkv.load_artifact(artifact)
    mixed = dataclasses.replace(loaded, layer_bits={1: (loaded.recipe.key_bits, 4)})
    oscarkv.save_artifact(mixed, tmp_path / "mixed")
    even = found(run, tiny, "--artifact", artifact, "--memory", 1)
    answer = found(run, tiny, "--artifact", tmp_path / "mixed", "--memory", 1)
    assert answer["page_tokens"] == even["page_tokens"]
    assert even["bits_per_element"] < answer["bits_per_element"] < 1.25 * even["bits_per_element"]
    assert answer["history_bits_per_element"] == even["history_bits_per_element"] + 0.5
    assert answer["tokens"] < even["tokens"]
    assert answer["plain_tokens"] == even["plain_tokens"]
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}
    sliding = changed(tiny, tmp_path / "sliding", **kinds)
    beside = found(run, sliding, "--artifact", tmp_path / "mixed")
    assert "2 a key and 2 a value in all layers" in json.dumps(beside)
    assert beside["history_bits_per_element"] == even["history_bits_per_element"]


def test_a_model_with_mla(run: Run, tiny: Path, artifact: Path, tmp_path: Path) -> None:
    model = changed(tiny, tmp_path / "latent", kv_lora_rank=512)
    answer = found(run, model, "--artifact", artifact, code=1)
    assert "multi-head latent attention" in problems(answer)[0]


def test_a_head_dim_without_pages(run: Run, tiny: Path, artifact: Path, tmp_path: Path) -> None:
    """24 is no multiple of 16."""
    model = changed(tiny, tmp_path / "odd", head_dim=24)
    loaded = oscarkv.load_artifact(artifact)
    for layer in loaded.layers.values():
        eye = torch.eye(24).repeat(2, 1, 1)
        for name in ("key", "value", "value_inverse"):
            setattr(layer, name, eye.clone())
        for name in ("key_mean", "value_mean", "spectrum"):
            setattr(layer, name, torch.ones(2, 24))
        layer.query = reader_of(eye, loaded.recipe)
    loaded.model = dataclasses.replace(loaded.model, head_dim=24)
    oscarkv.save_artifact(loaded, tmp_path / "artifact")
    answer = found(run, model, "--artifact", tmp_path / "artifact", code=1)
    assert "head_dim 24 is not a multiple of 16" in problems(answer)[0]
