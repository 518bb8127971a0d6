// Attention of a few new tokens per sequence over packed history and exact windows: two launches,
// oscar_queries (transforms the queries) and oscar_decode (everything else), the second started
// while the first still runs.
//
// Further macros: ROW_GROUPS (1, 2 or 4: query rows of a block in fours), CHUNK (tiles of 16 tokens
// that a warp fetches at a time), TILES_AT_ONCE (that it works on), STAGES (chunks on their way),
// WARPS, BLOCKS_PER_SM, SOFT_CAP, QUERY_ROWS (query rows of a block of oscar_queries), WAVES (parts
// that a block works on, about, where lengths differ), VALUE_HADAMARD (1: the values' transform is
// Sylvester's matrix).
//
// A "pair" is one (sequence, KV head, block of query rows). Its work is a line of units: first its
// window tiles (WINDOW_COST units each), then its history chunks (CHUNK units each). oscar_schedule
// cuts each line into equal parts, about as many in all as the GPU holds blocks or, where lengths
// differ, a few times as many, and blocks take them in turn. A pair of one part is finished by its
// block; otherwise each part leaves its sums, and the last block to arrive adds them up in the order
// of the line. So the result does not depend on who did what: two runs give the same bits.
//
// History tiles, in registers only (why: docs/how-it-works.md, kernels):
// - Keys: codes are the A operand of byte products, four to a register by one AND (an IMAD brings
//   the slot to the top of its byte). The transformed query is a 16-bit integer, its high and low
//   bytes two neighbouring columns of B. A lane gets both sums of one row and adds them, the low one
//   in units of 256; sums start at the bits of the float 1.5 2^23, so they are floats in the end.
// - Values: codes are read as float16 SUBNORMALS, two to a register by one AND: c 4^j 2^-24, exact.
//   Weights p s are float16, kept in range by the running reference m of each row.

#include "common.cuh"
#include "shapes.cuh"
#include "schedule.cuh"
#include "block.cuh"
#include "matrix.cuh"
#include "queries.cuh"
#include "windows.cuh"
#include "codes.cuh"
#include "history.cuh"
#include "parts.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
oscar_decode(const __grid_constant__ Arguments a) {
    extern __shared__ u8 dynamic[];
    Shared& s = *(Shared*)dynamic;
    start_next();
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
        if (threadIdx.x == 0)  // usually there is one part for each block
            s.next = parts > (int)gridDim.x ? gridDim.x + atomicAdd(a.tickets, 1) : parts;
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
        const int record = plan.first_record(a.batch)[b] + index - first_part[b];
        const Results results{s, q.parts > 1 ? record_of(a, record) : nullptr};
        // What a part has no keys of has no sums either.
        if (p.history_end == p.history_begin && threadIdx.x < ROWS)
            results.set_stats(0, threadIdx.x, NOTHING, 0);
        if (p.window_end == p.window_begin) {
            if (threadIdx.x < ROWS) results.set_stats(1, threadIdx.x, NOTHING, 0);
            if (q.parts == 1)  // write_rows adds them up
                for (int i = threadIdx.x; i < ROWS * HEAD_DIM; i += THREADS)
                    s.window[i / HEAD_DIM][i % HEAD_DIM] = 0;
        }
        const float* inverse =
            a.value_inverse ? a.value_inverse + (i64)p.head * HEAD_DIM * HEAD_DIM : nullptr;
        if (part == 0 && inverse) {  // some block will want them soon
            if (!VALUE_HADAMARD)
                ROLLED for (int i = threadIdx.x; i < HEAD_DIM * HEAD_DIM / 32; i += THREADS)
                    prefetch(inverse + 32 * i);
            if (a.value_mean && 32 * threadIdx.x < HEAD_DIM)
                prefetch(a.value_mean + p.head * HEAD_DIM + 32 * threadIdx.x);
        }
        if (p.history_end > p.history_begin) {
            read_history(a, p, q, results);
        } else {
            load_window_queries(a, p, s);
            __syncthreads();
        }
        if (p.window_end > p.window_begin) read_windows(a, p, q, results);

        bool last = true;
        if (q.parts > 1) {
            __syncthreads();
            if (threadIdx.x == 0) {
                int* arrivals = a.arrivals + (b * a.kv_heads + p.head) * a.row_blocks + p.row_block;
                const int before = arrive(arrivals);
                if (before == q.parts - 1) *arrivals = 0;
                s.last = before == q.parts - 1;
            }
            __syncthreads();
            last = s.last;
            if (last)
                merge_parts(a, record - part, q.parts, windows / size, (windows + size - 1) / size, s);
        }
        if (last) {
            __syncthreads();
            write_rows(a, p, q.chunks > 0, inverse, s);
        }
        __syncthreads();
        index = s.next;
        __syncthreads();
    }
    wait_for_previous();  // no launch after this one may overtake oscar_queries
    if (threadIdx.x == 0 && parts > (int)gridDim.x
        && atomicAdd(a.tickets + 1, 1) == (int)gridDim.x - 1)
        a.tickets[0] = a.tickets[1] = 0;  // every block has taken its last: ready for the next launch
}
