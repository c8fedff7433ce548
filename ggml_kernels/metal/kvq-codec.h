// The cache formats on a GPU: levels, unpacking of pairs of units, the signed Hadamard rotation by a simdgroup.
//
// A unit of a block of N values is the four coordinates b, N/4 + b, N/2 + b, 3N/4 + b: one byte of the 2-bit plane. Queries
// are kept in the order of units, so that four levels meet four query values in one product.
#pragma once

#include <metal_stdlib>

#include "kvq-metal-impl.h"
#include "kvq-metal-tables.h"

using namespace metal;

#define KVQ_UNROLL(x) _Pragma("clang loop unroll(full)") for (x)

// ---- blocks ----

static inline short kvq_bytes(short store, short n) {
    return store == KVQ_STORE_F16 ? 2*n : store == KVQ_STORE_Q8_0 ? n/32*34 : n*(store == KVQ_STORE_OSCAR2 ? 2 : store)/8 + 2;
}

static inline bool kvq_rotated(short store) { return store <= 4; }

// levels of a store in threadgroup memory: 16 of the turbo types, or 16 + 16 + 16 of oscar2's tiers
static inline void kvq_load_levels(short store, threadgroup float * table, ushort i, ushort step) {
    for (ushort j = i; j < 48; j += step) {
        float level = 0.0f;
        if (store == KVQ_STORE_OSCAR2) {
            level = j < 16 ? KVQ_TIER_LEVELS_4[j] : j < 32 ? KVQ_TIER_LEVELS_2[j - 16] : KVQ_TIER_LEVELS_1[j - 32];
        } else if (store == 2 && j < 4) {
            level = KVQ_LEVELS_2[j];
        } else if (store == 3 && j < 8) {
            level = KVQ_LEVELS_3[j];
        } else if (store == 4 && j < 16) {
            level = KVQ_LEVELS_4[j];
        }
        table[j] = level;
    }
}

static inline ushort kvq_u16(device const uchar * p) { return *(device const ushort *) p; }

// what levels are multiplied with; q8_0 and f16 bring it along
template <short N> float kvq_scale_of(short store, device const uchar * block) {
    if (store == KVQ_STORE_F16 || store == KVQ_STORE_Q8_0) {
        return 1.0f;
    }
    const ushort bits = kvq_u16(block + kvq_bytes(store, N) - 2);
    if (store == KVQ_STORE_OSCAR2) {
        return (float) as_type<half>((ushort) (bits & 0xFFE0))*(1.0f/KVQ_TIER_SCALE);
    }
    return (float) as_type<half>(bits)*(store == 2 ? 1.0f/KVQ_SCALE_2 : store == 3 ? 1.0f/KVQ_SCALE_3 : 1.0f/KVQ_SCALE_4);
}

// where the levels of oscar2's tiers of 2 and 1 bits begin for a block
struct kvq_tiers { short two, one; };
template <short N> kvq_tiers kvq_tiers_of(short store, device const uchar * block) {
    const ushort bits = store == KVQ_STORE_OSCAR2 ? kvq_u16(block + N/4) : (ushort) 0;
    return { (short) (16 + 4*((bits >> 3) & 3)), (short) (32 + 2*(bits & 7)) };
}

// Units b and b + 1 of a block, b even: levels, or values for q8_0 and f16.
template <short N> void kvq_pair(short store, device const uchar * block, short b, threadgroup const float * table, kvq_tiers tiers,
        thread float4 & first, thread float4 & second) {
    if (store == 2 || store == 3) {
        const ushort w = kvq_u16(block + b);
        const ushort h = store == 3 ? (ushort) (kvq_u16(block + N/4 + b % (N/8)) >> (b/(N/8))) : (ushort) 0;
        KVQ_UNROLL (short k = 0; k < 4; ++k) {
            first [k] = table[((w >> (2*k)) & 3)     | (((h >> (2*k)) & 1) << 2)];
            second[k] = table[((w >> (8 + 2*k)) & 3) | (((h >> (8 + 2*k)) & 1) << 2)];
        }
    } else if (store == 4) {
        const ushort l = kvq_u16(block + b), h = kvq_u16(block + N/4 + b);
        first  = float4(table[l & 15],        table[h & 15],        table[(l >> 4) & 15], table[(h >> 4) & 15]);
        second = float4(table[(l >> 8) & 15], table[(h >> 8) & 15], table[l >> 12],       table[h >> 12]);
    } else if (store == KVQ_STORE_OSCAR2) {
        const ushort f = kvq_u16(block + b % (N/8)) >> (4*(b/(N/8)));
        KVQ_UNROLL (short i = 0; i < 2; ++i) {
            const short u = (b + i) % (N/16), at = (b + i)/(N/16);
            const uchar two = block[N/8 + u] >> (2*at), one = block[N/8 + N/16 + u] >> at;
            const float4 levels = float4(table[(f >> (8*i)) & 15], table[tiers.two + (two & 3)], table[tiers.one + (one & 1)], table[tiers.one + ((one >> 4) & 1)]);
            if (i == 0) {
                first = levels;
            } else {
                second = levels;
            }
        }
    } else if (store == KVQ_STORE_Q8_0) {
        KVQ_UNROLL (short k = 0; k < 4; ++k) {
            const short at = k*(N/4) + b;
            device const uchar * q8 = block + at/32*34;
            const float d = (float) as_type<half>(kvq_u16(q8));
            const ushort w = kvq_u16(q8 + 2 + at % 32);
            first [k] = d*(float) as_type<char>((uchar) (w & 0xFF));
            second[k] = d*(float) as_type<char>((uchar) (w >> 8));
        }
    } else {
        KVQ_UNROLL (short k = 0; k < 4; ++k) {
            device const half * x = (device const half *) block + k*(N/4) + b;
            first [k] = (float) x[0];
            second[k] = (float) x[1];
        }
    }
}

// ---- rotation of a block by a simdgroup: value i in lane i % 32, register i/32 ----

#define KVQ_PALEY(N) ((N) == 80 ? 20 : (N) == 96 ? 12 : (N) == 112 ? 28 : 1)
#define KVQ_REGS(N)  (((N) + 31)/32)

static inline float kvq_flip(float x, uint minus) { return as_type<float>(as_type<uint>(x) ^ (minus << 31)); }

template <short N> void kvq_apply_signs(thread float (&x)[KVQ_REGS(N)], ushort lane) {
    KVQ_UNROLL (short r = 0; r < KVQ_REGS(N); ++r) {
        x[r] = kvq_flip(x[r], (KVQ_SIGN_WORDS[r] >> lane) & 1u);
    }
}

static inline uint kvq_paley_row(short order, bool transposed, short i) {
    return order == 12 ? KVQ_PALEY_12[(transposed ? 12 : 0) + i] : order == 20 ? KVQ_PALEY_20[(transposed ? 20 : 0) + i] : KVQ_PALEY_28[(transposed ? 28 : 0) + i];
}

// Butterflies of the Sylvester factor. All sums here have the reference's order of additions.
template <short N> void kvq_butterflies(thread float (&x)[KVQ_REGS(N)], ushort lane) {
    constexpr short inner = N/KVQ_PALEY(N);
    for (short h = 1; h < (inner < 32 ? inner : 32); h *= 2) {
        KVQ_UNROLL (short r = 0; r < KVQ_REGS(N); ++r) {
            const float other = simd_shuffle_xor(x[r], (ushort) h);
            x[r] = (lane & h) ? other - x[r] : x[r] + other;
        }
    }
    KVQ_UNROLL (short h = 1; h < (inner + 31)/32; h *= 2) {
        KVQ_UNROLL (short r = 0; r < KVQ_REGS(N); ++r) {
            if (!(r & h)) {
                const float u = x[r], v = x[r + h];
                x[r]     = u + v;
                x[r + h] = u - v;
            }
        }
    }
}

// Mixes the groups of a block with the Paley matrix or its transpose, where N is no power of two. buf: N floats of this simdgroup.
template <short N, bool TRANSPOSED> void kvq_paley_mix(thread float (&x)[KVQ_REGS(N)], threadgroup float * buf, ushort lane) {
    constexpr short inner = N/KVQ_PALEY(N);
    if (KVQ_PALEY(N) > 1) {
        simdgroup_barrier(mem_flags::mem_threadgroup);
        KVQ_UNROLL (short r = 0; r < KVQ_REGS(N); ++r) {
            if (r*32 + lane < N) {
                buf[r*32 + lane] = x[r];
            }
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);
        KVQ_UNROLL (short r = 0; r < KVQ_REGS(N); ++r) {
            const short i = r*32 + lane < N ? r*32 + lane : 0;
            const uint row = kvq_paley_row(KVQ_PALEY(N), TRANSPOSED, i/inner);
            float sum = kvq_flip(buf[i % inner], row & 1u);
            for (short a = 1; a < KVQ_PALEY(N); ++a) {
                sum = sum + kvq_flip(buf[a*inner + i % inner], (row >> a) & 1u);
            }
            x[r] = sum;
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);
    }
}

// x = H (signs*x), unnormalised
template <short N> void kvq_rotate(thread float (&x)[KVQ_REGS(N)], threadgroup float * buf, ushort lane) {
    kvq_apply_signs<N>(x, lane);
    kvq_butterflies<N>(x, lane);
    kvq_paley_mix<N, false>(x, buf, lane);
}

// x = signs*(H^T x), unnormalised
template <short N> void kvq_unrotate(thread float (&x)[KVQ_REGS(N)], threadgroup float * buf, ushort lane) {
    kvq_paley_mix<N, true>(x, buf, lane);
    kvq_butterflies<N>(x, lane);
    kvq_apply_signs<N>(x, lane);
}
