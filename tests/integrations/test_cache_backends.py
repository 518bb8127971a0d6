"""Which backend an OscarCache takes, and what it asks of it."""

import copy
from typing import Any

import pytest
import torch
from integrations import tiny

from oscarkv import OscarCache, Recipe
from oscarkv.errors import OscarError
from oscarkv.integrations.transformers.batch import left_padding, real_tokens
from oscarkv.integrations.transformers.cache import choose_backend
from oscarkv.kernels import LayerCache, registry
from oscarkv.kernels.torch_backend import TorchBackend


class Recorder(TorchBackend):
    """Like the GPU backends: writes every step at once, and cannot be copied."""

    name = "torch"
    write_batch = 1

    def __init__(self) -> None:
        super().__init__()
        self.planned: list[int | None] = []
        self.writes: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.queries: list[torch.Tensor] = []

    def plan(self, *arguments: Any) -> None:
        self.planned.append(arguments[5])
        super().plan(*arguments)

    def write(self, k: Any, v: Any, history: Any, window: Any, layer: LayerCache) -> None:
        self.writes.append((history, window))
        super().write(k, v, history, window, layer)

    def decode(self, q: torch.Tensor, layer: LayerCache, out: torch.Tensor) -> None:
        assert q.stride(-1) == 1
        assert out.is_contiguous()
        self.queries.append(q)
        super().decode(q, layer, out)

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("compiled kernels cannot be copied")


@pytest.fixture
def usable_gpu_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    def entry(name: str) -> registry._Entry:
        def make() -> Recorder:
            made = Recorder()
            made.name = name
            return made

        return registry._Entry(lambda: None, make)

    entries = {"cuda": entry("cuda"), "triton": entry("triton")}
    monkeypatch.setattr(registry, "_ENTRIES", registry._ENTRIES | entries)


@pytest.mark.usefixtures("usable_gpu_backends")
def test_a_model_on_the_cpu_never_gets_a_gpu_backend() -> None:
    model = tiny.model()
    assert OscarCache(model, tiny.calibrated()).backend.name == "torch"
    for name in ("cuda", "triton"):
        with pytest.raises(OscarError, match=f"the {name} backend needs the model on a GPU"):
            OscarCache(model, tiny.calibrated(), backend=name)


@pytest.mark.usefixtures("usable_gpu_backends")
@pytest.mark.parametrize("name", ["auto", "torch"])
def test_devices_without_float64_are_refused(name: str) -> None:
    with pytest.raises(OscarError, match=r"on mps, which has no float64, .*: use the CPU"):
        choose_backend(name, torch.device("mps"))
    with pytest.raises(OscarError, match="on meta, which is not supported: use the CPU"):
        choose_backend(name, torch.device("meta"))
    for place in ("cpu", "cuda:1", "xpu"):
        assert choose_backend("torch", torch.device(place)).name == "torch"


def test_a_model_on_a_refused_device_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model, artifact = tiny.model(), tiny.calibrated()
    attention = model.config._attn_implementation
    monkeypatch.setattr(type(model), "device", torch.device("mps"))
    with pytest.raises(OscarError, match="on mps, which has no float64"):
        OscarCache(model, artifact)
    assert model.config._attn_implementation == attention


def test_unknown_backends_are_refused() -> None:
    with pytest.raises(OscarError, match="unknown backend 'abacus'"):
        OscarCache(tiny.model(), tiny.calibrated(), backend="abacus")


def test_a_step_is_one_plan_and_one_write_a_layer() -> None:
    model = tiny.model()
    artifact = tiny.quick_calibrate(model, Recipe.named("uniform", sink=4, recent=32))
    cache, stock = OscarCache(model, artifact), OscarCache(model, artifact)
    cache.backend = backend = Recorder()
    ids = tiny.tokens(2, 60)
    found = tiny.decode_logits(model, ids[:, :50], cache, 48)
    assert backend.planned == [48, 1, 1]
    assert len(backend.writes) == 3 * artifact.model.layers
    assert all((slots >= 0).all() for pair in backend.writes[-2:] for slots in pair)
    assert torch.equal(found, tiny.decode_logits(model, ids[:, :50], stock, 48))
    tiny.logits(model, ids[:, 50:], cache)
    assert backend.planned[-1] == 10
    assert not any(layer.held_bytes() for layer in cache._packed)


@pytest.mark.usefixtures("usable_gpu_backends")
def test_a_copy_starts_a_backend_of_its_own() -> None:
    model = tiny.model()
    cache = OscarCache(model, tiny.calibrated())
    cache.backend = Recorder()
    cache.backend.name = "cuda"
    ids = tiny.tokens(1, 70)
    tiny.logits(model, ids[:, :60], cache)
    other = copy.deepcopy(cache)
    assert other.backend is not cache.backend
    assert other._packed[0].cache is other
    assert other.pages.layers[0] is other._packed[0].store
    first = tiny.decode_logits(model, ids[:, 60:], cache, 1)
    assert torch.equal(tiny.decode_logits(model, ids[:, 60:], other, 1), first)


def test_tokens_are_views_where_they_can_be() -> None:
    single = torch.randn(3, 4, 1, 8)
    projected = torch.randn(2, 5, 4, 8).transpose(1, 2)
    sequence = torch.randn(1, 4, 5, 8)
    for x in (single, projected, sequence):
        rows = real_tokens(x, [0] * x.shape[0], x.shape[2])
        assert rows.data_ptr() == x.data_ptr()
        assert torch.equal(rows, x.transpose(1, 2).flatten(0, 1))
    odd = torch.randn(3, 8, 1, 4).transpose(1, 3)  # channels are not side by side
    rows = real_tokens(odd, [0] * 3, 1)
    assert rows.stride(-1) == 1
    assert torch.equal(rows, odd.transpose(1, 2).flatten(0, 1))


def test_padding_is_learnt_in_one_read() -> None:
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]])
    assert left_padding(mask, 3, 4) == [2, 0, 4]
    assert left_padding(mask.bool(), 3, 4) == [2, 0, 4]
