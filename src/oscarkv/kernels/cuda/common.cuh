// What every kernel of oscarkv shares: types, the packed format's geometry, activations.
//
// Compiled by NVRTC without any header. A variant is fixed by macros (see decode.py and write.py):
//   HEAD_DIM, GROUPS, PARAMETERS (0 fp16, 1 log8, 2 log8-symmetric), KEY_BITS, VALUE_BITS (of codes:
//   2 or 3), PAGE (tokens of a history page), BF16 (1: activations are bfloat16, 0: float16), and those
//   named in each file.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define DEVICE __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define ROLLED _Pragma("unroll 1")
#define INFINITE as_float(0x7f800000u)

struct alignas(8) Pair { float x, y; };
struct alignas(16) Quad { u32 x, y, z, w; };
struct alignas(16) Float4 { float x, y, z, w; };

constexpr u32 ALL = 0xffffffffu;
constexpr float LOG2E = 1.4426950408889634f;

#include "ptx.cuh"

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
// Of codes of so many bits: their middle, what lo is -s times; and log8's unit of lo / s.
DEVICE constexpr float middle_of(int bits) { return bits == 3 ? 3.5f : 1.5f; }
DEVICE constexpr float step_of(int bits) { return bits == 3 ? 7.0f / 96.0f : 1.0f / 32.0f; }
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

DEVICE u32 permute_bytes(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }
DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

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
    return pack_bfloat(low, high);
#else
    return pack_half(low, high);
#endif
}

DEVICE float low_activation(u32 x) { return load_activation((u16)(x & 0xffff)); }
DEVICE float high_activation(u32 x) { return load_activation((u16)(x >> 16)); }

DEVICE void mma_activation(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if BF16
    mma_bfloat(d, a0, a1, a2, a3, b0, b1);
#else
    mma_half(d, a0, a1, a2, a3, b0, b1);
#endif
}
