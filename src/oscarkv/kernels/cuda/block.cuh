// What a block has in shared memory, and what its warps do together.

// The grid of one token and group: s, and lo (fp16 parameters) or lo / s (log8). Staged and PAIRED,
// of one token: s of either group.
struct Grid { float s, lo; };
// A warp turns the parameters of a chunk into floats once, for all its lanes: with 8-bit parameters
// that is a sixth of the work. (Not with more numbers: they would take too much memory.)
constexpr bool STAGED_GRIDS = GROUPS == 1 || PAIRED;
constexpr int CHUNK_TOKENS = CHUNK * TILE;

struct Shared {
    alignas(128) u8 work[WORK_BYTES];     // packed tiles on their way, warps' results, partial sums
    Grid grids[WARPS][2][STAGED_GRIDS ? CHUNK_TOKENS : 1];  // of keys, of values
    Quad window_query[COLUMN_TILES][WINDOW_CHUNKS][32];  // B fragments
    float history[ROWS][STRIDE], window[ROWS][STRIDE];  // sums of values
    float warp_m[WARPS][ROWS], warp_l[WARPS][ROWS], warp_lo[WARPS][ROWS][GROUPS];
    float m[2][ROWS], l[2][ROWS];         // history, windows
    float lo[ROWS][GROUPS];
    u32 schedule[HEADER + (FACTS + 2) * SCHEDULED];  // of a small batch
    int last, next;
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "decode.py gives too little shared memory");

DEVICE float warp_sum(float x) {
    UNROLL for (int lane = 16; lane; lane /= 2) x += __shfl_xor_sync(ALL, x, lane);
    return x;
}

DEVICE float warp_max(float x) {
    UNROLL for (int lane = 16; lane; lane /= 2) x = fmaxf(x, __shfl_xor_sync(ALL, x, lane));
    return x;
}

// Over the eight lanes that hold tokens of one row.
DEVICE float tokens_sum(float x) {
    UNROLL for (int lane = 4; lane < 32; lane *= 2) x += __shfl_xor_sync(ALL, x, lane);
    return x;
}

DEVICE float tokens_max(float x) {
    UNROLL for (int lane = 4; lane < 32; lane *= 2) x = fmaxf(x, __shfl_xor_sync(ALL, x, lane));
    return x;
}

DEVICE float capped(float logit, float cap) {  // cap tanh(logit / cap), logits in units of log 2
    const float u = exp2_approx(logit * (2.0f / cap));
    return cap * LOG2E * (1.0f - 2.0f / (u + 1.0f));
}

struct Piece {
    int sequence, head, row_block, rows;   // rows: how many of the block's rows exist
    int first, start;                      // the sequence's first new token: position, row of q
    int window_begin, window_end, history_begin, history_end;  // tiles, chunks
};

// Where a block's results go: into shared memory if it is alone with its pair, else into the record
// of its part.
struct Results {
    Shared& s;
    float* record;  // of several parts: m and l of each (kind, row), then their sums; or nullptr

    // Of a kind: 0 history, 1 windows.
    DEVICE void set_stats(int kind, int row, float m, float l) const {
        if (record) {
            *(Pair*)&record[2 * (kind * ROWS + row)] = {m, l};
        } else {
            s.m[kind][row] = m;
            s.l[kind][row] = l;
        }
    }

    DEVICE void set_sum(int kind, int row, int channel, float x) const {
        if (record)
            record[4 * ROWS + (kind * ROWS + row) * HEAD_DIM + channel] = x;
        else
            (kind ? s.window : s.history)[row][channel] = x;
    }
};

// Add up the warps' results of one kind.
template <int TILES, class Channel>
DEVICE void merge_warps(const Results& results, int kind, float (&out)[COLUMN_TILES][TILES][4],
                        const float (&m)[ROW_GROUPS], const float (&l)[ROW_GROUPS],
                        Channel channel) {
    Shared& s = results.s;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    UNROLL for (int rows = 0; rows < ROW_GROUPS; rows++) {
        const float sum = tokens_sum(l[rows]);
        if (g == 0) {
            s.warp_m[warp][4 * rows + t] = m[rows];
            s.warp_l[warp][4 * rows + t] = sum;
        }
    }
    __syncthreads();  // also: every warp is done with the ring
    float* buffer = (float*)s.work + warp * ROWS * STRIDE;
    UNROLL for (int rows = 0; rows < ROW_GROUPS; rows++) {
        const int r = 4 * rows + t;
        float top = s.warp_m[0][r];
        UNROLL for (int w = 1; w < WARPS; w++) top = fmaxf(top, s.warp_m[w][r]);
        const float factor = exp2_approx(m[rows] - top);
        UNROLL for (int tile = 0; tile < TILES; tile++) {
            UNROLL for (int half = 0; half < 2; half++) {
                const int c = channel(tile, g, half);
                if (c >= 0) buffer[r * STRIDE + c] = out[rows / 2][tile][2 * half + rows % 2] * factor;
            }
        }
    }
    if (threadIdx.x < ROWS) {
        const int r = threadIdx.x;
        float top = NOTHING, sum = 0, lo[GROUPS] = {};
        UNROLL for (int w = 0; w < WARPS; w++) top = fmaxf(top, s.warp_m[w][r]);
        UNROLL for (int w = 0; w < WARPS; w++) {
            const float factor = exp2_approx(s.warp_m[w][r] - top);
            sum += s.warp_l[w][r] * factor;
            if (kind == 0)
                UNROLL for (int group = 0; group < GROUPS; group++)
                    lo[group] += s.warp_lo[w][r][group] * factor;
        }
        results.set_stats(kind, r, top, sum);
        UNROLL for (int group = 0; group < GROUPS; group++) s.lo[r][group] = lo[group];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < ROWS * HEAD_DIM; i += THREADS) {
        const int r = i / HEAD_DIM, c = i % HEAD_DIM;
        float sum = s.lo[r][GROUPS == 1 ? 0 : c / (HEAD_DIM / GROUPS)];
        UNROLL for (int w = 0; w < WARPS; w++) sum += ((float*)s.work)[(w * ROWS + r) * STRIDE + c];
        results.set_sum(kind, r, c, sum);
    }
    __syncthreads();
}
