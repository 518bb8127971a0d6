"""The CUDA backend's host side, without a GPU: what it takes, and what a kernel that does not
compile or load does."""

import contextlib
import enum
import gc
import sys
import types
import warnings
import weakref
from dataclasses import replace

import pytest
import torch
from helpers import make_layer

from oscarkv.errors import CacheError
from oscarkv.kernels.cuda import backend, decode, launch, write
from oscarkv.kernels.cuda.compile import CompileError, compile_source
from oscarkv.kernels.interface import LayerCache
from oscarkv.linalg import hadamard
from oscarkv.recipe import Recipe

HEADS, DIM = 2, 64


def half_layer(**recipe: object) -> LayerCache:
    layer = make_layer(Recipe(**recipe), DIM, HEADS, pages=3)
    layer.window = layer.window.bfloat16()
    return layer


def rows(heads: int = HEADS, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(1, heads, DIM, generator=torch.Generator().manual_seed(0)).to(dtype)


def integers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_what_the_kernels_take_and_why_not_the_rest() -> None:
    q, k = rows(), rows()
    assert decode.unsupported(q, q, half_layer()) is None
    assert write.unsupported(k, k, half_layer()) is None
    for bits in ({"key_bits": 3}, {"value_bits": 3}, {"key_bits": 3, "value_bits": 3}):
        three = half_layer(**bits)
        assert decode.unsupported(q, q, three) is None
        assert write.unsupported(k, k, three) is None
    four = half_layer(key_bits=3, value_bits=4)
    assert decode.unsupported(q, q, four) == write.unsupported(k, k, four) == "3 and 4 bits"
    grouped = half_layer(value_bits=3, group_size=32, refine_keys=False)
    assert decode.unsupported(q, q, grouped) == "3 bits in 2 groups of head_dim 64"
    narrow = make_layer(Recipe(key_bits=3), 80, HEADS, pages=3)
    assert decode.unsupported(q, q, narrow) == "3 bits in 1 groups of head_dim 80"
    exact = rows(dtype=torch.float32)
    assert "torch.float32" in str(decode.unsupported(exact, exact, half_layer()))
    plain = {"refine_keys": False}
    assert write.unsupported(k, k, half_layer(**plain)) is None
    minmax = half_layer(fit="minmax", key_gain=0.0, value_gain=0.0, **plain)
    assert write.unsupported(k, k, minmax) == "fit minmax"
    assert write.unsupported(k, k, half_layer(metric_rounding=True, **plain)) == "metric rounding"
    assert "layout" in str(decode.unsupported(q.mT, q, half_layer()))


class Status(enum.Enum):
    """Stands in for the driver's `CUresult`."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_UNSUPPORTED_PTX_VERSION = 222


def fake_driver(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    """A driver that does all but the call `fails`, for what was compiled before it."""

    def call(name: str) -> tuple[object, ...]:
        return (list(Status)[name == fails], f"handle of {name}")

    names = ("cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute")
    attribute = types.SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8)
    driver = types.SimpleNamespace(
        CUresult=Status,
        CUfunction_attribute=attribute,
        cuGetErrorString=lambda status: (Status.CUDA_SUCCESS, b"made by a newer toolchain"),
        cuLaunchKernel=None,
        cuLaunchKernelEx=None,
        **{name: lambda *_, name=name: call(name) for name in names},
    )
    monkeypatch.setitem(sys.modules, "cuda.bindings", types.SimpleNamespace(driver=driver))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # as a CPU tensor's index
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(launch, "architecture", lambda device: "sm_80")
    monkeypatch.setattr(launch, "compiled", lambda *_: b"code")


@pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for a GPU on CPU tensors")
@pytest.mark.parametrize("call", ["cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute"])
def test_code_that_does_not_load_is_a_failed_compile(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_driver(monkeypatch, fails=call)
    with pytest.raises(CompileError, match=r"decode.cu for sm_80 .* newer toolchain") as raised:
        launch.load("decode.cu", (("oscar_decode", 64 * 1024),), (), 0)
    assert "CUDA_ERROR_UNSUPPORTED_PTX_VERSION" in str(raised.value.__cause__)


def test_packages_that_cannot_be_imported_are_a_failed_compile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_driver(monkeypatch, fails="")
    for package in ("cuda.core", "cuda.bindings"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(CompileError, match=r"compile decode.cu for sm_80 .*cuda\.core") as raised:
        compile_source("decode.cu", {}, "sm_80")
    assert isinstance(raised.value.__cause__, ImportError)
    with pytest.raises(CompileError, match=r"decode.cu for sm_80 .*cuda\.bindings") as raised:
        launch.load("decode.cu", (), (), 0)
    assert isinstance(raised.value.__cause__, ImportError)


@pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for a GPU on CPU tensors")
@pytest.mark.parametrize("stage", ["compile", "load"])
def test_a_failed_kernel_warns_once_and_triton_answers(
    stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise CompileError("NVRTC could not compile decode.cu")

    memory = types.SimpleNamespace(shared_memory_per_multiprocessor=228 * 1024)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # as a CPU tensor's index
    expected = "NVRTC could not compile decode.cu"
    if stage == "compile":
        monkeypatch.setattr(decode, "DecodeKernel", fail)
        monkeypatch.setattr(write, "WriteKernel", fail)
    else:
        fake_driver(monkeypatch, fails="cuModuleLoadData")
        expected = (
            "write.cu for sm_80 could not be loaded: CUDA driver: made by a newer toolchain "
            "(CUDA_ERROR_UNSUPPORTED_PTX_VERSION)"
        )
    layer, q, k, v = half_layer(), rows(4), rows(), -rows()
    out = torch.full_like(q, torch.nan)
    table = integers(1).view(1, 1)
    tried = backend.CudaBackend()
    tried.plan(integers(1), integers(0, 1), table, table, max_query_len=1)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        tried.write(k, v, torch.tensor([16]), torch.tensor([16]), layer)
        tried.decode(q, layer, out)
    messages = [str(warning.message) for warning in seen]
    instead = "the Triton backend is used instead: "
    assert [m for m in messages if m.startswith(instead)] == [instead + expected]
    # One token, exact in its window: each query head reads its KV head's value.
    torch.testing.assert_close(
        out[0].float(), v[0].repeat_interleave(2, 0).float(), atol=0.02, rtol=0
    )


class FakeKernel:
    """Stands in for `DecodeKernel`: says what it was asked for."""

    log: list[tuple[object, ...]]

    def __init__(self, geometry: decode.Geometry, device: torch.device) -> None:
        self.log.append(("made",))

    def arguments(self, plan: object, layer: LayerCache, heads: int) -> dict[str, object]:
        return {}

    def renew(
        self, arguments: dict[str, object], plan: object, layer: LayerCache, sequences: int
    ) -> None:
        arguments |= {"sequences": sequences, "history": layer.history.data_ptr()}

    def plan(self, arguments: dict[str, object]) -> None:
        self.log.append(("schedule", arguments["sequences"]))

    def run(self, arguments: dict[str, object], q: torch.Tensor, out: torch.Tensor) -> None:
        self.log.append(("run", arguments["history"]))


@pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for a GPU on CPU tensors")
def test_every_capture_shares_out_its_own_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay must do it again from the lengths of then, so that the launch is in the graph."""
    FakeKernel.log = []
    capture = 0
    memory = types.SimpleNamespace(shared_memory_per_multiprocessor=228 * 1024)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(decode, "DecodeKernel", FakeKernel)
    monkeypatch.setattr(backend, "_capture", lambda: capture)
    tried, q, table = backend.CudaBackend(), rows(4), integers(1).view(1, 1)
    tried.reserve(32)
    tried.reserve(8)
    tried.plan(integers(1), integers(0, 1), table, table, max_query_len=1)
    first, second = half_layer(), half_layer()
    for number in (0, 7, 8):  # a warm-up, and two captures of the same planned step
        capture = number
        for layer in (first, second):
            tried.decode(q, layer, q.clone())
    ran = [("run", layer.history.data_ptr()) for layer in (first, second)]
    assert FakeKernel.log == [("made",), *3 * [("schedule", 32), *ran]]


@pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for a GPU on CPU tensors")
def test_a_layer_is_found_again_by_itself_and_its_pages_may_move(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A new layer may get a dead one's address, and caches grow."""
    FakeKernel.log = []
    memory = types.SimpleNamespace(shared_memory_per_multiprocessor=228 * 1024)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(decode, "DecodeKernel", FakeKernel)
    monkeypatch.setattr(backend, "_capture", lambda: 0)
    tried, q, table = backend.CudaBackend(), rows(4), integers(1).view(1, 1)
    tried.plan(integers(1), integers(0, 1), table, table, max_query_len=1)
    layer, other = half_layer(), half_layer()
    tried.decode(q, layer, q.clone())
    (shapes,) = tried._bound
    arguments = tried._bound[shapes].arguments
    layer.history = layer.history.clone()
    tried.decode(q, layer, q.clone())
    assert tried._bound[shapes].arguments is arguments
    assert FakeKernel.log[-1] == ("run", layer.history.data_ptr())
    tried._bound[shapes] = tried._bound[shapes]._replace(layer=weakref.ref(other))
    tried.decode(q, layer, q.clone())
    assert tried._bound[shapes].layer() is layer
    assert tried._bound[shapes].arguments is not arguments
    alive = weakref.ref(layer)
    del layer
    gc.collect()
    assert alive() is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for a GPU on CPU tensors")
def test_nothing_is_made_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    slots, k = torch.tensor([16]), rows()
    with pytest.raises(CacheError, match="once before it is captured"):
        backend.CudaBackend().write(k, k, slots, slots, half_layer())


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_fragments_of_signs_are_the_high_parts_of_fragments(dim: int) -> None:
    """Both steps of a lane side by side, in the first half of the room, and no low parts."""
    value = hadamard(dim).float()[None] * torch.tensor([[[1.0]], [[3.0]]])
    room, size = write._sign_fragments(value)
    full, _ = write._fragments(value)
    assert room.shape == full.shape
    assert torch.equal(size, value.abs().amax((1, 2)))
    chunks, tiles = full.shape[1:3]
    half = room.flatten(1)[:, : room[0].numel() // 2].view(2, chunks, tiles, 32, 2, 4)
    for step in range(2):
        signs = full[:, :, :, step, :, :4].sign()
        assert torch.equal(half[..., step, :], signs)
    assert not room.flatten(1)[:, room[0].numel() // 2 :].any()


def test_signs_are_told_from_other_transforms() -> None:
    layer = half_layer()
    for value, signs in (
        (hadamard(layer.transforms.key.shape[-1]).float(), True),
        (torch.eye(layer.transforms.key.shape[-1]), False),
        (None, False),
    ):
        given = None if value is None else value.expand_as(layer.transforms.key)
        other = replace(layer, transforms=replace(layer.transforms, value=given), memo={})
        assert write._value_signs(other) is signs


def test_sylvesters_matrix_is_told_from_other_inverses() -> None:
    layer, basis = half_layer(), hadamard(DIM).float()
    for inverse, told in ((basis, True), (-basis, False), (torch.eye(DIM), False), (None, False)):
        given = None if inverse is None else inverse.expand_as(layer.transforms.key)
        transforms = replace(layer.transforms, value_inverse=given)
        assert decode._value_hadamard(replace(layer, transforms=transforms, memo={})) is told


@pytest.mark.parametrize(("dim", "short"), [(16, False), (32, False), (64, True), (256, True)])
def test_the_short_way_for_values_is_for_head_dims_it_is_written_for(dim: int, short: bool) -> None:
    layer = make_layer(Recipe(), dim, HEADS, pages=3)
    basis = hadamard(dim).float().expand(HEADS, dim, dim)
    transforms = replace(layer.transforms, value=basis, value_inverse=basis)
    layer = replace(layer, transforms=transforms, memo={})
    assert decode._value_hadamard(layer) is short
    assert write._value_signs(layer) is short
