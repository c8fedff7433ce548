// Device side of the cache formats: tables folded to constants, unpacking of 16-bit units, the signed Hadamard rotation.
#pragma once

#include "kvq-ptx.cuh"

// the C tables, as constant expressions that device code can fold
#define const constexpr
#include "kvq-tables.h"
#undef const

// ---- layout of a block of N values at BITS bits ----
// Stands for the bits per code of oscar2, whose tiers have 4, 2 and 1.
static constexpr int KVQ_TIERS = 5;

// The kernels read blocks as 16-bit units, because a block is only 2-byte aligned.
template <int BITS, int N> struct kvq_block {
    static constexpr int code_bits  = BITS == KVQ_TIERS ? 2 : BITS;     // on average
    static constexpr int bytes      = N*code_bits/8 + 2;
    static constexpr int scale_off  = N*code_bits/8;           // fp16 scale behind the codes
    static constexpr int unit_dims  = BITS == 4 ? 4 : 8;       // values of one unit
    static constexpr int units      = N/unit_dims;
    static constexpr int hi_off     = N/4;                     // high-bit plane of 3-bit codes
};

// planes of oscar2's tiers of 4, 2 and 1 bits; the last begins in the middle of a unit where N/16 is odd
template <int N> struct kvq_tier_block {
    static constexpr int two = N/8, one = N/8 + N/16, one_odd = one & 1, one_unit = one - one_odd;
};
static constexpr uint32_t KVQ_TIER_SCALE_MASK = 0xFFE0;        // bits of the fp16 scale; the others choose spreads

// int8 levels of the tiers of 2 and 1 bits in spread `index` (the five lowest bits of a block's scale), for prmt
struct kvq_tier_words { uint32_t two[32], one[32]; };
__host__ __device__ constexpr kvq_tier_words kvq_pack_tiers() {
    kvq_tier_words w = {};
    for (int i = 0; i < 32; ++i) {
        for (int c = 0; c < 4; ++c) {
            w.two[i] |= (uint32_t(KVQ_TIER_LEVELS_2[4*((i >> 3) & 3) + c]) & 0xFFu) << (8*c);
            w.one[i] |= (uint32_t(KVQ_TIER_LEVELS_1[2*(i & 7) + (c & 1)]) & 0xFFu) << (8*c);
        }
    }
    return w;
}
static __constant__ kvq_tier_words KVQ_TIER_DEV = kvq_pack_tiers();

// The levels of every spread, one spread a lane: a shuffle looks them up.
struct kvq_tier_tables {
    uint32_t two_of, one_of;
    __device__ __forceinline__ kvq_tier_tables(const int lane) : two_of(KVQ_TIER_DEV.two[lane]), one_of(KVQ_TIER_DEV.one[lane]) {}
    // levels of a block by the bits of its scale; all lanes take part
    __device__ __forceinline__ uint32_t two(const uint32_t scale) const { return __shfl_sync(0xFFFFFFFFu, two_of, int(scale & 31)); }
    __device__ __forceinline__ uint32_t one(const uint32_t scale) const { return __shfl_sync(0xFFFFFFFFu, one_of, int(scale & 31)); }
};

template <int BITS> __host__ __device__ constexpr float kvq_scale_of() {
    return BITS == 2 ? KVQ_SCALE_2 : BITS == 3 ? KVQ_SCALE_3 : BITS == 4 ? KVQ_SCALE_4 : KVQ_TIER_SCALE;
}

// four consecutive levels, plus a bias, packed into one register for prmt
template <int BITS> __host__ __device__ constexpr uint32_t kvq_level_word(const int first, const int bias) {
    uint32_t w = 0;
    for (int i = 0; i < 4; ++i) {
        const int level = BITS == 2 ? KVQ_LEVELS_2[(first + i) & 3] : BITS == 3 ? KVQ_LEVELS_3[(first + i) & 7] : KVQ_LEVELS_4[(first + i) & 15];
        w |= (uint32_t(level + bias) & 0xFFu) << (8*i);
    }
    return w;
}

// A constant in a vector register, by a detour that the compiler cannot see through: it would keep a plain one in a uniform
// register and copy it before every use. All lanes of a warp must take part.
static __device__ __forceinline__ uint32_t kvq_pin(const uint32_t value) {
    const uint32_t lane = threadIdx.x & 31;
    return __shfl_xor_sync(0xFFFFFFFFu, value ^ lane, 1) ^ lane ^ 1;
}

// Left shifts. The unit of shifts, permutes and logic is the busiest one while the decode kernel unpacks, so kvq_product_shift
// multiplies, with the factors in registers where the compiler does not see that they are powers of two.
struct kvq_plain_shift {
    template <int K> __device__ __forceinline__ uint32_t left(const uint32_t x) const { return x << K; }
};
struct kvq_product_shift {
    uint32_t l2, l4, l8;
    __device__ __forceinline__ kvq_product_shift() : l2(kvq_pin(4)), l4(kvq_pin(16)), l8(kvq_pin(256)) {}
    template <int K> __device__ __forceinline__ uint32_t left(const uint32_t x) const { return x*(K == 2 ? l2 : l4); }
    // a number from its two fixed-point bytes
    __device__ __forceinline__ int join(const int high, const int low) const { return high*int(l8) + low; }
};

// Level tables in registers, and the look-ups: the four codes of a look-up are the nibbles of sel's low half (bit 3 of a
// nibble is zero for 2- and 3-bit codes).
template <int BITS, int BIAS, typename SHIFT = kvq_plain_shift> struct kvq_tables {
    static constexpr uint32_t t0 = kvq_level_word<BITS>(0, BIAS), t1 = kvq_level_word<BITS>(4, BIAS);
    static constexpr uint32_t t2 = kvq_level_word<BITS>(8, BIAS), t3 = kvq_level_word<BITS>(12, BIAS);
    uint32_t r0, r2, pick;
    SHIFT shift;

    __device__ __forceinline__ kvq_tables(const SHIFT & s = SHIFT()) : r0(kvq_pin(t0)), r2(BITS == 4 ? kvq_pin(t2) : 0), pick(BITS == 4 ? kvq_pin(0x32103210u) : 0), shift(s) {}

    __device__ __forceinline__ uint32_t one(const uint32_t sel) const {
        if constexpr (BITS == 2) {
            return kvq_prmt(r0, r0, sel);
        } else if constexpr (BITS == 3) {
            return kvq_prmt(r0, t1, sel);
        } else {
            const uint32_t low = sel & 0x7777u;
            return kvq_prmt(kvq_prmt(r0, t1, low), kvq_prmt(r2, t3, low), ((sel >> 1) & 0x4444u) | pick);
        }
    }
    // both halves of sel
    __device__ __forceinline__ void two(const uint32_t sel, uint32_t & a, uint32_t & b) const {
        if constexpr (BITS == 4) {
            const uint32_t low  = sel & 0x77777777u, high  = ((sel >> 1) & 0x44444444u) | pick;
            const uint32_t low1 = low >> 16, high1 = high >> 16;
            a = kvq_prmt(kvq_prmt(r0, t1, low ), kvq_prmt(r2, t3, low ), high );
            b = kvq_prmt(kvq_prmt(r0, t1, low1), kvq_prmt(r2, t3, low1), high1);
        } else {
            a = one(sel);
            b = one(sel >> 16);
        }
    }
};

// One unit of a row-major operand. 2 and 3 bits: r0 = (b0 k0, b0 k2, b1 k0, b1 k2), r1 = the same of k1 and k3, where
// byte b of the plane holds coordinates k*(N/4) + b. hi: high-bit plane of the unit's two bytes, shifted to bit 2k.
template <int BITS, int BIAS, typename SHIFT> static __device__ __forceinline__ void kvq_unit_pair(
        const kvq_tables<BITS, BIAS, SHIFT> & table, const uint32_t lo, const uint32_t hi, uint32_t & r0, uint32_t & r1) {
    if constexpr (BITS == 2) {
        r0 = table.one(lo & 0x3333u);
        r1 = table.one((lo >> 2) & 0x3333u);
    } else {
        static_assert(BITS == 3, "4-bit units hold one register");
        const uint32_t h = hi & 0x5555u;
        r0 = table.one(kvq_bitsel(0x33333333u, lo, table.shift.template left<2>(h)));
        r1 = table.one(kvq_bitsel(0x33333333u, lo >> 2, h));
    }
}

static __device__ __forceinline__ uint32_t kvq_ld16(const void * p) {
    return *(const uint16_t *) p;
}
static __device__ __forceinline__ float kvq_ld_half(const void * p) {
    return __half2float(*(const __half *) p);
}

// High-bit plane of unit u of a 3-bit block: bytes 2u and 2u+1 of the plane, shifted so that coordinate k sits at bit 2k.
template <int N> static __device__ __forceinline__ uint32_t kvq_hi16(const char * block, const int u) {
    const int s = 2*u >= N/8;
    return kvq_ld16(block + N/4 + 2*u - s*(N/8)) >> s;
}

// ---- rotation ----

struct kvq_sign_words { uint32_t w[4]; };
__host__ __device__ constexpr kvq_sign_words kvq_pack_signs() {
    kvq_sign_words s = {};
    for (int i = 0; i < 128; ++i) {
        s.w[i/32] |= (KVQ_SIGNS[i] < 0.0f ? 1u : 0u) << (i%32);
    }
    return s;
}

template <int N> struct kvq_hadamard {
    static constexpr int paley = N == 80 ? 20 : N == 96 ? 12 : N == 112 ? 28 : 1;
    static constexpr int inner = N/paley;            // Sylvester factor
    static constexpr int regs  = (N + 31)/32;        // value i lives in lane i%32, register i/32
};

struct kvq_paley_words { uint32_t w[28]; };
template <int M> __host__ __device__ constexpr kvq_paley_words kvq_paley_rows(const bool transposed) {
    kvq_paley_words p = {};
    for (int i = 0; i < M; ++i) {
        for (int j = 0; j < M; ++j) {
            const uint32_t row = M == 12 ? KVQ_PALEY_12[i % 12] : M == 20 ? KVQ_PALEY_20[i % 20] : KVQ_PALEY_28[i % 28];
            const uint32_t bit = (row >> j) & 1u;
            if (transposed) { p.w[j] |= bit << i; } else { p.w[i] |= bit << j; }
        }
    }
    return p;
}
static __constant__ kvq_paley_words KVQ_PALEY_DEV[6] = {
    kvq_paley_rows<12>(false), kvq_paley_rows<12>(true), kvq_paley_rows<20>(false), kvq_paley_rows<20>(true),
    kvq_paley_rows<28>(false), kvq_paley_rows<28>(true),
};

static __device__ __forceinline__ float kvq_flip(const float x, const uint32_t minus) {
    return __uint_as_float(__float_as_uint(x) ^ (minus << 31));
}

template <int N> static __device__ __forceinline__ void kvq_apply_signs(float * x, const int lane) {
    constexpr kvq_sign_words s = kvq_pack_signs();
#pragma unroll
    for (int r = 0; r < kvq_hadamard<N>::regs; ++r) {
        x[r] = kvq_flip(x[r], (s.w[r] >> lane) & 1u);
    }
}

// the butterflies of every run of N/paley values
template <int N> static __device__ __forceinline__ void kvq_sylvester_warp(float * x, const int lane) {
    using H = kvq_hadamard<N>;
#pragma unroll
    for (int h = 1; h < (H::inner < 32 ? H::inner : 32); h *= 2) {
#pragma unroll
        for (int r = 0; r < H::regs; ++r) {
            const float other = __shfl_xor_sync(0xFFFFFFFFu, x[r], h);
            x[r] = (lane & h) ? __fsub_rn(other, x[r]) : __fadd_rn(x[r], other);
        }
    }
#pragma unroll
    for (int h = 1; 32*h < H::inner; h *= 2) {
#pragma unroll
        for (int r = 0; r < H::regs; ++r) {
            if (!(r & h)) {
                const float u = x[r], v = x[r + h];
                x[r]     = __fadd_rn(u, v);
                x[r + h] = __fsub_rn(u, v);
            }
        }
    }
}
// mixes the runs with the Paley matrix or its transpose
template <int N, bool TRANSPOSED> static __device__ __forceinline__ void kvq_paley_warp(float * x, float * buf, const int lane) {
    using H = kvq_hadamard<N>;
    const uint32_t * rows = KVQ_PALEY_DEV[(H::paley == 12 ? 0 : H::paley == 20 ? 2 : 4) + TRANSPOSED].w;
    __syncwarp();
#pragma unroll
    for (int r = 0; r < H::regs; ++r) {
        if (r*32 + lane < N) {
            buf[r*32 + lane] = x[r];
        }
    }
    __syncwarp();
#pragma unroll
    for (int r = 0; r < H::regs; ++r) {
        const int i = r*32 + lane < N ? r*32 + lane : 0;
        const uint32_t row = rows[i/H::inner];
        const int b = i % H::inner;
        float acc = kvq_flip(buf[b], row & 1u);
        for (int a = 1; a < H::paley; ++a) {
            acc = __fadd_rn(acc, kvq_flip(buf[a*H::inner + b], (row >> a) & 1u));
        }
        x[r] = acc;
    }
    __syncwarp();
}

// x = H x, or H^T x, of one block held by a warp (value i in lane i%32, register i/32); unnormalised; the order of the
// additions is the reference's. buf: N floats of shared memory of this warp, used only where N is no power of two.
template <int N, bool TRANSPOSED> static __device__ __forceinline__ void kvq_hadamard_warp(float * x, float * buf, const int lane) {
    if constexpr (!TRANSPOSED) {
        kvq_sylvester_warp<N>(x, lane);
    }
    if constexpr (kvq_hadamard<N>::paley > 1) {
        kvq_paley_warp<N, TRANSPOSED>(x, buf, lane);
    }
    if constexpr (TRANSPOSED) {
        kvq_sylvester_warp<N>(x, lane);
    }
}
