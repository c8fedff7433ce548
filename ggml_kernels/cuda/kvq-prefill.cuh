// Attention of many query rows, or of a compressed cache mixed with f16 or q8_0: f16 tensor-core products over tiles
// that are dequantised in shared memory, in the rotated domain. Half of the warps dequantise the next tile before their
// products and half after them, so that unpacking and tensor cores overlap. The tiles of an f16 window follow those of the
// cache. A key bias lengthens keys and queries: by cosines and sines of the position, and by what a query meets them with.
#pragma once

#include "kvq-fattn.cuh"

template <int DK_, int DV_, int DVP_, int NK_, int NV_, int WARPS_, int MT_, int TILE_, int NR_> struct kvq_prefill_shape {
    static constexpr int DK = DK_, DV = DV_;         // head sizes
    static constexpr int NR = NR_;                   // values that a key bias adds to a key, 0 without
    static constexpr int DVP = DVP_;                 // part of the value head that one block computes
    static constexpr int NK = NK_, NV = NV_;         // values per block of our types
    static constexpr int WARPS = WARPS_, MT = MT_;   // warps, and 16-row tiles of each: every fragment of K and V serves MT products
    static constexpr int ROWS = WARPS*MT*16;         // query rows of a block
    static constexpr int TILE = TILE_;               // tokens dequantised at once
    static constexpr int STEP = TILE < 32 ? TILE : 32;   // tokens of one softmax step
    static constexpr int SK = DK + NR + 8, SV = DVP + 8;  // row strides in halves; odd multiples of 16 bytes
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
    return store == 2 ? 32.0f/kvq_scale_of<2>() : store == 3 ? 32.0f/kvq_scale_of<3>() : store == 4 ? 32.0f/kvq_scale_of<4>() : store == KVQ_STORE_OSCAR2 ? 32.0f/KVQ_TIER_SCALE : 1.0f;
}

// Dequantises TILE token rows of D values into halves of row stride SD. shift0, shift1: where the slice of even and
// odd tokens begins in its window row.
template <int BITS, int D, int N, int TILE, int THREADS, int SD> static __device__ __forceinline__ void kvq_dequantise_turbo(
        const char * raw, const int stride, const int shift0, const int shift1, __half * tile, const int tid) {
    using B = kvq_block<BITS, N>;
    // PER threads a token, each every PER-th unit: one scale a thread, and neighbouring tokens in different banks
    constexpr int PER = THREADS/TILE, EACH = (B::units + PER - 1)/PER;
    static_assert(THREADS % TILE == 0, "a token has the same threads in every tile");
    const int q = tid % PER, tok = tid/PER;
    const kvq_tables<BITS, 128> table;
#pragma unroll
    for (int b = 0; b < D/N; ++b) {
        const char * block = raw + tok*stride + ((tok & 1) ? shift1 : shift0) + b*B::bytes;
        const __half2 d = __float2half2_rn(kvq_ld_half(block + B::scale_off)*0.03125f);
        uint32_t lo[EACH], hi[EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int u = B::units % PER == 0 ? q + i*PER : min(q + i*PER, B::units - 1);       // the last thread's repeats are not stored
            lo[i] = kvq_ld16(block + 2*u);
            hi[i] = BITS == 3 ? kvq_hi16<N>(block, u) : 0u;
        }
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int u = q + i*PER;
            if (B::units % PER != 0 && u >= B::units) {
                break;
            }
            __half * out = tile + tok*SD + b*N + 2*u;
            if constexpr (BITS == 4) {
                const uint32_t r = table.one(lo[i]);
                *(__half2 *) (out      ) = kvq_two_levels<0x4240>(r, d);
                *(__half2 *) (out + N/2) = kvq_two_levels<0x4341>(r, d);
            } else {
                uint32_t r0, r1;
                kvq_unit_pair(table, lo[i], hi[i], r0, r1);
                *(__half2 *) (out          ) = kvq_two_levels<0x4240>(r0, d);
                *(__half2 *) (out +   N/4  ) = kvq_two_levels<0x4240>(r1, d);
                *(__half2 *) (out + 2*(N/4)) = kvq_two_levels<0x4341>(r0, d);
                *(__half2 *) (out + 3*(N/4)) = kvq_two_levels<0x4341>(r1, d);
            }
        }
    }
}

// The 8 values of chunk u of an oscar2 block, two a word; chunks are units of 16 bits, those of the first tier pairs of
// units, those of the last half a unit. d: scale/32. words: levels of the tiers of 2 and 1 bits.
template <int N> static __device__ __forceinline__ uint4 kvq_tier_chunk(
        const kvq_tables<4, 128> & table, const char * block, const int u, const __half2 d, const uint32_t two, const uint32_t one) {
    using P = kvq_tier_block<N>;
    __half2 w[4];
    if (u < N/32) {
        const uint32_t r0 = table.one(kvq_ld16(block + 4*u)), r1 = table.one(kvq_ld16(block + 4*u + 2));
        w[0] = kvq_two_levels<0x4240>(r0, d);
        w[1] = kvq_two_levels<0x4341>(r0, d);
        w[2] = kvq_two_levels<0x4240>(r1, d);
        w[3] = kvq_two_levels<0x4341>(r1, d);
    } else if (u < N/16) {
        const uint32_t lo = kvq_ld16(block + P::two + 2*(u - N/32));
        const uint32_t r0 = kvq_prmt(two ^ 0x80808080u, two ^ 0x80808080u, lo & 0x3333u), r1 = kvq_prmt(two ^ 0x80808080u, two ^ 0x80808080u, (lo >> 2) & 0x3333u);
        w[0] = kvq_two_levels<0x4240>(r0, d);
        w[1] = kvq_two_levels<0x4240>(r1, d);
        w[2] = kvq_two_levels<0x4341>(r0, d);
        w[3] = kvq_two_levels<0x4341>(r1, d);
    } else {
        const int v = u - N/16;
        const __half2 x = __hmul2(__float2half2_rn(float(int8_t(one & 0xFF))), d);      // of code 0; code 1 flips the sign
        const uint32_t lo = kvq_ld16(block + P::one + 2*(v >> 1)) >> (4*(v & 1)), bytes = kvq_prmt(lo, 0, 0x1404);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const uint32_t flipped = *(const uint32_t *) &x ^ ((bytes << (7 - k)) & 0x80008000u);
            w[k] = *(const __half2 *) &flipped;
        }
    }
    return *(const uint4 *) w;
}

// The same tile for oscar2: a lane a coordinate where the planes are odd, else a lane a chunk.
template <int D, int N, int TILE, int THREADS, int SD> static __device__ __forceinline__ void kvq_dequantise_tiers(
        const char * raw, const int stride, const int shift0, const int shift1, __half * tile, const int tid) {
    using P = kvq_tier_block<N>;
    constexpr int PER = THREADS/TILE, BYTES = kvq_block<KVQ_TIERS, N>::bytes;
    const int q = tid % PER, tok = tid/PER;
    const kvq_tier_tables tiers(tid & 31);
    const kvq_tables<4, 128> table;
#pragma unroll
    for (int b = 0; b < D/N; ++b) {
        const char * block = raw + tok*stride + ((tok & 1) ? shift1 : shift0) + b*BYTES;
        const uint32_t bits = kvq_ld16(block + N/4), two = tiers.two(bits), one = tiers.one(bits);
        const float scale = __half2float(__ushort_as_half((unsigned short) (bits & KVQ_TIER_SCALE_MASK)))*0.03125f;
        __half * out = tile + tok*SD + b*N;
        if constexpr (N % 32 == 0) {
            const __half2 d = __float2half2_rn(scale);
            for (int u = q; u < N/8; u += PER) {
                const uint4 w = kvq_tier_chunk<N>(table, block, u, d, two, one);
                const bool four = u < N/32;
                const int v = u < N/16 ? u - N/32 : (u - N/16) >> 1;
                // pairs k of a chunk: a tier's parts k, and for the first tier two units of two parts
                uint32_t * at = (uint32_t *) (four ? out + 4*u : u < N/16 ? out + N/4 + 2*v : out + N/2 + ((u & 1)*4)*(N/16) + 2*v);
                const int step = four ? N/16 : N/32;
                at[0]                     = w.x;
                at[step]                  = w.y;
                at[four ? 1 : 2*step]     = w.z;
                at[four ? 1 + step : 3*step] = w.w;
            }
        } else {
            for (int i = q; i < N; i += PER) {
                int level;
                if (i < N/4) {
                    const int code = block[i % (N/8)] >> (4*(i/(N/8)));
                    level = int(table.one(uint32_t(code & 15)) & 0xFFu) - 128;
                } else if (i < N/2) {
                    const int r = i - N/4, code = (block[P::two + r % (N/16)] >> (2*(r/(N/16)))) & 3;
                    level = int8_t(two >> (8*code));
                } else {
                    const int r = i - N/2, code = (block[P::one + r % (N/16)] >> (r/(N/16))) & 1;
                    level = int8_t(one >> (8*code));
                }
                out[i] = __float2half_rn(float(level)*scale);
            }
        }
    }
}

template <int D, int N, int TILE, int THREADS, int SD> static __device__ __forceinline__ void kvq_dequantise_tile(
        const int store, const char * raw, const int stride, const int shift0, const int shift1, __half * tile, const int tid) {
    if (store == KVQ_STORE_TURBO2) {
        kvq_dequantise_turbo<2, D, N, TILE, THREADS, SD>(raw, stride, shift0, shift1, tile, tid);
    } else if (store == KVQ_STORE_TURBO3) {
        kvq_dequantise_turbo<3, D, N, TILE, THREADS, SD>(raw, stride, shift0, shift1, tile, tid);
    } else if (store == KVQ_STORE_TURBO4) {
        kvq_dequantise_turbo<4, D, N, TILE, THREADS, SD>(raw, stride, shift0, shift1, tile, tid);
    } else if (store == KVQ_STORE_OSCAR2) {
        kvq_dequantise_tiers<D, N, TILE, THREADS, SD>(raw, stride, shift0, shift1, tile, tid);
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

// TILE rows of an f16 window into such a tile
template <int D, int TILE, int THREADS, int SD> static __device__ __forceinline__ void kvq_copy_f16_tile(const char * rows, const int64_t nb, __half * tile, const int tid) {
#pragma unroll 4
    for (int i = tid; i < TILE*D/8; i += THREADS) {
        const int tok = i/(D/8), c = i % (D/8);
        *(uint4 *) (tile + tok*SD + 8*c) = *(const uint4 *) (rows + tok*nb + 16*c);
    }
}

// Cosines and sines of the positions of n tokens behind their keys, times factor; a token past the end is zero.
template <int DK, int TILE, int THREADS, int SD> static __device__ __forceinline__ void kvq_fill_turns(
        const kvq_bias_args & bias, const int * pos, const int n, const float factor, __half * tile, const int tid) {
    const int pairs = (bias.n + 7)/8*8;
    for (int i = tid; i < TILE*pairs; i += THREADS) {
        const int tok = i/pairs, k = i % pairs;
        const float2 cs = tok < n ? kvq_turn(bias, max(pos[tok], 0), bias.list[k]) : make_float2(0.0f, 0.0f);
        *(__half2 *) (tile + tok*SD + DK + 2*k) = __floats2half2_rn(cs.x*factor, cs.y*factor);
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
    constexpr int T = S::TILE, STEP = S::STEP, NT = STEP/8, KS = (S::DK + S::NR)/16, VN = S::DVP/8, MT = S::MT;
    constexpr int THREADS = 32*S::WARPS;
    constexpr int v_parts = S::DV/S::DVP;

    const int lane = threadIdx.x, warp = threadIdx.y, g = lane >> 2, t = lane & 3, tid = warp*32 + lane;
    const int head_kv = blockIdx.y/v_parts, v_part = blockIdx.y % v_parts;
    const int seq = blockIdx.z/a.n_split, split = blockIdx.z % a.n_split;
    const int row0 = blockIdx.x*S::ROWS + warp*16*MT;
    const int n_rows = a.gqa*a.n_tok;
    const int n_cache = (a.n_kv + T - 1)/T, n_tiles = n_cache + a.window.n/T;      // tiles of the cache, and with those of the window
    const int tile0 = int(int64_t(split)*n_tiles/a.n_split), tile1 = int(int64_t(split + 1)*n_tiles/a.n_split);

    extern __shared__ __align__(16) char smem[];
    __half * sq = (__half *) smem;                     // [ROWS][SK]
    __half * sk = sq + S::ROWS*S::SK;                  // [2][TILE][SK]
    __half * sv = sk + 2*T*S::SK;                      // [2][TILE][SV]
    char   * raw = (char *) (sv + 2*T*S::SV);          // [2][K window, V window], then [3][mask]
    const int k_bytes = T*a.k.stride, v_bytes = a.v_is_k ? 0 : T*a.v.stride;
    const uint32_t raw_s = kvq_shared(raw);

    const kvq_operand & vo = a.v_is_k ? a.k : a.v;
    const char * k_first = a.k.data + seq*a.k.nb3 + head_kv*a.k.nb2;
    const char * v_first = a.v_is_k ? k_first : a.v.data + seq*a.v.nb3 + head_kv*a.v.nb2;
    const int k_shift0 = int((uintptr_t) k_first & (a.k.gran - 1)), k_shift1 = (k_shift0 + int(a.k.nb1 & 3)) & (a.k.gran - 1);
    const int v_shift0 = int((uintptr_t) v_first & (vo.gran - 1)),  v_shift1 = (v_shift0 + int(vo.nb1 & 3)) & (vo.gran - 1);
    const int v_skip = kvq_slice_offset<S::NV>(vo.store, v_part*S::DVP);

    // mask rows of the block's tokens, staged like K and V when they can be copied in 16-byte pieces; a tile's are still read
    // while those of the tile after the next arrive, so there are three places
    const int tok0 = blockIdx.x*S::ROWS/a.gqa;
    const int mask_rows = a.mask_rows;
    const int mask_bytes = mask_rows*T*2;
    const int stage_bytes = k_bytes + v_bytes;
    const char * mask_first = a.mask + (seq % a.nem3)*a.nbm3;

    const kvq_copier k_copy(a.k.chunks, a.k.nb1, a.k.stride, tid, THREADS), v_copy(vo.chunks, vo.nb1, vo.stride, tid, THREADS);
    const kvq_copier mask_copy(T/8, a.nbm1, 2*T, tid, THREADS);
    const bool k_fast = a.k.gran == 16 && kvq_copier::possible(T, a.k.chunks, a.k.nb1);
    const bool v_fast = vo.gran == 16 && kvq_copier::possible(T, vo.chunks, vo.nb1);
    const bool mask_fast = tok0 + mask_rows <= a.n_tok && kvq_copier::possible(mask_rows, T/8, a.nbm1);
    const char * k_tiles = (const char *) ((uintptr_t) k_first & ~uintptr_t(15));
    const char * v_tiles = (const char *) ((uintptr_t) v_first & ~uintptr_t(15));
    auto fetch = [&](const int tile) {
        if (tile < min(tile1, n_cache)) {
            const uint32_t at = raw_s + uint32_t((tile - tile0) & 1)*stage_bytes;
            const uint32_t mask_at = raw_s + 2*stage_bytes + uint32_t((tile - tile0) % 3)*mask_bytes;
            if (k_fast) {
                k_copy.copy(at, k_tiles + int64_t(tile)*T*a.k.nb1, T, a.n_kv - tile*T);
            } else {
                kvq_copy_window(a.k, k_first, at, tile*T, T, a.n_kv, tid, THREADS);
            }
            if (a.v_is_k) {
                // the K window holds V too
            } else if (v_fast) {
                v_copy.copy(at + k_bytes, v_tiles + int64_t(tile)*T*vo.nb1, T, a.n_kv - tile*T);
            } else {
                kvq_copy_window(vo, v_first, at + k_bytes, tile*T, T, a.n_kv, tid, THREADS);
            }
            if (mask_rows > 0 && (tile + 1)*T <= a.n_kv) {
                if (mask_fast) {
                    mask_copy.copy(mask_at, mask_first + tok0*a.nbm1 + int64_t(tile)*T*2, mask_rows, mask_rows);
                } else {
                    for (int i = tid; i < mask_rows*(T/8); i += THREADS) {
                        const int r = i/(T/8), c = i % (T/8);
                        kvq_cp_async<16>(mask_at + i*16, mask_first + min(tok0 + r, a.n_tok - 1)*a.nbm1 + int64_t(tile)*T*2 + c*16);
                    }
                }
            }
        }
        kvq_cp_commit();
    };
    auto dequantise = [&](const int tile) {
        const int slot = (tile - tile0) & 1;
        const char * at = raw + slot*stage_bytes;
        __half * k_tile = sk + slot*T*S::SK, * v_tile = sv + slot*T*S::SV;
        if (tile < n_cache) {
            kvq_dequantise_tile<S::DK,  S::NK, T, THREADS, S::SK>(a.k.store, at, a.k.stride, k_shift0, k_shift1, k_tile, tid);
            kvq_dequantise_tile<S::DVP, S::NV, T, THREADS, S::SV>(vo.store, at + (a.v_is_k ? 0 : k_bytes) + v_skip, vo.stride, v_shift0, v_shift1, v_tile, tid);
        } else {
            const int64_t row = (tile - n_cache)*T;
            kvq_copy_f16_tile<S::DK,  T, THREADS, S::SK>(a.window.k + seq*a.window.nbk3 + head_kv*a.window.nbk2 + row*a.window.nbk1, a.window.nbk1, k_tile, tid);
            kvq_copy_f16_tile<S::DVP, T, THREADS, S::SV>(a.window.v + seq*a.window.nbv3 + head_kv*a.window.nbv2 + row*a.window.nbv1 + v_part*S::DVP*2, a.window.nbv1, v_tile, tid);
        }
        if constexpr (S::NR > 0) {
            const int * pos = (const int *) (a.bias.pos + seq/a.bias.seqs*a.bias.nbp1) + (tile < n_cache ? tile*T : a.n_kv + (tile - n_cache)*T);
            kvq_fill_turns<S::DK, T, THREADS, S::SK>(a.bias, pos, tile < n_cache ? a.n_kv - tile*T : T, tile < n_cache ? 1.0f : kvq_tile_factor(a.k.store), k_tile, tid);
        }
    };

    kvq_pdl_wait();
    fetch(tile0);
    fetch(tile0 + 1);

    // this warp's query rows, rotated when K is, times the logit scale
    const float logit_scale = a.scale*(a.softcap != 0.0f ? 1.0f : KVQ_LOG2E)*kvq_tile_factor(a.k.store);
    for (int r = 0; r < 16*MT; ++r) {
        const int row = row0 + r;
        __half * out = sq + (warp*16*MT + r)*S::SK;
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
        if constexpr (S::NR > 0) {
            const float scale = row < n_rows ? a.scale*(a.softcap != 0.0f ? 1.0f : KVQ_LOG2E) : 0.0f;
            for (int i = lane; i < (a.bias.n + 7)/8*8; i += 32) {
                const float2 z = kvq_bias_query(a.bias, seq, tok, head, head_kv, i, scale);
                *(__half2 *) (out + S::DK + 2*i) = __floats2half2_rn(z.x, z.y);
            }
        }
    }

    // thread rows: g + 8i of the warp's 16*MT
    int mask_row[2*MT];
    float slope[2*MT];
#pragma unroll
    for (int i = 0; i < 2*MT; ++i) {
        const int row = row0 + g + 8*i < n_rows ? row0 + g + 8*i : n_rows - 1;
        mask_row[i] = (max(row/a.gqa, tok0) - tok0)*T*2 + 4*t;
        slope[i] = kvq_slope(a, head_kv*a.gqa + row % a.gqa)*KVQ_LOG2E;
    }
    const bool active = row0 < n_rows;         // warps past the last row only help to dequantise

    float o[MT][VN][4], m[2*MT], l[2*MT];
#pragma unroll
    for (int i = 0; i < MT; ++i) {
#pragma unroll
        for (int n = 0; n < VN; ++n) {
            o[i][n][0] = o[i][n][1] = o[i][n][2] = o[i][n][3] = 0.0f;
        }
        m[2*i] = m[2*i + 1] = KVQ_NO_MAX;
        l[2*i] = l[2*i + 1] = 0.0f;
    }

    const int mi = lane >> 3, mr = lane & 7;      // matrix and row that this lane addresses in ldmatrix
    const uint32_t q_at = kvq_shared(sq + (warp*16*MT + (mi & 1)*8 + mr)*S::SK + (mi >> 1)*8);
    const uint32_t k_at = kvq_shared(sk + ((mi >> 1)*8 + mr)*S::SK + (mi & 1)*8);
    const uint32_t v_at = kvq_shared(sv + ((mi & 1)*8 + mr)*S::SV + (mi >> 1)*8);

    kvq_cp_wait<1>();
    __syncthreads();
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
        const bool in_window = tile >= n_cache;
        const char * mask_tile = raw + 2*stage_bytes + (tile - tile0) % 3*mask_bytes;
#pragma unroll 1
        for (int first = 0; first < T && active; first += STEP) {
            const int token = tile*T + first, at = slot*T + first;
            float p[MT][NT][4];
#pragma unroll
            for (int i = 0; i < MT; ++i) {
#pragma unroll
                for (int j = 0; j < NT; ++j) {
                    p[i][j][0] = p[i][j][1] = p[i][j][2] = p[i][j][3] = 0.0f;
                }
            }
            // fragments are loaded one step ahead of the products
            uint4 qa[2][MT], kb[2][NT/2];
            auto load_k = [&](const int s, const int into) {
#pragma unroll
                for (int i = 0; i < MT; ++i) {
                    qa[into][i] = kvq_ldmatrix(q_at + i*(32*S::SK) + 32*s);
                }
#pragma unroll
                for (int j = 0; j < NT/2; ++j) {
                    kb[into][j] = kvq_ldmatrix(k_at + (at + 16*j)*(2*S::SK) + 32*s);
                }
            };
            load_k(0, 0);
#pragma unroll
            for (int s = 0; s < KS; ++s) {
                auto in_use = [&](const int s) { return s < S::DK/16 || (s < KS && s < S::DK/16 + (a.bias.n + 7)/8); };
                if (!in_use(s)) {
                    break;
                }
                if (in_use(s + 1)) {
                    load_k(s + 1, (s + 1) & 1);
                }
#pragma unroll
                for (int j = 0; j < NT/2; ++j) {
#pragma unroll
                    for (int i = 0; i < MT; ++i) {
                        kvq_mma_f16(p[i][2*j    ], qa[s & 1][i], kb[s & 1][j].x, kb[s & 1][j].y);
                        kvq_mma_f16(p[i][2*j + 1], qa[s & 1][i], kb[s & 1][j].z, kb[s & 1][j].w);
                    }
                }
            }
            if (in_window) {       // its rows have no units of levels
                const float unit = 1.0f/kvq_tile_factor(a.k.store);
#pragma unroll
                for (int i = 0; i < MT; ++i) {
#pragma unroll
                    for (int j = 0; j < NT; ++j) {
#pragma unroll
                        for (int e = 0; e < 4; ++e) {
                            p[i][j][e] *= unit;
                        }
                    }
                }
            }
            if (a.softcap != 0.0f) {
#pragma unroll
                for (int i = 0; i < MT; ++i) {
#pragma unroll
                    for (int j = 0; j < NT; ++j) {
#pragma unroll
                        for (int e = 0; e < 4; ++e) {
                            p[i][j][e] = a.softcap*KVQ_LOG2E*tanhf(p[i][j][e]);
                        }
                    }
                }
            }
            if (mask_rows > 0 && (tile + 1)*T <= a.n_kv) {
                uint32_t mk[2*MT][NT], any_bits = 0;
#pragma unroll
                for (int i = 0; i < 2*MT; ++i) {
#pragma unroll
                    for (int j = 0; j < NT; ++j) {
                        mk[i][j] = *(const uint32_t *) (mask_tile + mask_row[i] + 2*first + 16*j);
                        any_bits |= mk[i][j];
                    }
                }
                // most tiles of a long context are fully visible
                if (__any_sync(0xFFFFFFFFu, any_bits != 0)) {
#pragma unroll
                    for (int i = 0; i < 2*MT; ++i) {
#pragma unroll
                        for (int j = 0; j < NT; ++j) {
                            const float2 mf = __half22float2(*(const __half2 *) &mk[i][j]);
                            float * x = p[i/2][j] + 2*(i & 1);
                            x[0] = fmaf(slope[i], mf.x, x[0]);
                            x[1] = fmaf(slope[i], mf.y, x[1]);
                        }
                    }
                }
            } else if (a.mask || in_window || token + STEP > a.n_kv) {
                const int first_token = in_window ? token - n_cache*T : token, end = in_window ? a.window.n : a.n_kv;
                const char * masks = in_window ? a.window.mask + (seq % a.window.nem3)*a.window.nbm3 : mask_first;
                const int64_t nb = in_window ? a.window.nbm1 : a.nbm1;
#pragma unroll
                for (int i = 0; i < 2*MT; ++i) {
                    const int row = row0 + g + 8*i < n_rows ? row0 + g + 8*i : n_rows - 1;
                    const __half * mask = (const __half *) (masks + (row/a.gqa)*nb);
#pragma unroll
                    for (int j = 0; j < NT; ++j) {
#pragma unroll
                        for (int e = 0; e < 2; ++e) {
                            const int c = first_token + 8*j + 2*t + e;
                            const float x = c >= end ? -INFINITY : a.mask || in_window ? slope[i]*__half2float(mask[c]) : 0.0f;
                            p[i/2][j][2*(i & 1) + e] += x;
                        }
                    }
                }
            }
            float decay[2*MT];
            bool moved = false;
#pragma unroll
            for (int i = 0; i < 2*MT; ++i) {
                float * x[NT];
                float top = m[i];
#pragma unroll
                for (int j = 0; j < NT; ++j) {
                    x[j] = p[i/2][j] + 2*(i & 1);
                    top = fmaxf(top, fmaxf(x[j][0], x[j][1]));
                }
                top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, 1));
                top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, 2));
                moved = moved || top != m[i];
                decay[i] = kvq_exp2(m[i] - top);
                m[i] = top;
                float sum = 0.0f;
#pragma unroll
                for (int j = 0; j < NT; ++j) {
                    x[j][0] = kvq_exp2(x[j][0] - top);
                    x[j][1] = kvq_exp2(x[j][1] - top);
                    sum += x[j][0] + x[j][1];
                }
                l[i] = fmaf(l[i], decay[i], sum);
            }
            if (__any_sync(0xFFFFFFFFu, moved)) {
#pragma unroll
                for (int i = 0; i < MT; ++i) {
#pragma unroll
                    for (int n = 0; n < VN; ++n) {
                        o[i][n][0] *= decay[2*i];
                        o[i][n][1] *= decay[2*i];
                        o[i][n][2] *= decay[2*i + 1];
                        o[i][n][3] *= decay[2*i + 1];
                    }
                }
            }
            if (in_window) {
                const float unit = 1.0f/kvq_tile_factor(vo.store);
#pragma unroll
                for (int i = 0; i < MT; ++i) {
#pragma unroll
                    for (int j = 0; j < NT; ++j) {
#pragma unroll
                        for (int e = 0; e < 4; ++e) {
                            p[i][j][e] *= unit;
                        }
                    }
                }
            }
            uint4 pa[MT][STEP/16];
#pragma unroll
            for (int i = 0; i < MT; ++i) {
#pragma unroll
                for (int s = 0; s < STEP/16; ++s) {
                    __half2 w;
                    w = __floats2half2_rn(p[i][2*s    ][0], p[i][2*s    ][1]); pa[i][s].x = *(const uint32_t *) &w;
                    w = __floats2half2_rn(p[i][2*s    ][2], p[i][2*s    ][3]); pa[i][s].y = *(const uint32_t *) &w;
                    w = __floats2half2_rn(p[i][2*s + 1][0], p[i][2*s + 1][1]); pa[i][s].z = *(const uint32_t *) &w;
                    w = __floats2half2_rn(p[i][2*s + 1][2], p[i][2*s + 1][3]); pa[i][s].w = *(const uint32_t *) &w;
                }
            }
            constexpr int PAIRS = VN/2, LOADS = STEP/16*PAIRS, AHEAD = 2;
            uint4 vb[AHEAD + 1];
            auto load_v = [&](const int i) {
                vb[i % (AHEAD + 1)] = kvq_ldmatrix_trans(v_at + (at + 16*(i/PAIRS))*(2*S::SV) + 32*(i % PAIRS));
            };
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                load_v(i);
            }
#pragma unroll
            for (int i = 0; i < LOADS; ++i) {
                if (i + AHEAD < LOADS) {
                    load_v(i + AHEAD);
                }
                const int n = 2*(i % PAIRS);
                const uint4 v = vb[i % (AHEAD + 1)];
#pragma unroll
                for (int k = 0; k < MT; ++k) {
                    kvq_mma_f16(o[k][n    ], pa[k][i/PAIRS], v.x, v.y);
                    kvq_mma_f16(o[k][n + 1], pa[k][i/PAIRS], v.z, v.w);
                }
            }
        }
        if (more && !early) {
            dequantise(tile + 1);
        }
    }
    kvq_pdl_launch();

#pragma unroll
    for (int i = 0; i < 2*MT; ++i) {
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
            *(float2 *) (out + 8*n) = make_float2(o[i/2][n][2*(i & 1)]*unit, o[i/2][n][2*(i & 1) + 1]*unit);
        }
    }
#endif // KVQ_AMPERE
}
