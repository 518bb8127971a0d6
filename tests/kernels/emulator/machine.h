// One multiprocessor in C++: it runs a kernel's blocks one after the other, and a block's threads as
// fibers, each up to the next point where it must wait for others. What the kernels take from CUDA is
// here; their PTX is in instructions.h, which takes the place of ptx.cuh.
//
//   - Warps run in order, or in reverse: a result that depends on it lacks a barrier.
//   - Addresses that are not aligned and indices beyond their arrays end the launch with an error.
//   - A lane that waits at one kind of exchange while another lane of its warp waits at another, and
//     threads that wait for ever, end it too.
//   - Asynchronous copies arrive when they are waited for, and not before.
//   - Dynamic shared memory is 0xFF, NaN in every float type, before each block.

#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static
#define __constant__ static const
#define __CUDA_ARCH__ 800

namespace machine {

constexpr int WARP = 32, STACK_BYTES = 1 << 18, REGISTERS = 8;

enum State { READY, AT_WARP, AT_BLOCK, DONE };

struct Copy { void* to; const void* from; };

struct Fiber {
    State state = READY;
    bool started = false;
    int thread = 0, parity = 0;
    jmp_buf at;
    ucontext_t context;
    std::vector<char> stack;
    std::vector<Copy> copies;               // since the last commit
    std::deque<std::vector<Copy>> groups;   // committed, the oldest first
};

struct Warp {
    int arrived = 0, kind = 0;
    uint32_t slots[2][WARP][REGISTERS];     // what lanes show each other, alternately
};

struct Index { unsigned x, y, z; };

inline std::vector<Fiber> fibers;
inline std::vector<Warp> warps;
inline Fiber* current;
inline int live, waiting;                   // threads that have not ended; those at the barrier
inline jmp_buf scheduler;
inline void (*body)();
inline char error[256];

alignas(128) inline unsigned char shared[256 * 1024];

}  // namespace machine

machine::Index threadIdx, blockIdx, gridDim;

namespace machine {

__attribute__((noinline, noclone)) inline void leave() {
    if (!_setjmp(current->at)) _longjmp(scheduler, 1);
}

// The block's barrier, once all threads that have not ended are there.
inline void pass() {
    if (waiting < live) return;
    waiting = 0;
    for (Fiber& fiber : fibers)
        if (fiber.state == AT_BLOCK) fiber.state = READY;
}

inline void enter() {
    body();
    current->state = DONE;
    live--;
    pass();
    _longjmp(scheduler, 1);
}

inline void resume(Fiber& fiber) {
    current = &fiber;
    threadIdx = {(unsigned)fiber.thread, 0, 0};
    if (_setjmp(scheduler)) return;
    if (fiber.started) _longjmp(fiber.at, 1);
    fiber.started = true;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    makecontext(&fiber.context, enter, 0);
    setcontext(&fiber.context);
}

inline void report(const char* what) {
    snprintf(error, sizeof error, "%s (thread %d of block %u, %u, %u)", what, current->thread,
             blockIdx.x, blockIdx.y, blockIdx.z);
    live = -1;
}

inline void fail(const char* what) {  // in a thread, which is left for good
    report(what);
    _longjmp(scheduler, 1);
}

// All lanes of a warp meet, for one and the same kind of exchange.
inline void meet(int kind) {
    Warp& warp = warps[current->thread / WARP];
    if (warp.arrived && warp.kind != kind) fail("lanes of a warp wait for different things");
    warp.kind = kind;
    if (++warp.arrived == WARP) {
        warp.arrived = 0;
        Fiber* lanes = &fibers[current->thread / WARP * WARP];
        for (int lane = 0; lane < WARP; lane++) lanes[lane].state = READY;
        return;
    }
    current->state = AT_WARP;
    leave();
}

inline void meet_all() {
    current->state = AT_BLOCK;
    waiting++;
    pass();
    if (current->state == AT_BLOCK) leave();
}

// What every lane shows: [lane][register]. Two rounds of slots, so that one meeting is enough.
template <int N>
inline const uint32_t (*show(const uint32_t (&mine)[N], int kind))[REGISTERS] {
    auto& slots = warps[current->thread / WARP].slots[current->parity ^= 1];
    memcpy(slots[current->thread % WARP], mine, sizeof mine);
    meet(kind);
    return slots;
}

inline int lane() { return current->thread % WARP; }

// Where a sanitizer found what a GPU would fault on: the first field of what its handlers are given.
struct Place { const char* file; uint32_t line, column; };

inline void fail_at(const char* what, const Place* place) {
    static char text[256];
    snprintf(text, sizeof text, "%s, line %u of %s", what, place->line, place->file);
    fail(text);
}

inline bool run_block(int threads, bool reversed) {
    const int count = threads / WARP;
    if ((int)fibers.size() != threads) fibers = std::vector<Fiber>(threads);
    warps.assign(count, Warp{});
    for (int i = 0; i < threads; i++) {
        Fiber& fiber = fibers[i];
        fiber.state = READY;
        fiber.started = false;
        fiber.thread = i;
        fiber.copies.clear();
        fiber.groups.clear();
        fiber.stack.resize(STACK_BYTES);
    }
    live = threads;
    waiting = 0;
    memset(shared, 0xff, sizeof shared);
    while (live > 0) {
        bool moved = false;
        for (int w = 0; w < count; w++) {
            Fiber* lanes = &fibers[(reversed ? count - 1 - w : w) * WARP];
            for (bool again = true; again && live > 0;) {
                again = false;
                for (int lane = 0; lane < WARP && live > 0; lane++)
                    if (lanes[lane].state == READY) {
                        resume(lanes[lane]);
                        again = moved = true;
                    }
            }
        }
        if (!moved) report("threads wait for others that never come");
    }
    return live == 0;
}

template <class... A, std::size_t... I>
inline void call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
    kernel(*(A*)arguments[I]...);
}

template <class... A>
inline const char* launch(void (*kernel)(A...), const unsigned* grid, unsigned threads,
                          void** arguments, bool reversed) {
    static void (*the_kernel)(A...);
    static void** the_arguments;
    the_kernel = kernel;
    the_arguments = arguments;
    body = [] { call(the_kernel, the_arguments, std::index_sequence_for<A...>{}); };
    error[0] = 0;
    gridDim = {grid[0], grid[1], grid[2]};
    for (blockIdx.z = 0; blockIdx.z < gridDim.z; blockIdx.z++)
        for (blockIdx.y = 0; blockIdx.y < gridDim.y; blockIdx.y++)
            for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++)
                if (!run_block(threads, reversed)) return error;
    return error;
}

}  // namespace machine

extern "C" __attribute__((used)) void __ubsan_handle_type_mismatch_v1_abort(machine::Place* place, uint64_t) {
    machine::fail_at("an address that is not aligned", place);
}

extern "C" __attribute__((used)) void __ubsan_handle_out_of_bounds_abort(machine::Place* place, uint64_t) {
    machine::fail_at("an index beyond its array", place);
}

#define KERNEL(name)                                                                              \
    extern "C" __attribute__((visibility("default"))) const char* emulate_##name(const unsigned* grid, unsigned threads, void** arguments, \
                                          int reversed) {                                         \
        return machine::launch(name, grid, threads, arguments, reversed);                         \
    }

// -- CUDA's own functions ------------------------------------------------------------------------

enum Meeting { SYNC = 1, SHUFFLE, VOTE, REDUCE, MMA_BYTES, MMA_HALVES, TRANSPOSE };

inline void __syncwarp() { machine::meet(SYNC); }
inline void __syncthreads() { machine::meet_all(); }

template <class T> inline T __shfl_sync(uint32_t, T x, int from) {
    uint32_t mine[1];
    static_assert(sizeof x == 4, "registers");
    memcpy(mine, &x, 4);
    memcpy(&x, machine::show(mine, SHUFFLE)[from & 31], 4);
    return x;
}
template <class T> inline T __shfl_xor_sync(uint32_t all, T x, int mask) {
    return __shfl_sync(all, x, machine::lane() ^ mask);
}
inline int __any_sync(uint32_t, int x) {
    const auto slots = machine::show<1>({(uint32_t)(x != 0)}, VOTE);
    for (int lane = 0; lane < 32; lane++)
        if (slots[lane][0]) return 1;
    return 0;
}
inline int __all_sync(uint32_t all, int x) { return !__any_sync(all, !x); }
inline int __reduce_add_sync(uint32_t, int x) {
    const auto slots = machine::show<1>({(uint32_t)x}, REDUCE);
    uint32_t sum = 0;
    for (int lane = 0; lane < 32; lane++) sum += slots[lane][0];
    return (int)sum;
}
inline int __reduce_max_sync(uint32_t, int x) {
    const auto slots = machine::show<1>({(uint32_t)x}, REDUCE);
    int top = x;
    for (int lane = 0; lane < 32; lane++)
        if ((int)slots[lane][0] > top) top = (int)slots[lane][0];
    return top;
}

inline int atomicAdd(int* p, int x) { const int before = *p; *p += x; return before; }

inline float __uint_as_float(uint32_t x) { float y; memcpy(&y, &x, 4); return y; }
inline uint32_t __float_as_uint(float x) { uint32_t y; memcpy(&y, &x, 4); return y; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __int2float_rn(int x) { return (float)x; }
inline float __ll2float_rn(long long x) { return (float)x; }
inline int __float2int_rn(float x) { return (int)lrintf(x); }
inline float __fadd_ru(float a, float b) {  // up: what rounding to nearest took away is put back
    const float sum = a + b, back = sum - a;
    const float lost = (a - (sum - back)) + (b - back);
    return lost > 0 ? nextafterf(sum, INFINITY) : sum;
}

inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
    const uint64_t both = (uint64_t)b << 32 | a;
    uint32_t y = 0;
    for (int i = 0; i < 4; i++) {
        const uint32_t byte = both >> 8 * (selector >> 4 * i & 7) & 0xff;
        y |= (selector >> 4 * i & 8 ? (byte & 0x80 ? 0xff : 0) : byte) << 8 * i;
    }
    return y;
}

inline uint64_t __cvta_generic_to_shared(const void* p) {
    return (const unsigned char*)p - machine::shared;
}
