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

// Add up what the parts of one pair left, in records first, first + 1, ...
DEVICE void merge_parts(const Arguments& a, int first, int parts, Shared& s) {
    constexpr int KINDS = 2 * ROWS;  // (kind, row)
    constexpr int MOST = WORK_BYTES / (8 * KINDS);  // parts at a time
    constexpr int AT_ONCE = 16;  // loads on their way
    float (*m)[KINDS] = (float(*)[KINDS])s.work;  // of the parts at hand; then their factors
    float (*l)[KINDS] = m + MOST;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    ROLLED for (int i = threadIdx.x; i < 2 * ROWS * HEAD_DIM; i += THREADS)
        (i < ROWS * HEAD_DIM ? s.history : s.window)[i / HEAD_DIM % ROWS][i % HEAD_DIM] = 0;
    ROLLED for (int i = threadIdx.x; i < KINDS; i += THREADS) {
        s.m[i / ROWS][i % ROWS] = NOTHING;
        s.l[i / ROWS][i % ROWS] = 0;
    }
    ROLLED for (int base = 0; base < parts; base += MOST) {
        const int count = parts - base < MOST ? parts - base : MOST;
        __syncthreads();
        ROLLED for (int i = threadIdx.x; i < count * KINDS; i += THREADS) {
            const float* record = record_of(a, first + base + i / KINDS) + 2 * (i % KINDS);
            m[i / KINDS][i % KINDS] = load_fresh(record);
            l[i / KINDS][i % KINDS] = load_fresh(record + 1);
        }
        __syncthreads();
        ROLLED for (int i = warp; i < KINDS; i += WARPS) {
            float& row_m = s.m[i / ROWS][i % ROWS];
            float& row_l = s.l[i / ROWS][i % ROWS];
            float top = row_m, sum = 0;
            int begin = count, end = 0;  // of the parts that have anything of this kind
            ROLLED for (int part = lane; part < count; part += 32) {
                top = fmaxf(top, m[part][i]);
                if (l[part][i] > 0) {
                    if (begin == count) begin = part;
                    end = part + 1;
                }
            }
            top = warp_max(top);
            begin = __reduce_min_sync(ALL, begin);
            end = __reduce_max_sync(ALL, end);
            ROLLED for (int part = lane; part < count; part += 32) {
                const float factor = l[part][i] > 0 ? exp2_approx(m[part][i] - top) : 0.0f;
                sum += l[part][i] * factor;
                m[part][i] = factor;
            }
            sum = warp_sum(sum);
            if (lane == 0) {
                s.rescale[i] = exp2_approx(row_m - top);  // of what was added before
                s.begins[i] = begin;
                s.ends[i] = end;
                row_l = row_l * exp2_approx(row_m - top) + sum;
                row_m = top;
            }
        }
        __syncthreads();
        constexpr int QUADS = ROWS * HEAD_DIM / 4;
        ROLLED for (int i = threadIdx.x; i < 2 * QUADS; i += THREADS) {
            const int kind = i / QUADS, row = i / (HEAD_DIM / 4), end = s.ends[row];
            int part = s.begins[row];
            Float4 sum = {0, 0, 0, 0};
            ROLLED for (; part < end; part += AT_ONCE) {
                Float4 x[AT_ONCE];
                UNROLL for (int j = 0; j < AT_ONCE; j++) {
                    const int index = part + j < end ? part + j : part;
                    x[j] = load_fresh_quad(record_of(a, first + base + index) + 2 * KINDS + 4 * i);
                }
                UNROLL for (int j = 0; j < AT_ONCE; j++) {
                    const float factor = part + j < end ? m[part + j][row] : 0.0f;
                    if (factor > 0) {  // what is not there may be anything
                        sum.x += factor * x[j].x;
                        sum.y += factor * x[j].y;
                        sum.z += factor * x[j].z;
                        sum.w += factor * x[j].w;
                    }
                }
            }
            float* to = (kind ? s.window : s.history)[row % ROWS] + 4 * (i % (HEAD_DIM / 4));
            const float before = base > 0 ? s.rescale[row] : 0.0f;
            to[0] = to[0] * before + sum.x;
            to[1] = to[1] * before + sum.y;
            to[2] = to[2] * before + sum.z;
            to[3] = to[3] * before + sum.w;
        }
    }
    __syncthreads();
}
