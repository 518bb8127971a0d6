// Who does what in a step: each sequence's facts, and the cutting of its work into parts.

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

// Sum of every thread's number.
DEVICE int block_total(int x, int* sums) {
    x = __reduce_add_sync(ALL, x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
    __syncthreads();
    int total = 0;
    UNROLL for (int warp = 0; warp < PLANNERS / 32; warp++) total += sums[warp];
    return total;
}

// The largest of them.
DEVICE int block_max(int x, int* sums) {
    x = __reduce_max_sync(ALL, x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
    __syncthreads();
    int top = 0;
    UNROLL for (int warp = 0; warp < PLANNERS / 32; warp++) top = larger(top, sums[warp]);
    return top;
}

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

// Into how many parts of at most `size` units each line of a sequence is cut.
DEVICE int parts_of(int units, int size) { return (units + size - 1) / size; }

// Units of a sequence's lines, and how many lines there are.
struct Lines {
    int units, count;
    DEVICE Lines(const Arguments& a, const Sequence& s)
        : units(s.units()), count(s.row_blocks(a.group) * a.kv_heads) {}
};

struct Cut { int parts, longest; };  // of all lines together; of a part

// What comes of cutting all lines into parts of at most `size` units. `own`: the thread's first.
DEVICE Cut cut(const Arguments& a, Schedule& plan, const Lines& own, int size, int* sums) {
    int parts = 0, longest = 0;
    auto add = [&](const Lines& lines) {
        const int each = parts_of(lines.units, size);
        parts += each * lines.count;
        if (each) longest = larger(longest, (lines.units + each - 1) / each);
    };
    add(own);
    for (int b = threadIdx.x + PLANNERS; b < a.batch; b += PLANNERS) add({a, plan.sequences()[b]});
    return {block_total(parts, sums), block_max(longest, sums)};
}

// One block, once per step and geometry.
extern "C" __global__ void __launch_bounds__(PLANNERS) oscar_schedule(Arguments a, int blocks) {
    __shared__ int sums[PLANNERS];
    Schedule& plan = *(Schedule*)a.schedule;
    const Sequence first = threadIdx.x < a.batch ? describe(a, threadIdx.x) : Sequence{};
    if (threadIdx.x < a.batch) plan.sequences()[threadIdx.x] = first;
    const Lines own(a, first);
    int total = own.units * own.count, longest = own.units;
    for (int b = threadIdx.x + PLANNERS; b < a.batch; b += PLANNERS) {
        const Sequence s = describe(a, b);
        plan.sequences()[b] = s;
        total += s.units() * s.row_blocks(a.group) * a.kv_heads;
        longest = larger(longest, s.units());
    }
    total = block_total(total, sums);
    longest = block_max(longest, sums);
    const int share = (total + blocks - 1) / blocks;
    // The smallest size that gives every block at most one part, if there is one.
    int size = larger(share, SMALLEST_PART), enough = larger(longest, size);
    for (int step = 0; step < 10 && size < enough; step++) {
        const int middle = size + (enough - size) / 2;
        if (cut(a, plan, own, middle, sums).parts <= blocks) enough = middle; else size = middle + 1;
    }
    // Where lengths differ much, or do not fill the last round, smaller parts end sooner: blocks take
    // them as they get ready.
    int best = enough, soonest = 1 << 30;
    for (int waves = 0; waves <= WAVES; waves++) {
        const int tried = waves ? larger((share + waves - 1) / waves, SMALLEST_PART) : enough;
        const Cut found = cut(a, plan, own, tried, sums);
        const int rounds = (found.parts + blocks - 1) / blocks;
        int end = rounds * found.longest;
        if (end > share + found.longest) end = share + found.longest;
        end += rounds * PART_COST;
        if (end < soonest) { soonest = end; best = tried; }
    }
    size = best;
    int parts = 0, records = 0, before;
    for (int base = 0; base < a.batch; base += PLANNERS) {
        const int b = base + threadIdx.x;
        int here = 0;
        if (b < a.batch) {
            Sequence& s = plan.sequences()[b];
            const int units = s.units();
            if (units) {
                s.parts = parts_of(units, size);
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
