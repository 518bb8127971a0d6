// A few rows in shared memory times a matrix in global memory.

// rows[r][:] times matrix [HEAD_DIM][HEAD_DIM], for N rows; use(r, channel, sum) gets each result.
// `fill` writes the rows: the matrix is already on its way by then. scratch: 16 N bytes a thread.
template <int N, int BLOCK_THREADS, class Fill, class Use>
DEVICE void times_matrix(const float (*rows)[STRIDE], const float* matrix, u8* scratch, Fill fill, Use use) {
    constexpr int QUADS = HEAD_DIM / 4;
    constexpr int SPLITS = BLOCK_THREADS / QUADS;  // parts of the inner dimension
    constexpr int DEPTH = (HEAD_DIM + SPLITS - 1) / SPLITS;
    constexpr int AT_ONCE = DEPTH < 16 ? DEPTH : 16;
    constexpr bool FOURS = DEPTH % AT_ONCE == 0 && AT_ONCE % 4 == 0 && SPLITS * DEPTH == HEAD_DIM;
    float* sums = (float*)scratch;  // [SPLITS][N][HEAD_DIM]
    const int quad = threadIdx.x % QUADS, split = threadIdx.x / QUADS;
    const int begin = split * DEPTH, end = begin + DEPTH < HEAD_DIM ? begin + DEPTH : HEAD_DIM;
    float acc[N][4] = {};
    ROLLED for (int k0 = begin; k0 < begin + DEPTH; k0 += AT_ONCE) {
        Quad m[AT_ONCE];
        UNROLL for (int i = 0; i < AT_ONCE; i++)
            m[i] = k0 + i < end ? load_quad(matrix + (k0 + i) * HEAD_DIM + 4 * quad) : Quad{0, 0, 0, 0};
        if (k0 == begin) {
            fill();
            __syncthreads();
        }
        auto add = [&](int r, float x, const Quad& row) {
            acc[r][0] += x * as_float(row.x);
            acc[r][1] += x * as_float(row.y);
            acc[r][2] += x * as_float(row.z);
            acc[r][3] += x * as_float(row.w);
        };
        if constexpr (FOURS) {
            UNROLL for (int i = 0; i < AT_ONCE; i += 4) {
                UNROLL for (int r = 0; r < N; r++) {
                    const Float4 x = *(const Float4*)&rows[r][k0 + i];
                    add(r, x.x, m[i]);
                    add(r, x.y, m[i + 1]);
                    add(r, x.z, m[i + 2]);
                    add(r, x.w, m[i + 3]);
                }
            }
        } else {
            UNROLL for (int i = 0; i < AT_ONCE; i++)
                UNROLL for (int r = 0; r < N; r++) add(r, rows[r][k0 + i < HEAD_DIM ? k0 + i : 0], m[i]);
        }
    }
    if (split < SPLITS)
        UNROLL for (int r = 0; r < N; r++)
            *(Float4*)&sums[(split * N + r) * HEAD_DIM + 4 * quad] =
                Float4{acc[r][0], acc[r][1], acc[r][2], acc[r][3]};
    __syncthreads();
    ROLLED for (int i = threadIdx.x; i < N * HEAD_DIM; i += BLOCK_THREADS) {
        const int r = i / HEAD_DIM, c = i % HEAD_DIM;
        float sum = 0;
        UNROLL for (int k = 0; k < SPLITS; k++) sum += sums[(k * N + r) * HEAD_DIM + c];
        use(r, c, sum);
    }
    __syncthreads();
}
