// Quantise keys and values into history pages and copy them into window pages: one launch.
//
// Further macros: TOKEN_TILES (1 or 2: a warp takes 8 or 16 tokens at a time), WARPS, BLOCKS_PER_SM,
// MATRIX_SHARED (1: the transform fits in shared memory), KEY_GAIN and VALUE_GAIN (quarters), FOLDED
// (1: values come transformed), REFINED (1: keys are), VALUE_SIGNS (1: the values' transform is one
// number with signs, as a Hadamard matrix is).
//
// Block (x, y, z): KV head y, keys (0) or values (1) z; its warps take tokens in turn. Everything of
// a token happens in the four lanes t of one g:
// - Product: tokens are the rows of A (g, and g + 8 with two token tiles), the transform is B. Both
//   are float16 pairs high + low, scaled by powers of two; of the four products of a pair, all but
//   low * low are summed, in float. A row's numbers do not depend on its neighbours. A matrix of
//   signs has no low part, and takes two products and half the memory.
// - Output columns are ordered so that lane t gets whole words of the packed row: its number q is
//   half slot q / LANE_WORDS (2 slot + half) of word t LANE_WORDS + q % LANE_WORDS. The last quarter
//   of the channels is the last quarter of every lane's numbers: refined keys leave out those tiles,
//   and a second digit goes into the same half of the same word as its first one, six slots on. With
//   two groups (split scales) it is the second quarter, and two slots.
// - Sums of the fit are exact: a code c = sum over thresholds of saturate(X - ceil(t) + 1), all in
//   float16 integers, and sums over the row are the diagonal of [X; c + 2044] c^T on the matrix
//   units. sum c (c + 2044) holds sum c and sum c c: it is within 3/8 of 2046 sum c. Codes of 3 bits
//   are too large for that: theirs is the diagonal of [X; c] c^T, and sum c a product of its own.
// - Scalars are worked out by one lane a token, "its" lane: that of the diagonal, t = g / 2, for
//   token g, and its neighbour for token g + 8; the other two lanes compute numbers nobody reads.

#include "common.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int LANE_WORDS = PADDED / 4;      // words of a row that a lane owns
constexpr int TILES = 2 * PADDED;           // of 8 output columns
constexpr int CHUNKS = (HEAD_DIM + 31) / 32;  // of the inner dimension: two steps of 16 each
constexpr int REFINED_TILES = TILES / 4 * 3;  // of a refined key that are computed
constexpr bool SPLIT = REFINED && GROUPS == 2;  // refined keys have two scales
constexpr int SECOND_DIGIT = SPLIT ? 2 : 6;  // slots from a first digit to its second
constexpr bool SYMMETRIC = PARAMETERS == 2;
constexpr int MATRIX_QUADS = CHUNKS * TILES * 2 * 32;  // of one head and side
constexpr float MAGIC = 12582912.0f;        // 1.5 2^23: adding it rounds to an integer
constexpr u32 MAGIC_BITS = 0x4b400000u;
constexpr int STARTS = 3, REFINE_ROUNDS = 3;
constexpr int STARTS_AT_ONCE = TOKEN_TILES == 1 && HEAD_DIM <= 128 ? STARTS : 1;  // hides latencies
constexpr u32 PAIR_1 = 0x3c003c00u, PAIR_2044 = 0x67fc67fcu;  // two halves
static_assert(GROUPS == 1 || EXACT_WORDS, "groups are runs of slots");
static_assert(TILES / GROUPS % 2 == 0 && REFINED_TILES % 2 == 0, "sums go over 16 columns");
static_assert(!REFINED || GROUPS <= 2 && (!SPLIT || SYMMETRIC), "one scale, or one for each kind");

struct Arguments {
    const u16* k;
    const u16* v;
    u8* history;
    u16* window;
    const i64* history_slots;
    const i64* window_slots;
    // [sides][heads][CHUNKS][TILES][2][32]: b0, b1 of high, b0, b1 of low. Of signs, in the first
    // half of a head's room: [CHUNKS][TILES][32], b0, b1 of the first step, b0, b1 of the second.
    const Quad* matrices;
    const float* means;    // [sides][heads][HEAD_DIM]
    const float* scales;   // [2][2][heads]: of matrices (to be multiplied with), 2^e0
    i64 k_token, k_head, v_token, v_head;      // strides in elements
    i64 history_page, history_head;            // in bytes
    i64 window_page, window_head;              // in elements
    int tokens, kv_heads;
};

#include "product.cuh"
#include "fit.cuh"

// The codes of a token tile, as halves of words, and the high bits of 3 in each word: from 2^23 on.
struct Halves {
    float low[LANE_WORDS][2], high[LANE_WORDS];

    // Number q's code, some slots on. All sums are exact: below 2^24.
    template <int BITS> DEVICE void place(int q, int slots, float code, float upper) {
        const int slot = q / LANE_WORDS / 2 + slots, half = q / LANE_WORDS % 2;
        if (BITS == 3) {
            high[q % LANE_WORDS] += upper * (float)(1 << (2 * slot + half));
            code -= 4.0f * upper;
        }
        low[q % LANE_WORDS][half] += code * (float)(1 << 2 * slot);
    }
};

DEVICE void clear(Halves (&halves)[TOKEN_TILES]) {
    UNROLL for (int r = 0; r < TOKEN_TILES; r++)
        UNROLL for (int i = 0; i < LANE_WORDS; i++)
            halves[r].low[i][0] = halves[r].low[i][1] = halves[r].high[i] = 8388608.0f;
}

template <int BITS> struct Thresholds {
    static constexpr int COUNT = (1 << BITS) - 1;
    float t[COUNT];

    DEVICE Thresholds(float s, float lo) {
        UNROLL for (int k = 0; k < COUNT; k++) t[k] = threshold<BITS>(s, lo, k + 1);
    }
    DEVICE float code(float y) const {
        float reached = reaches(y, t[0]);
        UNROLL for (int k = 1; k < COUNT; k++) reached += reaches(y, t[k]);
        return reached;
    }
    DEVICE float upper(float y) const { return BITS == 3 ? reaches(y, t[3]) : 0.0f; }  // of 4 and more
};

// Two codes for each number of the first quarter, on the grid of a reader.
template <int BITS>
DEVICE void encode_twice(const Numbers& x, int r, float s, float lo, Halves& halves) {
    const Thresholds<BITS> thresholds(s, lo);
    constexpr float SHRUNK = BITS == 3 ? 0.6875f : 0.75f, LEVELS = 1 << BITS;
    UNROLL for (int q = 0; q < 4 * LANE_WORDS; q++) {
        const float number = x[q / 2][2 * r + q % 2], y = SPLIT ? number : __fmul_rn(number, SHRUNK);
        const float first = thresholds.code(y);
        halves.place<BITS>(q, 0, first, thresholds.upper(y));
        const float rest = __fsub_rn(y, __fadd_rn(__fmul_rn(s, first), lo));
        const float left = __fmul_rn(rest, LEVELS);
        halves.place<BITS>(q, SECOND_DIGIT, thresholds.code(left), thresholds.upper(left));
    }
}

// The first group of a key with split scales: two digits, on a grid that reaches its largest number.
DEVICE void encode_wide(const Numbers& x, float base, const Rows& rows, u8* history, i64 page_stride,
                        Halves (&halves)[TOKEN_TILES]) {
    const int t = threadIdx.x % 4;
    UNROLL for (int r = 0; r < TOKEN_TILES; r++) {
        float largest = 0;
        UNROLL for (int q = 0; q < 4 * LANE_WORDS; q++)
            if (exists(t, q)) largest = fmaxf(largest, fabsf(x[q / 2][2 * r + q % 2]));
        float s = __fmul_rn(row_max(largest), 0.53125f), lo = 0;
        const u32 stored = store_grid<KEY_BITS>(s, lo, base);
        const int slot = rows.history[r];
        if (t == 0 && slot >= 0)
            history[slot / PAGE * page_stride + KEY_PARAMETERS + slot % PAGE * PARAMETER_BYTES] = (u8)stored;
        encode_twice<KEY_BITS>(x, r, s, lo, halves[r]);
    }
}

// Fit and store one group; its codes go into `halves`. A group of a refined key is what is computed
// of it.
template <int GROUP_TILES, bool TWICE, int BITS>
DEVICE void encode_group(const Numbers& x, int group, int side, float base, const Rows& rows,
                         u8* history, i64 page_stride, Halves (&halves)[TOKEN_TILES]) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int own = TOKEN_TILES == 1 ? 0 : (t ^ g / 2) & 1;  // the token whose scalars are the lane's
    const int home = 4 * g + g / 2, first = group * GROUP_TILES;
    Fit<GROUP_TILES, BITS> fit;
    fit.open(x, first, t, own);
    const Grid f = fit.solve(g, t, own);

    const float square = fmaxf(__fmul_rn(f.cov, f.cov), as_float(1u << 23));
    float gain = __fdiv_rn(__fmul_rn(fit.spread, f.den), square);
    gain = fminf(fmaxf(gain, 0.8f), 1.5f);
    gain = KEY_GAIN == VALUE_GAIN || side == 0 ? power(gain, KEY_GAIN) : power(gain, VALUE_GAIN);
    float s = __fmul_rn(__fmul_rn(f.s, gain), fit.unit);
    float lo = 0;
    if (!SYMMETRIC) {
        lo = __fadd_rn(__fmul_rn(__fsub_rn(f.lo, fit.center), gain), fit.center);
        lo = __fadd_rn(__fmul_rn(lo, fit.unit), fit.middle);
    }
    const float mu = __fadd_rn(__fmul_rn(fit.center, fit.unit), fit.middle);
    const u32 stored = store_grid<BITS>(s, lo, base);
    const int slot = own ? rows.history[TOKEN_TILES - 1] : rows.history[0];
    if ((lane == home || TOKEN_TILES == 2 && lane == (home ^ 1)) && slot >= 0) {
        u8* to = history + slot / PAGE * page_stride + (side ? VALUE_PARAMETERS : KEY_PARAMETERS)
            + slot % PAGE * PARAMETER_BYTES;
        if (PARAMETERS == 0) ((u32*)to)[group] = stored;
        if (PARAMETERS == 1) ((u16*)to)[group] = (u16)stored;
        if (PARAMETERS == 2) to[group] = (u8)stored;
    }
    const float reader_s = s, reader_lo = lo;
    s = __fdiv_rn(s, gain);
    if (!SYMMETRIC) lo = __fadd_rn(__fdiv_rn(__fsub_rn(lo, mu), gain), mu);
    UNROLL for (int r = 0; r < TOKEN_TILES; r++) {
        const float grid_s = __shfl_sync(ALL, s, home ^ r);
        const float grid_lo = SYMMETRIC ? 0.0f : __shfl_sync(ALL, lo, home ^ r);
        const Thresholds<BITS> thresholds(grid_s, grid_lo);
        UNROLL for (int q = 2 * first + (TWICE ? 4 * LANE_WORDS : 0); q < 2 * (first + GROUP_TILES); q++) {
            const float y = x[q / 2][2 * r + q % 2];
            halves[r].place<BITS>(q, 0, thresholds.code(y), thresholds.upper(y));
        }
        if (TWICE)
            encode_twice<BITS>(x, r, __shfl_sync(ALL, reader_s, home ^ r),
                         __shfl_sync(ALL, reader_lo, home ^ r), halves[r]);
    }
}

// A group of rows whose keys are not refined, with the bits of its side.
template <int GROUP_TILES>
DEVICE void encode_side(const Numbers& x, int group, int side, float base, const Rows& rows, u8* history,
                        i64 page_stride, Halves (&halves)[TOKEN_TILES]) {
    if (KEY_BITS == VALUE_BITS || side)
        encode_group<GROUP_TILES, false, VALUE_BITS>(x, group, side, base, rows, history, page_stride, halves);
    else
        encode_group<GROUP_TILES, false, KEY_BITS>(x, group, side, base, rows, history, page_stride, halves);
}

DEVICE void store_words(u8* to, const u32 (&words)[LANE_WORDS], int t) {
    constexpr bool ALIGNED = KEY_WORDS % LANE_WORDS == 0 && VALUE_WORDS % LANE_WORDS == 0;  // all rows
    if (WORDS % LANE_WORDS == 0 && ALIGNED) {
        if (!EXACT_WORDS && t * LANE_WORDS >= WORDS) return;
        if (LANE_WORDS == 4)
            *(Quad*)to = {words[0], words[1 % LANE_WORDS], words[2 % LANE_WORDS], words[3 % LANE_WORDS]};
        else if (LANE_WORDS == 2)
            *(u64*)to = words[0] | (u64)words[1 % LANE_WORDS] << 32;
        else
            *(u32*)to = words[0];
    } else {
        UNROLL for (int i = 0; i < LANE_WORDS; i++)
            if (t * LANE_WORDS + i < WORDS) ((u32*)to)[i] = words[i];
    }
}

// The high bits of a word of 3-bit codes are half of a word: see codes.cuh.
DEVICE void store_high_bits(u8* to, const float (&high)[LANE_WORDS], int t) {
    UNROLL for (int i = 0; i < LANE_WORDS; i++) {
        const int word = t * LANE_WORDS + i;
        if (EXACT_WORDS || word < WORDS)
            ((u16*)to)[2 * (word % HIGH_WORDS) + word / HIGH_WORDS] = (u16)as_bits(high[i]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
oscar_write(const __grid_constant__ Arguments a) {
#if MATRIX_SHARED
    extern __shared__ Quad shared_matrix[];
#endif
    start_next();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int head = blockIdx.y, side = blockIdx.z, pair = side * a.kv_heads + head;
    const Quad* matrix = a.matrices + (i64)pair * MATRIX_QUADS;
    const bool folded = FOLDED && side, refined = REFINED && side == 0, signs = VALUE_SIGNS && side;
#if MATRIX_SHARED
    if (!folded) {
        const u32 to = shared_address(shared_matrix);
        for (int i = threadIdx.x; i < (signs ? MATRIX_QUADS / 2 : MATRIX_QUADS); i += THREADS)
            if (!refined || SPLIT || i / 64 % TILES < REFINED_TILES)
                copy_to_shared(to + 16 * i, matrix + i);
        matrix = shared_matrix;
    }
    bool waiting = true;
#endif
    const float unscale = a.scales[pair], base = a.scales[2 * a.kv_heads + pair];
    const u16* input = side ? a.v + head * a.v_head : a.k + head * a.k_head;
    const i64 stride = side ? a.v_token : a.k_token;
    u8* history = a.history + head * a.history_head;
    u16* window = a.window + head * a.window_head + side * (WINDOW_ROWS * HEAD_DIM);
    constexpr int STEP = 8 * TOKEN_TILES, BLOCK_STEP = WARPS * STEP;

    // All warps of a block go round equally often, with tokens of their own or without.
    ROLLED for (int start = blockIdx.x * BLOCK_STEP; start < a.tokens; start += gridDim.x * BLOCK_STEP) {
        Rows rows;
        bool packed = false;
        UNROLL for (int r = 0; r < TOKEN_TILES; r++) {
            const int token = start + warp * STEP + 8 * r + g;
            rows.there[r] = token < a.tokens;
            rows.row[r] = input + token * stride;
            rows.history[r] = rows.there[r] ? (int)a.history_slots[token] : -1;
            rows.window[r] = rows.there[r] ? (int)a.window_slots[token] : -1;
            packed |= rows.history[r] >= 0;
        }
        Quad raw[TOKEN_TILES][CHUNKS];
        UNROLL for (int r = 0; r < TOKEN_TILES; r++)
            UNROLL for (int s = 0; s < CHUNKS; s++) raw[r][s] = rows.load(r, 32 * s + 8 * t);
        UNROLL for (int r = 0; r < TOKEN_TILES; r++) {
            if (rows.window[r] < WINDOW_ROWS) continue;  // page 0 is never used
            u16* to = window + rows.window[r] / WINDOW_ROWS * a.window_page
                + rows.window[r] % WINDOW_ROWS * HEAD_DIM;
            UNROLL for (int s = 0; s < CHUNKS; s++) {
                const int c = 32 * s + 8 * t;
                if (HEAD_DIM % 32 == 0 || c < HEAD_DIM) *(Quad*)(to + c) = raw[r][s];
            }
        }
#if MATRIX_SHARED
        if (waiting) {
            waiting = false;
            wait_for_shared();
            __syncthreads();
        }
#endif
        if (!__any_sync(ALL, packed)) continue;

        Numbers x;
        Halves halves[TOKEN_TILES];
        if (refined && SPLIT) {
            multiply<TILES, false>(x, rows, raw, a.means + (i64)pair * HEAD_DIM, matrix, unscale);
            clear(halves);
            encode_wide(x, base, rows, history, a.history_page, halves);
            encode_group<TILES / GROUPS, false, KEY_BITS>(x, GROUPS - 1, side, base, rows, history,
                                                          a.history_page, halves);
        } else if (refined) {
            multiply<REFINED_TILES, false>(x, rows, raw, a.means + (i64)pair * HEAD_DIM, matrix, unscale);
            clear(halves);
            encode_group<REFINED_TILES, true, KEY_BITS>(x, 0, side, base, rows, history, a.history_page,
                                                        halves);
        } else {
            const float* mean = a.means + (i64)pair * HEAD_DIM;
            if (folded) load_numbers(x, rows);
            else if (signs) multiply<TILES, true>(x, rows, raw, mean, matrix, unscale);
            else multiply<TILES, false>(x, rows, raw, mean, matrix, unscale);
            clear(halves);
            UNROLL for (int group = 0; group < GROUPS; group++)
                encode_side<TILES / GROUPS>(x, group, side, base, rows, history, a.history_page, halves);
        }
        UNROLL for (int r = 0; r < TOKEN_TILES; r++) {
            if (rows.history[r] < 0) continue;
            u32 words[LANE_WORDS];
            UNROLL for (int i = 0; i < LANE_WORDS; i++)
                words[i] = permute_bytes(as_bits(halves[r].low[i][0]), as_bits(halves[r].low[i][1]), 0x5410);
            u8* to = history + rows.history[r] / PAGE * a.history_page + (side ? VALUE_CODES : 0)
                + rows.history[r] % PAGE * (4 * (side ? VALUE_WORDS : KEY_WORDS)) + 4 * LANE_WORDS * t;
            store_words(to, words, t);
            if ((side ? VALUE_BITS : KEY_BITS) == 3)
                store_high_bits(to + 4 * (WORDS - LANE_WORDS * t), halves[r].high, t);
        }
    }
#if MATRIX_SHARED
    wait_for_shared();
#endif
}
