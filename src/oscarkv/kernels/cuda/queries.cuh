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

// Block (x, y): head x, and pairs y, y + gridDim.y, ... of (sequence, block of rows).
extern "C" __global__ void __launch_bounds__(THREADS) oscar_queries(const __grid_constant__ Arguments a) {
    __shared__ alignas(16) u8 scratch[SUMS_BYTES];
    __shared__ float q[ROWS][STRIDE], transformed[ROWS][STRIDE], unit[ROWS], key_mean[HEAD_DIM];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, head = blockIdx.x;
    const float* matrix = a.query_matrix + (i64)head * HEAD_DIM * HEAD_DIM;
    const float scale = a.scale * LOG2E;
    for (int c = threadIdx.x; c < HEAD_DIM; c += THREADS) key_mean[c] = a.key_mean[head * HEAD_DIM + c];
    ROLLED for (int pair = blockIdx.y; pair < a.batch * a.row_blocks; pair += gridDim.y) {
        const int b = pair / a.row_blocks, row_block = pair % a.row_blocks;
        const int start = a.query_start[b], rows = (a.query_start[b + 1] - start) * a.group - row_block * ROWS;
        if (rows <= 0) continue;
        PreparedQueries& result = *prepared(a, b, head, row_block);
        ROLLED for (int i = threadIdx.x; i < ROWS * HEAD_DIM; i += THREADS) {
            const int r = i / HEAD_DIM, c = i % HEAD_DIM;
            q[r][c] = r < rows
                ? load_activation(a.q[query_at(a, start, head, row_block * ROWS + r) + c]) : 0.0f;
        }
        __syncthreads();
#if __CUDA_ARCH__ >= 900
        // oscar_decode may start. Not earlier: its many bytes would be in this block's way.
        asm volatile("griddepcontrol.launch_dependents;");
#endif
        times_matrix(q, matrix, scratch, [&](int r, int c, float sum) { transformed[r][c] = sum; });
        ROLLED for (int r = warp; r < ROWS; r += WARPS) {
            float top = 0, mean = 0, sums[GROUPS] = {};
            for (int c = lane; c < HEAD_DIM; c += 32) {
                const float x = transformed[r][c];
                top = fmaxf(top, fabsf(x));
                mean += q[r][c] * key_mean[c];
                UNROLL for (int group = 0; group < GROUPS; group++)
                    if (c / (HEAD_DIM / GROUPS) == group) sums[group] += x;
            }
            top = warp_max(top);
            mean = warp_sum(mean);
            UNROLL for (int group = 0; group < GROUPS; group++) sums[group] = warp_sum(sums[group]);
            if (lane == 0) {
                unit[r] = top > 0 ? 32512.0f / top : 0.0f;  // 127 * 256: two bytes
                result.product[r] = top * (scale / (32512.0f * 64.0f));  // a code is 64 c in its byte
                result.mean[r] = mean * scale;
                UNROLL for (int group = 0; group < GROUPS; group++)
                    result.offset[r][group] = sums[group] * scale;
            }
        }
        __syncthreads();
        ROLLED for (int i = threadIdx.x; i < ROW_GROUPS * KEY_PARTS * 32; i += THREADS) {
            const int l = i % 32, g = l / 4, t = l % 4;
            const int k = i / 32 % KEY_PARTS, group = i / (32 * KEY_PARTS), r = 4 * group + g / 2;
            const int slot = k / LANE_WORDS, word = t * LANE_WORDS + k % LANE_WORDS;
            u32 bytes = 0;
            UNROLL for (int byte = 0; byte < 4; byte++) {
                if (!EXACT_WORDS && word >= WORDS) continue;
                const int channel = (2 * (4 * (byte & 1) + slot) + byte / 2) * WORDS + word;
                const int x = __float2int_rn(transformed[r][channel] * unit[r]);
                const int high = (x + 128) >> 8;
                bytes |= (u32)((g & 1 ? x - 256 * high : high) & 0xff) << (8 * byte);
            }
            result.parts[group][k][l] = bytes;
        }
        __syncthreads();
    }
}

DEVICE void wait_for_queries() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
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
