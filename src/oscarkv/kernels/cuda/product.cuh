// Rows of keys or values, centred, times their transform: near float precision on the matrix units.

template <int SIZE> DEVICE float divided(float x) {
    if ((SIZE & (SIZE - 1)) == 0) return __fmul_rn(x, 1.0f / SIZE);
    return __fdiv_rn(x, (float)SIZE);
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

// The first USED tiles of the product. SIGNS: all numbers of the matrix are of one size, which is its
// scale, so that they have no low parts; a Quad then holds the high parts of both steps.
template <int USED, bool SIGNS>
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
    UNROLL for (int tile = 0; tile < USED; tile++)
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
        constexpr int BATCH = USED % 4 == 0 ? 4 : 3;
        static_assert(USED % BATCH == 0, "whole batches");
        UNROLL for (int tile = 0; tile < USED; tile += BATCH) {
            Quad m[BATCH][2];
            UNROLL for (int i = 0; i < BATCH; i++)
                UNROLL for (int step = 0; step < (SIGNS ? 1 : 2); step++) {
                    const Quad* from = b + ((tile + i) * (SIGNS ? 1 : 2) + step) * 32;
#if MATRIX_SHARED
                    m[i][step] = *from;
#else
                    m[i][step] = load_quad(from);
#endif
                    if (SIGNS) m[i][1] = {m[i][0].z, m[i][0].w, 0, 0};
                }
            UNROLL for (int step = 0; step < 2; step++) {
                const int k = 2 * step;
                UNROLL for (int i = 0; i < BATCH; i++)
                    mma_half(x[tile + i], low[0][k], low[1][k], low[0][k + 1], low[1][k + 1],
                             m[i][step].x, m[i][step].y);
                UNROLL for (int i = 0; i < (SIGNS ? 0 : BATCH); i++)
                    mma_half(x[tile + i], high[0][k], high[1][k], high[0][k + 1], high[1][k + 1],
                             m[i][step].z, m[i][step].w);
                UNROLL for (int i = 0; i < BATCH; i++)
                    mma_half(x[tile + i], high[0][k], high[1][k], high[0][k + 1], high[1][k + 1],
                             m[i][step].x, m[i][step].y);
            }
        }
        b += TILES * (SIGNS ? 1 : 2) * 32;
    }
    UNROLL for (int r = 0; r < TOKEN_TILES; r++)
        UNROLL for (int tile = 0; tile < USED; tile++)
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
