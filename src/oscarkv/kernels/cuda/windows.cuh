// Exact keys and values: 16 tokens of a window page at a time, straight from memory to registers.

DEVICE void read_windows(const Arguments& a, const Piece& p, const Sequence& q,
                         const Results& results) {
    Shared& s = results.s;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    float out[COLUMN_TILES][WINDOW_TILES][4] = {};
    float m[ROW_GROUPS], l[ROW_GROUPS];
    int position[ROW_GROUPS];  // of the lane's query rows
    UNROLL for (int rows = 0; rows < ROW_GROUPS; rows++) {
        m[rows] = NOTHING;
        l[rows] = 0;
        const int r = 4 * rows + t;
        position[rows] = r < p.rows ? p.first + (p.row_block * ROWS + r) / a.group : -1;
    }
    const int last = q.length - 1;
    auto column_of = [&](int tile) {
        return tile < q.sink_tiles ? tile : q.first_recent + tile - q.sink_tiles;
    };
    auto page_of = [&](int tile) {
        return tile < p.window_end
            ? a.window_table[(i64)p.sequence * a.window_columns + column_of(tile)] : 0;
    };
    const u64 policy = read_once_policy();
    constexpr bool EARLY_VALUES = HEAD_DIM <= 128;  // else there are too few registers
    int next_page = page_of(p.window_begin + warp);
    for (int tile = p.window_begin + warp; tile < p.window_end; tile += WARPS) {
        const int page = next_page, start = column_of(tile) * WINDOW_ROWS;
        next_page = page_of(tile + WARPS);
        if (page == 0) continue;
        const u16* keys = a.window + page * a.window_page + p.head * a.window_head;
        const u16* values = keys + WINDOW_ROWS * HEAD_DIM;
        const Quad zero = {0, 0, 0, 0};
        auto load_key = [&](int token, int chunk) {
            const int c = 32 * chunk + 8 * t;
            return HEAD_DIM % 32 == 0 || c < HEAD_DIM
                ? load_quad_once(keys + token * HEAD_DIM + c, policy) : zero;
        };
        auto load_value = [&](int i, int block) {  // token 2t, 2t+1, 2t+8 or 2t+9: eight channels
            const int token = 2 * t + (i & 1) + 8 * (i >> 1);
            const int j = start + token, c = 64 * block + 8 * g;
            const bool written = j <= last && (j < a.sink || j > p.first - a.recent);
            const bool there = written && (HEAD_DIM % 64 == 0 || c < HEAD_DIM);
            return there ? load_quad_once(values + token * HEAD_DIM + c, policy) : zero;
        };
        Quad k[WINDOW_CHUNKS][2], v[WINDOW_TILES / 4][4];
        UNROLL for (int chunk = 0; chunk < WINDOW_CHUNKS; chunk++)
            UNROLL for (int i = 0; i < 2; i++) k[chunk][i] = load_key(g + 8 * i, chunk);
        if (EARLY_VALUES)
            UNROLL for (int block = 0; block < WINDOW_TILES / 4; block++)
                UNROLL for (int i = 0; i < 4; i++) v[block][i] = load_value(i, block);

        float logits[COLUMN_TILES][4] = {};
        UNROLL for (int chunk = 0; chunk < WINDOW_CHUNKS; chunk++) {
            const Quad k0 = k[chunk][0], k1 = k[chunk][1];
            UNROLL for (int n = 0; n < COLUMN_TILES; n++) {
                const Quad b = s.window_query[n][chunk][lane];
                mma_activation(logits[n], k0.x, k1.x, k0.y, k1.y, b.x, b.y);
                mma_activation(logits[n], k0.z, k1.z, k0.w, k1.w, b.z, b.w);
            }
        }
        float weight[ROW_GROUPS][2];
        UNROLL for (int rows = 0; rows < ROW_GROUPS; rows++) {
            const int at = position[rows];
            UNROLL for (int i = 0; i < 2; i++) {
                const int j = start + g + 8 * i;
                float x = logits[rows / 2][2 * i + rows % 2] * (a.scale * LOG2E);
                if (SOFT_CAP) x = capped(x, a.soft_cap);
                const bool seen = (j < a.sink || j > at - a.recent) && j <= at && j > at - a.sliding;
                weight[rows][i] = seen ? x : -INFINITE;
            }
            const float top = fmaxf(m[rows], tokens_max(fmaxf(weight[rows][0], weight[rows][1])));
            const float factor = exp2_approx(m[rows] - top);
            m[rows] = top;
            l[rows] *= factor;
            UNROLL for (int w = 0; w < WINDOW_TILES; w++) {
                out[rows / 2][w][rows % 2] *= factor;
                out[rows / 2][w][2 + rows % 2] *= factor;
            }
            UNROLL for (int i = 0; i < 2; i++) {
                weight[rows][i] = exp2_approx(weight[rows][i] - top);
                l[rows] += weight[rows][i];
            }
        }
        // Weights as a sum of two activations each: their rounding would be the largest error.
        u32 b_high[COLUMN_TILES][2], b_low[COLUMN_TILES][2];
        UNROLL for (int n = 0; n < COLUMN_TILES; n++) {
            UNROLL for (int i = 0; i < 2; i++) {
                const float even = weight[2 * n][i];
                const float odd = 2 * n + 1 < ROW_GROUPS ? weight[(2 * n + 1) % ROW_GROUPS][i] : 0.0f;
                const u32 high = pack_activation(even, odd);
                const u32 low = pack_activation(even - low_activation(high), odd - high_activation(high));
                b_high[n][i] = transpose_8x8(high);
                b_low[n][i] = transpose_8x8(low);
            }
        }
        UNROLL for (int block = 0; block < WINDOW_TILES / 4; block++) {
            if (!EARLY_VALUES)
                UNROLL for (int i = 0; i < 4; i++) v[block][i] = load_value(i, block);
            UNROLL for (int i = 0; i < 4; i++) {  // channels i and i + 4 of the lane's eight
                const Quad (&x)[4] = v[block];
                const u32 select = i & 1 ? 0x7632 : 0x5410;
                u32 a0, a1, a2, a3;
                if (i < 2) {
                    a0 = permute_bytes(x[0].x, x[1].x, select);
                    a1 = permute_bytes(x[0].z, x[1].z, select);
                    a2 = permute_bytes(x[2].x, x[3].x, select);
                    a3 = permute_bytes(x[2].z, x[3].z, select);
                } else {
                    a0 = permute_bytes(x[0].y, x[1].y, select);
                    a1 = permute_bytes(x[0].w, x[1].w, select);
                    a2 = permute_bytes(x[2].y, x[3].y, select);
                    a3 = permute_bytes(x[2].w, x[3].w, select);
                }
                UNROLL for (int n = 0; n < COLUMN_TILES; n++) {
                    float (&d)[4] = out[n][4 * block + i];
                    mma_activation(d, a0, a1, a2, a3, b_high[n][0], b_high[n][1]);
                    mma_activation(d, a0, a1, a2, a3, b_low[n][0], b_low[n][1]);
                }
            }
        }
    }
    merge_warps<WINDOW_TILES>(results, 1, out, m, l, [](int tile, int g, int half) {
        const int c = 64 * (tile / 4) + 8 * g + 4 * half + tile % 4;
        return HEAD_DIM % 64 == 0 || c < HEAD_DIM ? c : -1;
    });
}
