// Cache write (SET_ROWS), GET_ROWS and copies: one simdgroup a block, bit for bit as the scalar reference.
#include "kvq-codec.h"

constant int  FC_store [[function_constant(KVQ_FC_K_STORE)]];
constant int  FC_index [[function_constant(KVQ_FC_INDEX)]];
constant bool FC_half  [[function_constant(KVQ_FC_HALF)]];

struct kvq_place { uint i0, i1, i2, i3; };

static inline kvq_place kvq_place_of(uint i, uint row, uint ne1, uint ne2) {
    const uint r = i/row, r1 = r/ne1;
    return { i - r*row, r - r1*ne1, r1 % ne2, r1/ne2 };
}

static inline uint64_t kvq_row_of(constant kvq_metal_rows_args & args, device const char * index, kvq_place at) {
    device const char * p = index + at.i1*args.nb_index[0] + (at.i2 % args.index_ne1)*args.nb_index[1] + (at.i3 % args.index_ne2)*args.nb_index[2];
    return FC_index == 64 ? (uint64_t) *(device const int64_t *) p : (uint64_t) *(device const int32_t *) p;
}

// Sum of buf[0..M) in the reference's order: 16 lanes in turn, then a tree. Every lane gets it.
template <short M> float kvq_sum_lanes(threadgroup const float * buf, ushort lane) {
    float sum = 0.0f;
    if (lane < 16) {
        for (short i = lane; i < M; i += 16) {
            sum = sum + buf[i];
        }
    }
    KVQ_UNROLL (short w = 8; w >= 1; w /= 2) {
        sum = sum + simd_shuffle_down(sum, (ushort) w);
    }
    return simd_shuffle(sum, (ushort) 0);
}

static inline int kvq_find_code(float x, constant const float * thresholds, short n, float sigma) {
    int code = 0;
    for (short i = 0; i < n; ++i) {
        code += x > thresholds[i]*sigma;
    }
    return code;
}

// buf: N floats and then N codes of this simdgroup
template <short N> void kvq_quantise(short bits, thread float (&x)[KVQ_REGS(N)], device uchar * out, threadgroup float * buf, ushort lane) {
#pragma METAL fp math_mode(safe)
#pragma METAL fp contract(off)
    threadgroup ushort * codes = (threadgroup ushort *) (buf + N);
    kvq_rotate<N>(x, buf, lane);
    KVQ_UNROLL (short r = 0; r < KVQ_REGS(N); ++r) {
        if (r*32 + lane < N) {
            buf[r*32 + lane] = x[r]*x[r];
        }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    const float sigma = precise::sqrt(kvq_sum_lanes<N>(buf, lane)/(float) N);
    simdgroup_barrier(mem_flags::mem_threadgroup);

    int den = 0;
    KVQ_UNROLL (short r = 0; r < KVQ_REGS(N); ++r) {
        if (r*32 + lane < N) {
            const int code = bits == 2 ? kvq_find_code(x[r], KVQ_THRESHOLDS_2, 3, sigma) : bits == 3 ? kvq_find_code(x[r], KVQ_THRESHOLDS_3, 7, sigma)
                                       : kvq_find_code(x[r], KVQ_THRESHOLDS_4, 15, sigma);
            const int level = bits == 2 ? KVQ_LEVELS_2[code] : bits == 3 ? KVQ_LEVELS_3[code] : KVQ_LEVELS_4[code];
            den += level*level;
            codes[r*32 + lane] = (ushort) code;
        }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    den = simd_sum(den);
    const float d = sigma*(bits == 2 ? KVQ_SCALE_2 : bits == 3 ? KVQ_SCALE_3 : KVQ_SCALE_4)/precise::sqrt((float) den);

    for (short u = lane; u < N*bits/16; u += 32) {
        ushort w = 0;
        KVQ_UNROLL (short c = 0; c < 2; ++c) {
            const short b = 2*u + c;
            ushort byte = 0;
            if (bits == 4) {
                byte = codes[b] | (codes[N/2 + b] << 4);
            } else if (b < N/4) {
                KVQ_UNROLL (short k = 0; k < 4; ++k) {
                    byte |= (codes[k*(N/4) + b] & 3) << (2*k);
                }
            } else {
                KVQ_UNROLL (short k = 0; k < 4; ++k) {
                    byte |= ((codes[k*(N/4) + b - N/4] >> 2) & 1) << (2*k);
                    byte |= ((codes[k*(N/4) + b - N/4 + N/8] >> 2) & 1) << (2*k + 1);
                }
            }
            w |= byte << (8*c);
        }
        ((device ushort *) out)[u] = w;
    }
    if (lane == 0) {
        ((device half *) out)[N*bits/16] = (half) min(d, 65504.0f);
    }
}

// oscar2: coordinates come mixed and in order of importance
template <short N> void kvq_quantise_tiers(thread float (&x)[KVQ_REGS(N)], device uchar * out, threadgroup float * buf, ushort lane) {
#pragma METAL fp math_mode(safe)
#pragma METAL fp contract(off)
    constexpr short Q = N/4;
    threadgroup ushort * codes = (threadgroup ushort *) (buf + N);
    KVQ_UNROLL (short r = 0; r < KVQ_REGS(N); ++r) {
        if (r*32 + lane < N) {
            buf[r*32 + lane] = x[r]*x[r];
        }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    const float sigma = precise::sqrt(kvq_sum_lanes<Q>(buf, lane)/(float) Q);
    const float own2  = precise::sqrt(kvq_sum_lanes<Q>(buf + Q, lane)/(float) Q);
    const float own1  = precise::sqrt(kvq_sum_lanes<2*Q>(buf + 2*Q, lane)/(float) (2*Q));
    simdgroup_barrier(mem_flags::mem_threadgroup);
    const int spread2 = kvq_find_code(own2, KVQ_TIER_EDGES_2, 3, sigma), spread1 = kvq_find_code(own1, KVQ_TIER_EDGES_1, 7, sigma);
    const float sigma2 = KVQ_TIER_RATIOS_2[spread2]*sigma;

    int den = 0;
    KVQ_UNROLL (short r = 0; r < KVQ_REGS(N); ++r) {
        const short i = r*32 + lane;
        if (i < N) {
            int code;
            if (i < Q) {
                code = kvq_find_code(x[r], KVQ_TIER_THRESHOLDS_4, 15, sigma);
                const int level = KVQ_TIER_LEVELS_4[code];
                den += level*level;
                buf[i] = x[r]*(float) level;
            } else {
                code = i < 2*Q ? kvq_find_code(x[r], KVQ_TIER_THRESHOLDS_2, 3, sigma2) : (int) (x[r] > 0.0f);
            }
            codes[i] = (ushort) code;
        }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    const float num = kvq_sum_lanes<Q>(buf, lane);
    den = simd_sum(den);
    const float d = num/(float) den*KVQ_TIER_SCALE;

    for (short u = lane; u < N/8; u += 32) {
        ushort w = 0;
        KVQ_UNROLL (short c = 0; c < 2; ++c) {
            const short b = 2*u + c;
            ushort byte = 0;
            if (b < N/8) {
                byte = codes[b] | (codes[N/8 + b] << 4);
            } else if (b < N/8 + N/16) {
                KVQ_UNROLL (short k = 0; k < 4; ++k) {
                    byte |= codes[Q + k*(N/16) + b - N/8] << (2*k);
                }
            } else {
                KVQ_UNROLL (short k = 0; k < 8; ++k) {
                    byte |= codes[2*Q + k*(N/16) + b - N/8 - N/16] << k;
                }
            }
            w |= byte << (8*c);
        }
        ((device ushort *) out)[u] = w;
    }
    if (lane == 0) {
        // the scale keeps five mantissa bits, the rest choose the spreads
        const uint h = (as_type<ushort>((half) min(d, 65504.0f)) + 16u) & 0xFFE0u;
        ((device ushort *) out)[N/8] = (ushort) ((h >= 0x7C00u ? 0x7BE0u : h) | (uint) (spread2 << 3) | (uint) spread1);
    }
}

// float rows to blocks, scattered to the rows of an index or copied in the order of elements
template <short N> kernel void kernel_kvq_write(
        constant kvq_metal_rows_args & args,
        device const char * src,
        device const char * index,
        device       char * dst,
        threadgroup float * shared [[threadgroup(0)]],
        uint   group [[threadgroup_position_in_grid]],
        ushort lane  [[thread_index_in_simdgroup]],
        ushort sg    [[simdgroup_index_in_threadgroup]]) {
    const uint i = group*KVQ_SIMDGROUPS + sg;
    if (i >= (uint) args.n_blocks) {
        return;
    }
    kvq_place at = kvq_place_of(i, args.blocks_row, args.ne1, args.ne2);
    device const char * from = src + at.i0*args.nb_src[0] + at.i1*args.nb_src[1] + at.i2*args.nb_src[2] + at.i3*args.nb_src[3];
    float x[KVQ_REGS(N)];
    KVQ_UNROLL (short r = 0; r < KVQ_REGS(N); ++r) {
        x[r] = r*32 + lane >= N ? 0.0f : FC_half ? (float) ((device const half *) from)[r*32 + lane] : ((device const float *) from)[r*32 + lane];
    }
    uint64_t row = 0;
    if (FC_index) {
        row = kvq_row_of(args, index, at);
    } else {
        at = kvq_place_of(i, args.other_row, args.other_ne1, args.other_ne2);
        row = at.i1;
    }
    device uchar * out = (device uchar *) dst + at.i0*args.nb_dst[0] + row*args.nb_dst[1] + at.i2*args.nb_dst[2] + at.i3*args.nb_dst[3];
    threadgroup float * buf = shared + sg*(N + N/2);
    if (FC_store == KVQ_STORE_OSCAR2) {
        kvq_quantise_tiers<N>(x, out, buf, lane);
    } else if (FC_store == KVQ_STORE_TURBO_F16) {
        kvq_rotate<N>(x, buf, lane);
        KVQ_UNROLL (short r = 0; r < KVQ_REGS(N); ++r) {
            if (r*32 + lane < N) {
                ((device half *) out)[r*32 + lane] = (half) (x[r]*(1.0f/precise::sqrt((float) N)));
            }
        }
    } else {
        kvq_quantise<N>(FC_store, x, out, buf, lane);
    }
}

// blocks to float rows, gathered from the rows of an index or copied in the order of elements
template <short N> kernel void kernel_kvq_read(
        constant kvq_metal_rows_args & args,
        device const char * src,
        device const char * index,
        device       char * dst,
        threadgroup float * shared [[threadgroup(0)]],
        uint   group [[threadgroup_position_in_grid]],
        ushort lane  [[thread_index_in_simdgroup]],
        ushort sg    [[simdgroup_index_in_threadgroup]]) {
#pragma METAL fp math_mode(safe)
#pragma METAL fp contract(off)
    const uint i = group*KVQ_SIMDGROUPS + sg;
    if (i >= (uint) args.n_blocks) {
        return;
    }
    kvq_place at = kvq_place_of(i, args.blocks_row, args.ne1, args.ne2);
    const uint64_t row = FC_index ? kvq_row_of(args, index, at) : (uint64_t) at.i1;
    device const uchar * block = (device const uchar *) src + at.i0*args.nb_src[0] + row*args.nb_src[1] + at.i2*args.nb_src[2] + at.i3*args.nb_src[3];
    if (!FC_index) {
        at = kvq_place_of(i, args.other_row, args.other_ne1, args.other_ne2);
    }
    device char * out = dst + at.i0*args.nb_dst[0] + at.i1*args.nb_dst[1] + at.i2*args.nb_dst[2] + at.i3*args.nb_dst[3];

    const ushort bits = FC_store == KVQ_STORE_TURBO_F16 ? (ushort) 0 : kvq_u16(block + kvq_bytes(FC_store, N) - 2);
    float x[KVQ_REGS(N)];
    KVQ_UNROLL (short r = 0; r < KVQ_REGS(N); ++r) {
        const short c = r*32 + lane < N ? r*32 + lane : 0, k = c/(N/4), b = c % (N/4);
        if (FC_store == KVQ_STORE_TURBO_F16) {
            x[r] = (float) ((device const half *) block)[c];
        } else if (FC_store == KVQ_STORE_OSCAR2) {
            const short u = c % (N/16);
            if (k == 0) {
                x[r] = KVQ_TIER_LEVELS_4[(block[c % (N/8)] >> (4*(c/(N/8)))) & 15];
            } else if (k == 1) {
                x[r] = KVQ_TIER_LEVELS_2[4*((bits >> 3) & 3) + ((block[N/8 + (c - N/4) % (N/16)] >> (2*((c - N/4)/(N/16)))) & 3)];
            } else {
                x[r] = KVQ_TIER_LEVELS_1[2*(bits & 7) + ((block[N/8 + N/16 + u] >> ((c - N/2)/(N/16))) & 1)];
            }
        } else if (FC_store == 4) {
            x[r] = KVQ_LEVELS_4[(block[c % (N/2)] >> (4*(c/(N/2)))) & 15];
        } else {
            const short two = (block[b] >> (2*k)) & 3;
            x[r] = FC_store == 2 ? KVQ_LEVELS_2[two] : KVQ_LEVELS_3[two | (((block[N/4 + b % (N/8)] >> (2*k + b/(N/8))) & 1) << 2)];
        }
    }
    const float h = (float) as_type<half>((ushort) (FC_store == KVQ_STORE_OSCAR2 ? bits & 0xFFE0 : bits));
    float d = h*(1.0f/KVQ_TIER_SCALE);
    if (FC_store != KVQ_STORE_OSCAR2) {
        kvq_unrotate<N>(x, shared + sg*(N + N/2), lane);
        d = FC_store == KVQ_STORE_TURBO_F16 ? 1.0f/precise::sqrt((float) N)
                                            : h*(1.0f/((FC_store == 2 ? KVQ_SCALE_2 : FC_store == 3 ? KVQ_SCALE_3 : KVQ_SCALE_4)*precise::sqrt((float) N)));
    }
    KVQ_UNROLL (short r = 0; r < KVQ_REGS(N); ++r) {
        if (r*32 + lane < N) {
            if (FC_half) {
                ((device half *) out)[r*32 + lane] = (half) (x[r]*d);
            } else {
                ((device float *) out)[r*32 + lane] = x[r]*d;
            }
        }
    }
}

// blocks of one type, 16 bits a thread
kernel void kernel_kvq_copy(
        constant kvq_metal_rows_args & args,
        device const char * src,
        device       char * dst,
        uint2 thread_at [[thread_position_in_grid]]) {
    const uint i = thread_at.y;
    if (2*thread_at.x >= (uint) args.bytes) {
        return;
    }
    const kvq_place a = kvq_place_of(i, args.blocks_row, args.ne1, args.ne2), b = kvq_place_of(i, args.other_row, args.other_ne1, args.other_ne2);
    *(device ushort *) (dst + b.i0*args.nb_dst[0] + b.i1*args.nb_dst[1] + b.i2*args.nb_dst[2] + b.i3*args.nb_dst[3] + 2*thread_at.x) =
        *(device const ushort *) (src + a.i0*args.nb_src[0] + a.i1*args.nb_src[1] + a.i2*args.nb_src[2] + a.i3*args.nb_src[3] + 2*thread_at.x);
}

typedef decltype(kernel_kvq_write<128>) kvq_write_t;
typedef decltype(kernel_kvq_read<128>)  kvq_read_t;

template [[host_name("kernel_kvq_write_64")]]  kernel kvq_write_t kernel_kvq_write<64>;
template [[host_name("kernel_kvq_write_80")]]  kernel kvq_write_t kernel_kvq_write<80>;
template [[host_name("kernel_kvq_write_96")]]  kernel kvq_write_t kernel_kvq_write<96>;
template [[host_name("kernel_kvq_write_112")]] kernel kvq_write_t kernel_kvq_write<112>;
template [[host_name("kernel_kvq_write_128")]] kernel kvq_write_t kernel_kvq_write<128>;
template [[host_name("kernel_kvq_read_64")]]   kernel kvq_read_t  kernel_kvq_read<64>;
template [[host_name("kernel_kvq_read_80")]]   kernel kvq_read_t  kernel_kvq_read<80>;
template [[host_name("kernel_kvq_read_96")]]   kernel kvq_read_t  kernel_kvq_read<96>;
template [[host_name("kernel_kvq_read_112")]]  kernel kvq_read_t  kernel_kvq_read<112>;
template [[host_name("kernel_kvq_read_128")]]  kernel kvq_read_t  kernel_kvq_read<128>;
