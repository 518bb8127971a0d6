// The exact fit of a row's grid and its stored parameters (docs/format.md, sections 3 and 4).

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
template <int BITS> DEVICE u32 store_grid(float& s, float& lo, float base) {
#if PARAMETERS == 0
    const u32 both = pack_half(fminf(fmaxf(s, 0.00006103515625f), 65504.0f),
                               fminf(fmaxf(lo, -65504.0f), 65504.0f));
    s = half_to_float((u16)(both & 0xffff));
    lo = half_to_float((u16)(both >> 16));
    return both;
#else
    const float largest = as_float(BITS == 3 ? 0x41142aabu : 0x407e0000u);  // 127 steps
    if (!SYMMETRIC) s = fmaxf(s, __fdiv_rn(fabsf(lo), largest));
    const int n = grid_index(__fdiv_rn(s, base));
    s = __fmul_rn(as_float(OCTAVE[n & 15] + ((u32)(n >> 4) << 23)), base);
    if (SYMMETRIC) {
        lo = __fmul_rn(s, -middle_of(BITS));
        return n;
    }
    const float lows = __fdiv_rn(lo, s);
    const float ratio = BITS == 3 ? __fdiv_rn(lows, step_of(3)) : __fmul_rn(lows, 32.0f);
    const float z = fminf(fmaxf(rounded(fminf(fmaxf(ratio, -128.0f), 128.0f)), -127.0f), 127.0f);
    lo = __fmul_rn(s, __fmul_rn(z, step_of(BITS)));
    return (u32)n | ((u32)(int)z & 0xff) << 8;
#endif
}

template <int BITS> DEVICE float threshold(float s, float lo, int k) {  // 1 .. 3, or 1 .. 7
    if (SYMMETRIC) return __fmul_rn(s, (float)(k - (1 << BITS) / 2));
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
template <int GROUP_TILES, int BITS> struct Fit {
    static constexpr int GROUP_SIZE = GROUP_TILES * HEAD_DIM / TILES;
    static constexpr int TOP = (1 << BITS) - 1;    // the largest code, and how many thresholds there are
    static constexpr bool COUNTED_APART = BITS == 3;  // sums of c and of c c do not fit one number
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
        center = SYMMETRIC ? 0.0f : divided<GROUP_SIZE>(total);
        dev = divided<GROUP_SIZE>(__fsqrt_rn(spread));
    }

    // One round for each of N grids of the lane's own token: better ones, with their cov and den.
    template <int N>
    DEVICE void improve(Grid (&grids)[N], int g, int t, int own) const {
        const int home = 4 * g + g / 2;  // lane of token g; the next one to it is that of token g + 8
        constexpr int CHAINS = TOKEN_TILES == 1 && GROUP_TILES >= 8 ? 2 : 1;
        u32 bound[N][TOKEN_TILES][TOP];  // 1 - ceil(threshold), pairs
        float sums[N][TOKEN_TILES][CHAINS][4];
        float code_sums[N][TOKEN_TILES][4];  // COUNTED_APART
        UNROLL for (int n = 0; n < N; n++) {
            float u[TOP + 1];
            UNROLL for (int k = 0; k < TOP; k++) {
                // X is at least -2048. 2049 is no float16, so a bound there goes beyond it.
                float b = threshold<BITS>(grids[n].s, grids[n].lo, k + 1);
                b = b > -2048.0f ? fminf(b, 2049.0f) : -2049.0f;
                u[k] = __fsub_rn(MAGIC + 1.0f, __fadd_ru(b, MAGIC));
            }
            u[TOP] = u[TOP - 1];
            u32 pairs[(TOP + 1) / 2];
            UNROLL for (int k = 0; k < TOP; k += 2) pairs[k / 2] = pack_half(u[k], u[k + 1]);
            UNROLL for (int r = 0; r < TOKEN_TILES; r++) {
                UNROLL for (int k = 0; k < TOP - 1; k += 2) {
                    const u32 both = __shfl_sync(ALL, pairs[k / 2], home ^ r);
                    bound[n][r][k] = permute_bytes(both, both, 0x1010);
                    bound[n][r][k + 1] = permute_bytes(both, both, 0x3232);
                }
                bound[n][r][TOP - 1] = __shfl_sync(ALL, pairs[TOP / 2], home ^ r);
                UNROLL for (int i = 0; i < 4 * CHAINS; i++) sums[n][r][i / 4][i % 4] = 0;
                UNROLL for (int i = 0; i < 4; i++) code_sums[n][r][i] = 0;
            }
        }
        UNROLL for (int tile = 0; tile < GROUP_TILES; tile += 2) {
            UNROLL for (int n = 0; n < N; n++) {
                UNROLL for (int r = 0; r < TOKEN_TILES; r++) {
                    u32 code[2], moved[2];
                    UNROLL for (int i = 0; i < 2; i++) {
                        const u32 y = integers[r][tile + i];
                        const u32 (&u)[TOP] = bound[n][r];
                        code[i] = add_pair(add_saturated(y, u[0]), add_saturated(y, u[1]));
                        UNROLL for (int k = 2; k < TOP; k++)
                            code[i] = add_pair(code[i], add_saturated(y, u[k]));
                        moved[i] = COUNTED_APART ? code[i] : add_pair(code[i], PAIR_2044);
                        if (!EXACT_WORDS) code[i] &= mask(t, tile + i);
                    }
                    if (COUNTED_APART)
                        mma_half(code_sums[n][r], PAIR_1, PAIR_1, PAIR_1, PAIR_1, code[0], code[1]);
                    mma_half(sums[n][r][tile / 2 % CHAINS], integers[r][tile], moved[0],
                             integers[r][tile + 1], moved[1], code[0], code[1]);
                }
            }
        }
        UNROLL for (int n = 0; n < N; n++) {
            float products[TOKEN_TILES], counts[TOKEN_TILES], codes_of[TOKEN_TILES];
            UNROLL for (int r = 0; r < TOKEN_TILES; r++) {
                float (&d)[4] = sums[n][r][0];
                UNROLL for (int i = 0; i < 4 * (CHAINS - 1); i++) d[i] += sums[n][r][CHAINS - 1][i];
                products[r] = g & 1 ? d[1] : d[0];
                counts[r] = g & 1 ? d[3] : d[2];
                codes_of[r] = g & 1 ? code_sums[n][r][1] : code_sums[n][r][0];
            }
            float product = products[0], count = counts[0], codes = codes_of[0];
            if (TOKEN_TILES == 2) {
                const float p = __shfl_xor_sync(ALL, products[TOKEN_TILES - 1], 1);
                const float c = __shfl_xor_sync(ALL, counts[TOKEN_TILES - 1], 1);
                if (own) { product = p; count = c; }
                if (COUNTED_APART) {
                    const float s = __shfl_xor_sync(ALL, codes_of[TOKEN_TILES - 1], 1);
                    if (own) codes = s;
                }
            }
            float squares = count;
            int sum_c;
            if (COUNTED_APART) {
                sum_c = (int)(as_bits(__fadd_rn(codes, MAGIC)) - MAGIC_BITS);
            } else {
                const float shifted = __fmaf_rn(count, 1.0f / 2046.0f, MAGIC);
                sum_c = (int)(as_bits(shifted) - MAGIC_BITS);
                codes = __fsub_rn(shifted, MAGIC);
                squares = __fmaf_rn(codes, -2044.0f, count);
            }
            const int sum_cx = (int)(as_bits(__fadd_rn(product, MAGIC)) - MAGIC_BITS);
            Grid& f = grids[n];
            constexpr float SIZE = GROUP_SIZE;
            if (SYMMETRIC) {  // integers below 2^24 are exact in float, in any form
                f.cov = __int2float_rn(GROUP_SIZE * (2 * sum_cx - TOP * sum));
                f.den = SIZE * (4.0f * squares - 4.0f * TOP * codes + (float)(TOP * TOP) * SIZE);
                f.s = __fdiv_rn(__fmul_rn(2.0f, f.cov), f.den);
            } else {
                f.cov = __int2float_rn(GROUP_SIZE * sum_cx - sum_c * sum);
                f.den = SIZE * squares - codes * codes;
                f.s = __fdiv_rn(f.cov, fmaxf(f.den, 1.0f));
                f.lo = divided<GROUP_SIZE>(__fsub_rn(total, __fmul_rn(f.s, codes)));
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
                const u32 factor = BITS == 3 ? (n == 0 ? 0x3eff06f8u : n == 1 ? 0x3f160419u : 0x3f3404ebu)
                    : n == 0 ? 0x3f58aa11u : n == 1 ? 0x3f7ee632u : 0x3f98f085u;
                grids[i].s = __fmul_rn(dev, as_float(factor));
                grids[i].lo = __fsub_rn(center, __fmul_rn(grids[i].s, middle_of(BITS)));
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
