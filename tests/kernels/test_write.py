"""Writing: the same bytes however tokens arrive, and nothing where the slot is -1."""

import pytest
import torch
from helpers import Rig, dense_attention, generator, make_layer, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st

from oscarkv.codec import parameters
from oscarkv.kernels.rows import decode_tokens, encode_tokens
from oscarkv.kernels.torch_backend import TorchBackend
from oscarkv.recipe import Recipe

TINY = Recipe(sink=4, recent=8, parameters="log8")
RECIPES = {
    "fp16": Recipe(parameters="fp16"),
    "compact": Recipe.named("compact"),
    "wide": Recipe(key_bits=3),
    "paper": Recipe.named("paper"),
    "mixed": Recipe(key_bits=3, value_bits=4, group_size=32, refine_keys=False),
    "plain": Recipe(refine_keys=False),
    "metric": Recipe(metric_rounding=True, refine_keys=False),
}


def random_tokens(count: int, heads: int = 2, dim: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = torch.randn(2, count, heads, dim, generator=generator(count))
    return k, v


@pytest.mark.parametrize("name", RECIPES)
def test_a_chunk_and_single_tokens_write_the_same_bytes(name: str) -> None:
    chunk, single = (make_layer(RECIPES[name], pages=4) for _ in range(2))
    k, v = random_tokens(40)
    slots = torch.randperm(48, generator=generator(1))[:40] + 16  # pages 1 to 3, in any order
    backend = TorchBackend()
    backend.write(k, v, slots, slots, chunk)
    for i in range(40):
        backend.write(k[i : i + 1], v[i : i + 1], slots[i : i + 1], slots[i : i + 1], single)
    assert torch.equal(chunk.history, single.history)
    assert torch.equal(chunk.window, single.window)
    assert bool(chunk.history[1:].any())


@pytest.mark.parametrize("name", RECIPES)
def test_slots_hold_the_row_of_their_token(name: str) -> None:
    layer = make_layer(RECIPES[name], pages=4, page_size=32)
    k, v = random_tokens(10)
    slots = torch.tensor([32, 33, 63, 64, 127, 126, 50, 51, 90, 77])
    window_slots = torch.tensor([16, -1, 31, 17, 63, -1, 40, 41, 42, 43])
    TorchBackend().write(k, v, slots, window_slots, layer)
    rows = encode_tokens(k, v, layer)
    for section, expected in zip(layer.layout.sections(layer.history), rows, strict=True):
        for i, slot in enumerate(slots.tolist()):
            assert torch.equal(section[slot // 32, :, slot % 32], expected[i])
    for i, slot in enumerate(window_slots.tolist()):
        if slot >= 0:
            assert torch.equal(layer.window[slot // 16, :, 0, slot % 16], k[i])
            assert torch.equal(layer.window[slot // 16, :, 1, slot % 16], v[i])


@pytest.mark.parametrize("window_slot", [-1, 0, 15])
@pytest.mark.parametrize("count", [1, 5])
def test_slot_minus_one_and_window_page_0_write_nothing(count: int, window_slot: int) -> None:
    layer = make_layer(TINY, pages=3)
    layer.history.fill_(0xFF)
    layer.window.view(torch.uint8).fill_(0xFF)
    k, v = random_tokens(count)
    nowhere, no_window = torch.full((count,), -1), torch.full((count,), window_slot)
    TorchBackend().write(k, v, nowhere, no_window, layer)
    assert bool((layer.history == 0xFF).all())
    assert bool((layer.window.view(torch.uint8) == 0xFF).all())


def test_a_padded_batch_touches_only_its_own_slots() -> None:
    layer = make_layer(TINY, pages=3)
    layer.history.fill_(0xFF)
    layer.window.view(torch.uint8).fill_(0xFF)
    k, v = random_tokens(4)
    history_slots = torch.tensor([-1, 20, -1, 33])
    window_slots = torch.tensor([-1, -1, 17, -1])
    TorchBackend().write(k, v, history_slots, window_slots, layer)
    touched = torch.zeros(3, 16, dtype=torch.bool)
    for section in layer.layout.sections(layer.history):
        touched |= (section != 0xFF).any(-1).any(1)
    assert touched.nonzero().tolist() == [[1, 4], [2, 1]]
    exact = (layer.window.view(torch.uint8) != 0xFF).any(-1).any(2).any(1)
    assert exact.nonzero().tolist() == [[1, 1]]


def test_windows_hold_plain_keys_and_values_in_their_dtype() -> None:
    layer = make_layer(TINY, pages=2)
    layer.window = layer.window.to(torch.bfloat16)
    k, v = random_tokens(3)
    slots = torch.tensor([16, 17, 18])
    TorchBackend().write(k, v, slots, slots, layer)
    assert torch.equal(layer.window[1, :, 0, :3], k.bfloat16().transpose(0, 1))
    assert torch.equal(layer.window[1, :, 1, :3], v.bfloat16().transpose(0, 1))


@pytest.mark.parametrize("name", ["plain", "mixed"])
def test_decoded_pages_are_close_to_what_was_written(name: str) -> None:
    layer = make_layer(RECIPES[name], pages=3)
    k, v = random_tokens(32)
    slots = torch.arange(16, 48)
    TorchBackend().write(k, v, slots, slots, layer)
    keys, values = decode_tokens(layer.history[1:], layer)
    for decoded, x, mean in (
        (keys, k, layer.transforms.key_mean),
        (values, v, layer.transforms.value_mean),
    ):
        assert float((decoded - x).norm() / (x - mean).norm()) < 0.7
        assert float((decoded - x).mean().abs()) < 0.05


@pytest.mark.parametrize("name", ["fp16", "compact", "wide"])
def test_refined_keys_are_close_where_they_are_stored(name: str) -> None:
    """Of keys without the last quarter of the channels, less is lost than with one digit each."""
    errors = []
    for refined in (True, False):
        layer = make_layer(RECIPES[name].replace(refine_keys=refined), pages=3)
        assert layer.key_codec.refined == refined
        rows, v = random_tokens(32)
        rows[..., 48:] = 0
        k = torch.einsum("nhd,hde->nhe", rows, torch.linalg.inv(layer.transforms.key))
        k += layer.transforms.key_mean
        slots = torch.arange(16, 48)
        TorchBackend().write(k, v, slots, slots, layer)
        keys, _ = decode_tokens(layer.history[1:], layer)
        decoded = torch.einsum("nhd,hde->nhe", keys - k, layer.transforms.key)
        errors.append([float(part.norm() / 32) for part in decoded.split([16, 32, 16], -1)])
    (first, middle, last), plain = errors
    assert first < 0.5 * plain[0]
    assert 0.8 < middle / plain[1] < 1.25
    assert last < 1e-4


def test_metric_rounding_lowers_the_error_that_queries_see() -> None:
    recipe = Recipe(metric_rounding=True, key_gain=0.0, refine_keys=False)
    layer = make_layer(recipe, pages=3)
    plain = make_layer(recipe, pages=3)
    plain.transforms.metric = None
    k, v = random_tokens(32)
    slots, errors = torch.arange(16, 48), []
    for one in (layer, plain):
        TorchBackend().write(k, v, slots, slots, one)
        t = one.transforms
        k_codes, _, k_stored, _ = one.layout.sections(one.history[1:])
        codes = one.layout.key_row.unpack(k_codes).transpose(0, 1).flatten(1, 2)
        base = parameters.bases(t.exponents[0])[:, None]
        stored = k_stored.transpose(0, 1).flatten(1, 2)
        rows = torch.einsum("nhd,hde->hne", k - t.key_mean, t.key)
        error = one.key_codec.decode(codes, stored, base) - rows
        errors.append(torch.einsum("hnd,hde,hne->", error, layer.transforms.metric, error))
    assert float(errors[0]) < 0.8 * float(errors[1])


# -- chunking ------------------------------------------------------------------------------------

lengths = st.one_of(st.integers(1, 8), st.integers(9, 40), st.integers(60, 90))


@given(
    chunks=st.lists(st.tuples(lengths, st.booleans()), min_size=1, max_size=6),
    sink=st.sampled_from((0, 4, 20)),
    recent=st.sampled_from((1, 5, 16, 30)),
)
@settings(deadline=None, max_examples=25)
def test_strict_results_do_not_depend_on_how_a_prompt_is_cut(chunks, sink, recent) -> None:
    total = sum(count for count, _ in chunks)
    layers = [make_layer(Recipe(sink=sink, recent=recent), 32) for _ in range(2)]
    whole, cut = (Rig(layer, group=2) for layer in layers)
    q, k, v = whole.tokens(total)
    _, expected = whole.run([total], "prefill", (q, k, v), strict=True)
    outs, start = [], 0
    for count, as_decode in chunks:
        part = slice(start, start + count)
        mode = "decode" if as_decode and count <= 8 else "prefill"
        outs.append(cut.run([count], mode, (q[part], k[part], v[part]), strict=True)[1])
        start += count
    assert relative_error(torch.cat(outs), expected) < 1e-6
    for ours, theirs in zip(cut.history(0), whole.history(0), strict=True):
        assert torch.equal(ours, theirs)


def test_strict_whole_prompt_equals_the_oracle_of_every_decode_step() -> None:
    one = Rig(make_layer(TINY), group=2)
    q, out = one.run([50], "prefill", strict=True)
    k, v = one.record[0]
    for t in (0, 3, 11, 12, 30, 49):
        expected = dense_attention(q[t : t + 1], k[: t + 1], v[: t + 1], one.layer)
        assert relative_error(out[t : t + 1], expected) < 1e-9


def test_default_prefill_reads_its_own_chunk_exactly() -> None:
    one = Rig(make_layer(TINY), group=2)
    q, out = one.run([50], "prefill")
    k, v = one.record[0]
    exact = make_layer(TINY.replace(recent=1000))
    assert relative_error(out, dense_attention(q, k, v, exact)) < 1e-9
