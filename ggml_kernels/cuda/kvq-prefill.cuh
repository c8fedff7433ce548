// Attention of many query rows, or of a compressed cache mixed with f16 or q8_0: f16 tensor-core products over tiles
// that are dequantised in shared memory, in the rotated domain. Half of the warps dequantise the next tile before their
// products and half after them, so that unpacking and tensor cores overlap.
#pragma once

#include "kvq-fattn.cuh"

template <int DK_, int DV_, int DVP_, int NK_, int NV_, int ROWS_, int TILE_> struct kvq_prefill_shape {
    static constexpr int DK = DK_, DV = DV_;         // head sizes
    static constexpr int DVP = DVP_;                 // part of the value head that one block computes
    static constexpr int NK = NK_, NV = NV_;         // values per block of our types
    static constexpr int ROWS = ROWS_;               // query rows of a block, 16 a warp
    static constexpr int TILE = TILE_;               // tokens dequantised at once
    static constexpr int STEP = TILE < 32 ? TILE : 32;   // tokens of one softmax step
    static constexpr int WARPS = ROWS/16;
    static constexpr int SK = DK + 8, SV = DVP + 8;  // row strides in halves; odd multiples of 16 bytes
    static constexpr int fixed_bytes = 2*(ROWS*SK + 2*TILE*(SK + SV));      // queries and two tiles of K and V
};

#ifdef KVQ_AMPERE
// two levels with a bias of 128, in bytes A and B of x, times d
template <uint32_t SEL> static __device__ __forceinline__ __half2 kvq_two_levels(const uint32_t x, const __half2 d) {
    const uint32_t w = __byte_perm(x, 0x64646464u, SEL);       // 1024 + biased level in f16
    return __hmul2(__hsub2(*(const __half2 *) &w, __floats2half2_rn(1152.0f, 1152.0f)), d);
}

// What a tile's halves must be multiplied by: levels go in as level*d/32, which keeps the scale exact.
static __device__ __forceinline__ float kvq_tile_factor(const int store) {
    return store == 2 ? 32.0f/kvq_scale_of<2>() : store == 3 ? 32.0f/kvq_scale_of<3>() : store == 4 ? 32.0f/kvq_scale_of<4>() : 1.0f;
}

// Dequantises TILE token rows of D values into halves of row stride D + 8. shift0, shift1: where the slice of even and
// odd tokens begins in its window row.
template <int BITS, int D, int N, int TILE, int THREADS> static __device__ __forceinline__ void kvq_dequantise_turbo(
        const char * raw, const int stride, const int shift0, const int shift1, __half * tile, const int tid) {
    constexpr int SD = D + 8, BLOCKS = D/N;
    using B = kvq_block<BITS, N>;
    constexpr int U = B::units, ROWS = THREADS/U;
    constexpr bool REGULAR = THREADS % U == 0 && ROWS % 8 == 0 && (TILE % ROWS == 0 || ROWS % TILE == 0);
    const kvq_tables<BITS, 128> table;
    auto item = [&](const int u, const int tok, const int b) {
        const char * block = raw + tok*stride + ((tok & 1) ? shift1 : shift0) + b*B::bytes;
        const __half2 d = __float2half2_rn(kvq_ld_half(block + B::scale_off)*0.03125f);
        __half * out = tile + tok*SD + b*N + 2*u;
        if constexpr (BITS == 4) {
            const uint32_t r = table.one(kvq_ld16(block + 2*u));
            *(__half2 *) (out      ) = kvq_two_levels<0x4240>(r, d);
            *(__half2 *) (out + N/2) = kvq_two_levels<0x4341>(r, d);
        } else {
            uint32_t r0, r1;
            kvq_unit_pair(table, kvq_ld16(block + 2*u), BITS == 3 ? kvq_hi16<N>(block, u) : 0u, r0, r1);
            *(__half2 *) (out          ) = kvq_two_levels<0x4240>(r0, d);
            *(__half2 *) (out +   N/4  ) = kvq_two_levels<0x4240>(r1, d);
            *(__half2 *) (out + 2*(N/4)) = kvq_two_levels<0x4341>(r0, d);
            *(__half2 *) (out + 3*(N/4)) = kvq_two_levels<0x4341>(r1, d);
        }
    };
    if constexpr (REGULAR) {
        // neighbouring groups of lanes take tokens four apart: their stores fall into different banks
        const int u = tid % U, r = tid/U, row = (r & ~5) | ((r & 1) << 2) | ((r >> 2) & 1);
        if constexpr (ROWS <= TILE) {
#pragma unroll
            for (int b = 0; b < BLOCKS; ++b) {
#pragma unroll
                for (int tok = 0; tok < TILE; tok += ROWS) {
                    item(u, tok + row, b);
                }
            }
        } else {
            constexpr int AT_ONCE = ROWS/TILE;
#pragma unroll
            for (int b0 = 0; b0 < BLOCKS; b0 += AT_ONCE) {
                const int b = b0 + row/TILE;
                if (b < BLOCKS) {
                    item(u, row % TILE, b);
                }
            }
        }
    } else {
        for (int i = tid; i < TILE*BLOCKS*U; i += THREADS) {
            item(i % U, (i/U) % TILE, i/(U*TILE));
        }
    }
}

template <int D, int N, int TILE, int THREADS> static __device__ __forceinline__ void kvq_dequantise_tile(
        const int store, const char * raw, const int stride, const int shift0, const int shift1, __half * tile, const int tid) {
    constexpr int SD = D + 8;
    if (store == KVQ_STORE_TURBO2) {
        kvq_dequantise_turbo<2, D, N, TILE, THREADS>(raw, stride, shift0, shift1, tile, tid);
    } else if (store == KVQ_STORE_TURBO3) {
        kvq_dequantise_turbo<3, D, N, TILE, THREADS>(raw, stride, shift0, shift1, tile, tid);
    } else if (store == KVQ_STORE_TURBO4) {
        kvq_dequantise_turbo<4, D, N, TILE, THREADS>(raw, stride, shift0, shift1, tile, tid);
    } else {
        for (int i = tid; i < TILE*D/2; i += THREADS) {
            const int tok = i/(D/2), c = i % (D/2);
            const char * row = raw + tok*stride + ((tok & 1) ? shift1 : shift0);
            uint32_t w;
            if (store == KVQ_STORE_F16) {
                w = kvq_ld16(row + 4*c) | (kvq_ld16(row + 4*c + 2) << 16);
            } else {
                const char * block = row + (c/16)*34;
                const uint32_t q = kvq_ld16(block + 2 + 2*(c % 16));
                const float d = kvq_ld_half(block);
                const __half2 x = __floats2half2_rn(d*float(int8_t(q & 0xFF)), d*float(int8_t(q >> 8)));
                w = *(const uint32_t *) &x;
            }
            *(uint32_t *) (tile + tok*SD + 2*c) = w;
        }
    }
}

// byte offset of value `first` in a head's slice
template <int N> static __device__ __forceinline__ int kvq_slice_offset(const int store, const int first) {
    return store == KVQ_STORE_F16 ? 2*first : store == KVQ_STORE_Q8_0 ? first/32*34 : first/N*(N*store/8 + 2);
}
#endif // KVQ_AMPERE

template <typename S>
static __global__ void __launch_bounds__(32*S::WARPS, 1) kvq_prefill(const __grid_constant__ kvq_fattn_args a) {
#ifdef KVQ_AMPERE
    constexpr int T = S::TILE, STEP = S::STEP, NT = STEP/8, KS = S::DK/16, VN = S::DVP/8;
    constexpr int THREADS = 32*S::WARPS;
    constexpr bool Q_IN_REGS = S::DK <= 128 && S::WARPS <= 8;
    constexpr int v_parts = S::DV/S::DVP;

    const int lane = threadIdx.x, warp = threadIdx.y, g = lane >> 2, t = lane & 3, tid = warp*32 + lane;
    const int head_kv = blockIdx.y/v_parts, v_part = blockIdx.y % v_parts;
    const int seq = blockIdx.z/a.n_split, split = blockIdx.z % a.n_split;
    const int row0 = blockIdx.x*S::ROWS + warp*16;
    const int n_rows = a.gqa*a.n_tok;
    const int n_tiles = (a.n_kv + T - 1)/T;
    const int tile0 = int(int64_t(split)*n_tiles/a.n_split), tile1 = int(int64_t(split + 1)*n_tiles/a.n_split);

    extern __shared__ __align__(16) char smem[];
    __half * sq = (__half *) smem;                     // [ROWS][SK]
    __half * sk = sq + S::ROWS*S::SK;                  // [2][TILE][SK]
    __half * sv = sk + 2*T*S::SK;                      // [2][TILE][SV]
    char   * raw = (char *) (sv + 2*T*S::SV);          // [2][K window, V window]
    const int k_bytes = T*a.k.stride, v_bytes = a.v_is_k ? 0 : T*a.v.stride;
    const uint32_t raw_s = kvq_shared(raw);

    const kvq_operand & vo = a.v_is_k ? a.k : a.v;
    const char * k_first = a.k.data + seq*a.k.nb3 + head_kv*a.k.nb2;
    const char * v_first = a.v_is_k ? k_first : a.v.data + seq*a.v.nb3 + head_kv*a.v.nb2;
    const int k_shift0 = int((uintptr_t) k_first & (a.k.gran - 1)), k_shift1 = (k_shift0 + int(a.k.nb1 & 3)) & (a.k.gran - 1);
    const int v_shift0 = int((uintptr_t) v_first & (vo.gran - 1)),  v_shift1 = (v_shift0 + int(vo.nb1 & 3)) & (vo.gran - 1);
    const int v_skip = kvq_slice_offset<S::NV>(vo.store, v_part*S::DVP);

    // mask rows of the block's tokens, staged like K and V when they can be copied in 16-byte pieces
    const int tok0 = blockIdx.x*S::ROWS/a.gqa;
    const int mask_rows = a.mask_rows;
    const int mask_bytes = mask_rows*T*2;
    const int stage_bytes = k_bytes + v_bytes + mask_bytes;
    const char * mask_first = a.mask + (seq % a.nem3)*a.nbm3;

    const kvq_copier k_copy(a.k, k_first, tid, THREADS), v_copy(vo, v_first, tid, THREADS);
    auto fetch = [&](const int tile) {
        if (tile < tile1) {
            const uint32_t at = raw_s + uint32_t((tile - tile0) & 1)*stage_bytes;
            k_copy.copy(a.k, at, tile*T, T, a.n_kv);
            if (!a.v_is_k) {
                v_copy.copy(vo, at + k_bytes, tile*T, T, a.n_kv);
            }
            if (mask_rows > 0 && (tile + 1)*T <= a.n_kv) {
                for (int i = tid; i < mask_rows*(T/8); i += THREADS) {
                    const int r = i/(T/8), c = i % (T/8);
                    kvq_cp_async<16>(at + k_bytes + v_bytes + i*16, mask_first + min(tok0 + r, a.n_tok - 1)*a.nbm1 + tile*T*2 + c*16);
                }
            }
        }
        kvq_cp_commit();
    };
    auto dequantise = [&](const int tile) {
        const int slot = (tile - tile0) & 1;
        const char * at = raw + slot*stage_bytes;
        kvq_dequantise_tile<S::DK,  S::NK, T, THREADS>(a.k.store, at, a.k.stride, k_shift0, k_shift1, sk + slot*T*S::SK, tid);
        kvq_dequantise_tile<S::DVP, S::NV, T, THREADS>(vo.store, at + (a.v_is_k ? 0 : k_bytes) + v_skip, vo.stride, v_shift0, v_shift1, sv + slot*T*S::SV, tid);
    };

    kvq_pdl_wait();
    fetch(tile0);
    fetch(tile0 + 1);

    // this warp's query rows, rotated when K is, times the logit scale
    const float logit_scale = a.scale*(a.softcap != 0.0f ? 1.0f : KVQ_LOG2E)*kvq_tile_factor(a.k.store);
    for (int r = 0; r < 16; ++r) {
        const int row = row0 + r;
        __half * out = sq + (warp*16 + r)*S::SK;
        const int tok = row < n_rows ? row/a.gqa : 0, head = head_kv*a.gqa + (row < n_rows ? row % a.gqa : 0);
        const float * q = (const float *) (a.q + seq*a.nbq3 + tok*a.nbq1 + head*a.nbq2);
#pragma unroll
        for (int b = 0; b < S::DK/S::NK; ++b) {
            constexpr int R = kvq_hadamard<S::NK>::regs;
            float x[R];
            float factor = logit_scale;
#pragma unroll
            for (int j = 0; j < R; ++j) {
                x[j] = j*32 + lane < S::NK && row < n_rows ? q[b*S::NK + j*32 + lane] : 0.0f;
            }
            if (a.k.store <= KVQ_STORE_TURBO4) {
                kvq_apply_signs<S::NK>(x, lane);
                kvq_hadamard_warp<S::NK, false>(x, (float *) sk + warp*128, lane);
                factor *= rsqrtf(float(S::NK));
            }
#pragma unroll
            for (int j = 0; j < R; ++j) {
                if (j*32 + lane < S::NK) {
                    out[b*S::NK + j*32 + lane] = __float2half_rn(x[j]*factor);
                }
            }
        }
    }

    // thread rows: g and g + 8 of the warp's 16
    const __half * mask[2];
    int mask_at[2];
    float slope[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int row = row0 + g + 8*i < n_rows ? row0 + g + 8*i : 0;
        mask[i]  = a.mask ? (const __half *) (a.mask + (seq % a.nem3)*a.nbm3 + (row/a.gqa)*a.nbm1) : nullptr;
        mask_at[i] = ((row0 + g + 8*i < n_rows ? row/a.gqa : tok0) - tok0)*T*2 + 4*t;
        slope[i] = kvq_slope(a, head_kv*a.gqa + row % a.gqa)*KVQ_LOG2E;
    }

    const bool active = row0 < n_rows;         // warps past the last row only help to dequantise

    float o[VN][4];
#pragma unroll
    for (int n = 0; n < VN; ++n) {
        o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0.0f;
    }
    float m[2] = { KVQ_NO_MAX, KVQ_NO_MAX }, l[2] = { 0.0f, 0.0f };

    const int mi = lane >> 3, mr = lane & 7;      // matrix and row that this lane addresses in ldmatrix
    const uint32_t q_at = kvq_shared(sq + (warp*16 + (mi & 1)*8 + mr)*S::SK + (mi >> 1)*8);
    const uint32_t k_at = kvq_shared(sk + ((mi >> 1)*8 + mr)*S::SK + (mi & 1)*8);
    const uint32_t v_at = kvq_shared(sv + ((mi & 1)*8 + mr)*S::SV + (mi >> 1)*8);

    kvq_cp_wait<1>();
    __syncthreads();
    uint4 qf[Q_IN_REGS ? KS : 1];
    if constexpr (Q_IN_REGS) {
#pragma unroll
        for (int s = 0; s < KS; ++s) {
            qf[s] = kvq_ldmatrix(q_at + 32*s);
        }
    }
    if (tile0 < tile1) {
        dequantise(tile0);
    }

    for (int tile = tile0; tile < tile1; ++tile) {
        kvq_cp_wait<0>();
        __syncthreads();
        fetch(tile + 2);
        const bool more = tile + 1 < tile1, early = warp < (S::WARPS + 1)/2;
        if (more && early) {
            dequantise(tile + 1);
        }

        const int slot = (tile - tile0) & 1;
        const char * mask_tile = raw + slot*stage_bytes + k_bytes + v_bytes;
#pragma unroll 1
        for (int first = 0; first < T; first += STEP) {
            const int token = tile*T + first, at = slot*T + first;
            uint32_t mk[2][NT];
            bool masked = false, hidden = !active;
            if (active && (a.mask || token + STEP > a.n_kv)) {
                uint32_t all_bits = 0xFC00FC00u, any_bits = 0;
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    if (mask_rows > 0 && (tile + 1)*T <= a.n_kv) {
#pragma unroll
                        for (int j = 0; j < NT; ++j) {
                            mk[i][j] = *(const uint32_t *) (mask_tile + mask_at[i] + 2*first + 16*j);
                        }
                    } else {
#pragma unroll
                        for (int j = 0; j < NT; ++j) {
                            const int c = token + 8*j + 2*t;
                            const uint32_t lo = c     < a.n_kv ? (a.mask ? kvq_ld16(mask[i] + c)     : 0u) : 0xFC00u;
                            const uint32_t hi = c + 1 < a.n_kv ? (a.mask ? kvq_ld16(mask[i] + c + 1) : 0u) : 0xFC00u;
                            mk[i][j] = lo | (hi << 16);
                        }
                    }
#pragma unroll
                    for (int j = 0; j < NT; ++j) {
                        all_bits &= mk[i][j];
                        any_bits |= mk[i][j];
                    }
                }
                masked = __any_sync(0xFFFFFFFFu, any_bits != 0);
                hidden = __all_sync(0xFFFFFFFFu, all_bits == 0xFC00FC00u && any_bits == 0xFC00FC00u);
            }

            if (!hidden) {
                float p[NT][4];
#pragma unroll
                for (int j = 0; j < NT; ++j) {
                    p[j][0] = p[j][1] = p[j][2] = p[j][3] = 0.0f;
                }
#pragma unroll
                for (int s = 0; s < KS; ++s) {
                    const uint4 qa = Q_IN_REGS ? qf[Q_IN_REGS ? s : 0] : kvq_ldmatrix(q_at + 32*s);
#pragma unroll
                    for (int j = 0; j < NT; j += 2) {
                        const uint4 kb = kvq_ldmatrix(k_at + (at + 8*j)*(2*S::SK) + 32*s);
                        kvq_mma_f16(p[j    ], qa, kb.x, kb.y);
                        kvq_mma_f16(p[j + 1], qa, kb.z, kb.w);
                    }
                }
                if (a.softcap != 0.0f) {
#pragma unroll
                    for (int j = 0; j < NT; ++j) {
#pragma unroll
                        for (int e = 0; e < 4; ++e) {
                            p[j][e] = a.softcap*KVQ_LOG2E*tanhf(p[j][e]);
                        }
                    }
                }
                if (masked) {
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
#pragma unroll
                        for (int j = 0; j < NT; ++j) {
                            const float2 mf = __half22float2(*(const __half2 *) &mk[i][j]);
                            p[j][2*i    ] = fmaf(slope[i], mf.x, p[j][2*i    ]);
                            p[j][2*i + 1] = fmaf(slope[i], mf.y, p[j][2*i + 1]);
                        }
                    }
                }
                float decay[2];
                bool moved = false;
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float top = m[i];
#pragma unroll
                    for (int j = 0; j < NT; ++j) {
                        top = fmaxf(top, fmaxf(p[j][2*i], p[j][2*i + 1]));
                    }
                    top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, 1));
                    top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, 2));
                    moved = moved || top != m[i];
                    decay[i] = kvq_exp2(m[i] - top);
                    m[i] = top;
                    float sum = 0.0f;
#pragma unroll
                    for (int j = 0; j < NT; ++j) {
                        p[j][2*i    ] = kvq_exp2(p[j][2*i    ] - top);
                        p[j][2*i + 1] = kvq_exp2(p[j][2*i + 1] - top);
                        sum += p[j][2*i] + p[j][2*i + 1];
                    }
                    l[i] = fmaf(l[i], decay[i], sum);
                }
                if (__any_sync(0xFFFFFFFFu, moved)) {
#pragma unroll
                    for (int n = 0; n < VN; ++n) {
                        o[n][0] *= decay[0];
                        o[n][1] *= decay[0];
                        o[n][2] *= decay[1];
                        o[n][3] *= decay[1];
                    }
                }
#pragma unroll
                for (int s = 0; s < STEP/16; ++s) {
                    uint4 pa;
                    __half2 w;
                    w = __floats2half2_rn(p[2*s    ][0], p[2*s    ][1]); pa.x = *(const uint32_t *) &w;
                    w = __floats2half2_rn(p[2*s    ][2], p[2*s    ][3]); pa.y = *(const uint32_t *) &w;
                    w = __floats2half2_rn(p[2*s + 1][0], p[2*s + 1][1]); pa.z = *(const uint32_t *) &w;
                    w = __floats2half2_rn(p[2*s + 1][2], p[2*s + 1][3]); pa.w = *(const uint32_t *) &w;
#pragma unroll
                    for (int n = 0; n < VN; n += 2) {
                        const uint4 vb = kvq_ldmatrix_trans(v_at + (at + 16*s)*(2*S::SV) + 16*n);
                        kvq_mma_f16(o[n    ], pa, vb.x, vb.y);
                        kvq_mma_f16(o[n + 1], pa, vb.z, vb.w);
                    }
                }
            }
        }
        if (more && !early) {
            dequantise(tile + 1);
        }
    }
    kvq_pdl_launch();

#pragma unroll
    for (int i = 0; i < 2; ++i) {
        l[i] += __shfl_xor_sync(0xFFFFFFFFu, l[i], 1);
        l[i] += __shfl_xor_sync(0xFFFFFFFFu, l[i], 2);
        const int row = row0 + g + 8*i;
        if (row >= n_rows) {
            continue;
        }
        const int tok = row/a.gqa, head = head_kv*a.gqa + row % a.gqa;
        const int64_t part = ((int64_t(seq)*a.n_tok + tok)*a.n_head + head)*a.n_part + split;
        if (v_part == 0 && t == 0) {
            a.meta[part] = make_float2(m[i], l[i]);
        }
        float * out = a.part + part*S::DV + v_part*S::DVP + 2*t;
        const float unit = kvq_tile_factor(vo.store);
#pragma unroll
        for (int n = 0; n < VN; ++n) {
            *(float2 *) (out + 8*n) = make_float2(o[n][2*i]*unit, o[n][2*i + 1]*unit);
        }
    }
#endif // KVQ_AMPERE
}
