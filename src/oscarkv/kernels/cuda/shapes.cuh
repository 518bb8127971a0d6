// Sizes, arguments and shared memory of the decode kernels, and small helpers.

constexpr int ROWS = 4 * ROW_GROUPS;
constexpr int COLUMN_TILES = (ROW_GROUPS + 1) / 2;
constexpr int THREADS = 32 * WARPS;
constexpr int TILES_PER_PAGE = PAGE / TILE;
constexpr int CHUNKS_PER_PAGE = (TILES_PER_PAGE + CHUNK - 1) / CHUNK;  // the last may be shorter
constexpr int KEY_CODE_BYTES = TILE * 4 * KEY_WORDS, VALUE_CODE_BYTES = TILE * 4 * VALUE_WORDS;
constexpr int CODE_BYTES = KEY_CODE_BYTES + VALUE_CODE_BYTES;  // of a tile
constexpr int STORED_BYTES = TILE * PARAMETER_BYTES;  // of one side
constexpr int TILE_BYTES = CODE_BYTES + 2 * STORED_BYTES;
constexpr int STAGE_BYTES = CHUNK * TILE_BYTES;
constexpr int WINDOW_COST = (72 * HEAD_DIM + TILE_BYTES / 2) / TILE_BYTES;  // 64 d bytes, and slower
constexpr int SMALLEST_PART = 64;   // units; windows of one part, at most, are less
constexpr int PART_COST = 48;       // units: what a further part costs a block
constexpr int STRIDE = HEAD_DIM + 8;  // of float rows in shared memory: no bank conflicts
// A block's working space: the warps' rings; their sums; those of times_matrix.
constexpr int RING_BYTES = WARPS * STAGES * STAGE_BYTES;
constexpr int MERGE_BYTES = WARPS * ROWS * STRIDE * 4;
constexpr int PASS_ROWS = ROWS < 8 ? ROWS : 8;  // times_matrix takes so many at a time
constexpr int SUMS_BYTES = 16 * PASS_ROWS * THREADS;
DEVICE constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int WORK_BYTES = larger(RING_BYTES, larger(MERGE_BYTES, SUMS_BYTES));
constexpr int LANE_WORDS = PADDED / 4;  // words of a key that a lane holds
constexpr int KEY_PARTS = 4 * LANE_WORDS;  // (slot of a byte, word) of a lane: a register of bytes
// With two groups, a lane's parts are sorted by group: of every two words, or of its one word.
constexpr bool SORTED_PARTS = GROUPS == 2 && EXACT_WORDS;
DEVICE constexpr int part_group(int k) { return LANE_WORDS == 1 ? k / 2 : k / 4 % 2; }
DEVICE constexpr bool first_of_group(int k) { return k % (LANE_WORDS == 1 ? 2 : 4) == 0 && k < 8; }
// The channel of a byte of part k of lane t, or -1.
DEVICE constexpr int part_channel(int k, int t, int byte) {
    int slot = 4 * (byte & 1) + k / LANE_WORDS, half = byte / 2, word = t * LANE_WORDS + k % LANE_WORDS;
    if (SORTED_PARTS) {
        slot = 4 * part_group(k) + (LANE_WORDS == 1 ? 2 * k % 4 + 1 - byte / 2 : k % 4);
        half = byte & 1;
        word = LANE_WORDS == 1 ? t : t * LANE_WORDS + k / 8 * 2 + byte / 2;
    }
    return word < WORDS ? (2 * slot + half) * WORDS + word : -1;
}
// Four rows leave every second column of the values' products free: it takes the second group's
// weights, and each channel's sum is read from the column of its group.
constexpr bool GROUP_COLUMNS = PAIRED && ROW_GROUPS == 1;
constexpr int WEIGHT_GROUPS = GROUP_COLUMNS ? 1 : GROUPS;  // registers of weights
constexpr int WINDOW_TILES = 4 * ((HEAD_DIM + 63) / 64);
constexpr int WINDOW_CHUNKS = (HEAD_DIM + 31) / 32;
constexpr float NOTHING = -1e30f;  // reference of a row that has seen no key
constexpr float MAGIC = 12582912.0f;  // 1.5 2^23: adding an integer to its bits adds it to it
DEVICE float exact_times_magic(float x) { return as_float(as_bits(x) & ~3u); }  // 22 bits times 3
constexpr int KEY_UNIT = KEY_BITS == 3 ? 16 : 64;  // of codes as bytes: at the top, or one below it
// Sums of products stay below 2^22.
constexpr bool FLOAT_BITS = HEAD_DIM <= (KEY_BITS == 3 ? 256 : 128);
// Two weights p s as halves (they end at 65504): adding this sets the top bit of one above 4096.
constexpr u32 ABOVE_4096 = 0x13ff13ffu;
constexpr u32 ALWAYS_OVER = 0x80008000u;

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
