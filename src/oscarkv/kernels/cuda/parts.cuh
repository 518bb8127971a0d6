// Results: a block's own, those that parts of a pair leave, and their sum.

// The rows' final output, from sums in shared memory.
DEVICE void write_rows(const Arguments& a, const Piece& p, bool has_history, const float* inverse,
                       Shared& s) {
    const float* mean = a.value_mean ? a.value_mean + p.head * HEAD_DIM : nullptr;
    auto write = [&](int r, int c, float history) {
        if (r >= p.rows) return;
        const float top = fmaxf(s.m[0][r], s.m[1][r]);
        const float in_history = exp2_approx(s.m[0][r] - top), in_window = exp2_approx(s.m[1][r] - top);
        const float total = in_history * s.l[0][r] + in_window * s.l[1][r];
        if (mean) history += s.l[0][r] * mean[c];
        const float x = (in_window * s.window[r][c] + in_history * history) / total;
        const int row = p.row_block * ROWS + r;
        a.out[(p.start + row / a.group) * a.out_token + (p.head * a.group + row % a.group) * a.out_head
              + c] = (u16)pack_activation(x, 0.0f);
    };
    if (has_history && inverse) {
        times_matrix(s.history, inverse, s.work, write);
    } else {
        ROLLED for (int i = threadIdx.x; i < ROWS * HEAD_DIM; i += THREADS) {
            const int r = i / HEAD_DIM, c = i % HEAD_DIM;
            write(r, c, has_history ? s.history[r][c] : 0.0f);
        }
    }
}

// What a part leaves: m and l of each (kind, row), then their sums.
constexpr int RECORD = 2 * ROWS * (HEAD_DIM + 2);
DEVICE float* record_of(const Arguments& a, int index) { return a.partial + (i64)index * RECORD; }

DEVICE void write_partial(float* record, const Shared& s) {
    for (int i = threadIdx.x; i < 2 * ROWS; i += THREADS) {
        record[2 * i] = s.m[i / ROWS][i % ROWS];
        record[2 * i + 1] = s.l[i / ROWS][i % ROWS];
    }
    float* sums = record + 4 * ROWS;
    for (int i = threadIdx.x; i < 2 * ROWS * HEAD_DIM; i += THREADS) {
        const int kind = i / (ROWS * HEAD_DIM), r = i / HEAD_DIM % ROWS, c = i % HEAD_DIM;
        if (s.l[kind][r] > 0) sums[i] = kind ? s.window[r][c] : s.history[r][c];
    }
}

// Add up what the parts of one pair left, in records first, first + 1, ... Warp w takes parts w,
// w + WARPS, ..., several at a time so that their loads overlap; then the warps are added up.
DEVICE void merge_parts(const Arguments& a, int first, int parts, Shared& s) {
    constexpr int ROW_QUADS = HEAD_DIM / 4, QUADS = ROWS * ROW_QUADS;
    constexpr int EACH = (QUADS + 31) / 32;  // of a lane
    constexpr int AT_ONCE = EACH < 16 ? 16 / EACH : 1;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float* buffer = (float*)s.work;  // [WARPS][ROWS][HEAD_DIM]
    ROLLED for (int kind = 0; kind < 2; kind++) {
        Float4 sum[EACH];
        float m[EACH], l[EACH];
        UNROLL for (int e = 0; e < EACH; e++) {
            sum[e] = {0, 0, 0, 0};
            m[e] = NOTHING;
            l[e] = 0;
        }
        ROLLED for (int base = warp; base < parts; base += WARPS * AT_ONCE) {
            Float4 x[AT_ONCE][EACH];
            float part_m[AT_ONCE][EACH], part_l[AT_ONCE][EACH];
            UNROLL for (int j = 0; j < AT_ONCE; j++) {
                const int part = base + j * WARPS;
                const float* record = record_of(a, first + (part < parts ? part : base));
                UNROLL for (int e = 0; e < EACH; e++) {
                    int quad = lane + 32 * e;
                    if (QUADS % 32 && quad >= QUADS) quad = 0;
                    const int row = kind * ROWS + quad / ROW_QUADS;
                    part_m[j][e] = load_fresh(record + 2 * row);
                    part_l[j][e] = part < parts ? load_fresh(record + 2 * row + 1) : 0.0f;
                    x[j][e] = load_fresh_quad(record + 4 * ROWS + 4 * (kind * QUADS + quad));
                }
            }
            UNROLL for (int j = 0; j < AT_ONCE; j++) {
                UNROLL for (int e = 0; e < EACH; e++) {
                    if (!(part_l[j][e] > 0)) continue;  // nothing of this kind: x may be anything
                    const float top = fmaxf(m[e], part_m[j][e]);
                    const float before = exp2_approx(m[e] - top), now = exp2_approx(part_m[j][e] - top);
                    m[e] = top;
                    l[e] = l[e] * before + part_l[j][e] * now;
                    sum[e].x = sum[e].x * before + x[j][e].x * now;
                    sum[e].y = sum[e].y * before + x[j][e].y * now;
                    sum[e].z = sum[e].z * before + x[j][e].z * now;
                    sum[e].w = sum[e].w * before + x[j][e].w * now;
                }
            }
        }
        UNROLL for (int e = 0; e < EACH; e++) {
            const int quad = lane + 32 * e;
            if (QUADS % 32 && quad >= QUADS) continue;
            *(Float4*)&buffer[warp * ROWS * HEAD_DIM + 4 * quad] = sum[e];
            if (quad % ROW_QUADS == 0) {
                s.warp_m[warp][quad / ROW_QUADS] = m[e];
                s.warp_l[warp][quad / ROW_QUADS] = l[e];
            }
        }
        __syncthreads();
        ROLLED for (int i = threadIdx.x; i < ROWS * HEAD_DIM; i += THREADS) {
            const int r = i / HEAD_DIM;
            float top = NOTHING, total = 0, weight = 0;
            UNROLL for (int w = 0; w < WARPS; w++) top = fmaxf(top, s.warp_m[w][r]);
            UNROLL for (int w = 0; w < WARPS; w++) {
                const float factor = exp2_approx(s.warp_m[w][r] - top);
                weight += s.warp_l[w][r] * factor;
                total += buffer[w * ROWS * HEAD_DIM + i] * factor;
            }
            (kind ? s.window : s.history)[r][i % HEAD_DIM] = total;
            if (i % HEAD_DIM == 0) {
                s.m[kind][r] = top;
                s.l[kind][r] = weight;
            }
        }
        __syncthreads();
    }
}
