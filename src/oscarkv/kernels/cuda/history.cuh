// Packed keys and values: a warp's ring of chunks, and what it does with their codes (codes.cuh).

// A warp's own ring of chunks, and the pages they come from.
struct Ring {
    const Arguments& a;
    const u8* base;    // the head's bytes of page 0
    const int* table;  // the sequence's pages
    int first, count;  // the warp's first chunk, and how many it has; they are WARPS apart
    u32 shared;        // of its first stage
    u64 policy;
    int pages, next_pages;  // lane i: page of chunk (32 n + i), of (32 (n + 1) + i)

    DEVICE int page_of(int index) const {
        return index < count ? table[(first + index * WARPS) / CHUNKS_PER_PAGE] : 0;
    }

    DEVICE void open() {
        const int lane = threadIdx.x % 32;
        pages = page_of(lane);
        next_pages = count > 32 ? page_of(32 + lane) : 0;
    }

    static DEVICE int tiles_of(int chunk) {  // how many tiles it has
        if (TILES_PER_PAGE % CHUNK == 0) return CHUNK;
        const int left = TILES_PER_PAGE - chunk % CHUNKS_PER_PAGE * CHUNK;
        return left < CHUNK ? left : CHUNK;
    }

    static DEVICE int position_of(int chunk) {
        if (TILES_PER_PAGE % CHUNK == 0) return chunk * (CHUNK * TILE);
        return chunk / CHUNKS_PER_PAGE * PAGE + chunk % CHUNKS_PER_PAGE * (CHUNK * TILE);
    }

    // Stage: K codes, V codes, K parameters, V parameters of the chunk's tokens.
    DEVICE void fetch(int index, int stage) {
        const int lane = threadIdx.x % 32;
        const int page = __shfl_sync(ALL, pages, index & 31);
        if (index < count) {
            const int chunk = first + index * WARPS, sub = chunk % CHUNKS_PER_PAGE * CHUNK;
            const int tiles = tiles_of(chunk);
            const u8* from = base + page * a.history_page + sub * KEY_CODE_BYTES + 16 * lane;
            const u8* values = from + VALUE_CODES + sub * (VALUE_CODE_BYTES - KEY_CODE_BYTES);
            const u32 to = shared + stage * STAGE_BYTES + 16 * lane;
            UNROLL for (int i = 0; i < CHUNK * larger(KEY_CODE_BYTES, VALUE_CODE_BYTES); i += 512) {
                if (i + 16 * lane < tiles * KEY_CODE_BYTES)
                    copy_async_once(to + i, from + i, policy);
                if (i + 16 * lane < tiles * VALUE_CODE_BYTES)
                    copy_async_once(to + CHUNK * KEY_CODE_BYTES + i, values + i, policy);
            }
            from = base + page * a.history_page + KEY_PARAMETERS + sub * STORED_BYTES;
            UNROLL for (int i = 0; i < 2 * CHUNK * STORED_BYTES; i += 512) {
                const int at = i + 16 * lane, side = at >= CHUNK * STORED_BYTES;
                const int within = at - side * CHUNK * STORED_BYTES;
                if (within < tiles * STORED_BYTES && at < 2 * CHUNK * STORED_BYTES)
                    copy_async_once(to - 16 * lane + CHUNK * CODE_BYTES + at,
                                    from + side * (PAGE * PARAMETER_BYTES) + within, policy);
            }
        }
        commit_copies();
        if ((index & 31) == 31) {
            pages = next_pages;
            next_pages = page_of(index + 33 + lane);
        }
    }
};

// The stored parameters of a token's group, and the grid that they stand for.
DEVICE u32 load_parameters(const u8* stored, int token, int group) {
    if (PAIRED) return *(const u16*)(stored + token * PARAMETER_BYTES);  // of both groups
#if PARAMETERS == 0
    return *(const u32*)(stored + token * PARAMETER_BYTES + 4 * group);
#elif PARAMETERS == 1
    return *(const u16*)(stored + token * PARAMETER_BYTES + 2 * group);
#else
    return stored[token * PARAMETER_BYTES + group];
#endif
}

DEVICE Grid grid_of(u32 x, float exponent, int bits) {
#if PARAMETERS == 0
    return {half_to_float((u16)(x & 0xffff)), half_to_float((u16)(x >> 16))};
#else
    // A byte n in the mantissa of 2^23 is the number 2^23 + n; `exponent` makes up for the 2^23.
#if PARAMETERS == 1
    const float z = as_float((x >> 8) ^ 0x4b000080u) - 8388736.0f;
    return {exp2_approx(as_float(x & 0xff | 0x4b000000u) * 0.0625f + exponent), z * step_of(bits)};
#else
    const float s = exp2_approx(as_float(x & 0xff | 0x4b000000u) * 0.0625f + exponent);
    return {s, PAIRED ? exp2_approx(as_float(x >> 8 | 0x4b000000u) * 0.0625f + exponent)
                      : -middle_of(bits)};
#endif
#endif
}

// A group's grid, from what is staged of a token. (PAIRED: codes have 2 bits.)
DEVICE Grid grid_of_group(const Grid& staged, int group) {
    return PAIRED ? Grid{group ? staged.lo : staged.s, -middle_of(2)} : staged;
}

// The group of slot p: groups are runs of slots, whatever the half and the word.
DEVICE constexpr int group_of_slot(int p) { return p * GROUPS / 8; }

using Grids = Grid[2][STAGED_GRIDS ? CHUNK_TOKENS : 1];

struct History {
    float out[COLUMN_TILES][ROW_TILES][4] = {};
    float m[ROW_GROUPS], l[ROW_GROUPS], lo[ROW_GROUPS][GROUPS];
    float column_sums[4] = {};  // GROUP_COLUMNS: of all weights of a column, in place of lo
    u32 query[ROW_GROUPS][KEY_PARTS];
    float product[ROW_GROUPS], offset[ROW_GROUPS][GROUPS];
    float base[ROW_GROUPS];  // q . m_K less the reference m, once there is one
    float minus_magic[ROW_GROUPS];  // what MAGIC adds to a product
    float middle[ROW_GROUPS][GROUPS];  // symmetric codes: what makes products of c those of c - middle
    int newest[ROW_GROUPS], oldest[ROW_GROUPS];
    int start[4];     // of the sums of bytes; the low ones are rounded
    u32 over_limit;   // added to two weights, sets the top bit of those that are too large
    float key_exponent, value_exponent;
    u32 shift[4];  // 4^(3 - j): brings slot j of a byte to its top; opaque, so that IMAD does it

    DEVICE void open(const Arguments& a, const Piece& p, const PreparedQueries& prepared) {
        const int lane = threadIdx.x % 32, t = lane % 4;
        UNROLL for (int rows = 0; rows < ROW_GROUPS; rows++) {
            const int r = 4 * rows + t;
            m[rows] = NOTHING;
            l[rows] = 0;
            UNROLL for (int k = 0; k < KEY_PARTS; k++) query[rows][k] = prepared.parts[rows][k][lane];
            product[rows] = prepared.product[r];
            minus_magic[rows] = -MAGIC * product[rows];
            base[rows] = prepared.mean[r];
            UNROLL for (int group = 0; group < GROUPS; group++) {
                lo[rows][group] = 0;
                offset[rows][group] = prepared.offset[r][group];
                middle[rows][group] = (FLOAT_BITS ? minus_magic[rows] : 0.0f)
                    - middle_of(KEY_BITS) * offset[rows][group];
            }
            const int at = r < p.rows ? p.first + (p.row_block * ROWS + r) / a.group : -1;
            newest[rows] = at - a.recent;
            oldest[rows] = at - a.sliding + 1 > a.sink ? at - a.sliding + 1 : a.sink;
        }
        if (PARAMETERS) {
            key_exponent = (float)(a.exponents[p.head] - (1 << 19));
            value_exponent = (float)(a.exponents[a.kv_heads + p.head] - (1 << 19));
        }
        UNROLL for (int i = 0; i < 4; i++) start[i] = i & 1 ? 128 : FLOAT_BITS ? as_bits(MAGIC) : 0;
        over_limit = ALWAYS_OVER;
        shift[0] = 64 * a.one;
        shift[1] = 16 * a.one;
        shift[2] = 4 * a.one;
    }

    // Logits of a tile, 16 tokens from `start_position` on, less the rows' references; and the grids of
    // its values.
    template <bool MASKED>
    DEVICE void read_keys(float (&x)[ROW_GROUPS][2], Grid (&value)[2][GROUPS], const u8* stage,
                           const Grids& grids, int tile, int start_position, float soft_cap) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        const u32* key_codes = (const u32*)(stage + tile * KEY_CODE_BYTES);
        const u8* key_stored = stage + CHUNK * CODE_BYTES + tile * STORED_BYTES;
        const u8* value_stored = key_stored + CHUNK * STORED_BYTES;

        u32 words[2][KEY_REGISTERS];  // of tokens g and g + 8
        UNROLL for (int i = 0; i < 2; i++)
            load_key(words[i], key_codes + (g + 8 * i) * KEY_WORDS, t, shift);
        int sums[ROW_GROUPS][GROUPS][4];
        multiply(sums, words);
        Grid key[2][GROUPS];
        UNROLL for (int i = 0; i < 2; i++) {
            const int token = g + 8 * i;
            UNROLL for (int group = 0; group < GROUPS; group++) {
                key[i][group] = STAGED_GRIDS ? grid_of_group(grids[0][tile * TILE + token], group)
                    : grid_of(load_parameters(key_stored, token, group), key_exponent, KEY_BITS);
                value[i][group] = STAGED_GRIDS ? grid_of_group(grids[1][tile * TILE + token], group)
                    : grid_of(load_parameters(value_stored, token, group), value_exponent, VALUE_BITS);
            }
        }
        UNROLL for (int rows = 0; rows < ROW_GROUPS; rows++) {
            UNROLL for (int i = 0; i < 2; i++) {
                x[rows][i] = base[rows];
                UNROLL for (int group = 0; group < GROUPS; group++) {
                    const int (&sum)[4] = sums[rows][group];
                    const int both = sum[2 * i] + (sum[2 * i + 1] >> 8);
                    const Grid& grid = key[i][group];
                    if (PARAMETERS == 2) {
                        const float whole = FLOAT_BITS ? as_float(both) : (float)both;
                        x[rows][i] += grid.s * __fmaf_rn(whole, product[rows], middle[rows][group]);
                        continue;
                    }
                    const float products = FLOAT_BITS
                        ? __fmaf_rn(as_float(both), product[rows], minus_magic[rows])
                        : (float)both * product[rows];
                    if (PARAMETERS == 0) {
                        x[rows][i] += grid.lo * offset[rows][group];
                        x[rows][i] += grid.s * products;
                    } else {
                        x[rows][i] += grid.s * (grid.lo * offset[rows][group] + products);
                    }
                }
                if (SOFT_CAP) x[rows][i] = capped(x[rows][i], soft_cap) - (m[rows] == NOTHING ? 0 : m[rows]);
                if (MASKED) {
                    const int j = start_position + g + 8 * i;
                    if (j < oldest[rows] || j > newest[rows]) x[rows][i] = -INFINITE;
                }
            }
        }
        if (MASKED) {  // a token that no row sees may never have been written
            UNROLL for (int i = 0; i < 2; i++) {
                float top = x[0][i];
                UNROLL for (int rows = 1; rows < ROW_GROUPS; rows++) top = fmaxf(top, x[rows][i]);
                UNROLL for (int lanes = 1; lanes < 4; lanes *= 2)
                    top = fmaxf(top, __shfl_xor_sync(ALL, top, lanes));
                if (top == -INFINITE)
                    UNROLL for (int group = 0; group < GROUPS; group++) value[i][group] = {1.0f, 0.0f};
            }
        }
    }

    // N tiles of a stage at once, so that one's arithmetic fills the other's waits.
    template <bool MASKED, int N>
    DEVICE void read(const u8* stage, const Grids& grids, int tile, int start_position, float soft_cap) {
        float x[N][ROW_GROUPS][2], p[N][ROW_GROUPS][2];
        Grid value[N][2][GROUPS];
        u32 weights[N][WEIGHT_GROUPS][COLUMN_TILES][2];  // p s of two rows, or of two groups
        UNROLL for (int n = 0; n < N; n++)
            read_keys<MASKED>(x[n], value[n], stage, grids, tile + n, start_position + n * TILE, soft_cap);
        u32 over = 0;
        UNROLL for (int n = 0; n < N; n++) over |= weigh(p[n], weights[n], x[n], value[n]);
        if (__any_sync(ALL, over)) {
            move_references(x, value);
            UNROLL for (int n = 0; n < N; n++) weigh(p[n], weights[n], x[n], value[n]);
        }
        UNROLL for (int n = 0; n < N; n++) {
            UNROLL for (int rows = 0; rows < ROW_GROUPS; rows++) {
                l[rows] += p[n][rows][0] + p[n][rows][1];
                UNROLL for (int group = 0; group < (GROUP_COLUMNS ? 0 : GROUPS); group++)
                    UNROLL for (int i = 0; i < 2; i++) {
                        const Grid& grid = value[n][i][group];
                        const float weight = PARAMETERS ? p[n][rows][i] * grid.s : p[n][rows][i];
                        lo[rows][group] += PARAMETERS == 2 ? weight : weight * grid.lo;
                    }
            }
            UNROLL for (int group = 0; group < WEIGHT_GROUPS; group++)
                UNROLL for (int c = 0; c < COLUMN_TILES; c++)
                    UNROLL for (int i = 0; i < 2; i++)
                        weights[n][group][c][i] = transpose_8x8(weights[n][group][c][i]);
            if constexpr (GROUP_COLUMNS) {
                constexpr u32 ONES = 0x3c003c00u;
                mma_half(column_sums, ONES, ONES, ONES, ONES, weights[n][0][0][0], weights[n][0][0][1]);
            }
            constexpr int ABOVE = CHUNK * (KEY_CODE_BYTES - VALUE_CODE_BYTES);
            const u8* codes = stage + (CHUNK + tile + n) * VALUE_CODE_BYTES + ABOVE;
            add_values(weights[n], (const u32*)codes);
        }
    }

    // The first tiles of a stage, which every row sees.
    template <int TILES>
    DEVICE void read_tiles(const u8* stage, const Grids& grids, float soft_cap) {
        UNROLL for (int tile = 0; tile + TILES_AT_ONCE <= TILES; tile += TILES_AT_ONCE)
            read<false, TILES_AT_ONCE>(stage, grids, tile, 0, soft_cap);
        if constexpr (TILES % TILES_AT_ONCE)
            UNROLL for (int tile = TILES - TILES % TILES_AT_ONCE; tile < TILES; tile++)
                read<false, 1>(stage, grids, tile, 0, soft_cap);
    }

    // p = 2^x and the weights p s as halves; not 0 if one is over the limit.
    DEVICE u32 weigh(float (&p)[ROW_GROUPS][2], u32 (&weights)[WEIGHT_GROUPS][COLUMN_TILES][2],
                     const float (&x)[ROW_GROUPS][2], const Grid (&value)[2][GROUPS]) {
        UNROLL for (int rows = 0; rows < ROW_GROUPS; rows++)
            UNROLL for (int i = 0; i < 2; i++) p[rows][i] = exp2_approx(x[rows][i]);
        u32 largest = 0;
        UNROLL for (int group = 0; group < WEIGHT_GROUPS; group++) {
            UNROLL for (int c = 0; c < COLUMN_TILES; c++) {
                UNROLL for (int i = 0; i < 2; i++) {
                    const float s = value[i][group].s, even = p[2 * c][i] * s;
                    float odd = 2 * c + 1 < ROW_GROUPS ? p[(2 * c + 1) % ROW_GROUPS][i] * s : 0.0f;
                    if (GROUP_COLUMNS) odd = p[0][i] * value[i][GROUPS - 1].s;
                    weights[group][c][i] = pack_half(even, odd);
                    largest = max_half(largest, weights[group][c][i]);
                }
            }
        }
        return (largest + over_limit) & 0x80008000u;
    }

    // A chunk's parameters as they are stored, a lane's share of them; then as grids for all lanes.
    static constexpr int LANE_GRIDS = 2 * CHUNK_TOKENS / 32;
    static DEVICE void load_chunk_parameters(u32 (&raw)[LANE_GRIDS], const u8* stage) {
        const u8* stored = stage + CHUNK * CODE_BYTES;
        UNROLL for (int i = 0; i < LANE_GRIDS; i++) {
            const int at = threadIdx.x % 32 + 32 * i, side = at / CHUNK_TOKENS;
            raw[i] = load_parameters(stored + side * CHUNK * STORED_BYTES, at % CHUNK_TOKENS, 0);
        }
    }

    DEVICE void stage_grids(Grids& grids, const u32 (&raw)[LANE_GRIDS]) {
        UNROLL for (int i = 0; i < LANE_GRIDS; i++) {
            const int at = threadIdx.x % 32 + 32 * i, side = at / CHUNK_TOKENS;
            grids[side][at % CHUNK_TOKENS] = grid_of(raw[i], side ? value_exponent : key_exponent,
                                                     side ? VALUE_BITS : KEY_BITS);
        }
        __syncwarp();
    }

    DEVICE void multiply_sorted(int (&sums)[ROW_GROUPS][GROUPS][4],
                                const u32 (&words)[2][KEY_REGISTERS]) {
        UNROLL for (int k = 0; k < KEY_PARTS; k += 2) {
            const int group = part_group(k);
            const u32 a0 = sorted_part(words[0], k, shift), a1 = sorted_part(words[1], k, shift);
            const u32 a2 = sorted_part(words[0], k + 1, shift), a3 = sorted_part(words[1], k + 1, shift);
            UNROLL for (int rows = 0; rows < ROW_GROUPS; rows++) {
                if (first_of_group(k))
                    mma_bytes_from(sums[rows][group], start, a0, a1, a2, a3, query[rows][k], query[rows][k + 1]);
                else
                    mma_bytes(sums[rows][group], a0, a1, a2, a3, query[rows][k], query[rows][k + 1]);
            }
        }
    }

    // q' . c of a tile, high and low bytes of q' apart: KEY_UNIT times it, over the group's channels.
    DEVICE void multiply(int (&sums)[ROW_GROUPS][GROUPS][4], const u32 (&words)[2][KEY_REGISTERS]) {
        if constexpr (SORTED_PARTS) return multiply_sorted(sums, words);
        if (GROUPS > 1)
            UNROLL for (int rows = 0; rows < ROW_GROUPS; rows++)
                UNROLL for (int group = 0; group < GROUPS; group++)
                    UNROLL for (int i = 0; i < 4; i++) sums[rows][group][i] = start[i];
        UNROLL for (int k = 0; k < KEY_PARTS; k += 2) {
            u32 code[2][2];
            UNROLL for (int part = 0; part < 2; part++)
                UNROLL for (int i = 0; i < 2; i++) code[part][i] = key_part(words[i], k + part, shift);
            UNROLL for (int rows = 0; rows < ROW_GROUPS; rows++) {
                const u32 b0 = query[rows][k], b1 = query[rows][k + 1];
                if (GROUPS == 1 && k == 0) {
                    mma_bytes_from(sums[rows][0], start, code[0][0], code[0][1], code[1][0], code[1][1],
                                   b0, b1);
                } else if constexpr (GROUPS == 1) {
                    mma_bytes(sums[rows][0], code[0][0], code[0][1], code[1][0], code[1][1], b0, b1);
                } else {
                    UNROLL for (int upper = 0; upper < 2; upper++) {  // slots 0..3, 4..7
                        const u32 mask = upper ? 0xff00ff00u : 0x00ff00ffu;
                        mma_bytes(sums[rows][group_of_slot(4 * upper + k / LANE_WORDS)],
                                  code[0][0], code[0][1], code[1][0], code[1][1],
                                  b0 & mask, b1 & mask);
                    }
                }
            }
        }
    }

    // out += sum (p s) c of a tile; a lane reads tokens 2t, 2t + 1, 2t + 8, 2t + 9.
    DEVICE void add_values(const u32 (&b)[WEIGHT_GROUPS][COLUMN_TILES][2], const u32* codes) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        UNROLL for (int block = 0; block < (PADDED + 7) / 8; block++) {
            u32 x[4], odd[ODD_REGISTERS];
            const u32 byte = load_value(x, odd, codes, block, g, t, shift);
            UNROLL for (int p0 = 0; p0 < VALUE_SLOTS; p0++) {
                const u32 a0 = value_slot(x, odd, p0, 0), a1 = value_slot(x, odd, p0, 1);
                const u32 a2 = value_slot(x, odd, p0, 2), a3 = value_slot(x, odd, p0, 3);
                UNROLL for (int c = 0; c < COLUMN_TILES; c++) {
                    float (&d)[4] = out[c][8 * block + p0];
                    if constexpr (PADDED == 4 && WEIGHT_GROUPS == 2) {  // the group is the lane's byte
                        UNROLL for (int group = 0; group < 2; group++) {
                            const u32 mine = byte == group ? ALL : 0;
                            mma_half(d, a0 & mine, a1 & mine, a2 & mine, a3 & mine,
                                     b[group][c][0], b[group][c][1]);
                        }
                    } else {
                        const int group = GROUP_COLUMNS ? 0 : group_of_slot(p0);
                        mma_half(d, a0, a1, a2, a3, b[group][c][0], b[group][c][1]);
                    }
                }
            }
        }
    }

    // Move each row's reference so that its largest weight p s becomes 1: up only, but for the first
    // keys that it sees. Rare.
    template <int N>
    DEVICE void move_references(float (&x)[N][ROW_GROUPS][2], const Grid (&value)[N][2][GROUPS]) {
        bool all_seen = true;
        UNROLL for (int rows = 0; rows < ROW_GROUPS; rows++) {
            float top = -INFINITE;
            UNROLL for (int n = 0; n < N; n++)
                UNROLL for (int i = 0; i < 2; i++)
                    UNROLL for (int group = 0; group < GROUPS; group++)
                        top = fmaxf(top, x[n][rows][i] + log2_approx(value[n][i][group].s));
            top = tokens_max(top);
            const bool unseen = m[rows] == NOTHING;
            if (unseen && top == -INFINITE) { all_seen = false; continue; }
            if (!unseen) top = fmaxf(top, 0.0f);
            const float factor = unseen ? 0.0f : exp2_approx(-top);
            m[rows] = unseen ? top : m[rows] + top;
            if (!SOFT_CAP) base[rows] -= top;
            UNROLL for (int n = 0; n < N; n++)
                UNROLL for (int i = 0; i < 2; i++) x[n][rows][i] -= top;
            l[rows] *= factor;
            UNROLL for (int group = 0; group < GROUPS; group++) lo[rows][group] *= factor;
            UNROLL for (int i = 0; i < (GROUP_COLUMNS ? 4 : 0); i++) column_sums[i] *= factor;
            UNROLL for (int tile = 0; tile < ROW_TILES; tile++) {
                UNROLL for (int column = rows % 2; column < (GROUP_COLUMNS ? 2 : rows % 2 + 1); column++) {
                    out[rows / 2][tile][column] *= factor;
                    out[rows / 2][tile][2 + column] *= factor;
                }
            }
        }
        if (__all_sync(ALL, all_seen)) over_limit = ABOVE_4096;
    }

    DEVICE void finish(const Results& results) {
        Shared& s = results.s;
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
        UNROLL for (int rows = 0; rows < ROW_GROUPS; rows++) {
            UNROLL for (int group = 0; group < GROUPS; group++) {
                float sum = GROUP_COLUMNS ? column_sums[group] : tokens_sum(lo[rows][group]);
                if (PARAMETERS == 2) sum *= -middle_of(VALUE_BITS);
                if (g == 0) s.warp_lo[warp][4 * rows + t][group] = sum;
            }
        }
        if (GROUP_COLUMNS) {
            UNROLL for (int tile = 0; tile < ROW_TILES; tile++) {
                const bool second = PADDED == 4 ? g >= 4 : group_of_slot(tile % 8) == 1;
                UNROLL for (int i = 0; i < 4; i += 2)
                    out[0][tile][i] = second ? out[0][tile][i + 1] : out[0][tile][i];
            }
        }
        UNROLL for (int n = 0; n < COLUMN_TILES; n++)
            UNROLL for (int tile = 0; tile < ROW_TILES; tile++)
                UNROLL for (int i = 0; i < 4; i++)
                    out[n][tile][i] *= 16777216.0f / (float)(1 << value_place(tile));
        merge_warps<ROW_TILES>(results, 0, out, m, l, [](int tile, int g, int half) {
            return tile_valid(tile, g) ? tile_channel(tile, g, half) : -1;
        });
    }
};

DEVICE void read_history(const Arguments& a, const Piece& p, const Sequence& q,
                         const Results& results) {
    Shared& s = results.s;
    const int warp = threadIdx.x / 32;
    u8* stages = s.work + warp * STAGES * STAGE_BYTES;
    const int chunks = p.history_end - p.history_begin;
    Ring ring{a, a.history + p.head * a.history_head,
              a.history_table + (i64)p.sequence * a.history_columns,
              q.first_chunk + p.history_begin + warp,
              chunks > warp ? (chunks - warp + WARPS - 1) / WARPS : 0, shared_address(stages),
              read_once_policy()};
    ring.open();
    ROLLED for (int i = 0; i < STAGES - 1; i++) ring.fetch(i, i);
    if (p.window_end > p.window_begin) load_window_queries(a, p, s);  // they will be wanted later
    wait_for_previous();  // the queries
    History state;
    state.open(a, p, *prepared(a, p.sequence, p.head, p.row_block));
    // Positions that every row sees need no masks, those that no row sees are left out.
    const int first = p.first + p.row_block * ROWS / a.group;
    const int last = p.first + (p.row_block * ROWS + p.rows - 1) / a.group;
    int oldest = first - a.sliding + 1, all_oldest = last - a.sliding + 1;
    if (oldest < a.sink) oldest = a.sink;
    if (all_oldest < a.sink) all_oldest = a.sink;
    int stage = 0;
    for (int i = 0; i < ring.count; i++) {
        wait_copies<STAGES - 2>();
        __syncwarp();
        const u8* packed = stages + stage * STAGE_BYTES;
        u32 raw[History::LANE_GRIDS];
        if (STAGED_GRIDS) History::load_chunk_parameters(raw, packed);
        ring.fetch(i + STAGES - 1, stage == 0 ? STAGES - 1 : stage - 1);
        const int chunk = ring.first + i * WARPS, tiles = Ring::tiles_of(chunk);
        int start = Ring::position_of(chunk);
        Grids& grids = s.grids[warp];
        if (STAGED_GRIDS) state.stage_grids(grids, raw);
        if (start >= all_oldest && start + tiles * TILE - 1 <= first - a.recent) {
            constexpr int SHORT = TILES_PER_PAGE % CHUNK;  // tiles of a page's last chunk, if not CHUNK
            if (SHORT && tiles == SHORT)
                state.template read_tiles<SHORT ? SHORT : 1>(packed, grids, a.soft_cap);
            else
                state.template read_tiles<CHUNK>(packed, grids, a.soft_cap);
        } else {
            for (int tile = 0; tile < tiles; tile++, start += TILE)
                if (start + TILE > oldest && start <= last - a.recent)
                    state.template read<true, 1>(packed, grids, tile, start, a.soft_cap);
        }
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
    wait_copies<0>();
    state.finish(results);
}
