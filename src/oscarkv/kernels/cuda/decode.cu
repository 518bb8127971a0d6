// Attention of a few new tokens per sequence over packed history and exact windows: two launches,
// oscar_queries (transforms the queries) and oscar_decode (everything else), the second started
// while the first still runs.
//
// Further macros: ROW_GROUPS (1, 2 or 4: query rows of a block in fours), CHUNK (tiles of 16 tokens
// that a warp fetches at a time), STAGES (chunks on their way), WARPS, BLOCKS_PER_SM, MOST_ROUNDS
// (parts that a block does), SOFT_CAP.
//
// A "pair" is one (sequence, KV head, block of query rows). Its work is a line of units: first its
// window tiles (WINDOW_COST units each), then its history chunks (CHUNK units each). oscar_schedule
// cuts each line into equal parts, about as many in all as the GPU holds blocks, and blocks take
// them in turn. A pair of one part is finished by its block; otherwise each part leaves its sums,
// and the last block to arrive adds them up in the order of the line. So the result does not depend
// on who did what: two runs give the same bits.
//
// History tiles, in registers only (why: docs/how-it-works.md, kernels):
// - Keys: codes are the A operand of byte products, four to a register by one AND (an IMAD brings
//   the slot to the top of its byte). The transformed query is a 16-bit integer, its high and low
//   bytes two neighbouring columns of B. A lane gets both sums of one row and adds them in float.
// - Values: codes are read as float16 SUBNORMALS, two to a register by one AND: c 4^j 2^-24, exact.
//   Weights p s are float16, kept in range by the running reference m of each row.

constexpr int ROWS = 4 * ROW_GROUPS;
constexpr int COLUMN_TILES = (ROW_GROUPS + 1) / 2;
constexpr int THREADS = 32 * WARPS;
constexpr int TILES_PER_PAGE = PAGE / TILE;
constexpr int CHUNKS_PER_PAGE = (TILES_PER_PAGE + CHUNK - 1) / CHUNK;  // the last may be shorter
constexpr int CODE_BYTES = TILE * 4 * WORDS;  // of a tile, one side
constexpr int STORED_BYTES = TILE * PARAMETER_BYTES;
constexpr int STAGE_BYTES = 2 * CHUNK * (CODE_BYTES + STORED_BYTES);
constexpr int TILE_BYTES = 2 * (CODE_BYTES + STORED_BYTES);
constexpr int WINDOW_COST = (72 * HEAD_DIM + TILE_BYTES / 2) / TILE_BYTES;  // 64 d bytes, and slower
constexpr int SMALLEST_PART = 64;   // units; windows of one part, at most, are less
constexpr int STRIDE = HEAD_DIM + 8;  // of float rows in shared memory: no bank conflicts
constexpr int LANE_WORDS = PADDED / 4;  // words of a key that a lane holds
constexpr int KEY_PARTS = 4 * LANE_WORDS;  // (slot of a byte, word) of a lane: a register of bytes
constexpr int WINDOW_TILES = 4 * ((HEAD_DIM + 63) / 64);
constexpr int WINDOW_CHUNKS = (HEAD_DIM + 31) / 32;
constexpr float NOTHING = -1e30f;  // reference of a row that has seen no key
constexpr float MAGIC = 12582912.0f;  // 1.5 2^23: adding an integer to its bits adds it to it
constexpr bool FLOAT_BITS = HEAD_DIM <= 128;  // sums of products stay below 2^22
constexpr float WEIGHT_LIMIT = 4096.0f;  // p s above this (float16 ends at 65504) moves m

struct Arguments {
    const u16* q;
    u16* out;
    const u8* history;
    const u16* window;
    const int* seq_lens;
    const int* query_start;
    const int* history_table;
    const int* window_table;
    int* schedule;
    int* arrivals;
    int* tickets;
    float* partial;
    void* queries;
    const float* query_matrix;
    const float* key_mean;
    const float* value_inverse;
    const float* value_mean;
    const int* exponents;
    i64 q_token, q_head, out_token, out_head;  // strides in elements
    i64 history_page, history_head;            // in bytes
    i64 window_page, window_head;              // in elements
    int history_columns, window_columns;
    int batch, kv_heads, group, row_blocks, sink, recent, sliding;
    float scale, soft_cap;
    u32 one;
};

// -- what a sequence has to do -------------------------------------------------------------------

struct Sequence {
    int length, tokens, start;     // after the step; new ones; row of the first in q
    int first_chunk, chunks;       // of the history
    int sink_tiles, first_recent, window_tiles;
    int parts;                     // of each pair's line

    // Of one (head, block of rows).
    DEVICE int units() const { return window_tiles * WINDOW_COST + chunks * CHUNK; }
    DEVICE int row_blocks(int group) const { return (tokens * group + ROWS - 1) / ROWS; }
};
constexpr int FACTS = sizeof(Sequence) / 4;

DEVICE int chunk_of(int position) {
    return position / PAGE * CHUNKS_PER_PAGE + position % PAGE / (CHUNK * TILE);
}

DEVICE Sequence describe(const Arguments& a, int b) {
    Sequence s = {};
    s.length = a.seq_lens[b];
    s.start = a.query_start[b];
    s.tokens = a.query_start[b + 1] - s.start;
    if (s.tokens <= 0 || s.length < s.tokens) { s.tokens = 0; return s; }  // padding
    const int first = s.length - s.tokens;  // position of the first new token
    int oldest = a.sink;
    if (first - a.sliding + 1 > oldest) oldest = first - a.sliding + 1;
    const int newest = s.length - 1 - a.recent;
    s.first_chunk = chunk_of(oldest);
    if (newest >= oldest) s.chunks = chunk_of(newest) - s.first_chunk + 1;
    const int columns = (s.length + WINDOW_ROWS - 1) / WINDOW_ROWS;
    s.sink_tiles = (a.sink + WINDOW_ROWS - 1) / WINDOW_ROWS;
    if (s.sink_tiles > columns) s.sink_tiles = columns;
    const int recent = first - a.recent + 1;
    s.first_recent = recent > 0 ? recent / WINDOW_ROWS : 0;
    if (s.first_recent < s.sink_tiles) s.first_recent = s.sink_tiles;
    s.window_tiles = s.sink_tiles + (columns > s.first_recent ? columns - s.first_recent : 0);
    return s;
}

// How the step's work is shared out; `sequences` and two lists of batch numbers follow.
struct Schedule {
    int parts;                        // of all pairs
    int unused[3];
    DEVICE Sequence* sequences() { return (Sequence*)(this + 1); }
    DEVICE int* first_part(int batch) { return (int*)(sequences() + batch); }  // of each sequence
    DEVICE int* first_record(int batch) { return first_part(batch) + batch; }
};
constexpr int HEADER = 4;  // words of the above

constexpr int PLANNERS = 256;
constexpr int SCHEDULED = 64;  // sequences whose facts a block takes in one go

// Sum of every thread's number, and of those of the threads before this one.
DEVICE int block_sum(int x, int* sums, int& before) {
    __syncthreads();
    sums[threadIdx.x] = x;
    for (int step = 1; step < PLANNERS; step *= 2) {
        __syncthreads();
        const int left = threadIdx.x >= step ? sums[threadIdx.x - step] : 0;
        __syncthreads();
        sums[threadIdx.x] += left;
    }
    __syncthreads();
    before = sums[threadIdx.x] - x;
    return sums[PLANNERS - 1];
}

// One block, once per step and geometry.
extern "C" __global__ void __launch_bounds__(PLANNERS) oscar_schedule(Arguments a, int blocks) {
    __shared__ int sums[PLANNERS];
    Schedule& plan = *(Schedule*)a.schedule;
    int total = 0, before;
    for (int base = 0; base < a.batch; base += PLANNERS) {
        const int b = base + threadIdx.x;
        int units = 0;
        if (b < a.batch) {
            const Sequence s = describe(a, b);
            plan.sequences()[b] = s;
            units = s.units() * s.row_blocks(a.group) * a.kv_heads;
        }
        total += block_sum(units, sums, before);
    }
    int share = (total + blocks - 1) / blocks;
    if (share < SMALLEST_PART) share = SMALLEST_PART;
    int parts = 0, records = 0;
    for (int base = 0; base < a.batch; base += PLANNERS) {
        const int b = base + threadIdx.x;
        int here = 0;
        if (b < a.batch) {
            Sequence& s = plan.sequences()[b];
            const int units = s.units();
            if (units) {
                s.parts = (units + share / 32) / share;  // rather a little larger than one more
                if (s.parts < 1) s.parts = 1;
                here = s.parts * s.row_blocks(a.group) * a.kv_heads;
            }
        }
        int sum = block_sum(here, sums, before);
        if (b < a.batch) plan.first_part(a.batch)[b] = parts + before;
        parts += sum;
        const bool kept = b < a.batch && plan.sequences()[b].parts > 1;
        sum = block_sum(kept ? here : 0, sums, before);
        if (b < a.batch) plan.first_record(a.batch)[b] = records + before;
        records += sum;
    }
    if (threadIdx.x == 0) plan.parts = parts;
}

// -- shared memory -------------------------------------------------------------------------------

constexpr int RING_BYTES = WARPS * STAGES * STAGE_BYTES;
constexpr int MERGE_BYTES = WARPS * ROWS * STRIDE * 4;
constexpr int SUMS_BYTES = THREADS * 64;  // partial sums of a row times a matrix
DEVICE constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int WORK_BYTES = larger(RING_BYTES, larger(MERGE_BYTES, SUMS_BYTES));

// The grid of one token and group: s, and lo (fp16 parameters) or lo / s (log8).
struct Grid { float s, lo; };
// A warp turns the parameters of a chunk into floats once, for all its lanes: with 8-bit parameters
// that is a sixth of the work. (Not with several groups: they would take too much memory.)
constexpr bool STAGED_GRIDS = GROUPS == 1;
constexpr int CHUNK_TOKENS = CHUNK * TILE;

struct Shared {
    alignas(128) u8 work[WORK_BYTES];     // packed tiles on their way, warps' results, partial sums
    Grid grids[WARPS][2][STAGED_GRIDS ? CHUNK_TOKENS : 1];  // of keys, of values
    Quad window_query[COLUMN_TILES][WINDOW_CHUNKS][32];  // B fragments
    float history[ROWS][STRIDE], window[ROWS][STRIDE];  // sums of values
    float warp_m[WARPS][ROWS], warp_l[WARPS][ROWS], warp_lo[WARPS][ROWS][GROUPS];
    float m[2][ROWS], l[2][ROWS];         // history, windows
    float lo[ROWS][GROUPS], rescale[2 * ROWS];
    int begins[2 * ROWS], ends[2 * ROWS];
    u32 schedule[HEADER + (FACTS + 2) * SCHEDULED];  // of a small batch
    int last, next;
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "decode.py gives too little shared memory");

// rows[r][:] times matrix [HEAD_DIM][HEAD_DIM]; use(r, channel, sum) gets each result.
template <class Use>
DEVICE void times_matrix(const float (*rows)[STRIDE], const float* matrix, u8* scratch, Use use) {
    constexpr int QUADS = HEAD_DIM / 4;
    constexpr int SPLITS = THREADS / QUADS;  // parts of the inner dimension
    constexpr int DEPTH = (HEAD_DIM + SPLITS - 1) / SPLITS;
    float* sums = (float*)scratch;  // [SPLITS][4][HEAD_DIM]
    const int quad = threadIdx.x % QUADS, split = threadIdx.x / QUADS;
    const int begin = split * DEPTH, end = begin + DEPTH < HEAD_DIM ? begin + DEPTH : HEAD_DIM;
    ROLLED for (int r0 = 0; r0 < ROWS; r0 += 4) {
        float acc[4][4] = {};
        if (split < SPLITS) {
            UNROLL_16 for (int k = begin; k < end; k++) {
                const Quad m = load_quad(matrix + k * HEAD_DIM + 4 * quad);
                UNROLL for (int r = 0; r < 4; r++) {
                    const float x = rows[r0 + r][k];
                    acc[r][0] += x * as_float(m.x);
                    acc[r][1] += x * as_float(m.y);
                    acc[r][2] += x * as_float(m.z);
                    acc[r][3] += x * as_float(m.w);
                }
            }
            UNROLL for (int r = 0; r < 4; r++)
                *(Float4*)&sums[(split * 4 + r) * HEAD_DIM + 4 * quad] =
                    Float4{acc[r][0], acc[r][1], acc[r][2], acc[r][3]};
        }
        __syncthreads();
        ROLLED for (int i = threadIdx.x; i < 4 * HEAD_DIM; i += THREADS) {
            const int r = i / HEAD_DIM, c = i % HEAD_DIM;
            float sum = 0;
            UNROLL for (int k = 0; k < SPLITS; k++) sum += sums[(k * 4 + r) * HEAD_DIM + c];
            use(r0 + r, c, sum);
        }
        __syncthreads();
    }
}

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

// -- a piece: part of one pair's line, done by one block ------------------------------------------

struct Piece {
    int sequence, head, row_block, rows;   // rows: how many of the block's rows exist
    int first, start;                      // the sequence's first new token: position, row of q
    int window_begin, window_end, history_begin, history_end;  // tiles, chunks
};

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

// Add up the warps' results of one kind (0 history, 1 windows) into s.history or s.window.
template <int TILES, class Channel>
DEVICE void merge_warps(Shared& s, int kind, float (&out)[COLUMN_TILES][TILES][4],
                        const float (&m)[ROW_GROUPS], const float (&l)[ROW_GROUPS],
                        Channel channel) {
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
        s.m[kind][r] = top;
        s.l[kind][r] = sum;
        UNROLL for (int group = 0; group < GROUPS; group++) s.lo[r][group] = lo[group];
    }
    __syncthreads();
    float (*result)[STRIDE] = kind ? s.window : s.history;
    for (int i = threadIdx.x; i < ROWS * HEAD_DIM; i += THREADS) {
        const int r = i / HEAD_DIM, c = i % HEAD_DIM;
        float sum = s.lo[r][GROUPS == 1 ? 0 : c / (HEAD_DIM / GROUPS)];
        UNROLL for (int w = 0; w < WARPS; w++) sum += ((float*)s.work)[(w * ROWS + r) * STRIDE + c];
        result[r][c] = sum;
    }
    __syncthreads();
}

// -- windows ---------------------------------------------------------------------------------------

DEVICE void read_windows(const Arguments& a, const Piece& p, const Sequence& q, Shared& s) {
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
    merge_warps<WINDOW_TILES>(s, 1, out, m, l, [](int tile, int g, int half) {
        const int c = 64 * (tile / 4) + 8 * g + 4 * half + tile % 4;
        return HEAD_DIM % 64 == 0 || c < HEAD_DIM ? c : -1;
    });
}

// -- history ---------------------------------------------------------------------------------------

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
            const u8* from = base + page * a.history_page + sub * CODE_BYTES + 16 * lane;
            const u32 to = shared + stage * STAGE_BYTES + 16 * lane;
            UNROLL for (int i = 0; i < CHUNK * CODE_BYTES; i += 512) {
                if (i + 16 * lane < tiles * CODE_BYTES) {
                    copy_async_once(to + i, from + i, policy);
                    copy_async_once(to + CHUNK * CODE_BYTES + i, from + VALUE_CODES + i, policy);
                }
            }
            from = base + page * a.history_page + KEY_PARAMETERS + sub * STORED_BYTES;
            UNROLL for (int i = 0; i < 2 * CHUNK * STORED_BYTES; i += 512) {
                const int at = i + 16 * lane, side = at >= CHUNK * STORED_BYTES;
                const int within = at - side * CHUNK * STORED_BYTES;
                if (within < tiles * STORED_BYTES && at < 2 * CHUNK * STORED_BYTES)
                    copy_async_once(to - 16 * lane + 2 * CHUNK * CODE_BYTES + at,
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

DEVICE Grid read_parameters(const u8* stored, int token, int group, float exponent) {
#if PARAMETERS == 0
    const u32 x = *(const u32*)(stored + token * PARAMETER_BYTES + 4 * group);
    return {half_to_float((u16)(x & 0xffff)), half_to_float((u16)(x >> 16))};
#else
    // A byte n in the mantissa of 2^23 is the number 2^23 + n; `exponent` makes up for the 2^23.
#if PARAMETERS == 1
    const u32 x = *(const u16*)(stored + token * PARAMETER_BYTES + 2 * group);
    const float z = as_float((x >> 8) ^ 0x4b000080u) - 8388736.0f;
    return {exp2_approx(as_float(x & 0xff | 0x4b000000u) * 0.0625f + exponent), z * 0.03125f};
#else
    const u32 x = stored[token * PARAMETER_BYTES + group];
    return {exp2_approx(as_float(x | 0x4b000000u) * 0.0625f + exponent), -1.5f};
#endif
#endif
}

// The group of slot p: groups are runs of slots, whatever the half and the word.
DEVICE constexpr int group_of_slot(int p) { return p * GROUPS / 8; }

using Grids = Grid[2][STAGED_GRIDS ? CHUNK_TOKENS : 1];

struct History {
    float out[COLUMN_TILES][ROW_TILES][4] = {};
    float m[ROW_GROUPS], l[ROW_GROUPS], lo[ROW_GROUPS][GROUPS];
    u32 query[ROW_GROUPS][KEY_PARTS];
    float product[ROW_GROUPS], offset[ROW_GROUPS][GROUPS], mean[ROW_GROUPS];
    int newest[ROW_GROUPS], oldest[ROW_GROUPS];
    float key_exponent, value_exponent;
    u32 shift[4];  // 4^(3 - j): brings slot j of a byte to its top; opaque, so that IMAD does it

    DEVICE void open(const Arguments& a, const Piece& p) {
        const PreparedQueries& prepared_rows = *prepared(a, p.sequence, p.head, p.row_block);
        const int lane = threadIdx.x % 32, t = lane % 4;
        UNROLL for (int rows = 0; rows < ROW_GROUPS; rows++) {
            const int r = 4 * rows + t;
            m[rows] = NOTHING;
            l[rows] = 0;
            UNROLL for (int k = 0; k < KEY_PARTS; k++) query[rows][k] = prepared_rows.parts[rows][k][lane];
            product[rows] = prepared_rows.product[r];
            mean[rows] = prepared_rows.mean[r];
            UNROLL for (int group = 0; group < GROUPS; group++) {
                lo[rows][group] = 0;
                offset[rows][group] = prepared_rows.offset[r][group];
            }
            const int at = r < p.rows ? p.first + (p.row_block * ROWS + r) / a.group : -1;
            newest[rows] = at - a.recent;
            oldest[rows] = at - a.sliding + 1 > a.sink ? at - a.sliding + 1 : a.sink;
        }
        if (PARAMETERS) {
            key_exponent = (float)(a.exponents[p.head] - (1 << 19));
            value_exponent = (float)(a.exponents[a.kv_heads + p.head] - (1 << 19));
        }
        shift[0] = 64 * a.one;
        shift[1] = 16 * a.one;
        shift[2] = 4 * a.one;
    }

    // One tile of a stage: 16 tokens from position `start` on.
    template <bool MASKED>
    DEVICE void read(const u8* stage, const Grids& grids, int tile, int start, float soft_cap) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        const u32* key_codes = (const u32*)(stage + tile * CODE_BYTES);
        const u32* value_codes = (const u32*)(stage + (CHUNK + tile) * CODE_BYTES);
        const u8* key_stored = stage + 2 * CHUNK * CODE_BYTES + tile * STORED_BYTES;
        const u8* value_stored = key_stored + CHUNK * STORED_BYTES;

        u32 words[2][LANE_WORDS];  // of tokens g and g + 8, as everything up to `b` below
        UNROLL for (int i = 0; i < 2; i++) load_words(words[i], key_codes + (g + 8 * i) * WORDS, t);
        int sums[ROW_GROUPS][GROUPS][4];
        multiply(sums, words);
        Grid key[2][GROUPS], value[2][GROUPS];
        UNROLL for (int i = 0; i < 2; i++) {
            const int token = g + 8 * i;
            UNROLL for (int group = 0; group < GROUPS; group++) {
                key[i][group] = STAGED_GRIDS ? grids[0][tile * TILE + token]
                    : read_parameters(key_stored, token, group, key_exponent);
                value[i][group] = STAGED_GRIDS ? grids[1][tile * TILE + token]
                    : read_parameters(value_stored, token, group, value_exponent);
            }
        }
        float logits[ROW_GROUPS][2];
        UNROLL for (int rows = 0; rows < ROW_GROUPS; rows++) {
            UNROLL for (int i = 0; i < 2; i++) {
                float x = mean[rows];
                UNROLL for (int group = 0; group < GROUPS; group++) {
                    const int high = sums[rows][group][2 * i], low = sums[rows][group][2 * i + 1];
                    const float h = FLOAT_BITS ? as_float(high) - MAGIC : (float)high;
                    const float b = FLOAT_BITS ? as_float(low) - MAGIC : (float)low;
                    const float products = (h * 256.0f + b) * product[rows];
                    const float offsets = key[i][group].lo * offset[rows][group];
                    if (PARAMETERS == 0) x += key[i][group].s * products + offsets;
                    else x += key[i][group].s * (products + offsets);
                }
                if (SOFT_CAP) x = capped(x, soft_cap);
                if (MASKED) {
                    const int j = start + g + 8 * i;
                    if (j < oldest[rows] || j > newest[rows]) x = -INFINITE;
                }
                logits[rows][i] = x;
            }
        }
        if (MASKED) {  // a token that no row sees may never have been written
            UNROLL for (int i = 0; i < 2; i++) {
                float top = logits[0][i];
                UNROLL for (int rows = 1; rows < ROW_GROUPS; rows++) top = fmaxf(top, logits[rows][i]);
                UNROLL for (int lanes = 1; lanes < 4; lanes *= 2)
                    top = fmaxf(top, __shfl_xor_sync(ALL, top, lanes));
                if (top == -INFINITE)
                    UNROLL for (int group = 0; group < GROUPS; group++) value[i][group] = {1.0f, 0.0f};
            }
        }
        float p[ROW_GROUPS][2], top = 0;
        UNROLL for (int rows = 0; rows < ROW_GROUPS; rows++) {
            UNROLL for (int i = 0; i < 2; i++) {
                p[rows][i] = exp2_approx(logits[rows][i] - m[rows]);
                UNROLL for (int group = 0; group < GROUPS; group++)
                    top = fmaxf(top, p[rows][i] * value[i][group].s);
            }
        }
        if (__any_sync(ALL, !(top <= WEIGHT_LIMIT))) move_reference(logits, p, value);
        u32 b[GROUPS][COLUMN_TILES][2];
        UNROLL for (int group = 0; group < GROUPS; group++) {
            float weight[ROW_GROUPS][2];
            UNROLL for (int rows = 0; rows < ROW_GROUPS; rows++) {
                UNROLL for (int i = 0; i < 2; i++) {
                    weight[rows][i] = p[rows][i] * value[i][group].s;
                    lo[rows][group] += (PARAMETERS ? weight[rows][i] : p[rows][i]) * value[i][group].lo;
                }
            }
            UNROLL for (int c = 0; c < COLUMN_TILES; c++) {
                UNROLL for (int i = 0; i < 2; i++) {
                    const float odd = 2 * c + 1 < ROW_GROUPS ? weight[(2 * c + 1) % ROW_GROUPS][i] : 0.0f;
                    b[group][c][i] = transpose_8x8(pack_half(weight[2 * c][i], odd));
                }
            }
        }
        UNROLL for (int rows = 0; rows < ROW_GROUPS; rows++) l[rows] += p[rows][0] + p[rows][1];
        add_values(b, value_codes);
    }

    DEVICE void stage_grids(Grids& grids, const u8* stage) {
        const int lane = threadIdx.x % 32;
        const u8* stored = stage + 2 * CHUNK * CODE_BYTES;
        UNROLL for (int i = lane; i < 2 * CHUNK_TOKENS; i += 32) {
            const int side = i / CHUNK_TOKENS, token = i % CHUNK_TOKENS;
            grids[side][token] = read_parameters(stored + side * CHUNK * STORED_BYTES, token, 0,
                                                 side ? value_exponent : key_exponent);
        }
        __syncwarp();
    }

    // A lane's words of a token's key.
    static DEVICE void load_words(u32 (&words)[LANE_WORDS], const u32* row, int t) {
        if constexpr (EXACT_WORDS && LANE_WORDS == 2) {
            const u64 pair = *(const u64*)(row + 2 * t);
            words[0] = (u32)pair;
            words[1] = (u32)(pair >> 32);
        } else if constexpr (EXACT_WORDS && LANE_WORDS == 4) {
            const Quad quad = *(const Quad*)(row + 4 * t);
            words[0] = quad.x; words[1] = quad.y; words[2] = quad.z; words[3] = quad.w;
        } else {
            UNROLL for (int w = 0; w < LANE_WORDS; w++) {
                const int word = t * LANE_WORDS + w;
                words[w] = EXACT_WORDS || word < WORDS ? row[word] : 0;
            }
        }
    }

    // q' . c of a tile, high and low bytes of q' apart: 64 times it, over the group's channels.
    DEVICE void multiply(int (&sums)[ROW_GROUPS][GROUPS][4], const u32 (&words)[2][LANE_WORDS]) {
        UNROLL for (int rows = 0; rows < ROW_GROUPS; rows++)
            UNROLL for (int group = 0; group < GROUPS; group++)
                UNROLL for (int i = 0; i < 4; i++)
                    sums[rows][group][i] = FLOAT_BITS ? 0x4b400000 : 0;
        UNROLL for (int k = 0; k < KEY_PARTS; k += 2) {
            u32 code[2][2];
            UNROLL for (int part = 0; part < 2; part++) {
                const int slot = (k + part) / LANE_WORDS, w = (k + part) % LANE_WORDS;
                UNROLL for (int i = 0; i < 2; i++)
                    code[part][i] = (slot == 3 ? words[i][w] : words[i][w] * shift[slot]) & 0xc0c0c0c0u;
            }
            UNROLL for (int rows = 0; rows < ROW_GROUPS; rows++) {
                const u32 b0 = query[rows][k], b1 = query[rows][k + 1];
                if constexpr (GROUPS == 1) {
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
    DEVICE void add_values(const u32 (&b)[GROUPS][COLUMN_TILES][2], const u32* codes) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        UNROLL for (int block = 0; block < (PADDED + 7) / 8; block++) {
            const int word = PADDED == 4 ? (g & 3) : 8 * block + g;
            u32 v[4];
            UNROLL for (int i = 0; i < 4; i++) {
                const int token = 2 * t + (i & 1) + 8 * (i >> 1);
                v[i] = EXACT_WORDS || word < WORDS ? codes[token * WORDS + word] : 0;
            }
            const u32 byte = PADDED == 4 ? g >> 2 : 0;  // four words: lanes g and g + 4 share one
            const u32 low = 0x5410 + 0x1111 * byte, high = 0x7632 + 0x1111 * byte;
            u32 x[4] = {permute_bytes(v[0], v[1], low), permute_bytes(v[0], v[1], high),
                        permute_bytes(v[2], v[3], low), permute_bytes(v[2], v[3], high)};
            constexpr int SLOTS = PADDED == 4 ? 4 : 8;
            UNROLL for (int p0 = 0; p0 < SLOTS; p0++) {
                if (p0 == 4) UNROLL for (int i = 0; i < 4; i++) x[i] >>= 8;
                const u32 mask = 0x00030003u << (2 * (p0 & 3));
                const u32 a0 = x[0] & mask, a1 = x[1] & mask, a2 = x[2] & mask, a3 = x[3] & mask;
                UNROLL for (int c = 0; c < COLUMN_TILES; c++) {
                    float (&d)[4] = out[c][8 * block + p0];
                    if constexpr (PADDED == 4 && GROUPS == 2) {  // the group is the lane's byte
                        UNROLL for (int group = 0; group < 2; group++) {
                            const u32 mine = byte == group ? ALL : 0;
                            mma_half(d, a0 & mine, a1 & mine, a2 & mine, a3 & mine,
                                     b[group][c][0], b[group][c][1]);
                        }
                    } else {
                        const int group = group_of_slot(p0);
                        mma_half(d, a0, a1, a2, a3, b[group][c][0], b[group][c][1]);
                    }
                }
            }
        }
    }

    // Raise each row's reference so that its largest weight p s becomes 1. Rare.
    DEVICE void move_reference(const float (&logits)[ROW_GROUPS][2], float (&p)[ROW_GROUPS][2],
                               const Grid (&value)[2][GROUPS]) {
        UNROLL for (int rows = 0; rows < ROW_GROUPS; rows++) {
            float top = NOTHING;
            UNROLL for (int i = 0; i < 2; i++)
                UNROLL for (int group = 0; group < GROUPS; group++)
                    top = fmaxf(top, logits[rows][i] + log2_approx(value[i][group].s));
            top = fmaxf(m[rows], tokens_max(top));
            const float factor = exp2_approx(m[rows] - top);
            m[rows] = top;
            l[rows] *= factor;
            UNROLL for (int group = 0; group < GROUPS; group++) lo[rows][group] *= factor;
            UNROLL for (int tile = 0; tile < ROW_TILES; tile++) {
                out[rows / 2][tile][rows % 2] *= factor;
                out[rows / 2][tile][2 + rows % 2] *= factor;
            }
            UNROLL for (int i = 0; i < 2; i++) p[rows][i] = exp2_approx(logits[rows][i] - top);
        }
    }

    DEVICE void finish(Shared& s) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
        UNROLL for (int rows = 0; rows < ROW_GROUPS; rows++) {
            UNROLL for (int group = 0; group < GROUPS; group++) {
                const float sum = tokens_sum(lo[rows][group]);
                if (g == 0) s.warp_lo[warp][4 * rows + t][group] = sum;
            }
        }
        UNROLL for (int n = 0; n < COLUMN_TILES; n++)
            UNROLL for (int tile = 0; tile < ROW_TILES; tile++)
                UNROLL for (int i = 0; i < 4; i++)
                    out[n][tile][i] *= 16777216.0f / (float)(1 << (2 * (tile & 3)));
        merge_warps<ROW_TILES>(s, 0, out, m, l, [](int tile, int g, int half) {
            return tile_valid(tile, g) ? tile_channel(tile, g, half) : -1;
        });
    }
};

DEVICE void read_history(const Arguments& a, const Piece& p, const Sequence& q, Shared& s) {
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
    wait_for_queries();
    History state;
    state.open(a, p);
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
        ring.fetch(i + STAGES - 1, stage == 0 ? STAGES - 1 : stage - 1);
        const int chunk = ring.first + i * WARPS, tiles = Ring::tiles_of(chunk);
        int start = Ring::position_of(chunk);
        const u8* packed = stages + stage * STAGE_BYTES;
        Grids& grids = s.grids[warp];
        if (STAGED_GRIDS) state.stage_grids(grids, packed);
        if (start >= all_oldest && start + tiles * TILE - 1 <= first - a.recent) {
            UNROLL for (int tile = 0; tile < CHUNK; tile++)
                if (TILES_PER_PAGE % CHUNK == 0 || tile < tiles)
                    state.template read<false>(packed, grids, tile, start + tile * TILE, a.soft_cap);
        } else {
            for (int tile = 0; tile < tiles; tile++, start += TILE)
                if (start + TILE > oldest && start <= last - a.recent)
                    state.template read<true>(packed, grids, tile, start, a.soft_cap);
        }
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
    wait_copies<0>();
    state.finish(s);
}

// -- results ---------------------------------------------------------------------------------------

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

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
oscar_decode(const __grid_constant__ Arguments a) {
    extern __shared__ u8 dynamic[];
    Shared& s = *(Shared*)dynamic;
    if (a.batch <= SCHEDULED) {
        for (int i = threadIdx.x; i < HEADER + (FACTS + 2) * a.batch; i += THREADS)
            s.schedule[i] = ((const u32*)a.schedule)[i];
        __syncthreads();
    }
    Schedule& plan = *(Schedule*)(a.batch <= SCHEDULED ? (int*)s.schedule : a.schedule);
    const int* first_part = plan.first_part(a.batch);
    const int parts = plan.parts;
    int index = blockIdx.x;
    ROLLED while (index < parts) {
        if (threadIdx.x == 0) s.next = gridDim.x + atomicAdd(a.tickets, 1);
        int b = 0, high = a.batch - 1;  // the last sequence that begins at or before this part
        while (b < high) {
            const int middle = (b + high + 1) / 2;
            if (first_part[middle] <= index) b = middle; else high = middle - 1;
        }
        const Sequence q = plan.sequences()[b];
        const int part = (index - first_part[b]) % q.parts, line = (index - first_part[b]) / q.parts;
        const int row_blocks = q.row_blocks(a.group);
        const int size = (q.units() + q.parts - 1) / q.parts;

        Piece p;
        p.sequence = b;
        p.head = line / row_blocks;
        p.row_block = line % row_blocks;
        const int left = q.tokens * a.group - p.row_block * ROWS;
        p.rows = left < ROWS ? left : ROWS;
        p.first = q.length - q.tokens;
        p.start = q.start;
        // A tile or chunk belongs to the part in which its units begin.
        const int windows = q.window_tiles * WINDOW_COST;
        auto window_from = [&](int x) {
            return ((x < windows ? x : windows) + WINDOW_COST - 1) / WINDOW_COST;
        };
        auto chunk_from = [&](int x) {
            const int chunk = x > windows ? (x - windows + CHUNK - 1) / CHUNK : 0;
            return chunk < q.chunks ? chunk : q.chunks;
        };
        p.window_begin = window_from(part * size);
        p.window_end = window_from(part * size + size);
        p.history_begin = chunk_from(part * size);
        p.history_end = chunk_from(part * size + size);
        if (threadIdx.x < 2 * ROWS) {
            s.m[threadIdx.x / ROWS][threadIdx.x % ROWS] = NOTHING;
            s.l[threadIdx.x / ROWS][threadIdx.x % ROWS] = 0;
        }
        for (int i = threadIdx.x; i < ROWS * HEAD_DIM; i += THREADS)
            s.window[i / HEAD_DIM][i % HEAD_DIM] = 0;
        const float* inverse =
            a.value_inverse ? a.value_inverse + (i64)p.head * HEAD_DIM * HEAD_DIM : nullptr;
        if (part == 0 && inverse)  // some block will want it soon
            ROLLED for (int i = threadIdx.x; i < HEAD_DIM * HEAD_DIM / 32; i += THREADS)
                prefetch(inverse + 32 * i);
        if (p.history_end > p.history_begin) {
            read_history(a, p, q, s);
        } else {
            load_window_queries(a, p, s);
            __syncthreads();
        }
        if (p.window_end > p.window_begin) read_windows(a, p, q, s);

        bool last = true;
        if (q.parts > 1) {
            const int record = plan.first_record(a.batch)[b] + index - first_part[b];
            __syncthreads();
            write_partial(record_of(a, record), s);
            __threadfence();
            __syncthreads();
            if (threadIdx.x == 0) {
                int* arrivals = a.arrivals + (b * a.kv_heads + p.head) * a.row_blocks + p.row_block;
                const int before = atomicAdd(arrivals, 1);
                if (before == q.parts - 1) *arrivals = 0;
                s.last = before == q.parts - 1;
            }
            __syncthreads();
            last = s.last;
            if (last) {
                __threadfence();
                merge_parts(a, record - part, q.parts, s);
            }
        }
        if (last) {
            __syncthreads();
            write_rows(a, p, q.chunks > 0, inverse, s);
        }
        __syncthreads();
        index = s.next;
        __syncthreads();
    }
    wait_for_queries();  // no launch after this one may overtake oscar_queries
    if (threadIdx.x == 0 && atomicAdd(a.tickets + 1, 1) == (int)gridDim.x - 1) {
        a.tickets[0] = a.tickets[1] = 0;  // every block has taken its last: ready for the next launch
    }
}
