// The instructions that C++ has no words for: PTX in plain integers. Nothing else of the kernels' code
// is more than C++ with CUDA's own functions, so what stands here is all that a test without a GPU has
// to make up for (tests/kernels/emulator).

// -- scalars -------------------------------------------------------------------------------------

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

// Two floats to two bfloat16.
DEVICE u32 pack_bfloat(float low, float high) {
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

DEVICE u32 add_pair(u32 a, u32 b) {
    u32 y;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}

DEVICE u32 add_saturated(u32 a, u32 b) {  // to [0, 1]
    u32 y;
    asm("add.rn.sat.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}

DEVICE float reaches(float x, float threshold) {  // 1 or 0
    float y;
    asm("set.ge.f32.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(threshold));
    return y;
}

// Bits of a where the mask is set, of b elsewhere. Written in C, it becomes two instructions: what is
// read of the result makes two masks of one.
DEVICE u32 mix(u32 a, u32 b, u32 mask) {
    u32 y;
    asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(y) : "r"(a), "r"(b), "r"(mask));
    return y;
}

// -- memory --------------------------------------------------------------------------------------

DEVICE Quad load_quad(const void* p) {  // data that no launch in flight changes
    Quad v;
    asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

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

DEVICE void copy_to_shared(u32 shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(shared), "l"(global));
}

// Of all that the thread copied.
DEVICE void wait_for_shared() { asm volatile("cp.async.wait_all;" ::: "memory"); }

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

DEVICE void mma_bfloat(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Transpose of an 8 x 8 matrix of 16-bit elements that lies in fragment order.
DEVICE u32 transpose_8x8(u32 x) {
    u32 y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

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

