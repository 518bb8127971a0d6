"""CUDA sources compile for every architecture, without a GPU; compiled code is kept on disk."""

import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import make_layer

pytest.importorskip("cuda.core")
from oscarkv.errors import OscarError
from oscarkv.kernels import LayerCache
from oscarkv.kernels.cuda import cache_folder, decode, unusable_reason, write
from oscarkv.kernels.cuda import compile as module
from oscarkv.kernels.cuda.compile import CompileError, compile_source, compiled
from oscarkv.recipe import Recipe

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
#: Shared memory of a processor, in KiB; a block can have 1 KiB less.
SHARED_KIB = {"sm_80": 164, "sm_86": 100, "sm_90": 228, "sm_100": 228}

#: head_dim, group size, parameters, page size, type, query rows of a KV head, soft cap. Every
#: architecture compiles every third of them, beginning with another.
DECODE = [
    (128, None, "fp16", 64, torch.bfloat16, 4, None),
    (256, 32, "log8", 128, torch.float16, 8, 30.0),
    (80, None, "log8", 48, torch.float16, 16, None),
    (64, 32, "fp16", 112, torch.bfloat16, 7, None),
    (192, None, "log8-symmetric", 16, torch.bfloat16, 6, 50.0),
    (96, None, "fp16", 256, torch.float16, 1, None),
    (128, 64, "log8-symmetric", 16, torch.float16, 64, 2.0),
    (256, None, "fp16", 64, torch.bfloat16, 4, None),
    (64, None, "log8", 64, torch.bfloat16, 8, None),
]
#: The same, of layers of 3-bit keys, values or both.
THREE_BITS = [
    ((128, None, "fp16", 64, torch.bfloat16, 4, None), (3, 3)),
    ((64, None, "log8", 64, torch.bfloat16, 3, None), (3, 3)),
    ((96, None, "log8-symmetric", 112, torch.float16, 6, 50.0), (3, 3)),
    ((256, None, "log8", 16, torch.bfloat16, 4, None), (3, 3)),
    ((128, None, "log8-symmetric", 16, torch.float16, 7, 30.0), (3, 2)),
    ((64, None, "fp16", 112, torch.float16, 12, None), (3, 2)),
    ((96, None, "fp16", 64, torch.bfloat16, 1, None), (3, 2)),
    ((256, None, "log8-symmetric", 64, torch.bfloat16, 16, None), (3, 2)),
    ((128, None, "log8", 64, torch.bfloat16, 12, None), (2, 3)),
    ((64, None, "log8-symmetric", 64, torch.bfloat16, 4, None), (2, 3)),
    ((96, None, "log8", 16, torch.bfloat16, 12, None), (2, 3)),
    ((256, None, "fp16", 112, torch.float16, 7, None), (2, 3)),
]
#: head_dim, group size, parameters, page size, type, whether keys are refined; with split scales.
WRITE = [
    (128, None, "fp16", 64, torch.bfloat16, False),
    (256, 64, "log8", 128, torch.float16, False),
    (80, None, "log8-symmetric", 48, torch.bfloat16, False),
    (64, 32, "log8", 16, torch.float16, False),
    (96, None, "fp16", 112, torch.float16, False),
    (192, None, "log8", 256, torch.bfloat16, False),
    (64, None, "log8-symmetric", 16, torch.float16, True),
    (80, None, "fp16", 48, torch.bfloat16, True),
    (96, None, "log8", 112, torch.float16, True),
    (192, None, "log8-symmetric", 256, torch.bfloat16, True),
    (256, None, "log8", 64, torch.float16, True),
    (64, None, "log8-symmetric", 64, torch.bfloat16, True, None, True),
    (128, None, "log8-symmetric", 112, torch.float16, True, None, True),
    (256, None, "log8-symmetric", 64, torch.bfloat16, True, None, True),
]
#: The same, of layers of 3-bit keys, values or both; and how many tokens.
WRITE_THREE_BITS = [
    ((128, None, "log8-symmetric", 64, torch.bfloat16, True), (3, 3), 1),
    ((64, None, "log8-symmetric", 112, torch.float16, True), (3, 2), 8192),
    ((96, None, "log8", 64, torch.bfloat16, True), (3, 3), 8192),
    ((256, None, "fp16", 16, torch.float16, True), (2, 3), 1),
    ((192, None, "fp16", 64, torch.bfloat16, False), (3, 3), 8192),
]
USUAL_WRITE = (128, None, "fp16", 64, torch.bfloat16, True)


def layer_of(
    head_dim,
    group_size,
    parameters,
    page_size,
    dtype,
    refined=False,
    soft_cap=None,
    split=False,
    bits=(2, 2),
) -> LayerCache:
    recipe = Recipe(
        group_size=group_size,
        parameters=parameters,
        refine_keys=refined,
        split_scales=split,
        key_bits=bits[0],
        value_bits=bits[1],
    )
    layer = make_layer(recipe, head_dim, 1, page_size, soft_cap=soft_cap)
    layer.window = layer.window.to(dtype)
    return layer


def decode_geometry(case, arch: str, bits: tuple[int, int] = (2, 2)) -> decode.Geometry:
    *storage, rows, soft_cap = case
    q = torch.empty(1, rows, storage[0], dtype=storage[-1])
    layer = layer_of(*storage, soft_cap=soft_cap, bits=bits)
    assert decode.unsupported(q, q, layer) is None
    with on_a_gpu(arch):
        return decode.Geometry.of(q, layer, 1)


def write_geometry(case, arch: str, count: int, bits: tuple[int, int] = (2, 2)) -> write.Geometry:
    """For few tokens or many."""
    k = torch.empty(count, 1, case[0], dtype=case[4])
    with on_a_gpu(arch):
        return write.Geometry.of(k, layer_of(*case, bits=bits))


@contextmanager
def on_a_gpu(arch: str) -> Iterator[None]:
    """What torch says of its GPU, where there is none."""
    properties = SimpleNamespace(
        shared_memory_per_multiprocessor=SHARED_KIB[arch] * 1024, multi_processor_count=132
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
        yield


def named(case) -> str:
    return "-".join(str(x).removeprefix("torch.") for x in case)


def spread(cases: list) -> Iterator:
    """Every architecture with a third of the cases, every case with one architecture."""
    for index, case in enumerate(cases):
        arch = ARCHITECTURES[index % len(ARCHITECTURES)]
        yield pytest.param(case, arch, id=f"{named(case)}-{arch}")


def is_machine_code(code: bytes) -> bool:
    return code[:4] == b"\x7fELF" and len(code) > 1000


# -- compiling -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("case", "arch"), spread(DECODE))
def test_decode_compiles(case, arch: str) -> None:
    assert is_machine_code(compile_source("decode.cu", decode_geometry(case, arch).macros(), arch))


@pytest.mark.parametrize(
    ("case", "bits", "arch"),
    [
        pytest.param(case, bits, arch, id=f"{named(case)}-{bits[0]}-{bits[1]}-{arch}")
        for index, (case, bits) in enumerate(THREE_BITS)
        for arch in (ARCHITECTURES if index == 0 else [ARCHITECTURES[index % 3]])
    ],
)
def test_decode_of_three_bits_compiles(case, bits: tuple[int, int], arch: str) -> None:
    macros = decode_geometry(case, arch, bits).macros()
    assert (macros["KEY_BITS"], macros["VALUE_BITS"]) == bits
    assert is_machine_code(compile_source("decode.cu", macros, arch))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_usual_decode_compiles_everywhere(arch: str) -> None:
    code = compile_source("decode.cu", decode_geometry(DECODE[0], arch).macros(), arch)
    assert is_machine_code(code)
    for kernel in (b"oscar_schedule", b"oscar_queries", b"oscar_decode"):
        assert kernel in code


@pytest.mark.parametrize(("case", "arch"), spread(WRITE))
def test_write_compiles(case, arch: str) -> None:
    for count in (1, 8192):
        macros = write_geometry(case, arch, count).macros()
        assert is_machine_code(compile_source("write.cu", macros, arch))


@pytest.mark.parametrize(
    ("case", "bits", "count", "arch"),
    [
        pytest.param(*case, ARCHITECTURES[i % 3], id=f"{named(case[0])}-{case[1][0]}-{case[1][1]}")
        for i, case in enumerate(WRITE_THREE_BITS)
    ],
)
def test_write_of_three_bits_compiles(case, bits: tuple[int, int], arch: str, count: int) -> None:
    macros = write_geometry(case, arch, count, bits).macros()
    assert (macros["KEY_BITS"], macros["VALUE_BITS"]) == bits
    assert is_machine_code(compile_source("write.cu", macros, arch))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_usual_write_compiles_everywhere(arch: str) -> None:
    for count in (1, 8192):
        macros = write_geometry(USUAL_WRITE, arch, count).macros()
        assert macros["REFINED"]
        assert is_machine_code(compile_source("write.cu", macros, arch))


@pytest.mark.parametrize("arch", SHARED_KIB)
def test_blocks_have_the_shared_memory_they_ask_for(arch: str) -> None:
    asked = {
        named((*storage, rows, *bits)): decode_geometry(
            (*storage, rows, None), arch, bits
        ).shared_bytes
        for (*storage, _, _), bits in [*((case, (2, 2)) for case in DECODE), *THREE_BITS]
        for rows in (1, 4, 8, 16, 64)
    }
    for case in WRITE:
        asked[f"write {named(case)}"] = write_geometry(case, arch, 8192).shared_bytes
    too_large = {k: v for k, v in asked.items() if v > (SHARED_KIB[arch] - 1) * 1024}
    assert not too_large


def test_a_failed_compile_names_the_file_the_architecture_and_the_variant() -> None:
    macros = decode_geometry(DECODE[0], "sm_90").macros() | {"HEAD_DIM": "nonsense"}
    with pytest.raises(
        CompileError, match=r"decode.cu for sm_90 \(HEAD_DIM=nonsense .*\): "
    ) as error:
        compile_source("decode.cu", macros, "sm_90")
    assert isinstance(error.value, OscarError)
    assert "nonsense" in str(error.value).split("): ", 1)[1]  # NVRTC's own words
    with pytest.raises(CompileError, match="sm_11"):
        compile_source("decode.cu", decode_geometry(DECODE[0], "sm_90").macros(), "sm_11")


# -- the cache on disk ---------------------------------------------------------------------------


class Compiler:
    """In place of NVRTC: its code is the number of calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, name: str, macros: Mapping[str, int], arch: str) -> bytes:
        self.calls += 1
        return f"code {self.calls} of {name}".encode()


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    fake = Compiler()
    monkeypatch.setattr(module, "compile_source", fake)
    return fake


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "oscarkv" / "kernels"


def test_code_is_compiled_once_and_then_read(compiler: Compiler, folder: Path) -> None:
    assert cache_folder() == str(folder)
    first = compiled("decode.cu", {"A": 1}, "sm_90")
    assert compiled("decode.cu", {"A": 1}, "sm_90") == first
    assert compiler.calls == 1
    [path] = folder.iterdir()
    assert path.read_bytes() == first
    assert path.name.startswith("decode-sm_90-")
    assert path.suffix == ".cubin"


def test_whatever_changes_the_code_changes_the_file(
    compiler: Compiler, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled("decode.cu", {"A": 1, "B": 2}, "sm_90")
    compiled("decode.cu", {"B": 2, "A": 1}, "sm_90")  # the same
    assert compiler.calls == 1
    compiled("decode.cu", {"A": 2, "B": 2}, "sm_90")
    compiled("decode.cu", {"A": 1, "B": 2}, "sm_80")
    source = module._source("decode.cu")
    monkeypatch.setattr(module, "_source", lambda name: source + " ")
    compiled("decode.cu", {"A": 1, "B": 2}, "sm_90")
    assert compiler.calls == len(list(folder.iterdir())) == 4


def test_a_file_appears_whole_or_not_at_all(
    compiler: Compiler, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def replace(source: str, target: Path) -> None:
        seen.append((Path(source).read_bytes(), Path(target).exists()))
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", replace)
    assert compiled("decode.cu", {}, "sm_90") == b"code 1 of decode.cu"
    assert seen == [(b"code 1 of decode.cu", False)]
    assert list(folder.iterdir()) == []  # nothing half written, nothing left over


def a_file_in_its_place(folder: Path) -> None:
    folder.parent.parent.mkdir(exist_ok=True)
    folder.parent.write_text("not a folder")


def a_folder_under_its_name(folder: Path) -> None:
    compiled("decode.cu", {}, "sm_90")
    [path] = folder.iterdir()
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("breaks", [a_file_in_its_place, a_folder_under_its_name])
def test_a_broken_cache_costs_only_time(
    breaks: Callable[[Path], None], compiler: Compiler, folder: Path
) -> None:
    breaks(folder)
    before = compiler.calls
    for call in (1, 2):
        assert compiled("decode.cu", {}, "sm_90") == f"code {before + call} of decode.cu".encode()


def test_a_home_that_cannot_be_written_costs_only_time(
    compiler: Compiler, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert compiled("decode.cu", {}, "sm_90") == b"code 1 of decode.cu"
    assert compiled("decode.cu", {}, "sm_90") == b"code 2 of decode.cu"
    assert not folder.exists()


# -- the machine ---------------------------------------------------------------------------------


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert unusable_reason() == "no NVIDIA GPU is visible to torch"


def test_an_old_gpu_or_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    package = importlib.import_module("oscarkv.kernels.cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert unusable_reason() == "compute capability 7.5 is below 8.0"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert unusable_reason() is None
    monkeypatch.setattr(package, "_found", lambda name: name != "cuda.bindings")
    assert unusable_reason() == 'cuda.bindings is not installed: pip install "oscarkv[cuda]"'
