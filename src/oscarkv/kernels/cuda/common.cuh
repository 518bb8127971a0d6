// What every kernel of oscarkv shares: types, PTX in plain integers, the packed format's geometry.
//
// Compiled by NVRTC without any header. A variant is fixed by macros (see decode.py and write.py):
//   HEAD_DIM, GROUPS, PARAMETERS (0 fp16, 1 log8, 2 log8-symmetric), KEY_BITS, VALUE_BITS (of codes:
//   2 or, for decode alone, 3), PAGE (tokens of a history page), BF16 (1: activations are bfloat16, 0:
//   float16), and those named in each file.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define DEVICE __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define ROLLED _Pragma("unroll 1")
#define INFINITE as_float(0x7f800000u)

// -- the packed format (docs/format.md) --------------------------------------------------------

constexpr int WORDS = HEAD_DIM / 16;                                // 32-bit words of 2-bit codes
constexpr int HIGH_WORDS = HEAD_DIM / 32;                           // of 3 bits: of the high bits
constexpr int KEY_WORDS = WORDS + (KEY_BITS == 3 ? HIGH_WORDS : 0);  // of a row
constexpr int VALUE_WORDS = WORDS + (VALUE_BITS == 3 ? HIGH_WORDS : 0);
static_assert((KEY_BITS == 2 && VALUE_BITS == 2) || (HEAD_DIM % 32 == 0 && GROUPS == 1),
              "3 bits: whole words of high bits, one group");
constexpr int PADDED = WORDS <= 4 ? 4 : WORDS <= 8 ? 8 : 16;        // as the fragments see it
constexpr bool EXACT_WORDS = PADDED == WORDS;
// Two groups with a scale each and no offset: what is known of a token still fits a pair of floats.
constexpr bool PAIRED = GROUPS == 2 && PARAMETERS == 2;
constexpr int PARAMETER_BYTES = GROUPS * (PARAMETERS == 0 ? 4 : PARAMETERS == 1 ? 2 : 1);
constexpr int VALUE_CODES = PAGE * KEY_WORDS * 4;
constexpr int KEY_PARAMETERS = VALUE_CODES + PAGE * VALUE_WORDS * 4;
constexpr int VALUE_PARAMETERS = KEY_PARAMETERS + PAGE * PARAMETER_BYTES;
constexpr int TILE = 16;                                            // tokens of a tile
constexpr int WINDOW_ROWS = 16;                                     // tokens of a window page

// Lanes of a warp as matrix fragments see them: g = lane / 4 (0..7), t = lane % 4 (0..3).
//
// Words as a warp holds them, for values and for writing: lane g owns word g of each block of 8;
// with 4 words only, lanes g and g + 4 share word g & 3 and split its slots. Slot p of half e is
// channel (2 p + e) WORDS + word. A "row tile" m is 16 channels: row g is half 0, row g + 8 half 1.
constexpr int ROW_TILES = PADDED;
DEVICE int tile_word(int m, int g) { return PADDED == 4 ? (g & 3) : (m / 8) * 8 + g; }
DEVICE int tile_slot(int m, int g) { return PADDED == 4 ? 4 * (g >> 2) + m : m % 8; }
DEVICE int tile_channel(int m, int g, int half) {
    return (2 * tile_slot(m, g) + half) * WORDS + tile_word(m, g);
}
DEVICE bool tile_valid(int m, int g) { return EXACT_WORDS || tile_word(m, g) < WORDS; }

// -- scalars -------------------------------------------------------------------------------------

DEVICE float as_float(u32 x) { return __uint_as_float(x); }
DEVICE u32 as_bits(float x) { return __float_as_uint(x); }

DEVICE float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE float log2_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE float half_to_float(u16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}

// Two floats to two halves: low | high << 16.
DEVICE u32 pack_half(float low, float high) {
    u32 y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

// The larger of each of two halves.
DEVICE u32 max_half(u32 a, u32 b) {
    u32 y;
    asm("max.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}

// Activations: bfloat16 or float16.
DEVICE float load_activation(u16 x) {
#if BF16
    return as_float((u32)x << 16);
#else
    return half_to_float(x);
#endif
}

DEVICE u32 pack_activation(float low, float high) {
#if BF16
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
#else
    return pack_half(low, high);
#endif
}

DEVICE float low_activation(u32 x) { return load_activation((u16)(x & 0xffff)); }
DEVICE float high_activation(u32 x) { return load_activation((u16)(x >> 16)); }

// -- memory --------------------------------------------------------------------------------------

struct alignas(16) Quad { u32 x, y, z, w; };
struct alignas(16) Float4 { float x, y, z, w; };

DEVICE Quad load_quad(const void* p) {  // data that no launch in flight changes
    Quad v;
    asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

struct alignas(8) Pair { float x, y; };

DEVICE Pair load_fresh_pair(const float* p) {  // written by another block of this launch
    Pair v;
    asm volatile("ld.global.cg.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(p));
    return v;
}

DEVICE Float4 load_fresh_quad(const float* p) {
    Float4 v;
    asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p));
    return v;
}

// Counts one more, and says how many there were. What this block wrote before a barrier in front of
// it is there for a block that counts later and has a barrier behind it.
DEVICE int arrive(int* count) {
    int before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(count) : "memory");
    return before;
}

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// The cache itself is read once and is far larger than L2: what it brings in should go first, so
// that tables, transforms, partial results and code stay.
DEVICE u64 read_once_policy() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

DEVICE Quad load_quad_once(const void* p, u64 policy) {
    Quad v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p), "l"(policy));
    return v;
}

DEVICE void copy_async_once(u32 shared, const void* global, u64 policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;"
                 :: "r"(shared), "l"(global), "l"(policy));
}

DEVICE void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" :: "l"(p)); }
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;"); }
template <int N> DEVICE void wait_copies() { asm volatile("cp.async.wait_group %0;" :: "n"(N)); }

// -- matrix units --------------------------------------------------------------------------------

// D[16 x 8] += A[16 x 32] B[32 x 8], unsigned by signed bytes.
DEVICE void mma_bytes(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The same, from a start that stays as it is.
DEVICE void mma_bytes_from(int (&d)[4], const int (&start)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0,
                           u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%10,%11,%12,%13};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1),
          "r"(start[0]), "r"(start[1]), "r"(start[2]), "r"(start[3]));
}

// D[16 x 8] += A[16 x 16] B[16 x 8], halves in, floats out.
DEVICE void mma_half(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

DEVICE void mma_activation(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if BF16
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
    mma_half(d, a0, a1, a2, a3, b0, b1);
#endif
}

// Transpose of an 8 x 8 matrix of 16-bit elements that lies in fragment order.
DEVICE u32 transpose_8x8(u32 x) {
    u32 y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

DEVICE u32 permute_bytes(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }

// A launch may start while the one before it still runs; before it touches anything that others
// write, it waits. The one after it may start once all blocks have called start_next, or ended.
DEVICE void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

DEVICE void start_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

constexpr u32 ALL = 0xffffffffu;
constexpr float LOG2E = 1.4426950408889634f;
