// Attention of a few query rows against a compressed cache, in int8 tensor-core products.
//
// Warps of a block divide KV heads, groups of 8 query rows, parts of the value head and slices of a tile's tokens.
// Queries are 16-bit fixed point: rows 0-7 of the 16-row tile hold the high byte, rows 8-15 the low byte, so both meet
// in one thread's accumulators. Weights times value scales likewise, relative to the largest of the tile. The codes'
// int8 levels are exact, the K scale goes into the logit, the V scale into the weight.
#pragma once

#include "kvq-fattn.cuh"

template <int DK_, int DV_, int NK_, int NV_, int VP_, int TILE_, int STAGES_, int BLOCKS_> struct kvq_decode_shape {
    static constexpr int DK = DK_, DV = DV_;         // head sizes
    static constexpr int NK = NK_, NV = NV_;         // values per block
    static constexpr int VP = VP_;                   // parts of the value head, one warp each
    static constexpr int TILE = TILE_;               // tokens of one step of a warp
    static constexpr int STAGES = STAGES_;
    static constexpr int BLOCKS = BLOCKS_;           // resident blocks aimed at
    static constexpr int k_blocks = DK/NK, v_blocks = DV/NV/VP;
    static constexpr int k_steps  = (NK + 31)/32;    // products of 32 values per block, padded with zero queries
    static constexpr int q_bytes  = k_blocks*k_steps*32*16;     // query fragments of one row group
};

#ifdef KVQ_AMPERE
// coordinate i of a block of the K type -> byte in the fragments of 32-value products, without the row
template <int KB, int N> static __device__ __forceinline__ int kvq_query_slot(const int i) {
    if constexpr (KB == 4) {
        const int half = i/(N/2), b = i % (N/2), u = b/2;
        return ((u/8)*32 + (u & 3))*16 + ((u/4) & 1)*8 + 2*(b & 1) + half;
    } else {
        const int k = i/(N/4), b = i % (N/4), u = b/2;
        return ((u/4)*32 + (u & 3))*16 + (k & 1)*8 + 2*(b & 1) + (k >> 1);
    }
}

// Rotates and quantises the 8 query rows of one group into fragments; row_scale gets the factors that undo it.
template <int KB, typename S> static __device__ __forceinline__ void kvq_load_queries(
        const kvq_fattn_args & a, const int seq, const int head_kv, const int group, char * frags, float * row_scale, float * buf, const int lane) {
    constexpr int R = kvq_hadamard<S::NK>::regs;
    for (int i = lane; i < S::q_bytes/16; i += 32) {
        ((uint4 *) frags)[i] = make_uint4(0, 0, 0, 0);
    }
    __syncwarp();
    // four rows at a time: their loads and their butterflies overlap
    for (int r0 = 0; r0 < 8; r0 += 4) {
        float x[4][S::k_blocks][R];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const int row = group*8 + r0 + r;
            const bool valid = row < a.gqa*a.n_tok;
            const int tok = valid ? row/a.gqa : 0, head = head_kv*a.gqa + (valid ? row % a.gqa : 0);
            const float * q = (const float *) (a.q + seq*a.nbq3 + tok*a.nbq1 + head*a.nbq2);
#pragma unroll
            for (int b = 0; b < S::k_blocks; ++b) {
#pragma unroll
                for (int j = 0; j < R; ++j) {
                    x[r][b][j] = valid && j*32 + lane < S::NK ? q[b*S::NK + j*32 + lane] : 0.0f;
                }
            }
        }
        if (group*8 + r0 >= a.gqa*a.n_tok) {
            if (lane < 4) {
                row_scale[r0 + lane] = 0.0f;
            }
            continue;
        }
        float amax[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            amax[r] = 0.0f;
#pragma unroll
            for (int b = 0; b < S::k_blocks; ++b) {
                kvq_apply_signs<S::NK>(x[r][b], lane);
                kvq_hadamard_warp<S::NK, false>(x[r][b], buf, lane);
#pragma unroll
                for (int j = 0; j < R; ++j) {
                    amax[r] = fmaxf(amax[r], fabsf(x[r][b][j]));
                }
            }
        }
#pragma unroll
        for (int h = 16; h > 0; h /= 2) {
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                amax[r] = fmaxf(amax[r], __shfl_xor_sync(0xFFFFFFFFu, amax[r], h));
            }
        }
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const float id = amax[r] > 0.0f ? 32512.0f/amax[r] : 0.0f;
#pragma unroll
            for (int b = 0; b < S::k_blocks; ++b) {
#pragma unroll
                for (int j = 0; j < R; ++j) {
                    const int i = j*32 + lane;
                    if (i < S::NK) {
                        const int v = __float2int_rn(x[r][b][j]*id);
                        const int hi = (v + 128) >> 8;
                        char * at = frags + b*S::k_steps*32*16 + (r0 + r)*4*16 + kvq_query_slot<KB, S::NK>(i);
                        at[0] = (char) hi;
                        at[4] = (char) (v - 256*hi);
                    }
                }
            }
            if (lane == 0) {
                // undo the fixed point, the rotation's sqrt(n), the level table's scale, and apply the attention scale
                row_scale[r0 + r] = amax[r]/32512.0f*rsqrtf(float(S::NK))*(a.scale/kvq_scale_of<KB>());
            }
        }
    }
}

// Value fragments of one 16-bit unit of four tokens: f[4*c + k] holds, for byte c of the unit and coordinate group k,
// the four tokens' levels. 4-bit codes have two coordinate groups, the others four.
template <int VB> struct kvq_value_unit { static constexpr int frags = VB == 4 ? 4 : 8; };

template <int VB> static __device__ __forceinline__ void kvq_split_tokens(const uint32_t (&h)[4], uint32_t & low, uint32_t & high) {
    const uint32_t a = __byte_perm(h[0], h[2], 0x5140);
    const uint32_t b = __byte_perm(h[1], h[3], 0x5140);
    low  = kvq_bitsel(0x0F0F0F0Fu, a, b << 4);
    high = kvq_bitsel(0x0F0F0F0Fu, a >> 4, b);
}

template <int VB> static __device__ __forceinline__ void kvq_value_frags(
        const kvq_tables<VB, 0> & table, const uint32_t (&h)[4], const uint32_t (&hi)[4], uint32_t * f) {
    uint32_t low, high;
    kvq_split_tokens<VB>(h, low, high);
    if constexpr (VB == 4) {
        table.two(low,  f[0], f[2]);
        table.two(high, f[1], f[3]);
    } else if constexpr (VB == 2) {
        table.two( low        & 0x33333333u, f[0], f[4]);
        table.two((low  >> 2) & 0x33333333u, f[1], f[5]);
        table.two( high       & 0x33333333u, f[2], f[6]);
        table.two((high >> 2) & 0x33333333u, f[3], f[7]);
    } else {
        uint32_t hl, hh;
        kvq_split_tokens<3>(hi, hl, hh);
        hl &= 0x55555555u;
        hh &= 0x55555555u;
        table.two(kvq_bitsel(0x33333333u, low,       hl << 2), f[0], f[4]);
        table.two(kvq_bitsel(0x33333333u, low  >> 2, hl),      f[1], f[5]);
        table.two(kvq_bitsel(0x33333333u, high,      hh << 2), f[2], f[6]);
        table.two(kvq_bitsel(0x33333333u, high >> 2, hh),      f[3], f[7]);
    }
}
#endif // KVQ_AMPERE

// LINEAR: the usual case that a block takes all 8 KV heads of packed, 16-byte aligned rows; strides are constants then
// and a tile is one run of bytes.
template <int KB, int VB, typename S, bool LINEAR>
static __global__ void __launch_bounds__(256, S::BLOCKS) kvq_decode(const __grid_constant__ kvq_fattn_args a) {
#ifdef KVQ_AMPERE
    constexpr int T = S::TILE, NJ = T/8;
    using BK = kvq_block<KB, S::NK>;
    using BV = kvq_block<VB, S::NV>;
    constexpr int VU = kvq_value_unit<VB>::frags;                 // products per unit
    constexpr int QU = (BV::units + 7)/8;                         // units per thread and block
    constexpr int OUT = S::v_blocks*QU*VU;                        // pairs of outputs per thread

    const int lane = threadIdx.x, warp = threadIdx.y, g = lane >> 2, t = lane & 3;
    const int tid = warp*32 + lane, n_threads = blockDim.y*32;

    constexpr int K_SLICE = S::k_blocks*BK::bytes, V_SLICE = S::v_blocks*S::VP*BV::bytes;
    const int heads = LINEAR ? 8 : a.heads, row_groups = LINEAR ? 1 : a.row_groups, slices = LINEAR ? 1 : a.slices;
    const int k_stride = LINEAR ? 8*K_SLICE : a.k.stride;
    const int v_stride = LINEAR ? 8*V_SLICE : a.v_is_k ? a.k.stride : a.v.stride;
    const int k_head = LINEAR ? K_SLICE : int(a.k.nb2), v_head = LINEAR ? V_SLICE : int(a.v.nb2);
    const bool v_is_k = !LINEAR && a.v_is_k;

    int role = warp;
    const int h  = role % heads;      role /= heads;
    const int rg = role % row_groups; role /= row_groups;
    const int vp = role % S::VP;
    const int sl = role / S::VP;
    const int head_blocks = LINEAR ? 1 : a.n_head_kv/heads;
    const int head0 = (blockIdx.y % head_blocks)*heads;
    const int group = (blockIdx.y/head_blocks)*row_groups + rg;
    const int seq = blockIdx.z, split = blockIdx.x;
    const int n_rows = a.gqa*a.n_tok;

    const int tile_tokens = T*slices;
    const int n_tiles = (a.n_kv + tile_tokens - 1)/tile_tokens;
    const int tile0 = int(int64_t(split)*n_tiles/a.n_split), tile1 = int(int64_t(split + 1)*n_tiles/a.n_split);

    extern __shared__ __align__(16) char smem[];
    char  * q_frags   = smem;                                                    // [heads*row_groups][q_bytes]
    float * row_scale = (float *) (q_frags + heads*row_groups*S::q_bytes);   // [heads*row_groups][8]
    char  * ring      = (char *) (row_scale + ((heads*row_groups*8 + 3) & ~3));
    const int k_bytes = tile_tokens*k_stride, v_bytes = v_is_k ? 0 : tile_tokens*v_stride;
    const uint32_t ring_s = kvq_shared(ring);

    const char * k_first = a.k.data + seq*a.k.nb3 + head0*a.k.nb2;
    const char * v_first = a.v.data + seq*a.v.nb3 + head0*a.v.nb2;

    auto fetch = [&](const int tile) {
        if (tile < tile1) {
            const uint32_t at = ring_s + uint32_t((tile - tile0) % S::STAGES)*(k_bytes + v_bytes);
            const int token = tile*tile_tokens;
            if constexpr (LINEAR) {
                // past the end come zeros
                const char * ks = k_first + int64_t(token)*k_stride;
                const int k_left = min(a.n_kv - token, T)*k_stride;
#pragma unroll
                for (int i0 = 0; i0 < T*8*K_SLICE; i0 += 256*16) {
                    const int i = i0 + tid*16;
                    if (i0 + 256*16 <= T*8*K_SLICE || i < T*8*K_SLICE) {
                        kvq_cp_async<16>(at + i, ks + i, i < k_left);
                    }
                }
                const char * vs = v_first + int64_t(token)*v_stride;
                const int v_left = min(a.n_kv - token, T)*v_stride;
#pragma unroll
                for (int i0 = 0; i0 < T*8*V_SLICE; i0 += 256*16) {
                    const int i = i0 + tid*16;
                    if (i0 + 256*16 <= T*8*V_SLICE || i < T*8*V_SLICE) {
                        kvq_cp_async<16>(at + T*8*K_SLICE + i, vs + i, i < v_left);
                    }
                }
            } else {
                kvq_copy_window(a.k, k_first, at, token, tile_tokens, a.n_kv, tid, n_threads);
                if (!v_is_k) {
                    kvq_copy_window(a.v, v_first, at + k_bytes, token, tile_tokens, a.n_kv, tid, n_threads);
                }
            }
        }
        kvq_cp_commit();
    };

    kvq_pdl_wait();
#pragma unroll
    for (int s = 0; s < S::STAGES - 1; ++s) {
        fetch(tile0 + s);
    }
    if (vp == 0 && sl == 0) {
        // the last stage of the ring is still free: scratch for rotations that need shared memory
        float * buf = (float *) (ring + (S::STAGES - 1)*(k_bytes + v_bytes)) + (h + rg*heads)*128;
        kvq_load_queries<KB, S>(a, seq, head0 + h, group, q_frags + (h + rg*heads)*S::q_bytes, row_scale + (h + rg*heads)*8, buf, lane);
    }
    __syncthreads();

    const char * my_q = q_frags + (h + rg*heads)*S::q_bytes + lane*16;
    const float q_scale = row_scale[(h + rg*heads)*8 + g];
    const int row = group*8 + g;
    const bool row_valid = row < n_rows;
    const int tok_q  = row_valid ? row/a.gqa : 0;
    const int head_q = (head0 + h)*a.gqa + (row_valid ? row % a.gqa : 0);
    const __half * mask = a.mask ? (const __half *) (a.mask + (seq % a.nem3)*a.nbm3 + tok_q*a.nbm1) : nullptr;
    const float slope = kvq_slope(a, head_q)*KVQ_LOG2E;
    const float logit_scale = q_scale*(a.softcap != 0.0f ? 1.0f : KVQ_LOG2E);

    // where a token's slice begins in its window row: the copy starts at an address aligned down to its granularity
    auto shift_of = [&](const kvq_operand & o, const char * first, const int odd) {
        return LINEAR ? 0 : int((uintptr_t) first + odd*(o.nb1 & 3)) & (o.gran - 1);
    };
    const int k_shift0 = shift_of(a.k, k_first, 0), k_shift1 = shift_of(a.k, k_first, 1);
    const int v_shift0 = v_is_k ? k_shift0 : shift_of(a.v, v_first, 0), v_shift1 = v_is_k ? k_shift1 : shift_of(a.v, v_first, 1);
    const int k_at  = (sl*T + g)*k_stride + ((g & 1) ? k_shift1 : k_shift0) + h*k_head + 2*t;
    const int ks_at = (sl*T + 2*t)*k_stride + h*k_head + BK::scale_off;
    const int v_at  = (sl*T + 2*t)*v_stride + h*v_head + vp*S::v_blocks*BV::bytes;

    const kvq_tables<KB, 0> k_table;
    const kvq_tables<VB, 0> v_table;

    float o[OUT][2];
#pragma unroll
    for (int i = 0; i < OUT; ++i) {
        o[i][0] = o[i][1] = 0.0f;
    }
    float m = KVQ_NO_MAX, l = 0.0f;

    for (int tile = tile0; tile < tile1; ++tile) {
        kvq_cp_wait<S::STAGES - 2>();
        __syncthreads();
        fetch(tile + S::STAGES - 1);

        const char * kt = ring + ((tile - tile0) % S::STAGES)*(k_bytes + v_bytes);
        const char * vt = v_is_k ? kt : kt + k_bytes;
        const int token = tile*tile_tokens + sl*T;

        // mask of this row's token, two KV tokens a word
        uint32_t mk[NJ];
        if (mask && token + T <= a.n_kv && (a.nbm1 & 3) == 0) {
#pragma unroll
            for (int j = 0; j < NJ; ++j) {
                mk[j] = *(const uint32_t *) (mask + token + 8*j + 2*t);
            }
        } else {
#pragma unroll
            for (int j = 0; j < NJ; ++j) {
                const int c = token + 8*j + 2*t;
                const uint32_t lo = c     < a.n_kv ? (mask ? kvq_ld16(mask + c)     : 0u) : 0xFC00u;
                const uint32_t hi = c + 1 < a.n_kv ? (mask ? kvq_ld16(mask + c + 1) : 0u) : 0xFC00u;
                mk[j] = lo | (hi << 16);
            }
        }
        uint32_t all_hidden = 0xFC00FC00u, any_bits = 0;
#pragma unroll
        for (int j = 0; j < NJ; ++j) {
            all_hidden &= mk[j];
            any_bits   |= mk[j];
        }
        // both tests are exact: minus infinity has no other bits set that "or" could add
        if (__all_sync(0xFFFFFFFFu, all_hidden == 0xFC00FC00u && any_bits == 0xFC00FC00u)) {
            continue;
        }
        const bool masked = __any_sync(0xFFFFFFFFu, any_bits != 0);

        // logits: p[j][e] of row g and tokens 8j + 2t + e
        float p[NJ][2];
#pragma unroll
        for (int b = 0; b < S::k_blocks; ++b) {
            int c[NJ][4];
#pragma unroll
            for (int j = 0; j < NJ; ++j) {
                c[j][0] = c[j][1] = c[j][2] = c[j][3] = 0;
            }
#pragma unroll
            for (int s = 0; s < S::k_steps; ++s) {
                const uint4 qa = *(const uint4 *) (my_q + (b*S::k_steps + s)*32*16);
#pragma unroll
                for (int j = 0; j < NJ; ++j) {
                    const char * at = kt + k_at + 8*j*k_stride + b*BK::bytes;
                    uint32_t b0, b1;
                    if constexpr (KB == 4) {
                        b0 = k_table.one(kvq_ld16(at + 16*s));
                        b1 = k_table.one(kvq_ld16(at + 16*s + 8));
                    } else {
                        const uint32_t hi = KB == 3 ? kvq_hi16<S::NK>(at - 2*t, 4*s + t) : 0u;
                        kvq_unit_pair(k_table, kvq_ld16(at + 8*s), hi, b0, b1);
                    }
                    kvq_mma_s8(c[j], qa, b0, b1);
                }
            }
#pragma unroll
            for (int j = 0; j < NJ; ++j) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const float d = kvq_ld_half(kt + ks_at + (8*j + e)*k_stride + (e ? k_shift1 : k_shift0) + b*BK::bytes);
                    const float x = float(c[j][e]*256 + c[j][2 + e]);
                    const float ds = d*logit_scale;
                    p[j][e] = b == 0 ? x*ds : fmaf(x, ds, p[j][e]);
                }
            }
        }
        if (a.softcap != 0.0f) {
#pragma unroll
            for (int j = 0; j < NJ; ++j) {
                p[j][0] = a.softcap*KVQ_LOG2E*tanhf(p[j][0]);
                p[j][1] = a.softcap*KVQ_LOG2E*tanhf(p[j][1]);
            }
        }
        if (masked) {
#pragma unroll
            for (int j = 0; j < NJ; ++j) {
                const float2 mf = __half22float2(*(const __half2 *) &mk[j]);
                p[j][0] = fmaf(slope, mf.x, p[j][0]);
                p[j][1] = fmaf(slope, mf.y, p[j][1]);
            }
        }
        float tile_max = -INFINITY;
#pragma unroll
        for (int j = 0; j < NJ; ++j) {
            tile_max = fmaxf(tile_max, fmaxf(p[j][0], p[j][1]));
        }
        tile_max = fmaxf(tile_max, __shfl_xor_sync(0xFFFFFFFFu, tile_max, 1));
        tile_max = fmaxf(tile_max, __shfl_xor_sync(0xFFFFFFFFu, tile_max, 2));
        const float m_new = fmaxf(m, tile_max);
        const float decay = kvq_exp2(m - m_new);
        if (__any_sync(0xFFFFFFFFu, m_new != m)) {
#pragma unroll
            for (int i = 0; i < OUT; ++i) {
                o[i][0] *= decay;
                o[i][1] *= decay;
            }
        }
        m = m_new;
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < NJ; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                p[j][e] = kvq_exp2(p[j][e] - m_new);
                sum += p[j][e];
            }
        }
        l = fmaf(l, decay, sum);

#pragma unroll
        for (int b = 0; b < S::v_blocks; ++b) {
            // weights times value scales as 16-bit fixed point relative to the tile's largest
            const char * vs = vt + v_at + b*BV::bytes;
            float x[NJ][2], x_max = 0.0f;
#pragma unroll
            for (int j = 0; j < NJ; ++j) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    x[j][e] = p[j][e]*kvq_ld_half(vs + (8*j + e)*v_stride + (e ? v_shift1 : v_shift0) + BV::scale_off);
                    x_max = fmaxf(x_max, x[j][e]);
                }
            }
            x_max = fmaxf(x_max, __shfl_xor_sync(0xFFFFFFFFu, x_max, 1));
            x_max = fmaxf(x_max, __shfl_xor_sync(0xFFFFFFFFu, x_max, 2));
            const bool some = x_max > 1e-30f;
            const float to_fixed = some ? 65280.0f/x_max : 0.0f;
            const float from_fixed = some ? x_max*(1.0f/65280.0f) : 0.0f;
            uint4 pa[T/32];
#pragma unroll
            for (int s = 0; s < T/32; ++s) {
                uint32_t lo[2], hi[2];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int j = 4*s + 2*i;
                    const uint32_t f0 = __float_as_uint(fmaf(x[j    ][0], to_fixed, 8388608.0f)), f1 = __float_as_uint(fmaf(x[j    ][1], to_fixed, 8388608.0f));
                    const uint32_t f2 = __float_as_uint(fmaf(x[j + 1][0], to_fixed, 8388608.0f)), f3 = __float_as_uint(fmaf(x[j + 1][1], to_fixed, 8388608.0f));
                    const uint32_t t01 = __byte_perm(f0, f1, 0x5140), t23 = __byte_perm(f2, f3, 0x5140);
                    lo[i] = __byte_perm(t01, t23, 0x5410);
                    hi[i] = __byte_perm(t01, t23, 0x7632);
                }
                pa[s] = make_uint4(hi[0], lo[0], hi[1], lo[1]);
            }
#pragma unroll
            for (int qu = 0; qu < QU; ++qu) {
                int c[VU][4];
#pragma unroll
                for (int i = 0; i < VU; ++i) {
                    c[i][0] = c[i][1] = c[i][2] = c[i][3] = 0;
                }
#pragma unroll
                for (int s = 0; s < T/32; ++s) {
                    uint32_t f[2][VU];
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        uint32_t lo[4], hi[4];
#pragma unroll
                        for (int n = 0; n < 4; ++n) {
                            const char * at = vs + (32*s + 16*i + 8*(n >> 1) + (n & 1))*v_stride + ((n & 1) ? v_shift1 : v_shift0);
                            lo[n] = kvq_ld16(at + 2*(g + 8*qu));
                            hi[n] = VB == 3 ? kvq_hi16<S::NV>(at, g + 8*qu) : 0u;
                        }
                        kvq_value_frags<VB>(v_table, lo, hi, f[i]);
                    }
#pragma unroll
                    for (int i = 0; i < VU; ++i) {
                        kvq_mma_u8s8(c[i], pa[s], f[0][i], f[1][i]);
                    }
                }
#pragma unroll
                for (int i = 0; i < VU; ++i) {
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        float & acc = o[(b*QU + qu)*VU + i][e];
                        acc = fmaf(float(c[i][e]*256 + c[i][2 + e]), from_fixed, acc);
                    }
                }
            }
        }
    }
    kvq_pdl_launch();

    l += __shfl_xor_sync(0xFFFFFFFFu, l, 1);
    l += __shfl_xor_sync(0xFFFFFFFFu, l, 2);
    if (!row_valid) {
        return;
    }
    const int64_t part = ((int64_t(seq)*a.n_tok + tok_q)*a.n_head + head_q)*a.n_part + split*slices + sl;
    if (vp == 0 && t == 0) {
        a.meta[part] = make_float2(m, l);
    }
    float * out = a.part + part*S::DV + vp*S::v_blocks*S::NV;
    constexpr float unit = 1.0f/kvq_scale_of<VB>();
    constexpr int group_dims = VB == 4 ? S::NV/2 : S::NV/4;
#pragma unroll
    for (int b = 0; b < S::v_blocks; ++b) {
#pragma unroll
        for (int qu = 0; qu < QU; ++qu) {
            if (4*t + 16*qu < group_dims) {
#pragma unroll
                for (int k = 0; k < VU/2; ++k) {
                    // columns 2t, 2t+1 of the two byte positions are four neighbouring coordinates
                    const float (&c0)[2] = o[(b*QU + qu)*VU + k];
                    const float (&c1)[2] = o[(b*QU + qu)*VU + VU/2 + k];
                    *(float4 *) (out + b*S::NV + k*group_dims + 16*qu + 4*t) = make_float4(c0[0]*unit, c1[0]*unit, c0[1]*unit, c1[1]*unit);
                }
            }
        }
    }
#endif // KVQ_AMPERE
}
