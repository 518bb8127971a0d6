"""The torch backend against dense fp64 attention, over every geometry and kind of batch."""

import pytest
import torch
from helpers import Rig, generator, make_layer, make_transforms

from oscarkv.errors import CacheError, OscarError
from oscarkv.kernels import available_backends, get_backend
from oscarkv.kernels.torch_backend import TorchBackend
from oscarkv.recipe import Recipe

SMALL = Recipe(sink=4, recent=8)
BOUND = {torch.float64: 1e-9, torch.float32: 2e-5}


def rig(
    recipe: Recipe = SMALL, *, group: int = 2, sequences: int = 1, dtype=torch.float64, **layer
):
    layer.setdefault("head_dim", 64)
    return Rig(make_layer(recipe, **layer), group, sequences, dtype=dtype)


# -- geometries ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_every_head_dim_in_fp64_and_fp32(head_dim: int, dtype: torch.dtype) -> None:
    one = rig(head_dim=head_dim, dtype=dtype, sequences=2)
    assert one.check([40, 21], "prefill") < BOUND[dtype]
    assert one.check([1, 1], "decode") < BOUND[dtype]


@pytest.mark.parametrize("group", [1, 2, 3, 6, 7, 12, 16])
def test_every_gqa_ratio(group: int) -> None:
    one = rig(group=group, kv_heads=3)
    assert one.check([20], "prefill") < 1e-9
    assert one.check([1], "decode") < 1e-9


@pytest.mark.parametrize("mode", ["decode", "prefill"])
@pytest.mark.parametrize("group", [1, 2, 3, 6, 7, 12, 16])
def test_query_heads_read_their_own_kv_head(group: int, mode: str) -> None:
    """All values of KV head h are the constant h + 1, packed and exact: outputs must be too."""
    heads = 4
    one = rig(group=group, kv_heads=heads)
    transforms = one.layer.transforms
    transforms.value_mean = (torch.arange(heads) + 1.0)[:, None].expand(heads, 64).clone()
    for count in (40, 2):
        q, k, _ = one.tokens(count)
        v = (torch.arange(heads) + 1.0)[None, :, None].expand(count, heads, 64)
        _, out = one.run([count], mode if count == 2 else "prefill", (q, k, v))
    expected = torch.arange(heads * group) // group + 1.0
    # A zero row is stored with the smallest scale, up to 2^-8 here: not exactly zero
    torch.testing.assert_close(out.mean(-1)[0], expected.double(), atol=0.05, rtol=0)


@pytest.mark.parametrize("group_size", [None, 32, 64])
@pytest.mark.parametrize("parameters", ["fp16", "log8", "log8-symmetric"])
@pytest.mark.parametrize("bits", [(2, 2), (3, 3), (4, 4), (2, 4), (3, 2)])
def test_bits_formats_and_groups(bits: tuple[int, int], parameters: str, group_size) -> None:
    recipe = SMALL.replace(
        key_bits=bits[0],
        value_bits=bits[1],
        parameters=parameters,
        group_size=group_size,
        refine_keys=group_size is None,
    )
    one = rig(recipe, head_dim=128)
    assert one.check([30], "prefill") < 1e-9
    assert one.check([2], "decode") < 1e-9
    assert one.check([5], "prefill") < 1e-9


@pytest.mark.parametrize("name", ["paper", "paper-softmax", "naive-int2", "precise", "retrieval"])
def test_other_recipes(name: str) -> None:
    one = rig(Recipe.named(name, sink=4, recent=8), head_dim=128)
    assert one.check([30], "prefill") < 1e-9
    assert one.check([3], "decode") < 1e-9


# -- batches -------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [16, 32])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_ragged_batches_at_page_borders(dtype: torch.dtype, page_size: int) -> None:
    lengths = [page_size - 1, page_size, page_size + 1, 1, 2 * page_size + 3]
    one = rig(sequences=len(lengths), page_size=page_size, dtype=dtype)
    assert one.check(lengths, "prefill") < BOUND[dtype]
    for _ in range(2):
        assert one.check([1] * len(lengths), "decode") < BOUND[dtype]


def test_decode_from_an_empty_history_and_one_token() -> None:
    one = rig(sequences=2)
    for _ in range(20):
        assert one.check([1, 1], "decode") < 1e-9


@pytest.mark.parametrize("recent", [1, 2, 15, 16, 17, 40])
@pytest.mark.parametrize("sink", [0, 4, 64])
def test_window_sizes(sink: int, recent: int) -> None:
    one = rig(Recipe(sink=sink, recent=recent), sequences=2)
    assert one.check([37, 5], "prefill") < 1e-9
    assert one.check([1, 3], "decode") < 1e-9
    assert one.check([33, 70], "prefill", strict=True) < 1e-9
    assert one.check([2, 1], "decode") < 1e-9


@pytest.mark.parametrize("counts", [[1, 8, 3], [8, 8, 8], [5, 1, 0], [2, 7, 4]])
def test_several_tokens_a_sequence_in_one_decode(counts: list[int]) -> None:
    one = rig(sequences=3)
    one.check([30, 9, 17], "prefill")
    assert one.check(counts, "decode") < 1e-9
    assert one.check([1, 2, 3], "decode") < 1e-9


@pytest.mark.parametrize("strict", [False, True])
def test_prefill_in_chunks_with_and_without_context(strict: bool) -> None:
    one = rig(sequences=2)
    for counts in ([20, 3], [17, 40], [1, 1], [70, 16]):
        assert one.check(counts, "prefill", strict=strict) < 1e-9


def test_a_fresh_prompt_is_read_as_a_model_reads_it_to_the_bit() -> None:
    """What an engine packs of a prompt is then what `OscarCache` packs, whose prompts go through
    Transformers' attention."""
    one = rig(sequences=2, dtype=torch.float32)
    counts = [70, 37]
    q, k, v = one.tokens(sum(counts))
    _, out = one.run(counts, "prefill", (q, k, v))
    parts = zip(*(x.split(counts) for x in (q, k, v, out)), strict=True)
    for *rows, found in parts:
        expected = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(0, 1)[None] for x in rows),
            is_causal=True,
            scale=one.layer.scale,
            enable_gqa=True,
        )
        assert torch.equal(found, expected[0].transpose(0, 1))


@pytest.mark.parametrize("strict", [False, True])
def test_a_fresh_request_beside_one_with_context(strict: bool) -> None:
    one = rig(sequences=2)
    assert one.check([40, 0], "prefill", strict=strict) < 1e-9
    assert one.check([9, 33], "prefill", strict=strict) < 1e-9  # the second is new


@pytest.mark.parametrize("mode", ["decode", "prefill"])
def test_a_soft_cap_on_the_logits(mode: str) -> None:
    one = rig(soft_cap=2.0)
    one.check([40], "prefill")
    assert one.check([6], mode) < 1e-9
    q, k, v = one.tokens(1)
    capped = one.run([1], mode, (q, k, v))[1]
    one.cache.truncate(0, 46)
    one.layer.soft_cap = None
    free = one.run([1], mode, (q, k, v))[1]
    assert not torch.allclose(capped, free, rtol=1e-2)


@pytest.mark.parametrize("window", [1, 5, 8, 20, 100])
@pytest.mark.parametrize("strict", [False, True])
def test_a_sliding_window(window: int, strict: bool) -> None:
    one = rig(sliding_window=window, sequences=2)
    assert one.check([50, 7], "prefill", strict=strict) < 1e-9
    assert one.check([20, 30], "prefill", strict=strict) < 1e-9
    assert one.check([3, 1], "decode") < 1e-9


def test_long_prompts_take_several_query_and_history_blocks(monkeypatch) -> None:
    monkeypatch.setattr("oscarkv.kernels.torch_backend.QUERY_BLOCK", 16)
    monkeypatch.setattr("oscarkv.kernels.torch_backend.HISTORY_BLOCK", 32)
    one = rig(sequences=2)
    assert one.check([90, 61], "prefill") < 1e-9
    assert one.check([40, 50], "prefill") < 1e-9
    assert one.check([33, 40], "prefill", strict=True) < 1e-9
    assert one.check([2, 1], "decode") < 1e-9


def test_folded_values_come_and_go_transformed() -> None:
    """With the value side folded into the weights, the kernel stores and returns v' = (v - m) B."""
    plain, folded = (rig(seed=7) for _ in range(2))
    transforms = folded.layer.transforms
    value, mean = transforms.value, transforms.value_mean
    transforms.value = transforms.value_inverse = transforms.value_mean = None
    for count, mode in ((40, "prefill"), (1, "decode")):
        q, k, v = plain.tokens(count)
        moved = torch.einsum("nhd,hde->nhe", v.double() - mean, value.double())
        _, expected = plain.run([count], mode, (q, k, v))
        _, out = folded.run([count], mode, (q, k, moved.float()))
        per_head = out.unflatten(1, (2, -1))
        back = torch.einsum("nhgd,hde->nhge", per_head, torch.linalg.inv(value.double()))
        back = (back + mean[:, None]).flatten(1, 2)
        torch.testing.assert_close(back, expected, atol=1e-4, rtol=1e-4)


# -- the interface -------------------------------------------------------------------------------


def test_a_plan_must_fit_its_batch() -> None:
    backend, table = TorchBackend(), torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(CacheError, match="plan"):
        backend.decode(torch.zeros(1, 2, 64), make_layer(SMALL), torch.zeros(1, 2, 64))
    with pytest.raises(CacheError, match="one entry more"):
        backend.plan(torch.tensor([3]), torch.tensor([0, 1, 2]), table, table)
    with pytest.raises(CacheError, match="sequence 0 has 4 new tokens of 3"):
        backend.plan(torch.tensor([3]), torch.tensor([0, 4]), table, table)


def test_backends_by_name() -> None:
    assert "torch" in available_backends()
    assert get_backend().name == available_backends()[0]
    assert get_backend("torch") is not get_backend("torch")
    with pytest.raises(OscarError, match="unknown backend 'cudnn'; known: auto, cuda"):
        get_backend("cudnn")


def test_random_transforms_of_these_tests_are_sane() -> None:
    transforms = make_transforms(2, 96, 0)
    product = transforms.key.double() @ transforms.query.double().mT
    assert float((product - torch.eye(96)).abs().max()) < 1e-5
    assert float(torch.linalg.cond(transforms.key.double()).max()) < 12
    assert torch.rand(1, generator=generator(1)) == torch.rand(1, generator=generator(1))
