// Queries: transformed and split into bytes for the history, and as they are for the windows.

// What history tiles need of a block of query rows; one record for each pair.
struct PreparedQueries {
    u32 parts[ROW_GROUPS][KEY_PARTS][32];  // bytes of the transformed queries, as B fragments
    float product[ROWS];                   // of a sum of bytes: to logits in units of log 2
    float mean[ROWS];                      // q . m_K, likewise
    float offset[ROWS][GROUPS];            // sums over q', likewise: what multiplies lo
};

static_assert(sizeof(PreparedQueries) == PREPARED_BYTES, "decode.py has another size of it");

DEVICE PreparedQueries* prepared(const Arguments& a, int sequence, int head, int row_block) {
    return (PreparedQueries*)a.queries
        + ((i64)(sequence * a.kv_heads + head) * a.row_blocks + row_block);
}

DEVICE i64 query_at(const Arguments& a, int start, int head, int row) {  // element of q
    return (start + row / a.group) * a.q_token + (head * a.group + row % a.group) * a.q_head;
}

constexpr int QUERY_THREADS = 32 * QUERY_ROWS;  // a warp for each row, at least

// Block (x, y): head x, and rows N y ... of those of all pairs, in the order of their records.
template <int N>
DEVICE void prepare_queries(const Arguments& a) {
    alignas(16) __shared__ u8 scratch[16 * N * QUERY_THREADS];
    alignas(16) __shared__ float rows[N][STRIDE];  // queries, then transformed
    constexpr int EACH = (HEAD_DIM + 31) / 32;  // channels of a lane
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, head = blockIdx.x;
    const int first = N * blockIdx.y;
    const bool row_there = warp < N;
    float key_mean[EACH], mean = 0;
    UNROLL for (int i = 0; i < EACH; i++) {
        const int c = lane + 32 * i;
        key_mean[i] = HEAD_DIM % 32 == 0 || c < HEAD_DIM ? a.key_mean[head * HEAD_DIM + c] : 0.0f;
    }
    // The warp's own row: of which pair, and where it lies in q (-1: nowhere).
    const int pair = (first + warp) / ROWS, r = (first + warp) % ROWS;
    const int b = pair / a.row_blocks, row_block = pair % a.row_blocks;
    i64 at = -1;
    // query_start was written before oscar_schedule, which is not started early, so long before.
    if (row_there && b < a.batch) {
        const int start = a.query_start[b], row = row_block * ROWS + r;
        if (row < (a.query_start[b + 1] - start) * a.group) at = query_at(a, start, head, row);
    }
    auto fill = [&] {
        wait_for_previous();
        start_next();  // not earlier: it reads what the launches before this one wrote
        if (row_there) UNROLL for (int i = 0; i < EACH; i++) {
            const int c = lane + 32 * i;
            if (HEAD_DIM % 32 && c >= HEAD_DIM) continue;
            const float x = at >= 0 ? load_activation(a.q[at + c]) : 0.0f;
            rows[warp][c] = x;
            mean += x * key_mean[i];
        }
    };
    times_matrix<N, QUERY_THREADS>(
        rows, a.query_matrix + (i64)head * HEAD_DIM * HEAD_DIM, scratch, fill,
        [&](int row, int c, float sum) { rows[row][c] = sum; });
    if (row_there) {
        const float scale = a.scale * LOG2E;
        float top = 0, sums[GROUPS] = {};
        UNROLL for (int i = 0; i < EACH; i++) {
            const int c = lane + 32 * i;
            if (HEAD_DIM % 32 && c >= HEAD_DIM) continue;
            const float x = rows[warp][c];
            top = fmaxf(top, fabsf(x));
            UNROLL for (int group = 0; group < GROUPS; group++)
                if (c / (HEAD_DIM / GROUPS) == group) sums[group] += x;
        }
        top = warp_max(top);
        mean = warp_sum(mean);
        UNROLL for (int group = 0; group < GROUPS; group++) sums[group] = warp_sum(sums[group]);
        const float unit = top > 0 ? 32512.0f / top : 0.0f;  // 127 * 256: two bytes
        UNROLL for (int i = 0; i < EACH; i++) {
            const int c = lane + 32 * i;
            if (HEAD_DIM % 32 == 0 || c < HEAD_DIM) rows[warp][c] *= unit;
        }
        if (lane == 0 && b < a.batch) {
            PreparedQueries& result = *prepared(a, b, head, row_block);
            // A sum of bytes counts 64 c, or 16 c, in units of 256.
            result.product[r] = exact_times_magic(top * (scale / (127.0f * KEY_UNIT)));
            result.mean[r] = mean * scale;
            UNROLL for (int group = 0; group < GROUPS; group++)
                result.offset[r][group] = sums[group] * scale;
        }
    }
    __syncthreads();
    ROLLED for (int i = threadIdx.x; i < N / 4 * KEY_PARTS * 32; i += QUERY_THREADS) {
        const int l = i % 32, g = l / 4, t = l % 4;
        const int k = i / 32 % KEY_PARTS, four = 4 * (i / (32 * KEY_PARTS)), local = four + g / 2;
        const int pair = (first + four) / ROWS, b = pair / a.row_blocks;
        if (b >= a.batch) continue;
        u32 bytes = 0;
        UNROLL for (int byte = 0; byte < 4; byte++) {
            const int channel = part_channel(k, t, byte);
            if (!EXACT_WORDS && channel < 0) continue;
            const int x = __float2int_rn(rows[local][channel]);
            const int high = (x + 128) >> 8;
            bytes |= (u32)((g & 1 ? x - 256 * high : high) & 0xff) << (8 * byte);
        }
        prepared(a, b, head, pair % a.row_blocks)->parts[(first + four) % ROWS / 4][k][l] = bytes;
    }
}

extern "C" __global__ void __launch_bounds__(QUERY_THREADS)
oscar_queries(const __grid_constant__ Arguments a) {
    prepare_queries<QUERY_ROWS>(a);
}

// For half as many rows, which are ready sooner.
extern "C" __global__ void __launch_bounds__(QUERY_THREADS)
oscar_few_queries(const __grid_constant__ Arguments a) {
    prepare_queries<QUERY_ROWS / 2>(a);
}

// The piece's query rows as the B fragments of the windows' keys: column g is row 4 (g & 1) + g / 2
// of eight.
DEVICE void load_window_queries(const Arguments& a, const Piece& p, Shared& s) {
    for (int i = threadIdx.x; i < COLUMN_TILES * WINDOW_CHUNKS * 32; i += THREADS) {
        const int lane = i % 32, chunk = i / 32 % WINDOW_CHUNKS, n = i / (32 * WINDOW_CHUNKS);
        const int g = lane / 4, c = 32 * chunk + 8 * (lane % 4);
        const int rows = 2 * n + (g & 1), r = 4 * rows + g / 2;
        const bool there = rows < ROW_GROUPS && r < p.rows && c < HEAD_DIM;
        Quad b = {0, 0, 0, 0};
        if (there) {
            const u32* q = (const u32*)(a.q + query_at(a, p.start, p.head, p.row_block * ROWS + r) + c);
            b = {q[0], q[1], q[2], q[3]};
        }
        s.window_query[n][chunk][lane] = b;
    }
}
