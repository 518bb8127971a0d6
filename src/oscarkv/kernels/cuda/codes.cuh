// Packed codes on their way to the matrix units: what a lane loads, and the operands made of it.
//
// A 3-bit row has its low bits in words as a 2-bit row has them, then HIGH_WORDS words of high bits.
// The high bits of word w are half w / HIGH_WORDS of high word w % HIGH_WORDS: bit 2 p + e belongs to
// slot p of half e. Two neighbouring slots leave no room for a third bit, every second slot does: a
// word becomes two registers, of its even and of its odd slots, fields of 3 bits, 4 bits apart.
// (tests/kernels/test_cuda_codes.py does all steps in Python.)

constexpr u32 LOW_BITS = 0x33333333u;  // of fields, 4 bits apart

// -- keys ----------------------------------------------------------------------------------------

// Of a token: the lane's words; with 3 bits each as slots 0 and 2 of every byte, then slots 1 and 3.
constexpr int KEY_REGISTERS = LANE_WORDS * (KEY_BITS - 1);

// Words that lie next to each other, aligned to their size.
template <int N> DEVICE void load_neighbours(u32 (&words)[N], const u32* from) {
    if constexpr (N == 2) {
        const u64 pair = *(const u64*)from;
        words[0] = (u32)pair;
        words[1] = (u32)(pair >> 32);
    } else if constexpr (N == 4) {
        const Quad quad = *(const Quad*)from;
        words[0] = quad.x; words[1] = quad.y; words[2] = quad.z; words[3] = quad.w;
    } else {
        words[0] = from[0];
    }
}

// A lane's words of a token's key.
template <int N> DEVICE void load_words(u32 (&words)[N], const u32* row, int t) {
    if constexpr (EXACT_WORDS) {
        load_neighbours(words, row + N * t);
    } else {
        UNROLL for (int w = 0; w < N; w++) {
            const int word = t * N + w;
            words[w] = word < WORDS ? row[word] : 0;
        }
    }
}

// `shift`: 4^(3 - j), as `History` has it.
DEVICE void load_key(u32 (&key)[KEY_REGISTERS], const u32* row, int t, const u32 (&shift)[4]) {
    if constexpr (KEY_BITS == 2) {
        load_words(key, row, t);
    } else {
        u32 low[LANE_WORDS], high[LANE_WORDS];
        load_words(low, row, t);
        if constexpr (EXACT_WORDS) {
            load_neighbours(high, row + WORDS + LANE_WORDS * (t % 2));
        } else {
            UNROLL for (int w = 0; w < LANE_WORDS; w++) {
                const int word = t * LANE_WORDS + w;
                high[w] = word < WORDS ? row[WORDS + word % HIGH_WORDS] : 0;
            }
        }
        UNROLL for (int w = 0; w < LANE_WORDS; w++) {
            const int half = EXACT_WORDS ? t / 2 : (t * LANE_WORDS + w) / HIGH_WORDS;
            const u32 both = permute_bytes(high[w], high[w], half ? 0x3232 : 0x1010);
            const u32 bits = mix(both, both >> 1, 0x0000ffff);  // bit 2 p of either half is slot p's
            key[2 * w] = mix(low[w], bits * shift[2], LOW_BITS);
            key[2 * w + 1] = mix(low[w] >> 2, bits, LOW_BITS);
        }
    }
}

// Part k of a key: four bytes, of slot k / LANE_WORDS of a word's bytes, each KEY_UNIT times a code.
DEVICE u32 key_part(const u32 (&key)[KEY_REGISTERS], int k, const u32 (&shift)[4]) {
    const int slot = k / LANE_WORDS, w = k % LANE_WORDS;
    if constexpr (KEY_BITS == 2) {
        return (slot == 3 ? key[w] : key[w] * shift[slot]) & 0xc0c0c0c0u;
    } else {
        const u32 fields = key[2 * w + slot % 2];
        return (slot / 2 ? fields : fields * shift[1]) & 0x70707070u;
    }
}

// With two groups, which are the bytes' places in a half word, the bytes are sorted by group
// first (`part_channel`): every part is of one group, and nothing is multiplied twice.
DEVICE u32 sorted_part(const u32 (&words)[KEY_REGISTERS], int k, const u32 (&shift)[4]) {
    const u32 order = part_group(k) ? 0x7531 : 0x6420;
    if constexpr (LANE_WORDS == 1) {  // of one word: two slots at a time, the lower one above
        const u32 x = permute_bytes(words[0], words[0] * 4, order);
        return (k % 2 ? x : x * shift[1]) & 0xc0c0c0c0u;
    } else {
        const u32 x = permute_bytes(words[k / 8 * 2], words[k / 8 * 2 + 1], order);
        return (k % 4 == 3 ? x : x * shift[k % 4]) & 0xc0c0c0c0u;
    }
}

// -- values --------------------------------------------------------------------------------------

// Words of two tokens, in either half: x[e] of tokens 2t, 2t + 1, x[2 + e] of 2t + 8, 2t + 9, half e
// of the lane's word of block `block`; with four words, of its byte. 3 bits: as even slots in x, odd
// slots in `odd`.
constexpr int VALUE_SLOTS = PADDED == 4 ? 4 : 8;  // of a lane's half word
constexpr int ODD_REGISTERS = VALUE_BITS == 3 ? 4 : 1;

// Returns the byte.
DEVICE u32 load_value(u32 (&x)[4], u32 (&odd)[ODD_REGISTERS], const u32* codes, int block, int g,
                      int t, const u32 (&shift)[4]) {
    const int word = PADDED == 4 ? (g & 3) : 8 * block + g;
    u32 v[4];
    UNROLL for (int i = 0; i < 4; i++) {
        const int token = 2 * t + (i & 1) + 8 * (i >> 1);
        v[i] = EXACT_WORDS || word < WORDS ? codes[token * VALUE_WORDS + word] : 0;
    }
    const u32 byte = PADDED == 4 ? g >> 2 : 0;  // four words: lanes g and g + 4 share one
    const u32 low = 0x5410 + 0x1111 * byte, high = 0x7632 + 0x1111 * byte;
    x[0] = permute_bytes(v[0], v[1], low);
    x[1] = permute_bytes(v[0], v[1], high);
    x[2] = permute_bytes(v[2], v[3], low);
    x[3] = permute_bytes(v[2], v[3], high);
    if constexpr (VALUE_BITS == 3) {
        UNROLL for (int i = 0; i < 4; i++) {
            const int token = 2 * t + (i & 1) + 8 * (i >> 1), at = WORDS + word % HIGH_WORDS;
            v[i] = EXACT_WORDS || word < WORDS ? codes[token * VALUE_WORDS + at] : 0;
        }
        const u32 half = word / HIGH_WORDS;  // of the high word; with four words, a byte of it
        const u32 mine = PADDED == 4 ? 0x0400 + 0x0101 * (2 * half + byte) : half ? 0x7632 : 0x5410;
        UNROLL for (int i = 0; i < 4; i += 2) {
            const u32 both = permute_bytes(v[i], v[i + 1], mine);
            UNROLL for (int e = 0; e < 2; e++) {
                const u32 bits = both >> e;  // bit 2 p is slot p's
                odd[i + e] = mix(x[i + e] >> 2, bits, LOW_BITS);
                x[i + e] = mix(x[i + e], bits * shift[2], LOW_BITS);
            }
        }
    }
    return byte;
}

// Slot p of both tokens, as float16 subnormals: the code times 2^value_place(p) 2^-24. Slots are
// asked for in their order.
DEVICE constexpr int value_place(int p) { return VALUE_BITS == 3 ? 2 * (p & 2) : 2 * (p & 3); }

DEVICE u32 value_slot(u32 (&x)[4], u32 (&odd)[ODD_REGISTERS], int p, int i) {
    u32& fields = VALUE_BITS == 3 && p % 2 ? odd[i % ODD_REGISTERS] : x[i];
    if (p == 4 || VALUE_BITS == 3 && p == 5) fields >>= 8;
    return fields & ((VALUE_BITS == 3 ? 0x00070007u : 0x00030003u) << value_place(p));
}
