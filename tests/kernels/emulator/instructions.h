// ptx.cuh without a GPU: the same functions, in C++.

DEVICE float exp2_approx(float x) {
    const float y = exp2f(x);
    return y < 1.17549435e-38f ? 0.0f : y;
}

DEVICE float log2_approx(float x) { return log2f(x); }

DEVICE float half_to_float(u16 x) {
    _Float16 y;
    memcpy(&y, &x, 2);
    return (float)y;
}

DEVICE u32 half_of(double x) {
    const _Float16 y = (_Float16)x;
    u16 bits;
    memcpy(&bits, &y, 2);
    return bits;
}

DEVICE u32 pack_half(float low, float high) { return half_of(low) | half_of(high) << 16; }

DEVICE u32 max_half(u32 a, u32 b) {
    u32 y = 0;
    for (int i = 0; i < 32; i += 16)
        y |= half_of(fmaxf(half_to_float((u16)(a >> i)), half_to_float((u16)(b >> i)))) << i;
    return y;
}

DEVICE u32 bfloat_of(float x) {
    const u32 bits = __float_as_uint(x);
    return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

DEVICE u32 pack_bfloat(float low, float high) { return bfloat_of(low) | bfloat_of(high) << 16; }

DEVICE u32 add_halves(u32 a, u32 b, bool saturate) {
    u32 y = 0;
    for (int i = 0; i < 32; i += 16) {
        double sum = (double)half_to_float((u16)(a >> i)) + half_to_float((u16)(b >> i));
        if (saturate) sum = sum > 0 ? (sum < 1 ? sum : 1) : 0;
        y |= half_of(sum) << i;
    }
    return y;
}

DEVICE u32 add_pair(u32 a, u32 b) { return add_halves(a, b, false); }
DEVICE u32 add_saturated(u32 a, u32 b) { return add_halves(a, b, true); }
DEVICE float reaches(float x, float threshold) { return x >= threshold ? 1.0f : 0.0f; }
DEVICE u32 mix(u32 a, u32 b, u32 mask) { return (a & mask) | (b & ~mask); }

// -- memory --------------------------------------------------------------------------------------

template <class T> DEVICE T aligned_load(const void* p) {
    if ((u64)p % sizeof(T)) machine::fail("a load that is not aligned");
    T x;
    memcpy(&x, p, sizeof x);
    return x;
}

DEVICE Quad load_quad(const void* p) { return aligned_load<Quad>(p); }
DEVICE Pair load_fresh_pair(const float* p) { return aligned_load<Pair>(p); }
DEVICE Float4 load_fresh_quad(const float* p) { return aligned_load<Float4>(p); }
DEVICE int arrive(int* count) { return atomicAdd(count, 1); }
DEVICE u64 read_once_policy() { return 0; }
DEVICE Quad load_quad_once(const void* p, u64) { return load_quad(p); }

DEVICE void copy_to_shared(u32 shared, const void* global) {
    if ((u64)global % 16 || shared % 16) machine::fail("a copy that is not aligned");
    machine::current->copies.push_back({machine::shared + (int)shared, global});
}

DEVICE void copy_async_once(u32 shared, const void* global, u64) { copy_to_shared(shared, global); }
DEVICE void prefetch(const void*) {}

DEVICE void commit_copies() {
    machine::current->groups.push_back(std::move(machine::current->copies));
    machine::current->copies.clear();
}

template <int N> DEVICE void wait_copies() {  // for all groups but the N newest
    auto& groups = machine::current->groups;
    for (; groups.size() > N; groups.pop_front())
        for (const machine::Copy& copy : groups.front()) memcpy(copy.to, copy.from, 16);
}

DEVICE void wait_for_shared() {
    commit_copies();
    wait_copies<0>();
}

// -- matrix units --------------------------------------------------------------------------------

// Lane 4 g + t has rows g and g + 8 of A (registers a0, a2 and a1, a3), column g of B, and columns 2t
// and 2t + 1 of D: d0, d1 of row g, d2, d3 of row g + 8. A register holds neighbours along the inner
// dimension, the second one of a row the other half of it.
template <class Element, int PER_REGISTER, class Sum>
DEVICE void product(Sum (&sums)[4], int kind, const u32 (&registers)[6], Element element) {
    const auto all = machine::show(registers, kind);
    const int g = machine::lane() / 4, t = machine::lane() % 4;
    for (int i = 0; i < 4; i++) {
        const int second_row = i / 2, column = 2 * t + i % 2;
        for (int half = 0; half < 2; half++)
            for (int lane = 0; lane < 4; lane++)
                for (int k = 0; k < PER_REGISTER; k++)
                    sums[i] += element(all[4 * g + lane][2 * half + second_row], k, true)
                        * element(all[4 * column + lane][4 + half], k, false);
    }
}

DEVICE void mma_bytes_from(int (&d)[4], const int (&start)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0,
                           u32 b1) {
    u32 sums[4] = {(u32)start[0], (u32)start[1], (u32)start[2], (u32)start[3]};  // they may wrap
    auto element = [](u32 x, int k, bool of_a) {
        return (u32)(of_a ? (int)(u8)(x >> 8 * k) : (int)(signed char)(x >> 8 * k));
    };
    product<decltype(element), 4>(sums, MMA_BYTES, {a0, a1, a2, a3, b0, b1}, element);
    for (int i = 0; i < 4; i++) d[i] = (int)sums[i];
}

DEVICE void mma_bytes(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    const int start[4] = {d[0], d[1], d[2], d[3]};
    mma_bytes_from(d, start, a0, a1, a2, a3, b0, b1);
}

template <class Element>
DEVICE void mma_16_bits(float (&d)[4], const u32 (&registers)[6], Element element) {
    double sums[4] = {d[0], d[1], d[2], d[3]};
    product<Element, 2>(sums, MMA_HALVES, registers, element);
    for (int i = 0; i < 4; i++) d[i] = (float)sums[i];
}

struct HalfValues {
    float of[1 << 16];
    HalfValues() { for (int x = 0; x < 1 << 16; x++) of[x] = half_to_float((u16)x); }
};
static const HalfValues half_values;

DEVICE void mma_half(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    mma_16_bits(d, {a0, a1, a2, a3, b0, b1},
                [](u32 x, int k, bool) { return (double)half_values.of[x >> 16 * k & 0xffff]; });
}

DEVICE void mma_bfloat(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    mma_16_bits(d, {a0, a1, a2, a3, b0, b1},
                [](u32 x, int k, bool) { return (double)__uint_as_float(x >> 16 * k << 16); });
}

DEVICE u32 transpose_8x8(u32 x) {
    const auto all = machine::show<1>({x}, TRANSPOSE);
    const int g = machine::lane() / 4, t = machine::lane() % 4;
    auto element = [&](int row, int column) {
        return all[4 * row + column / 2][0] >> 16 * (column % 2) & 0xffff;
    };
    return element(2 * t, g) | element(2 * t + 1, g) << 16;
}

DEVICE void wait_for_previous() {}
DEVICE void start_next() {}
