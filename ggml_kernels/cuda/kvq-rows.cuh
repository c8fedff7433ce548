// One quantisation block per warp: quantise and dequantise with the rotation, bit for bit as the scalar reference does.
#pragma once

#include "kvq-codec.cuh"

#include <float.h>

struct kvq_threshold_list { float v[15]; };
template <int BITS> __host__ __device__ constexpr kvq_threshold_list kvq_thresholds_of() {
    kvq_threshold_list t = {};
    for (int i = 0; i < (1 << BITS) - 1; ++i) {
        t.v[i] = BITS == 2 ? KVQ_THRESHOLDS_2[i % 3] : BITS == 3 ? KVQ_THRESHOLDS_3[i % 7] : KVQ_THRESHOLDS_4[i % 15];
    }
    return t;
}

// level of a code, without a table in memory
template <int BITS> static __device__ __forceinline__ int kvq_level(const int code) {
    constexpr uint32_t w0 = kvq_level_word<BITS>(0, 0), w1 = kvq_level_word<BITS>(4, 0), w2 = kvq_level_word<BITS>(8, 0), w3 = kvq_level_word<BITS>(12, 0);
    const int word = code >> 2;
    const uint32_t w = word == 0 ? w0 : word == 1 ? w1 : word == 2 ? w2 : w3;
    return int8_t(w >> (8*(code & 3)));
}

// Sum of buf[0..N) in the reference's order: 16 lanes in turn, then a tree. Every lane gets the result.
template <int N> static __device__ __forceinline__ float kvq_sum_lanes(const float * buf, const int lane) {
    float acc = 0.0f;
    if (lane < 16) {
#pragma unroll
        for (int i = 0; i < N/16; ++i) {
            acc = __fadd_rn(acc, buf[16*i + lane]);
        }
    }
#pragma unroll
    for (int w = 8; w >= 1; w /= 2) {
        acc = __fadd_rn(acc, __shfl_down_sync(0xFFFFFFFFu, acc, w));
    }
    return __shfl_sync(0xFFFFFFFFu, acc, 0);
}

// The same for the M values from `buf` on, M not a multiple of 16.
template <int M> static __device__ __forceinline__ float kvq_sum_lanes_of(const float * buf, const int lane) {
    float acc = 0.0f;
    if (lane < 16) {
#pragma unroll
        for (int i = 0; i < (M + 15)/16; ++i) {
            if (16*i + lane < M) {
                acc = __fadd_rn(acc, buf[16*i + lane]);
            }
        }
    }
#pragma unroll
    for (int w = 8; w >= 1; w /= 2) {
        acc = __fadd_rn(acc, __shfl_down_sync(0xFFFFFFFFu, acc, w));
    }
    return __shfl_sync(0xFFFFFFFFu, acc, 0);
}

struct kvq_float_list { float v[16]; };
__host__ __device__ constexpr kvq_float_list kvq_floats(const float * x, const int n) {
    kvq_float_list l = {};
    for (int i = 0; i < n; ++i) {
        l.v[i] = x[i];
    }
    return l;
}

// squares of a block's values to buf, for all lanes to read
template <int N> static __device__ __forceinline__ void kvq_store_squares(const float * x, float * buf, const int lane) {
    __syncwarp();
#pragma unroll
    for (int r = 0; r < kvq_hadamard<N>::regs; ++r) {
        if (r*32 + lane < N) {
            buf[r*32 + lane] = __fmul_rn(x[r], x[r]);
        }
    }
    __syncwarp();
}

// Quantises one block of oscar2, whose coordinates come mixed and in order of importance. x, out, buf, codes as below.
template <int N> static __device__ __forceinline__ void kvq_quantise_tiers(const float * x, uint8_t * out, float * buf, uint8_t * codes, const int lane) {
    constexpr int R = kvq_hadamard<N>::regs, Q = N/4;
    constexpr kvq_float_list four = kvq_floats(KVQ_TIER_THRESHOLDS_4, 15), two = kvq_floats(KVQ_TIER_THRESHOLDS_2, 3);
    constexpr kvq_float_list edges2 = kvq_floats(KVQ_TIER_EDGES_2, 3), edges1 = kvq_floats(KVQ_TIER_EDGES_1, 7);
    constexpr kvq_float_list ratios2 = kvq_floats(KVQ_TIER_RATIOS_2, 4);
    kvq_store_squares<N>(x, buf, lane);
    const float sigma = __fsqrt_rn(__fdiv_rn(kvq_sum_lanes_of<Q>(buf, lane), float(Q)));
    const float own2  = __fsqrt_rn(__fdiv_rn(kvq_sum_lanes_of<Q>(buf + Q, lane), float(Q)));
    const float own1  = __fsqrt_rn(__fdiv_rn(kvq_sum_lanes_of<2*Q>(buf + 2*Q, lane), float(2*Q)));
    int spread2 = 0, spread1 = 0;
#pragma unroll
    for (int i = 0; i < 3; ++i) {
        spread2 += own2 > __fmul_rn(edges2.v[i], sigma);
    }
#pragma unroll
    for (int i = 0; i < 7; ++i) {
        spread1 += own1 > __fmul_rn(edges1.v[i], sigma);
    }
    const float ratio2 = spread2 == 0 ? ratios2.v[0] : spread2 == 1 ? ratios2.v[1] : spread2 == 2 ? ratios2.v[2] : ratios2.v[3];
    const float sigma2 = __fmul_rn(ratio2, sigma);
    __syncwarp();
    int den = 0;
#pragma unroll
    for (int r = 0; r < R; ++r) {
        const int i = r*32 + lane;
        if (i < N) {
            int code = 0;
            if (i < Q) {
#pragma unroll
                for (int j = 0; j < 15; ++j) {
                    code += x[r] > __fmul_rn(four.v[j], sigma);
                }
                const int level = kvq_level<4>(code);            // the levels of turbo4
                den += level*level;
                buf[i] = __fmul_rn(x[r], float(level));
            } else if (i < 2*Q) {
#pragma unroll
                for (int j = 0; j < 3; ++j) {
                    code += x[r] > __fmul_rn(two.v[j], sigma2);
                }
            } else {
                code = x[r] > 0.0f;
            }
            codes[i] = uint8_t(code);
        }
    }
    __syncwarp();
    const float num = kvq_sum_lanes_of<Q>(buf, lane);
#pragma unroll
    for (int w = 16; w >= 1; w /= 2) {
        den += __shfl_xor_sync(0xFFFFFFFFu, den, w);
    }
    const float d = __fmul_rn(__fdiv_rn(num, float(den)), KVQ_TIER_SCALE);
    for (int u = lane; u < N/8; u += 32) {
        uint32_t w = 0;
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const int b = 2*u + c;
            uint32_t byte = 0;
            if (b < N/8) {
                byte = codes[b] | (codes[N/8 + b] << 4);
            } else if (b < N/8 + N/16) {
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    byte |= uint32_t(codes[Q + k*(N/16) + b - N/8]) << (2*k);
                }
            } else {
#pragma unroll
                for (int k = 0; k < 8; ++k) {
                    byte |= uint32_t(codes[2*Q + k*(N/16) + b - N/8 - N/16]) << k;
                }
            }
            w |= byte << (8*c);
        }
        ((uint16_t *) out)[u] = uint16_t(w);
    }
    if (lane == 0) {
        // the scale keeps five mantissa bits, the rest choose the spreads
        const uint32_t h = (__half_as_ushort(__float2half_rn(d > 65504.0f ? 65504.0f : d)) + 16u) & KVQ_TIER_SCALE_MASK;
        *(uint16_t *) (out + N/4) = uint16_t((h >= 0x7C00u ? 0x7BE0u : h) | (uint32_t(spread2) << 3) | uint32_t(spread1));
    }
    __syncwarp();
}

// Dequantises one block of oscar2 into x.
template <int N> static __device__ __forceinline__ void kvq_dequantise_tiers_warp(const uint8_t * in, float * x, const int lane) {
    const uint32_t bits = *(const uint16_t *) (in + N/4);
    const float d = __fmul_rn(__half2float(__ushort_as_half((unsigned short) (bits & KVQ_TIER_SCALE_MASK))), 1.0f/KVQ_TIER_SCALE);
    const uint32_t two = KVQ_TIER_DEV.two[bits & 31], one = KVQ_TIER_DEV.one[bits & 31];
#pragma unroll
    for (int r = 0; r < kvq_hadamard<N>::regs; ++r) {
        const int i = r*32 + lane < N ? r*32 + lane : 0;
        int level;
        if (i < N/4) {
            level = kvq_level<4>((in[i % (N/8)] >> (4*(i/(N/8)))) & 15);
        } else if (i < N/2) {
            const int t = i - N/4;
            level = int8_t(two >> (8*((in[N/8 + t % (N/16)] >> (2*(t/(N/16)))) & 3)));
        } else {
            const int t = i - N/2;
            level = int8_t(one >> (8*((in[N/8 + N/16 + t % (N/16)] >> (t/(N/16))) & 1)));
        }
        x[r] = __fmul_rn(float(level), d);
    }
}

// Quantises one block. x: value i in lane i%32, register i/32 (zero past N). out: the block, 2-byte aligned.
// buf: N floats, codes: N bytes of this warp's shared memory.
template <int BITS, int N> static __device__ __forceinline__ void kvq_quantise_warp(float * x, uint8_t * out, float * buf, uint8_t * codes, const int lane) {
    constexpr int R = kvq_hadamard<N>::regs;
    using B = kvq_block<BITS, N>;
    kvq_apply_signs<N>(x, lane);
    kvq_hadamard_warp<N, false>(x, buf, lane);

    kvq_store_squares<N>(x, buf, lane);
    const float sigma = __fsqrt_rn(__fdiv_rn(kvq_sum_lanes<N>(buf, lane), float(N)));
    __syncwarp();

    constexpr kvq_threshold_list t = kvq_thresholds_of<BITS>();
    int den = 0;
#pragma unroll
    for (int r = 0; r < R; ++r) {
        if (r*32 + lane < N) {
            int code = 0;
#pragma unroll
            for (int i = 0; i < (1 << BITS) - 1; ++i) {
                code += x[r] > __fmul_rn(t.v[i], sigma);
            }
            const int level = kvq_level<BITS>(code);
            den += level*level;
            codes[r*32 + lane] = uint8_t(code);
        }
    }
    __syncwarp();
#pragma unroll
    for (int w = 16; w >= 1; w /= 2) {
        den += __shfl_xor_sync(0xFFFFFFFFu, den, w);
    }
    const float d = __fdiv_rn(__fmul_rn(sigma, kvq_scale_of<BITS>()), __fsqrt_rn(float(den)));

    // 16 bits a store
    for (int u = lane; u < B::scale_off/2; u += 32) {
        uint32_t w = 0;
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const int b = 2*u + c;
            uint32_t byte = 0;
            if constexpr (BITS == 4) {
                byte = codes[b] | (codes[N/2 + b] << 4);
            } else {
                if (b < N/4) {
#pragma unroll
                    for (int k = 0; k < 4; ++k) {
                        byte |= uint32_t(codes[k*(N/4) + b] & 3) << (2*k);
                    }
                } else {
#pragma unroll
                    for (int k = 0; k < 4; ++k) {
#pragma unroll
                        for (int s = 0; s < 2; ++s) {
                            byte |= uint32_t((codes[k*(N/4) + b - N/4 + s*(N/8)] >> 2) & 1) << (2*k + s);
                        }
                    }
                }
            }
            w |= byte << (8*c);
        }
        ((uint16_t *) out)[u] = uint16_t(w);
    }
    if (lane == 0) {
        *(__half *) (out + B::scale_off) = __float2half_rn(fminf(d, 65504.0f));
    }
    __syncwarp();
}

// Dequantises one block into x: value i in lane i%32, register i/32. buf: N floats of this warp's shared memory.
template <int BITS, int N> static __device__ __forceinline__ void kvq_dequantise_warp(const uint8_t * in, float * x, float * buf, const int lane) {
    constexpr int R = kvq_hadamard<N>::regs;
    using B = kvq_block<BITS, N>;
#pragma unroll
    for (int r = 0; r < R; ++r) {
        const int i = r*32 + lane < N ? r*32 + lane : 0;
        int code;
        if constexpr (BITS == 4) {
            code = i < N/2 ? in[i] & 15 : in[i - N/2] >> 4;
        } else {
            const int k = i/(N/4), b = i % (N/4);
            code = (in[b] >> (2*k)) & 3;
            if constexpr (BITS == 3) {
                code |= ((in[N/4 + b % (N/8)] >> (2*k + b/(N/8))) & 1) << 2;
            }
        }
        x[r] = float(kvq_level<BITS>(code));
    }
    kvq_hadamard_warp<N, true>(x, buf, lane);
    kvq_apply_signs<N>(x, lane);
    const float g = __fdiv_rn(1.0f, __fmul_rn(kvq_scale_of<BITS>(), __fsqrt_rn(float(N))));
    const float d = __fmul_rn(__half2float(*(const __half *) (in + B::scale_off)), g);
#pragma unroll
    for (int r = 0; r < R; ++r) {
        x[r] = __fmul_rn(x[r], d);
    }
}

// One block of an f16 window, rotated like the turbo types or as it is. x, buf as above.
template <bool ROTATED, int N> static __device__ __forceinline__ void kvq_write_window_warp(float * x, __half * out, float * buf, const int lane) {
    const float norm = __fdiv_rn(1.0f, __fsqrt_rn(float(N)));
    if constexpr (ROTATED) {
        kvq_apply_signs<N>(x, lane);
        kvq_hadamard_warp<N, false>(x, buf, lane);
    }
#pragma unroll
    for (int r = 0; r < kvq_hadamard<N>::regs; ++r) {
        if (r*32 + lane < N) {
            out[r*32 + lane] = __float2half_rn(ROTATED ? __fmul_rn(x[r], norm) : x[r]);
        }
    }
}

// Such a rotated block back into x.
template <int N> static __device__ __forceinline__ void kvq_read_window_warp(const __half * in, float * x, float * buf, const int lane) {
    const float norm = __fdiv_rn(1.0f, __fsqrt_rn(float(N)));
#pragma unroll
    for (int r = 0; r < kvq_hadamard<N>::regs; ++r) {
        x[r] = r*32 + lane < N ? __half2float(in[r*32 + lane]) : 0.0f;
    }
    kvq_hadamard_warp<N, true>(x, buf, lane);
    kvq_apply_signs<N>(x, lane);
#pragma unroll
    for (int r = 0; r < kvq_hadamard<N>::regs; ++r) {
        x[r] = __fmul_rn(x[r], norm);
    }
}
