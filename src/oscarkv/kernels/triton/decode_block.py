"""A block of history tokens in decode: packed words -> logits -> weights -> sums of values."""

import triton
import triton.language as tl

from oscarkv.kernels.triton.decode_operands import fragment_order, high_low, in_parts
from oscarkv.kernels.triton.parameters import load_grid
from oscarkv.kernels.triton.portable import dot
from oscarkv.kernels.triton.powers import capped, power_of_two
from oscarkv.kernels.triton.unpack import low_bits, plane_words, row_words, unpack


@triton.jit
def _load_words(words, at, exists, WORDS: tl.constexpr, MASKED: tl.constexpr):
    """Rows of packed words [tokens, words], the padding zero."""
    word = tl.arange(0, triton.next_power_of_2(WORDS))
    pointers = words + at[:, None] + word[None, :]
    if MASKED:
        packed = tl.load(pointers, mask=exists[:, None] & (word < WORDS)[None, :], other=0)
    elif word.shape[0] == WORDS:
        packed = tl.load(pointers)
    else:
        packed = tl.load(pointers, mask=(word < WORDS)[None, :], other=0)
    return packed


@triton.jit
def _low_codes(
    words, at, exists, DIM: tl.constexpr, BITS: tl.constexpr, KEYS: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Codes of the rows at `at`, of 3-bit ones the low two bits."""
    PLANE: tl.constexpr = low_bits(BITS)
    packed = _load_words(words, at, exists, plane_words(DIM, PLANE), MASKED)
    return unpack(packed, PLANE, KEYS)


@triton.jit
def _high_codes(words, at, exists, DIM: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr):
    """The third bits of 3-bit codes, which lie behind the plane of the other two."""
    words += plane_words(DIM, 2)
    return unpack(_load_words(words, at, exists, plane_words(DIM, 1), MASKED), 1, KEYS)


@triton.jit
def history_block(
    j0, top, total, power_v, offset_sum, acc, acc_high,
    codes_q, codes_q_high, down, q_sum, q_mean, positions, oldest, end,
    history, table, table_step, key_exponent, value_exponent, soft_cap,
    MASKED: tl.constexpr, MULTI: tl.constexpr, DIM: tl.constexpr, RECENT: tl.constexpr,
    SLIDING: tl.constexpr, SOFT_CAP: tl.constexpr, PAGE: tl.constexpr, PAGE_STRIDE: tl.constexpr,
    PARTS: tl.constexpr, GROUPS: tl.constexpr, FORMAT: tl.constexpr, PARAMETER_BYTES: tl.constexpr,
    KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr, V_AT: tl.constexpr, KP_AT: tl.constexpr,
    VP_AT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK tokens of the history, from j0 on. Unless MASKED, every query reads all of them."""
    ROWS: tl.constexpr = top.shape[0]
    M: tl.constexpr = PARTS * ROWS
    EIGHTS: tl.constexpr = ROWS // 8
    K_ROW: tl.constexpr = row_words(DIM, KEY_BITS)
    V_ROW: tl.constexpr = row_words(DIM, VALUE_BITS)
    v_tokens = tl.arange(0, BLOCK)
    # Such that `fragment_order` brings logits, a column for each of these, to the values' order.
    tokens = (v_tokens & -15) | ((v_tokens & 6) << 1) | ((v_tokens & 8) >> 2)
    j, v_j = j0 + tokens, j0 + v_tokens
    exists, v_exists = (j >= oldest) & (j < end), (v_j >= oldest) & (v_j < end)
    words = history.to(tl.pointer_type(tl.int32))
    ROW_PARAMETERS: tl.constexpr = GROUPS * PARAMETER_BYTES
    if PAGE % BLOCK == 0:  # then a block lies in one page, and addresses differ by constants
        page = tl.load(table + (j0 // PAGE).to(tl.int64) * table_step).to(tl.int64)
        inside = j0 % PAGE
        k_words = words + (page * (PAGE_STRIDE // 4) + inside * K_ROW)
        v_words = words + (page * (PAGE_STRIDE // 4) + inside * V_ROW)
        k_stored = history + (page * PAGE_STRIDE + inside * ROW_PARAMETERS)
        k_at, v_at, stored_at = tokens * K_ROW, v_tokens * V_ROW, tokens * ROW_PARAMETERS
    else:
        column, v_column = (j // PAGE).to(tl.int64), (v_j // PAGE).to(tl.int64)
        if MASKED:
            page = tl.load(table + column * table_step, mask=exists, other=0).to(tl.int64)
            v_page = tl.load(table + v_column * table_step, mask=v_exists, other=0).to(tl.int64)
        else:
            page = tl.load(table + column * table_step).to(tl.int64)
            v_page = tl.load(table + v_column * table_step).to(tl.int64)
        k_words, v_words, k_stored = words, words, history
        k_at = page * (PAGE_STRIDE // 4) + j % PAGE * K_ROW
        v_at = v_page * (PAGE_STRIDE // 4) + v_j % PAGE * V_ROW
        stored_at = page * PAGE_STRIDE + j % PAGE * ROW_PARAMETERS
    v_words += V_AT // 4
    v_stored = k_stored + VP_AT
    k_stored += KP_AT
    groups = tl.arange(0, PARTS)

    # Logits, as powers of two.
    codes = _low_codes(k_words, k_at, exists, DIM, KEY_BITS, True, MASKED)
    products = dot(codes_q, tl.trans(codes), tl.zeros((M, BLOCK), tl.float32))
    if KEY_BITS == 3:
        codes = _high_codes(k_words, k_at, exists, DIM, True, MASKED)
        products = dot(codes_q_high, tl.trans(codes), products)
    products = tl.reshape(products, (EIGHTS, PARTS, 8, BLOCK))
    if GROUPS == 1:
        s, lo = load_grid(k_stored, stored_at, exists, key_exponent, FORMAT, 2**KEY_BITS, MASKED)
        logits = tl.reshape(tl.sum(products, 1), (ROWS, BLOCK)) * down[:, None]
        logits = logits * s[None, :] + (lo[None, :] * q_sum[:, None] + q_mean[:, None])
    else:
        present = (groups < GROUPS)[:, None] & exists[None, :]
        all_at = stored_at[None, :] + groups[:, None] * PARAMETER_BYTES
        s, lo = load_grid(k_stored, all_at, present, key_exponent, FORMAT, 2**KEY_BITS, True)
        products *= tl.reshape(down, (EIGHTS, 1, 8, 1))
        products = products * s[None, :, None, :] + lo[None, :, None, :] * q_sum[:, :, :, None]
        logits = tl.reshape(tl.sum(products, 1), (ROWS, BLOCK)) + q_mean[:, None]
    logits = capped(logits, soft_cap, SOFT_CAP)
    if MASKED:
        visible = exists[None, :]
        if MULTI:
            visible &= j[None, :] <= positions[:, None] - RECENT
            if SLIDING > 0:
                visible &= j[None, :] > positions[:, None] - SLIDING
        logits = tl.where(visible, logits, float("-inf"))

    # Probabilities; and weights, brought to the range of fp16 by the largest scale so far.
    new_top = tl.maximum(top, tl.max(logits, 1))
    shrink = tl.exp2(top - new_top)
    top = new_top
    p = tl.exp2(logits - top[:, None])
    total = total * shrink + tl.sum(p, 1)
    if GROUPS == 1:
        s, lo = load_grid(
            v_stored, stored_at, exists, value_exponent, FORMAT, 2**VALUE_BITS, MASKED
        )
        offset_sum = offset_sum * shrink + tl.sum(p * lo[None, :], 1)
        largest = tl.max(s, 0)
    else:
        s, lo = load_grid(v_stored, all_at, present, value_exponent, FORMAT, 2**VALUE_BITS, True)
        shares = in_parts(p, PARTS)
        offset_sum *= tl.reshape(shrink, (EIGHTS, 1, 8))
        offset_sum += tl.sum(shares * lo[None, :, None, :], 3)
        largest = tl.max(tl.max(s, 0), 0)
    new_power = tl.maximum(power_v, ((largest.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127)
    shrink *= power_of_two(tl.maximum(power_v - new_power, -126))
    power_v = new_power
    s *= power_of_two(tl.minimum(13 - power_v, 127))
    if GROUPS == 1:
        weights = high_low(p * s[None, :])
    else:
        weights = tl.reshape((shares * s[None, :, None, :]).to(tl.float16), (M, BLOCK))
    weights = fragment_order(weights)
    shrink_parts = tl.reshape(in_parts(shrink[:, None], PARTS), (M, 1))

    codes = _low_codes(v_words, v_at, v_exists, DIM, VALUE_BITS, False, MASKED)
    acc = dot(weights, codes, acc * shrink_parts)
    if VALUE_BITS == 3:
        codes = _high_codes(v_words, v_at, v_exists, DIM, False, MASKED)
        acc_high = dot(weights, codes, acc_high * shrink_parts)
    else:
        acc_high = acc
    return top, total, power_v, offset_sum, acc, acc_high
