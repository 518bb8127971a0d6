// Quantise keys and values into history pages and copy them into window pages: one launch.
//
// Further macros: TOKEN_TILES (1 or 2: a warp takes 8 or 16 tokens at a time), WARPS, BLOCKS_PER_SM,
// MATRIX_SHARED (1: the transform fits in shared memory), KEY_GAIN and VALUE_GAIN (quarters), FOLDED
// (1: values come transformed).
//
// Block (x, y, z): KV head y, keys (0) or values (1) z; its warps take tokens in turn. Everything of
// a token happens in the four lanes t of one g:
// - Product: tokens are the rows of A (g, and g + 8 with two token tiles), the transform is B. Both
//   are float16 pairs high + low, scaled by powers of two; of the four products of a pair, all but
//   low * low are summed, in float. A row's numbers do not depend on its neighbours.
// - Output columns are ordered so that lane t gets whole words of the packed row: its number q is
//   half slot q / LANE_WORDS (2 slot + half) of word t LANE_WORDS + q % LANE_WORDS.
// - Sums of the fit are exact: a code c = sum over thresholds of saturate(X - ceil(t) + 1), all in
//   float16 integers, and sums over the row are the diagonal of [X; c + 2044] c^T on the matrix
//   units. sum c (c + 2044) holds sum c and sum c c: it is within 3/8 of 2046 sum c.
// - Scalars are worked out by one lane a token, "its" lane: that of the diagonal, t = g / 2, for
//   token g, and its neighbour for token g + 8; the other two lanes compute numbers nobody reads.

#include "common.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int LANE_WORDS = PADDED / 4;      // words of a row that a lane owns
constexpr int TILES = 2 * PADDED;           // of 8 output columns
constexpr int CHUNKS = (HEAD_DIM + 31) / 32;  // of the inner dimension: two steps of 16 each
constexpr int GROUP_SIZE = HEAD_DIM / GROUPS;
constexpr int GROUP_TILES = TILES / GROUPS;
constexpr bool SYMMETRIC = PARAMETERS == 2;
constexpr int MATRIX_QUADS = CHUNKS * TILES * 2 * 32;  // of one head and side
constexpr float MAGIC = 12582912.0f;        // 1.5 2^23: adding it rounds to an integer
constexpr u32 MAGIC_BITS = 0x4b400000u;
constexpr int STARTS = 3, REFINE_ROUNDS = 3;
constexpr int STARTS_AT_ONCE = TOKEN_TILES == 1 && HEAD_DIM <= 128 ? STARTS : 1;  // hides latencies
constexpr u32 PAIR_2044 = 0x67fc67fcu;      // two halves
static_assert(GROUPS == 1 || EXACT_WORDS, "groups are runs of slots");
static_assert(GROUP_TILES % 2 == 0, "sums go over 16 columns");

struct Arguments {
    const u16* k;
    const u16* v;
    u8* history;
    u16* window;
    const i64* history_slots;
    const i64* window_slots;
    const Quad* matrices;  // [sides][heads][CHUNKS][TILES][2][32]: b0, b1 of high, b0, b1 of low
    const float* means;    // [sides][heads][HEAD_DIM]
    const float* scales;   // [2][2][heads]: of matrices (to be multiplied with), 2^e0
    i64 k_token, k_head, v_token, v_head;      // strides in elements
    i64 history_page, history_head;            // in bytes
    i64 window_page, window_head;              // in elements
    int tokens, kv_heads;
};

// -- float16 pairs and exact floats ----------------------------------------------------------------

DEVICE u32 add_pair(u32 a, u32 b) {
    u32 y;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}

DEVICE u32 add_saturated(u32 a, u32 b) {  // to [0, 1]
    u32 y;
    asm("add.rn.sat.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}

DEVICE float reaches(float x, float threshold) {  // 1 or 0
    float y;
    asm("set.ge.f32.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(threshold));
    return y;
}

DEVICE float divided(float x) {  // by the size of a group
    if ((GROUP_SIZE & (GROUP_SIZE - 1)) == 0) return __fmul_rn(x, 1.0f / GROUP_SIZE);
    return __fdiv_rn(x, (float)GROUP_SIZE);
}

DEVICE float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(ALL, x, 1));
    return fmaxf(x, __shfl_xor_sync(ALL, x, 2));
}

DEVICE float row_min(float x) {
    x = fminf(x, __shfl_xor_sync(ALL, x, 1));
    return fminf(x, __shfl_xor_sync(ALL, x, 2));
}

DEVICE u32 row_sum(u32 x) {
    x += __shfl_xor_sync(ALL, x, 1);
    return x + __shfl_xor_sync(ALL, x, 2);
}

DEVICE bool exists(int t, int q) {  // number q of lane t
    return EXACT_WORDS || t * LANE_WORDS + q % LANE_WORDS < WORDS;
}

DEVICE void copy_to_shared(u32 shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(shared), "l"(global));
}

DEVICE void wait_for_shared() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// -- product ---------------------------------------------------------------------------------------

using Numbers = float[TILES][4];  // [q / 2][2 * token tile + q % 2]

struct Centered { float x[8]; };

DEVICE Centered centered(const Quad& raw, const Quad (&mean)[2]) {
    return {__fsub_rn(low_activation(raw.x), as_float(mean[0].x)),
            __fsub_rn(high_activation(raw.x), as_float(mean[0].y)),
            __fsub_rn(low_activation(raw.y), as_float(mean[0].z)),
            __fsub_rn(high_activation(raw.y), as_float(mean[0].w)),
            __fsub_rn(low_activation(raw.z), as_float(mean[1].x)),
            __fsub_rn(high_activation(raw.z), as_float(mean[1].y)),
            __fsub_rn(low_activation(raw.w), as_float(mean[1].z)),
            __fsub_rn(high_activation(raw.w), as_float(mean[1].w))};
}

// Rows of a warp: where they come from, and where they go to.
struct Rows {
    const u16* row[TOKEN_TILES];
    int history[TOKEN_TILES], window[TOKEN_TILES];  // slots
    bool there[TOKEN_TILES];

    DEVICE Quad load(int r, int c) const {
        const bool in_row = HEAD_DIM % 32 == 0 || c < HEAD_DIM;
        return there[r] && in_row ? load_quad(row[r] + c) : Quad{0, 0, 0, 0};
    }
};

DEVICE void load_mean(Quad (&to)[2], const float* mean, int c) {
    const bool there = HEAD_DIM % 32 == 0 || c < HEAD_DIM;
    UNROLL for (int i = 0; i < 2; i++) to[i] = there ? load_quad(mean + c + 4 * i) : Quad{0, 0, 0, 0};
}

DEVICE void multiply(Numbers& x, const Rows& rows, const Quad (&raw)[TOKEN_TILES][CHUNKS],
                     const float* mean, const Quad* matrix, float unscale) {
    const int lane = threadIdx.x % 32, t = lane % 4;
    float scale[TOKEN_TILES], back[TOKEN_TILES];
    {
        float top[TOKEN_TILES] = {};
        UNROLL for (int s = 0; s < CHUNKS; s++) {
            Quad m[2];
            load_mean(m, mean, 32 * s + 8 * t);
            UNROLL for (int r = 0; r < TOKEN_TILES; r++) {
                const Centered d = centered(raw[r][s], m);
                UNROLL for (int i = 0; i < 8; i++) top[r] = fmaxf(top[r], fabsf(d.x[i]));
            }
        }
        UNROLL for (int r = 0; r < TOKEN_TILES; r++) {
            // The largest becomes 2^13 .. 2^14.
            u32 exponent = as_bits(row_max(top[r])) >> 23;
            exponent = exponent < 14 ? 14 : exponent > 254 ? 254 : exponent;
            scale[r] = as_float((267 - exponent) << 23);
            back[r] = __fmul_rn(as_float((exponent - 13) << 23), unscale);
        }
    }
    UNROLL for (int tile = 0; tile < TILES; tile++)
        UNROLL for (int i = 0; i < 4; i++) x[tile][i] = 0;
    Quad next[TOKEN_TILES], next_mean[2];
    auto fetch = [&](int s) {
        load_mean(next_mean, mean, 32 * s + 8 * t);
        UNROLL for (int r = 0; r < TOKEN_TILES; r++) next[r] = rows.load(r, 32 * s + 8 * t);
    };
    fetch(0);
    const Quad* b = matrix + lane;
    ROLLED for (int s = 0; s < CHUNKS; s++) {
        u32 high[2][4], low[2][4];
        if (TOKEN_TILES == 1) {  // rows 8 to 15 of A: any numbers, but each in a register of its own
            UNROLL for (int i = 0; i < 4; i++) {
                high[1][i] = threadIdx.y + i;
                low[1][i] = threadIdx.y + 4 + i;
            }
        }
        UNROLL for (int r = 0; r < TOKEN_TILES; r++) {
            const Centered d = centered(next[r], next_mean);
            UNROLL for (int i = 0; i < 4; i++) {
                const float even = __fmul_rn(d.x[2 * i], scale[r]), odd = __fmul_rn(d.x[2 * i + 1], scale[r]);
                const u32 both = pack_half(even, odd);
                high[r][i] = both;
                low[r][i] = pack_half(__fsub_rn(even, half_to_float((u16)(both & 0xffff))),
                                      __fsub_rn(odd, half_to_float((u16)(both >> 16))));
            }
        }
        if (s + 1 < CHUNKS) fetch(s + 1);
        constexpr int BATCH = 4;
        UNROLL for (int tile = 0; tile < TILES; tile += BATCH) {
            Quad m[BATCH][2];
            UNROLL for (int i = 0; i < BATCH; i++)
                UNROLL for (int step = 0; step < 2; step++) {
#if MATRIX_SHARED
                    m[i][step] = b[((tile + i) * 2 + step) * 32];
#else
                    m[i][step] = load_quad(b + ((tile + i) * 2 + step) * 32);
#endif
                }
            UNROLL for (int step = 0; step < 2; step++) {
                const int k = 2 * step;
                UNROLL for (int i = 0; i < BATCH; i++)
                    mma_half(x[tile + i], low[0][k], low[1][k], low[0][k + 1], low[1][k + 1],
                             m[i][step].x, m[i][step].y);
                UNROLL for (int i = 0; i < BATCH; i++)
                    mma_half(x[tile + i], high[0][k], high[1][k], high[0][k + 1], high[1][k + 1],
                             m[i][step].z, m[i][step].w);
                UNROLL for (int i = 0; i < BATCH; i++)
                    mma_half(x[tile + i], high[0][k], high[1][k], high[0][k + 1], high[1][k + 1],
                             m[i][step].x, m[i][step].y);
            }
        }
        b += TILES * 2 * 32;
    }
    UNROLL for (int r = 0; r < TOKEN_TILES; r++)
        UNROLL for (int tile = 0; tile < TILES; tile++)
            UNROLL for (int i = 0; i < 2; i++) x[tile][2 * r + i] = __fmul_rn(x[tile][2 * r + i], back[r]);
}

// Rows that come transformed, in the order of a product's results.
DEVICE void load_numbers(Numbers& x, const Rows& rows) {
    const int t = threadIdx.x % 4;
    UNROLL for (int r = 0; r < TOKEN_TILES; r++) {
        UNROLL for (int tile = 0; tile < TILES; tile++) {
            UNROLL for (int i = 0; i < 2; i++) x[tile][2 * r + i] = 0;
            const int q = 2 * tile, c = q / LANE_WORDS * WORDS + t * LANE_WORDS + q % LANE_WORDS;
            if (!rows.there[r]) continue;
            if (LANE_WORDS > 1 && EXACT_WORDS) {
                const u32 both = *(const u32*)(rows.row[r] + c);
                x[tile][2 * r] = low_activation(both);
                x[tile][2 * r + 1] = high_activation(both);
            } else {
                const int next = (q + 1) / LANE_WORDS * WORDS + t * LANE_WORDS + (q + 1) % LANE_WORDS;
                if (exists(t, q)) x[tile][2 * r] = load_activation(rows.row[r][c]);
                if (exists(t, q + 1)) x[tile][2 * r + 1] = load_activation(rows.row[r][next]);
            }
        }
    }
}

// -- parameters (docs/format.md, section 3) --------------------------------------------------------

__constant__ u32 OCTAVE[16] = {
    0x3f800000u, 0x3f85aac3u, 0x3f8b95c2u, 0x3f91c3d3u, 0x3f9837f0u, 0x3f9ef532u, 0x3fa5fed7u,
    0x3fad583fu, 0x3fb504f3u, 0x3fbd08a4u, 0x3fc5672au, 0x3fce248cu, 0x3fd744fdu, 0x3fe0ccdfu,
    0x3feac0c7u, 0x3ff5257du,
};

DEVICE int grid_index(float x) {  // how many bounds x >= 0 reaches
    constexpr int HALF[16] = {
        0x02cd87, 0x08980f, 0x0ea43a, 0x14f4f0, 0x1b8d3a, 0x227043, 0x29a15b, 0x3123f6,
        0x38fbaf, 0x412c4d, 0x49b9be, 0x52a81e, 0x5bfbb8, 0x65b907, 0x6fe4ba, 0x7a83b3,
    };
    const int bits = (int)as_bits(x), mantissa = bits & 0x7fffff;
    int n = ((bits >> 23) - 127) * 16;
    UNROLL for (int i = 0; i < 16; i++) n += mantissa >= HALF[i];
    return n < 0 ? 0 : n > 255 ? 255 : n;
}

DEVICE float rounded(float x) {  // |x| < 2^22
    return __fsub_rn(__fadd_rn(x, MAGIC), MAGIC);
}

// s and lo become those of a reader; returns what is stored.
DEVICE u32 store_grid(float& s, float& lo, float base) {
#if PARAMETERS == 0
    const u32 both = pack_half(fminf(fmaxf(s, 0.00006103515625f), 65504.0f),
                               fminf(fmaxf(lo, -65504.0f), 65504.0f));
    s = half_to_float((u16)(both & 0xffff));
    lo = half_to_float((u16)(both >> 16));
    return both;
#else
    if (!SYMMETRIC) s = fmaxf(s, __fdiv_rn(fabsf(lo), 3.96875f));
    const int n = grid_index(__fdiv_rn(s, base));
    s = __fmul_rn(as_float(OCTAVE[n & 15] + ((u32)(n >> 4) << 23)), base);
    if (SYMMETRIC) {
        lo = __fmul_rn(s, -1.5f);
        return n;
    }
    const float ratio = __fmul_rn(__fdiv_rn(lo, s), 32.0f);
    const float z = fminf(fmaxf(rounded(fminf(fmaxf(ratio, -128.0f), 128.0f)), -127.0f), 127.0f);
    lo = __fmul_rn(s, __fmul_rn(z, 0.03125f));
    return (u32)n | ((u32)(int)z & 0xff) << 8;
#endif
}

DEVICE float threshold(float s, float lo, int k) {  // 1 .. 3
    if (SYMMETRIC) return __fmul_rn(s, (float)(k - 2));
    return __fadd_rn(__fmul_rn(s, (float)k - 0.5f), lo);
}

DEVICE float power(float ratio, int quarters) {
    if (quarters == 0) return 1.0f;
    if (quarters == 4) return ratio;
    const float root = __fsqrt_rn(ratio);
    if (quarters == 2) return root;
    const float fourth = __fsqrt_rn(root);
    return quarters == 1 ? fourth : __fmul_rn(root, fourth);
}

// -- fit (section 4) -------------------------------------------------------------------------------

struct Grid { float s, lo, cov, den; };

// Of one group; the scalars belong to the lane's own token.
struct Fit {
    u32 integers[TOKEN_TILES][GROUP_TILES];  // X, pairs
    float middle, unit, spread, center, dev, total;
    int sum;

    // Two numbers' existence as a mask of codes.
    static DEVICE u32 mask(int t, int tile) {
        return (exists(t, 2 * tile) ? 0x0000ffffu : 0) | (exists(t, 2 * tile + 1) ? 0xffff0000u : 0);
    }

    DEVICE void open(const Numbers& x, int first, int t, int own) {
        float middles[TOKEN_TILES];
        u32 units[TOKEN_TILES], sums[TOKEN_TILES], squares[TOKEN_TILES];
        UNROLL for (int r = 0; r < TOKEN_TILES; r++) {
            float low = INFINITE, high = -INFINITE;
            UNROLL for (int q = 0; q < 2 * GROUP_TILES; q++) {
                const float y = x[first + q / 2][2 * r + q % 2];
                low = fminf(low, exists(t, q) ? y : INFINITE);
                high = fmaxf(high, exists(t, q) ? y : -INFINITE);
            }
            low = row_min(low);
            high = row_max(high);
            float half = fmaxf(high, -low);
            middles[r] = 0;
            if (!SYMMETRIC) {
                middles[r] = __fadd_rn(__fmul_rn(0.5f, low), __fmul_rn(0.5f, high));
                half = fmaxf(__fsub_rn(high, middles[r]), __fsub_rn(middles[r], low));
            }
            half = fmaxf(half, as_float(27u << 23));  // 2^-100
            units[r] = (as_bits(half) & 0x7f800000u) - (10u << 23);
            const float inverse = as_float((254u << 23) - units[r]);
            u32 sum = 0, square = 0;
            UNROLL for (int tile = 0; tile < GROUP_TILES; tile++) {
                float whole[2];
                UNROLL for (int i = 0; i < 2; i++) {
                    const float y = __fmul_rn(__fsub_rn(x[first + tile][2 * r + i], middles[r]), inverse);
                    const float shifted = exists(t, 2 * tile + i) ? __fadd_rn(y, MAGIC) : MAGIC;
                    sum += as_bits(shifted);
                    square += as_bits(shifted) * as_bits(shifted);
                    whole[i] = __fsub_rn(shifted, MAGIC);
                }
                integers[r][tile] = pack_half(whole[0], whole[1]);
            }
            // Modulo 2^32, with M = MAGIC_BITS: (M + X)^2 = 2 M X + X^2.
            sums[r] = row_sum(sum) - 8u * GROUP_TILES * MAGIC_BITS;
            squares[r] = row_sum(square) - 2u * MAGIC_BITS * sums[r];
        }
        const int r = TOKEN_TILES - 1;
        middle = own ? middles[r] : middles[0];
        unit = as_float(own ? units[r] : units[0]);
        sum = (int)(own ? sums[r] : sums[0]);
        const i64 square = own ? squares[r] : squares[0];
        spread = __ll2float_rn(GROUP_SIZE * square - (SYMMETRIC ? 0 : (i64)sum * sum));
        total = __int2float_rn(sum);
        center = SYMMETRIC ? 0.0f : divided(total);
        dev = divided(__fsqrt_rn(spread));
    }

    // One round for each of N grids of the lane's own token: better ones, with their cov and den.
    template <int N>
    DEVICE void improve(Grid (&grids)[N], int g, int t, int own) const {
        const int home = 4 * g + g / 2;  // lane of token g; the next one to it is that of token g + 8
        constexpr int CHAINS = TOKEN_TILES == 1 && GROUP_TILES >= 8 ? 2 : 1;
        u32 bound[N][TOKEN_TILES][3];  // 1 - ceil(threshold), pairs
        float sums[N][TOKEN_TILES][CHAINS][4];
        UNROLL for (int n = 0; n < N; n++) {
            float u[3];
            UNROLL for (int k = 0; k < 3; k++) {
                // X is at least -2048. 2049 is no float16, so a bound there goes beyond it.
                float b = threshold(grids[n].s, grids[n].lo, k + 1);
                b = b > -2048.0f ? fminf(b, 2049.0f) : -2049.0f;
                u[k] = __fsub_rn(MAGIC + 1.0f, __fadd_ru(b, MAGIC));
            }
            const u32 first = pack_half(u[0], u[1]), last = pack_half(u[2], u[2]);
            UNROLL for (int r = 0; r < TOKEN_TILES; r++) {
                const u32 both = __shfl_sync(ALL, first, home ^ r);
                bound[n][r][0] = permute_bytes(both, both, 0x1010);
                bound[n][r][1] = permute_bytes(both, both, 0x3232);
                bound[n][r][2] = __shfl_sync(ALL, last, home ^ r);
                UNROLL for (int i = 0; i < 4 * CHAINS; i++) sums[n][r][i / 4][i % 4] = 0;
            }
        }
        UNROLL for (int tile = 0; tile < GROUP_TILES; tile += 2) {
            UNROLL for (int n = 0; n < N; n++) {
                UNROLL for (int r = 0; r < TOKEN_TILES; r++) {
                    u32 code[2], moved[2];
                    UNROLL for (int i = 0; i < 2; i++) {
                        const u32 y = integers[r][tile + i];
                        const u32 (&u)[3] = bound[n][r];
                        code[i] = add_pair(add_pair(add_saturated(y, u[0]), add_saturated(y, u[1])),
                                           add_saturated(y, u[2]));
                        moved[i] = add_pair(code[i], PAIR_2044);
                        if (!EXACT_WORDS) code[i] &= mask(t, tile + i);
                    }
                    mma_half(sums[n][r][tile / 2 % CHAINS], integers[r][tile], moved[0],
                             integers[r][tile + 1], moved[1], code[0], code[1]);
                }
            }
        }
        UNROLL for (int n = 0; n < N; n++) {
            float products[TOKEN_TILES], counts[TOKEN_TILES];
            UNROLL for (int r = 0; r < TOKEN_TILES; r++) {
                float (&d)[4] = sums[n][r][0];
                UNROLL for (int i = 0; i < 4 * (CHAINS - 1); i++) d[i] += sums[n][r][CHAINS - 1][i];
                products[r] = g & 1 ? d[1] : d[0];
                counts[r] = g & 1 ? d[3] : d[2];
            }
            float product = products[0], count = counts[0];
            if (TOKEN_TILES == 2) {
                const float p = __shfl_xor_sync(ALL, products[TOKEN_TILES - 1], 1);
                const float c = __shfl_xor_sync(ALL, counts[TOKEN_TILES - 1], 1);
                if (own) { product = p; count = c; }
            }
            const float shifted = __fmaf_rn(count, 1.0f / 2046.0f, MAGIC);
            const int sum_c = (int)(as_bits(shifted) - MAGIC_BITS);
            const float codes = __fsub_rn(shifted, MAGIC), squares = __fmaf_rn(codes, -2044.0f, count);
            const int sum_cx = (int)(as_bits(__fadd_rn(product, MAGIC)) - MAGIC_BITS);
            Grid& f = grids[n];
            constexpr float SIZE = GROUP_SIZE;
            if (SYMMETRIC) {  // integers below 2^24 are exact in float, in any form
                f.cov = __int2float_rn(GROUP_SIZE * (2 * sum_cx - 3 * sum));
                f.den = SIZE * (4.0f * squares - 12.0f * codes + 9.0f * SIZE);
                f.s = __fdiv_rn(__fmul_rn(2.0f, f.cov), f.den);
            } else {
                f.cov = __int2float_rn(GROUP_SIZE * sum_cx - sum_c * sum);
                f.den = SIZE * squares - codes * codes;
                f.s = __fdiv_rn(f.cov, fmaxf(f.den, 1.0f));
                f.lo = divided(__fsub_rn(total, __fmul_rn(f.s, codes)));
            }
        }
    }

    DEVICE Grid solve(int g, int t, int own) const {
        Grid best[1];
        float most = 0;
        ROLLED for (int start = 0; start < STARTS; start += STARTS_AT_ONCE) {
            Grid grids[STARTS_AT_ONCE];
            UNROLL for (int i = 0; i < STARTS_AT_ONCE; i++) {
                const int n = start + i;
                const u32 factor = n == 0 ? 0x3f58aa11u : n == 1 ? 0x3f7ee632u : 0x3f98f085u;
                grids[i].s = __fmul_rn(dev, as_float(factor));
                grids[i].lo = __fsub_rn(center, __fmul_rn(grids[i].s, 1.5f));
            }
            improve(grids, g, t, own);
            UNROLL for (int i = 0; i < STARTS_AT_ONCE; i++) {
                const Grid& f = grids[i];
                const float explained = __fdiv_rn(__fmul_rn(f.cov, f.cov), fmaxf(f.den, 1.0f));
                if (start + i == 0 || explained > most) {
                    best[0] = f;
                    most = explained;
                }
            }
        }
        ROLLED for (int i = 0; i < REFINE_ROUNDS; i++) improve(best, g, t, own);
        return best[0];
    }
};

// -- one warp's tokens -----------------------------------------------------------------------------

// Fit and store one group; its codes go into `halves`, from 2^23 on.
DEVICE void encode_group(const Numbers& x, int group, int side, float base, const Rows& rows,
                         u8* history, i64 page_stride, float (&halves)[TOKEN_TILES][LANE_WORDS][2]) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int own = TOKEN_TILES == 1 ? 0 : (t ^ g / 2) & 1;  // the token whose scalars are the lane's
    const int home = 4 * g + g / 2, first = group * GROUP_TILES;
    Fit fit;
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
    const u32 stored = store_grid(s, lo, base);
    const int slot = own ? rows.history[TOKEN_TILES - 1] : rows.history[0];
    if ((lane == home || TOKEN_TILES == 2 && lane == (home ^ 1)) && slot >= 0) {
        u8* to = history + slot / PAGE * page_stride + (side ? VALUE_PARAMETERS : KEY_PARAMETERS)
            + slot % PAGE * PARAMETER_BYTES;
        if (PARAMETERS == 0) ((u32*)to)[group] = stored;
        if (PARAMETERS == 1) ((u16*)to)[group] = (u16)stored;
        if (PARAMETERS == 2) to[group] = (u8)stored;
    }
    s = __fdiv_rn(s, gain);
    if (!SYMMETRIC) lo = __fadd_rn(__fdiv_rn(__fsub_rn(lo, mu), gain), mu);
    UNROLL for (int r = 0; r < TOKEN_TILES; r++) {
        const float grid_s = __shfl_sync(ALL, s, home ^ r);
        const float grid_lo = SYMMETRIC ? 0.0f : __shfl_sync(ALL, lo, home ^ r);
        const float t1 = threshold(grid_s, grid_lo, 1), t2 = threshold(grid_s, grid_lo, 2);
        const float t3 = threshold(grid_s, grid_lo, 3);
        UNROLL for (int q = 2 * first; q < 2 * (first + GROUP_TILES); q++) {
            const float y = x[q / 2][2 * r + q % 2];
            float& half = halves[r][q % LANE_WORDS][q / LANE_WORDS % 2];
            const float code = reaches(y, t1) + reaches(y, t2) + reaches(y, t3);
            half += code * (float)(1 << (q / LANE_WORDS / 2 * 2));  // exact: below 2^24
        }
    }
}

DEVICE void store_words(u8* to, const u32 (&words)[LANE_WORDS], int t) {
    if (WORDS % LANE_WORDS == 0) {
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

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
oscar_write(const __grid_constant__ Arguments a) {
#if MATRIX_SHARED
    extern __shared__ Quad shared_matrix[];
#endif
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int head = blockIdx.y, side = blockIdx.z, pair = side * a.kv_heads + head;
    const Quad* matrix = a.matrices + (i64)pair * MATRIX_QUADS;
    const bool folded = FOLDED && side;
#if MATRIX_SHARED
    if (!folded) {
        const u32 to = shared_address(shared_matrix);
        for (int i = threadIdx.x; i < MATRIX_QUADS; i += THREADS) copy_to_shared(to + 16 * i, matrix + i);
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
            if (rows.window[r] < 0) continue;
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
        if (folded) load_numbers(x, rows);
        else multiply(x, rows, raw, a.means + (i64)pair * HEAD_DIM, matrix, unscale);
        float halves[TOKEN_TILES][LANE_WORDS][2];
        UNROLL for (int r = 0; r < TOKEN_TILES; r++)
            UNROLL for (int i = 0; i < LANE_WORDS; i++)
                UNROLL for (int half = 0; half < 2; half++) halves[r][i][half] = 8388608.0f;
        UNROLL for (int group = 0; group < GROUPS; group++)
            encode_group(x, group, side, base, rows, history, a.history_page, halves);
        UNROLL for (int r = 0; r < TOKEN_TILES; r++) {
            if (rows.history[r] < 0) continue;
            u32 words[LANE_WORDS];
            UNROLL for (int i = 0; i < LANE_WORDS; i++)
                words[i] = permute_bytes(as_bits(halves[r][i][0]), as_bits(halves[r][i][1]), 0x5410);
            u8* to = history + rows.history[r] / PAGE * a.history_page + (side ? VALUE_CODES : 0)
                + rows.history[r] % PAGE * (4 * WORDS) + 4 * LANE_WORDS * t;
            store_words(to, words, t);
        }
    }
#if MATRIX_SHARED
    wait_for_shared();
#endif
}
