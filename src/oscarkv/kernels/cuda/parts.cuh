// Results: a block's own, those that parts of a pair leave, and their sum.

#if VALUE_HADAMARD
static_assert(HEAD_DIM == 64 || HEAD_DIM == 128 || HEAD_DIM == 256, "HADAMARD_SIZE knows these");
constexpr int LANE_CHANNELS = HEAD_DIM / 32;
constexpr float HADAMARD_SIZE = HEAD_DIM == 64 ? 0.125f : HEAD_DIM == 128 ? 0.08838834764831845f : 0.0625f;

// A row times Sylvester's Hadamard matrix: lane t holds channels LANE_CHANNELS t ...
DEVICE void times_hadamard(float (&x)[LANE_CHANNELS]) {
    UNROLL for (int bit = 1; bit < LANE_CHANNELS; bit *= 2) {
        UNROLL for (int i = 0; i < LANE_CHANNELS; i++) {
            if (i & bit) continue;
            const float a = x[i], b = x[i + bit];
            x[i] = a + b;
            x[i + bit] = a - b;
        }
    }
    UNROLL for (int bit = 1; bit < 32; bit *= 2) {
        UNROLL for (int i = 0; i < LANE_CHANNELS; i++) {
            const float other = __shfl_xor_sync(ALL, x[i], bit);
            x[i] = threadIdx.x & bit ? other - x[i] : x[i] + other;
        }
    }
    UNROLL for (int i = 0; i < LANE_CHANNELS; i++) x[i] *= HADAMARD_SIZE;
}
#endif

// The rows' final output, from sums in shared memory.
DEVICE void write_rows(const Arguments& a, const Piece& p, bool has_history, const float* inverse,
                       Shared& s) {
    const float* mean = a.value_mean ? a.value_mean + p.head * HEAD_DIM : nullptr;
    auto write = [&](int r, int c, float history, float mean_c) {
        if (r >= p.rows) return;
        const float top = fmaxf(s.m[0][r], s.m[1][r]);
        const float in_history = exp2_approx(s.m[0][r] - top), in_window = exp2_approx(s.m[1][r] - top);
        const float total = in_history * s.l[0][r] + in_window * s.l[1][r];
        history += s.l[0][r] * mean_c;
        const float x = (in_window * s.window[r][c] + in_history * history) / total;
        const int row = p.row_block * ROWS + r;
        a.out[(p.start + row / a.group) * a.out_token + (p.head * a.group + row % a.group) * a.out_head
              + c] = (u16)pack_activation(x, 0.0f);
    };
    if (has_history && inverse) {
#if VALUE_HADAMARD
        const int first = LANE_CHANNELS * (threadIdx.x % 32);
        float means[LANE_CHANNELS];
        UNROLL for (int i = 0; i < LANE_CHANNELS; i++) means[i] = mean ? mean[first + i] : 0.0f;
        ROLLED for (int r = threadIdx.x / 32; r < p.rows; r += WARPS) {
            float x[LANE_CHANNELS];
            UNROLL for (int i = 0; i < LANE_CHANNELS; i++) x[i] = s.history[r][first + i];
            times_hadamard(x);
            UNROLL for (int i = 0; i < LANE_CHANNELS; i++) write(r, first + i, x[i], means[i]);
        }
#else
        ROLLED for (int r0 = 0; r0 < ROWS; r0 += PASS_ROWS)
            times_matrix<PASS_ROWS, THREADS>(
                s.history + r0, inverse, s.work, [] {},
                [&](int r, int c, float sum) { write(r0 + r, c, sum, mean ? mean[c] : 0.0f); });
#endif
    } else {
        ROLLED for (int i = threadIdx.x; i < ROWS * HEAD_DIM; i += THREADS) {
            const int r = i / HEAD_DIM, c = i % HEAD_DIM;
            write(r, c, has_history ? s.history[r][c] : 0.0f, mean ? mean[c] : 0.0f);
        }
    }
}

// What a part leaves: m and l of each (kind, row), then their sums.
constexpr int RECORD = 2 * ROWS * (HEAD_DIM + 2);
DEVICE float* record_of(const Arguments& a, int index) { return a.partial + (i64)index * RECORD; }

// Sums of keys with respect to a reference: what more of them, with another one, makes of them.
struct Running {
    float top = NOTHING, weight = 0;

    // The factors of what is there and of what comes; a part without keys (weight 0) has 0, and sums
    // that may be anything.
    DEVICE Pair add(const Pair& stats) {
        const float higher = stats.y > 0 ? fmaxf(top, stats.x) : top;
        const Pair factors = {exp2_approx(top - higher), stats.y > 0 ? exp2_approx(stats.x - higher) : 0.0f};
        weight = weight * factors.x + stats.y * factors.y;
        top = higher;
        return factors;
    }
};

DEVICE void scale(Float4& sum, float factor) {
    sum.x *= factor;
    sum.y *= factor;
    sum.z *= factor;
    sum.w *= factor;
}

DEVICE void add_scaled(Float4& sum, const Float4& x, float factor) {
    if (!(factor > 0)) return;
    sum.x += x.x * factor;
    sum.y += x.y * factor;
    sum.z += x.z * factor;
    sum.w += x.w * factor;
}

// Add up what the parts of one pair left, in records first, first + 1, ... Only parts before
// `windows_end` can have seen windows, only those from `history_begin` on history. Each warp has its
// own parts and a reference of its own, so that statistics and sums are fetched in one go.
DEVICE void merge_parts(const Arguments& a, int first, int parts, int history_begin, int windows_end,
                        Shared& s) {
    constexpr int ROW_QUADS = HEAD_DIM / 4, QUADS = ROWS * ROW_QUADS;
    constexpr int EACH = (QUADS + 31) / 32;  // of a lane
    constexpr int ENOUGH = EACH < 20 ? 20 / EACH : 1, MOST = 32 / ROWS;  // a lane for each (part, row)
    constexpr int AT_ONCE = ENOUGH < MOST ? ENOUGH : MOST;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (windows_end > parts) windows_end = parts;
    auto stats_of = [&](int part, int row) {
        return load_fresh_pair(record_of(a, first + part) + 2 * row);
    };
    auto windows_of = [&](int part, int quad) {
        return load_fresh_quad(record_of(a, first + part) + 4 * (ROWS + QUADS + quad));
    };
    // The windows of the first part, which often has them all, are on their way meanwhile.
    const int own = threadIdx.x < QUADS ? threadIdx.x : 0;
    const Pair first_stats = stats_of(0, ROWS + own / ROW_QUADS);
    const Float4 first_windows = windows_of(0, own);

    // History: warp w takes every WARPS-th part, several at a time so that their loads overlap.
    Float4 sum[EACH] = {};
    float top = NOTHING, weight = 0;  // of row lane % ROWS; the weight of the lane's own parts
    ROLLED for (int base = history_begin + warp; base < parts; base += WARPS * AT_ONCE) {
        const int mine = base + lane / ROWS * WARPS;
        const bool there = lane / ROWS < AT_ONCE && mine < parts;
        Pair stats = stats_of(there ? mine : base, lane % ROWS);
        Float4 x[AT_ONCE][EACH];
        UNROLL for (int j = 0; j < AT_ONCE; j++) {
            const int part = base + j * WARPS;
            const float* record = record_of(a, first + (part < parts ? part : base)) + 4 * ROWS;
            UNROLL for (int e = 0; e < EACH; e++) {
                const int quad = lane + 32 * e;
                x[j][e] = load_fresh_quad(record + 4 * (QUADS % 32 == 0 || quad < QUADS ? quad : 0));
            }
        }
        if (!there) stats.y = 0;
        float higher = stats.y > 0 ? fmaxf(top, stats.x) : top;
        UNROLL for (int lanes = ROWS; lanes < 32; lanes *= 2)
            higher = fmaxf(higher, __shfl_xor_sync(ALL, higher, lanes));
        const float before = exp2_approx(top - higher);
        const float factor = stats.y > 0 ? exp2_approx(stats.x - higher) : 0.0f;
        weight = weight * before + stats.y * factor;
        top = higher;
        UNROLL for (int e = 0; e < EACH; e++) {
            const int row = (lane + 32 * e) / ROW_QUADS % ROWS;
            scale(sum[e], __shfl_sync(ALL, before, row));
            UNROLL for (int j = 0; j < AT_ONCE; j++)
                add_scaled(sum[e], x[j][e], __shfl_sync(ALL, factor, j * ROWS + row));
        }
    }
    UNROLL for (int lanes = ROWS; lanes < 32; lanes *= 2) weight += __shfl_xor_sync(ALL, weight, lanes);
    if (lane < ROWS) {
        s.warp_m[warp][lane] = top;
        s.warp_l[warp][lane] = weight;
    }
    float* buffer = (float*)s.work;  // [WARPS][ROWS][HEAD_DIM]
    UNROLL for (int e = 0; e < EACH; e++) {
        const int quad = lane + 32 * e;
        if (QUADS % 32 == 0 || quad < QUADS)
            *(Float4*)&buffer[warp * ROWS * HEAD_DIM + 4 * quad] = sum[e];
    }
    ROLLED for (int quad = threadIdx.x; quad < QUADS; quad += THREADS) {
        const int row = quad / ROW_QUADS;
        Float4 windows = {};
        Running running;
        ROLLED for (int part = 0; part < windows_end; part++) {
            const bool loaded = part == 0 && quad == own;
            const Pair factors = running.add(loaded ? first_stats : stats_of(part, ROWS + row));
            scale(windows, factors.x);
            add_scaled(windows, loaded ? first_windows : windows_of(part, quad), factors.y);
        }
        *(Float4*)&s.window[row][quad % ROW_QUADS * 4] = windows;
        if (quad % ROW_QUADS == 0) {
            s.m[1][row] = running.top;
            s.l[1][row] = running.weight;
        }
    }
    __syncthreads();
    ROLLED for (int i = threadIdx.x; i < ROWS * HEAD_DIM; i += THREADS) {
        const int row = i / HEAD_DIM;
        float highest = NOTHING, all = 0, total = 0;
        UNROLL for (int w = 0; w < WARPS; w++) highest = fmaxf(highest, s.warp_m[w][row]);
        UNROLL for (int w = 0; w < WARPS; w++) {
            const float factor = exp2_approx(s.warp_m[w][row] - highest);
            total += buffer[w * ROWS * HEAD_DIM + i] * factor;
            all += s.warp_l[w][row] * factor;
        }
        s.history[row][i % HEAD_DIM] = total;
        if (i % HEAD_DIM == 0) {
            s.m[0][row] = highest;
            s.l[0][row] = all;
        }
    }
    __syncthreads();
}
