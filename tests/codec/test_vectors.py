"""The committed vectors: the codec reproduces them, and so does the written definition."""

import json
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from codec_reference import encode as reference_encode
from codec_reference import pack
from safetensors import safe_open

from oscarkv.codec import RowCodec, RowLayout

VECTORS = Path(__file__).parents[1] / "vectors"


def read() -> tuple[dict[str, torch.Tensor], dict[str, dict]]:
    with safe_open(VECTORS / "codec.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return tensors, json.loads(file.metadata()["cases"])


TENSORS, CASES = read()


@pytest.mark.parametrize("case", sorted(CASES))
def test_the_codec_reproduces_the_vectors(case: str) -> None:
    codec, dim = RowCodec(**CASES[case]), int(case.split(".")[0][1:])
    codes, stored = codec.encode(TENSORS[f"d{dim}.rows"], TENSORS["base"])
    layout = RowLayout(dim, codec.bits)
    assert torch.equal(codes, TENSORS[f"{case}.codes"])
    assert torch.equal(stored, TENSORS[f"{case}.parameters"])
    assert torch.equal(layout.pack(codes), TENSORS[f"{case}.packed"])
    assert torch.equal(layout.unpack(TENSORS[f"{case}.packed"]), codes)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_vectors_too() -> None:
    for case, knobs in CASES.items():
        rows = TENSORS[f"{case.split('.')[0]}.rows"]
        codes, stored = RowCodec(**knobs).encode(rows.cuda(), TENSORS["base"].cuda())
        assert torch.equal(codes.cpu(), TENSORS[f"{case}.codes"]), case
        assert torch.equal(stored.cpu(), TENSORS[f"{case}.parameters"]), case


@pytest.mark.parametrize("case", [c for c in sorted(CASES) if c.startswith(("d80", "d128"))])
@np.errstate(over="ignore")
def test_the_written_definition_gives_the_vectors(case: str) -> None:
    knobs, dim = CASES[case], int(case.split(".")[0][1:])
    names = ("bits", "groups", "parameter_format", "fit", "clip", "gain", "refined")
    arguments = [knobs[name] for name in names]
    for row, base in enumerate(TENSORS["base"].tolist()):
        x = TENSORS[f"d{dim}.rows"][row].numpy()
        codes, stored = reference_encode(x, *arguments, base)
        assert codes == TENSORS[f"{case}.codes"][row].tolist()
        assert stored == bytes(TENSORS[f"{case}.parameters"][row].tolist())
        assert pack(codes, knobs["bits"]) == bytes(TENSORS[f"{case}.packed"][row].tolist())


def test_the_file_is_what_its_generator_makes() -> None:
    tensors, metadata = runpy.run_path(str(VECTORS / "make_vectors.py"))["make"]()
    assert json.loads(metadata["cases"]) == CASES
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, TENSORS[name]), name


def test_the_file_is_small_and_covers_every_size() -> None:
    assert (VECTORS / "codec.safetensors").stat().st_size < 300_000
    covered = {tuple(case.split(".")[:2]) for case in CASES}
    assert covered == {(f"d{d}", f"b{b}") for d in (64, 80, 96, 128, 256) for b in (2, 3, 4)}
