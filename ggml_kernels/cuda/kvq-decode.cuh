// Attention of a few query rows against a compressed cache, in int8 tensor-core products.
//
// Warps of a block divide KV heads, groups of query rows, parts of the value head and slices of a tile's tokens. K and V
// are the 16-row operands (tokens x values, and values x tokens), so that the cost of unpacking them is shared by every
// query row. The narrow operand has 8 columns: columns 2t and 2t+1 hold the high and the low byte of row t's 16-bit fixed
// point, and meet in one thread's accumulators. Queries are fixed point relative to the row's largest value; weights times
// value scales likewise, relative to the largest of the tile. The codes' int8 levels are exact, the K scale goes into the
// logit, the V scale into the weight. The tiles of an f16 window are products of f16 onto the same accumulators.
#pragma once

#include "kvq-decode-f16.cuh"

template <int DK_, int DV_, int NK_, int NV_, int VP_, int TILE_, int STAGES_, int BLOCKS_, int GROUPS_> struct kvq_decode_shape {
    static constexpr int DK = DK_, DV = DV_;         // head sizes
    static constexpr int NK = NK_, NV = NV_;         // values per block
    static constexpr int VP = VP_;                   // parts of the value head, one warp each
    static constexpr int TILE = TILE_;               // tokens of one step of a warp
    static constexpr int STAGES = STAGES_;
    static constexpr int BLOCKS = BLOCKS_;           // resident blocks aimed at
    static constexpr int GROUPS = GROUPS_;           // groups of 4 query rows that one warp serves
    static constexpr int ROWS = 4*GROUPS;
    static constexpr int k_blocks = DK/NK, v_blocks = DV/NV/VP;
    // products of 32 values per block, padded with zero queries; oscar2 has one, one and two for its tiers at any block size
    template <int KB> static constexpr int steps = KB == KVQ_TIERS ? 4 : (NK + 31)/32;
    template <int KB> static constexpr int query_bytes = GROUPS*k_blocks*steps<KB>*32*8;     // fragments of one warp's rows
    static constexpr int query16_bytes = ROWS*(DK + 8)*2;      // the same rows in f16
};

// the first tier of oscar2 has the levels of 4-bit codes
template <int BITS> using kvq_decode_tables = kvq_tables<BITS == KVQ_TIERS ? 4 : BITS, 0, kvq_product_shift>;

#ifdef KVQ_AMPERE
// the tables of V: those of K when they are the same
template <int VB, int KB> static __device__ __forceinline__ auto kvq_value_tables(const kvq_decode_tables<KB> & k) {
    if constexpr (VB == (KB == KVQ_TIERS ? 4 : KB)) {
        return k;
    } else {
        return kvq_decode_tables<VB>(k.shift);
    }
}

// coordinate i of a block of the K type -> byte in the fragments of 32-value products, without the column
template <int KB, int N> static __device__ __forceinline__ int kvq_query_slot(const int i) {
    if constexpr (KB == KVQ_TIERS) {
        if (i < N/4) {
            const int half = i/(N/8), b = i % (N/8), u = b/2;
            return (u & 3)*8 + (u/4)*4 + 2*(b & 1) + half;
        } else if (i < N/2) {
            const int k = (i - N/4)/(N/16), b = (i - N/4) % (N/16), u = b/2;
            return (32 + u)*8 + (k & 1)*4 + 2*(b & 1) + (k >> 1);
        }
        const int k = (i - N/2)/(N/16), b = (i - N/2) % (N/16) + kvq_tier_block<N>::one_odd, u = b/2;
        return ((2 + ((k >> 1) & 1))*32 + u)*8 + (k & 1)*4 + 2*(b & 1) + (k >> 2);
    } else if constexpr (KB == 4) {
        const int half = i/(N/2), b = i % (N/2), u = b/2;
        return ((u/8)*32 + (u & 3))*8 + ((u/4) & 1)*4 + 2*(b & 1) + half;
    } else {
        const int k = i/(N/4), b = i % (N/4), u = b/2;
        return ((u/4)*32 + (u & 3))*8 + (k & 1)*4 + 2*(b & 1) + (k >> 1);
    }
}

// Rotates and quantises the query rows of one warp into fragments; row_scale gets the factors that undo it. q16: null without a
// window, else their place in f16, times the logit scale.
template <int KB, typename S> static __device__ __forceinline__ void kvq_load_queries(
        const kvq_fattn_args & a, const int seq, const int head_kv, const int group, char * frags, float * row_scale, __half * q16, float * buf, const int lane) {
    constexpr int R = kvq_hadamard<S::NK>::regs;
    constexpr int STEPS = S::template steps<KB>;
    const float scale16 = (KB == KVQ_TIERS ? 1.0f : rsqrtf(float(S::NK)))*a.scale*(a.softcap != 0.0f ? 1.0f : KVQ_LOG2E);
    for (int i = lane; i < S::template query_bytes<KB>/16; i += 32) {
        ((uint4 *) frags)[i] = make_uint4(0, 0, 0, 0);
    }
    __syncwarp();
    // four rows at a time: their loads and their butterflies overlap
    for (int r0 = 0; r0 < S::ROWS; r0 += 4) {
        float x[4][S::k_blocks][R];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const int row = group*S::ROWS + r0 + r;
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
        if (group*S::ROWS + r0 >= a.gqa*a.n_tok) {
            if (lane < 4) {
                row_scale[r0 + lane] = 0.0f;
            }
            for (int i = lane; q16 && i < 4*(S::DK + 8)/2; i += 32) {
                ((uint32_t *) (q16 + r0*(S::DK + 8)))[i] = 0;
            }
            continue;
        }
        float amax[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            amax[r] = 0.0f;
#pragma unroll
            for (int b = 0; b < S::k_blocks; ++b) {
                if constexpr (KB != KVQ_TIERS) {
                    kvq_apply_signs<S::NK>(x[r][b], lane);
                    kvq_hadamard_warp<S::NK, false>(x[r][b], buf, lane);
                }
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
                        char * at = frags + ((r0/4)*S::k_blocks + b)*STEPS*32*8 + r*8*8 + kvq_query_slot<KB, S::NK>(i);
                        at[0]   = (char) hi;
                        at[4*8] = (char) (v - 256*hi);
                    }
                }
            }
            if (lane == 0) {
                // undo the fixed point, the rotation's sqrt(n), the level table's scale, and apply the attention scale
                row_scale[r0 + r] = amax[r]/32512.0f*(KB == KVQ_TIERS ? 1.0f : rsqrtf(float(S::NK)))*(a.scale/kvq_scale_of<KB>());
            }
        }
        if (q16) {
#pragma unroll
            for (int r = 0; r < 4; ++r) {
#pragma unroll
                for (int b = 0; b < S::k_blocks; ++b) {
#pragma unroll
                    for (int j = 0; j < R; ++j) {
                        if (j*32 + lane < S::NK) {
                            q16[(r0 + r)*(S::DK + 8) + b*S::NK + j*32 + lane] = __float2half_rn(x[r][b][j]*scale16);
                        }
                    }
                }
            }
        }
    }
}

// Value fragments of one 16-bit unit of four tokens: f[4*c + k] holds, for byte c of the unit and coordinate group k,
// the four tokens' levels. 4-bit codes have two coordinate groups, the others four.
template <int VB> struct kvq_value_unit { static constexpr int frags = VB == 4 ? 4 : 8; };

static __device__ __forceinline__ void kvq_split_tokens(const kvq_product_shift & shift, const uint32_t (&h)[4], uint32_t & low, uint32_t & high) {
    const uint32_t a = kvq_prmt(h[0], h[2], 0x5140);
    const uint32_t b = kvq_prmt(h[1], h[3], 0x5140);
    low  = kvq_bitsel(0x0F0F0F0Fu, a, shift.left<4>(b));
    high = kvq_bitsel(0x0F0F0F0Fu, a >> 4, b);
}

template <int VB> static __device__ __forceinline__ void kvq_value_frags(
        const kvq_decode_tables<VB> & table, const uint32_t (&h)[4], const uint32_t (&hi)[4], uint32_t * f) {
    uint32_t low, high;
    kvq_split_tokens(table.shift, h, low, high);
    if constexpr (VB == 4) {
        table.two(low,  f[0], f[2]);
        table.two(high, f[1], f[3]);
    } else if constexpr (VB == 2) {
        table.two( low        & 0x33333333u, f[0], f[4]);
        table.two((low >> 2) & 0x33333333u, f[1], f[5]);
        table.two( high       & 0x33333333u, f[2], f[6]);
        table.two((high >> 2) & 0x33333333u, f[3], f[7]);
    } else {
        uint32_t hl, hh;
        kvq_split_tokens(table.shift, hi, hl, hh);
        hl &= 0x55555555u;
        hh &= 0x55555555u;
        table.two(kvq_bitsel(0x33333333u, low,       table.shift.template left<2>(hl)), f[0], f[4]);
        table.two(kvq_bitsel(0x33333333u, low >> 2, hl),      f[1], f[5]);
        table.two(kvq_bitsel(0x33333333u, high,      table.shift.template left<2>(hh)), f[2], f[6]);
        table.two(kvq_bitsel(0x33333333u, high >> 2, hh),      f[3], f[7]);
    }
}

// What a thread knows of its two tokens before their products: for oscar2 the bits of the scale and the levels they choose.
template <int KB> struct kvq_key_rows {
    uint32_t scale[2], two[2], one[2];
};

// The 16 tokens x 32 values of product s: registers of this thread's tokens g and g+8 (at0, at1: their block, plus 2t).
template <int KB, int N> static __device__ __forceinline__ uint4 kvq_key_frag(
        const kvq_decode_tables<KB> & table, const kvq_key_rows<KB> & rows, const char * at0, const char * at1, const int s, const int t) {
    uint4 f;
    if constexpr (KB == KVQ_TIERS) {
        using P = kvq_tier_block<N>;
        if (s == 0) {
            f.x = table.one(kvq_ld16(at0));
            f.y = table.one(kvq_ld16(at1));
            f.z = table.one(kvq_ld16(at0 + 8));
            f.w = table.one(kvq_ld16(at1 + 8));
        } else if (s == 1) {
            const uint32_t lo0 = kvq_ld16(at0 + P::two), lo1 = kvq_ld16(at1 + P::two);
            f.x = kvq_prmt(rows.two[0], rows.two[0], lo0 & 0x3333u);
            f.y = kvq_prmt(rows.two[1], rows.two[1], lo1 & 0x3333u);
            f.z = kvq_prmt(rows.two[0], rows.two[0], (lo0 >> 2) & 0x3333u);
            f.w = kvq_prmt(rows.two[1], rows.two[1], (lo1 >> 2) & 0x3333u);
        } else {
            // bits j and j + 4 of both bytes
            const int j = 2*(s - 2);
            const uint32_t lo0 = kvq_ld16(at0 + P::one_unit), lo1 = kvq_ld16(at1 + P::one_unit);
            f.x = kvq_prmt(rows.one[0], rows.one[0], (lo0 >> j) & 0x1111u);
            f.y = kvq_prmt(rows.one[1], rows.one[1], (lo1 >> j) & 0x1111u);
            f.z = kvq_prmt(rows.one[0], rows.one[0], (lo0 >> (j + 1)) & 0x1111u);
            f.w = kvq_prmt(rows.one[1], rows.one[1], (lo1 >> (j + 1)) & 0x1111u);
        }
    } else if constexpr (KB == 4) {
        f.x = table.one(kvq_ld16(at0 + 16*s));
        f.y = table.one(kvq_ld16(at1 + 16*s));
        f.z = table.one(kvq_ld16(at0 + 16*s + 8));
        f.w = table.one(kvq_ld16(at1 + 16*s + 8));
    } else {
        const uint32_t hi0 = KB == 3 ? kvq_hi16<N>(at0 - 2*t, 4*s + t) : 0u, hi1 = KB == 3 ? kvq_hi16<N>(at1 - 2*t, 4*s + t) : 0u;
        kvq_unit_pair(table, kvq_ld16(at0 + 8*s), hi0, f.x, f.z);
        kvq_unit_pair(table, kvq_ld16(at1 + 8*s), hi1, f.y, f.w);
    }
    return f;
}
#endif // KVQ_AMPERE

// How a block of the decode kernel finds its data.
enum kvq_decode_mode {
    KVQ_GENERAL,    // any strides, any number of heads
    KVQ_LINEAR,     // 8 KV heads of packed, 16-byte aligned rows, all query rows, whole tiles: strides are constants, a tile
                    // is one run of bytes, its mask is staged with it, the queries stay in registers
    KVQ_SHORT,      // the same for a context of a few tiles: the 8 blocks of a cluster share it and join their results
};

static constexpr int KVQ_CLUSTER = 8;

// With a bias, where every byte counts for a second block: the f16 queries stand behind the others in the ring, if both fit there.
template <int KB, int VB, typename S, bool LINEAR, bool BIAS> __host__ __device__ constexpr bool kvq_query16_in_ring() {
    constexpr int slices = S::k_blocks*kvq_block<KB, S::NK>::bytes + S::v_blocks*S::VP*kvq_block<VB, S::NV>::bytes;
    return LINEAR && BIAS && S::TILE*slices >= S::template query_bytes<KB> + 32 + S::query16_bytes;
}

template <int KB, int VB, typename S, int MODE, bool BIAS>
static __device__ __forceinline__ void kvq_decode_body(const kvq_fattn_args & a) {
#ifdef KVQ_AMPERE
    constexpr bool LINEAR = MODE != KVQ_GENERAL;
    constexpr int T = S::TILE, NI = T/16, NB = S::GROUPS, K_STEPS = S::template steps<KB>, Q_BYTES = S::template query_bytes<KB>;
    using BK = kvq_block<KB, S::NK>;
    using BV = kvq_block<VB, S::NV>;
    constexpr int VU = kvq_value_unit<VB>::frags;                 // coordinates of a unit, registers of four tokens
    constexpr int QU = (BV::units + 7)/8;                         // units per thread and block
    constexpr int OUT = S::v_blocks*QU*VU;                        // outputs per thread and row

    const int lane = threadIdx.x & 31, warp = threadIdx.y, g = lane >> 2, t = lane & 3;    // the "& 31" tells the compiler that g < 8
    const int tid = warp*32 + lane, n_threads = blockDim.y*32;

    constexpr int K_SLICE = S::k_blocks*BK::bytes, V_SLICE = S::v_blocks*S::VP*BV::bytes;
    static_assert(!LINEAR || T*(K_SLICE + V_SLICE) >= Q_BYTES + 32, "the queries of 8 heads pass through a stage");
    static_assert(MODE != KVQ_SHORT || T*S::STAGES*(K_SLICE + V_SLICE) >= S::ROWS*(4*S::DV + 8), "the results of 8 heads take the place of the ring");
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
    const int tile0 = kvq_first_tile(split, a.n_split, n_tiles), tile1 = kvq_first_tile(split + 1, a.n_split, n_tiles);
    // this warp's rows of an f16 window: the first, and from one tile of the block to its next
    const int window0 = (split*slices + sl)*KVQ_WINDOW_TILE, window_step = a.n_split*slices*KVQ_WINDOW_TILE;

    extern __shared__ __align__(16) char smem[];
    const int k_bytes = tile_tokens*k_stride, v_bytes = v_is_k ? 0 : tile_tokens*v_stride, m_bytes = LINEAR ? a.mask_rows*T*2 : 0;
    const int stage_bytes = k_bytes + v_bytes + m_bytes + (BIAS ? tile_tokens*4 : 0);      // with a bias the positions come last
    // LINEAR: the queries pass through the stage that is filled last
    char  * q_frags   = smem + (LINEAR ? (S::STAGES - 1)*stage_bytes : 0);       // [heads*row_groups][Q_BYTES]
    float * row_scale = (float *) (q_frags + heads*row_groups*Q_BYTES);       // [heads*row_groups][8]
    char  * ring      = LINEAR ? smem : (char *) (row_scale + ((heads*row_groups*8 + 3) & ~3));
    const uint32_t ring_s = kvq_shared(ring);
    // behind the stages and their barriers: queries in f16, then those of the bias, its tables and the warps' turns
    constexpr bool RING16 = kvq_query16_in_ring<KB, VB, S, LINEAR, BIAS>();
    char   * behind = ring + S::STAGES*stage_bytes + 64;
    __half * q16    = (__half *) (RING16 ? q_frags + 8*(Q_BYTES + 32) : behind);
    const int n16   = BIAS ? 16*a.bias.chunks : 0;
    float2 * z      = (float2 *) (behind + (a.window.n > 0 && !RING16 ? heads*row_groups*S::query16_bytes : 0));
    uint4  * table  = (uint4 *) (z + heads*row_groups*S::ROWS*n16);
    float2 * step   = (float2 *) (table + n16*S::TILE/4);
    float2 * turn   = step + n16 + warp*2*n16;          // of a position of the cache, then of one of the window
#ifdef KVQ_BULK_COPY
    const uint32_t full_s = ring_s + S::STAGES*stage_bytes;      // LINEAR: a barrier for every stage
    if (LINEAR && tid == 0) {
        for (int i = 0; i < S::STAGES; ++i) {
            kvq_bulk_init(full_s + 8*i);
        }
        kvq_bulk_fence();
    }
#endif

    const char * k_first = a.k.data + seq*a.k.nb3 + head0*a.k.nb2;
    const char * v_first = a.v.data + seq*a.v.nb3 + head0*a.v.nb2;
    const char * m_first = a.mask ? a.mask + (seq % a.nem3)*a.nbm3 : nullptr;
    const int * pos_first = BIAS ? (const int *) (a.bias.pos + seq/a.bias.seqs*a.bias.nbp1) : nullptr;

    auto fetch = [&](const int tile) {
        if (tile < tile1) {
            const uint32_t at = ring_s + uint32_t((tile - tile0) % S::STAGES)*stage_bytes;
            const int token = tile*tile_tokens;
            if constexpr (LINEAR) {
                const char * ks = k_first + int64_t(token)*k_stride, * vs = v_first + int64_t(token)*v_stride;
#ifdef KVQ_BULK_COPY
                if (tid == 0) {
                    const uint32_t barrier = full_s + (tile - tile0) % S::STAGES*8;
                    kvq_bulk_expect(barrier, stage_bytes);
                    kvq_bulk_copy(at, ks, k_bytes, barrier);
#pragma unroll 1
                    for (int r = 0; r < a.mask_rows; ++r) {
                        kvq_bulk_copy(at + k_bytes + v_bytes + r*T*2, m_first + r*a.nbm1 + token*2, T*2, barrier);
                    }
                    kvq_bulk_copy(at + k_bytes, vs, v_bytes, barrier);
                    if constexpr (BIAS) {
                        kvq_bulk_copy(at + k_bytes + v_bytes + m_bytes, pos_first + token, T*4, barrier);
                    }
                }
                return;
#else
#pragma unroll
                for (int i0 = 0; i0 < T*8*K_SLICE; i0 += 256*16) {
                    const int i = i0 + tid*16;
                    if (i0 + 256*16 <= T*8*K_SLICE || i < T*8*K_SLICE) {
                        kvq_cp_async<16>(at + i, ks + i);
                    }
                }
#pragma unroll
                for (int i0 = 0; i0 < T*8*V_SLICE; i0 += 256*16) {
                    const int i = i0 + tid*16;
                    if (i0 + 256*16 <= T*8*V_SLICE || i < T*8*V_SLICE) {
                        kvq_cp_async<16>(at + T*8*K_SLICE + i, vs + i);
                    }
                }
                constexpr int PIECES = T*2/16;       // of a mask row
                if (tid < a.mask_rows*PIECES) {
                    kvq_cp_async<16>(at + k_bytes + v_bytes + tid*16, m_first + (tid/PIECES)*a.nbm1 + (token + tid % PIECES*8)*2);
                }
                if (BIAS && tid < T/4) {
                    kvq_cp_async<16>(at + k_bytes + v_bytes + m_bytes + tid*16, pos_first + token + tid*4);
                }
#endif
            } else {
                kvq_copy_window(a.k, k_first, at, token, tile_tokens, a.n_kv, tid, n_threads);
                if (!v_is_k) {
                    kvq_copy_window(a.v, v_first, at + k_bytes, token, tile_tokens, a.n_kv, tid, n_threads);
                }
                for (int i = tid; BIAS && i < tile_tokens; i += n_threads) {
                    const bool real = token + i < a.n_kv;
                    kvq_cp_async<4>(at + k_bytes + v_bytes + i*4, pos_first + (real ? token + i : 0), real);
                }
            }
        }
        kvq_cp_commit();
    };

    const int slot = h + rg*heads;
    auto load_queries = [&]() {
        if (vp == 0 && sl == 0) {
            // the last stage of the ring is still free: scratch for the rotations, of head sizes that are not linear, that need it
            float * buf = LINEAR ? nullptr : (float *) (ring + (S::STAGES - 1)*stage_bytes) + slot*128;
            kvq_load_queries<KB, S>(a, seq, head0 + h, group, q_frags + slot*Q_BYTES, row_scale + slot*8, a.window.n > 0 ? q16 + slot*(S::query16_bytes/2) : nullptr, buf, lane);
            if constexpr (BIAS) {
                const float scale = a.scale*(a.softcap != 0.0f ? 1.0f : KVQ_LOG2E);
#pragma unroll 1
                for (int i = lane & 15; i < n16; i += 16) {
                    float2 x[S::ROWS/2];        // all loads before the first store
#pragma unroll
                    for (int r = 0; r < S::ROWS/2; ++r) {
                        const int row = group*S::ROWS + 2*r + lane/16, tok = row < n_rows ? row/a.gqa : 0, head = (head0 + h)*a.gqa + (row < n_rows ? row % a.gqa : 0);
                        x[r] = kvq_bias_query(a.bias, seq, tok, head, head0 + h, i, row < n_rows ? scale : 0.0f);
                    }
#pragma unroll
                    for (int r = 0; r < S::ROWS/2; ++r) {
                        z[(slot*S::ROWS + 2*r + lane/16)*n16 + i] = x[r];
                    }
                }
            }
        }
    };
    // this warp's part of K and V of a window tile
    auto window_k = [&](const int token) { return a.window.k + seq*a.window.nbk3 + (head0 + h)*a.window.nbk2 + token*a.window.nbk1; };
    auto window_v = [&](const int token) { return a.window.v + seq*a.window.nbv3 + (head0 + h)*a.window.nbv2 + token*a.window.nbv1 + vp*S::v_blocks*S::NV*2; };
    // read without a stage in shared memory: on their way to the L2 cache, which sees every write, while the queries are turned
    for (int token = window0; token < a.window.n; token += window_step) {
        kvq_prefetch_rows(window_k(token), a.window.nbk1, KVQ_WINDOW_TILE, 2*S::DK, lane);
        kvq_prefetch_rows(window_v(token), a.window.nbv1, KVQ_WINDOW_TILE, 2*S::v_blocks*S::NV, lane);
    }
    // What no launch writes: the tables, and the turns by the positions where this warp probably begins.
    int first_pos = 0, first_pos16 = 0;
    if constexpr (BIAS) {
        first_pos   = pos_first[min(tile0*tile_tokens + sl*T, a.n_kv - 1)];
        first_pos16 = pos_first[window0 < a.window.n ? a.n_kv + window0 : 0];
        kvq_fill_bias_table<S>(a.bias, table, tid, n_threads);
        asm volatile("" : "+r"(first_pos), "+r"(first_pos16));      // not waited for before the loads of the table
        first_pos   = max(first_pos, 0);
        first_pos16 = max(first_pos16, 0);
#pragma unroll 1
        for (int i = lane; i < n16; i += 32) {
            const int pair = a.bias.list[i];
            const float2 x = kvq_turn(a.bias, first_pos, pair), y = kvq_turn(a.bias, first_pos16, pair), one = kvq_turn_row(a.bias, T, pair);
            turn[i]       = x;
            turn[n16 + i] = y;
            if (warp == 0) {
                float2 z = one;
                for (int k = 1; k < slices; ++k) {
                    z = kvq_turn_on(z, one);
                }
                step[i] = z;
            }
        }
    }
    if (a.early_queries) {
        load_queries();
    }
    kvq_pdl_wait();
    kvq_pdl_launch();
#pragma unroll
    for (int s = 0; s < S::STAGES - 1; ++s) {
        fetch(tile0 + s);
    }
    if (!a.early_queries) {
        load_queries();
    }
#ifdef KVQ_BULK_COPY
    if (LINEAR) {
        kvq_bulk_fence();
    }
#endif
    __syncthreads();

    const char * my_q = q_frags + slot*Q_BYTES + lane*8;
    constexpr int Q_FRAGS = NB*S::k_blocks*K_STEPS;
    uint2 q_regs[LINEAR ? Q_FRAGS : 1];
    if constexpr (LINEAR) {
#pragma unroll
        for (int i = 0; i < Q_FRAGS; ++i) {
            q_regs[i] = *(const uint2 *) (my_q + i*32*8);
        }
    }
    // this thread's row of every group of 4
    float logit_scale[NB], slope[NB];
    int tok_q[NB];
#pragma unroll
    for (int n = 0; n < NB; ++n) {
        const int row = group*S::ROWS + 4*n + t;
        const bool valid = row < n_rows;
        tok_q[n] = valid ? row/a.gqa : 0;
        logit_scale[n] = row_scale[slot*8 + 4*n + t]*(a.softcap != 0.0f ? 1.0f : KVQ_LOG2E);
        slope[n] = kvq_slope(a, (head0 + h)*a.gqa + (valid ? row % a.gqa : 0))*KVQ_LOG2E;
    }

    // where a token's slice begins in its window row: the copy starts at an address aligned down to its granularity
    auto shift_of = [&](const kvq_operand & o, const char * first, const int odd) {
        return LINEAR ? 0 : int((uintptr_t) first + odd*(o.nb1 & 3)) & (o.gran - 1);
    };
    const int k_shift = shift_of(a.k, k_first, g & 1);
    // logits are of tokens g, g+8, ...; the values' tokens are t, t+4, ...
    const int v_shift_g = v_is_k ? k_shift : shift_of(a.v, v_first, g & 1), v_shift_t = v_is_k ? shift_of(a.k, k_first, t & 1) : shift_of(a.v, v_first, t & 1);
    const int k_at  = (sl*T + g)*k_stride + k_shift + h*k_head;
    const int v_off = h*v_head + vp*S::v_blocks*BV::bytes;
    const int vs_at = (sl*T + g)*v_stride + v_shift_g + v_off + BV::scale_off;
    const int v_at  = (sl*T + t)*v_stride + v_shift_t + v_off + 2*g;
    // the exchange of weights: lanes of tokens 0-3 send the high bytes first, the others the low bytes
    const uint32_t pick_a = g < 4 ? 0x7632 : 0x5410, pick_b = g < 4 ? 0x5410 : 0x7632;
    const int lane_a = 4*t + (g >> 1) + ((g & 1) ? 16 : 0), lane_b = lane_a ^ 16;

    const kvq_decode_tables<KB> k_table;
    [[maybe_unused]] const kvq_tier_tables tiers(lane);
    const kvq_decode_tables<VB> v_table = kvq_value_tables<VB, KB>(k_table);

    float o[NB][OUT];
    float m[NB], l[NB];
#pragma unroll
    for (int n = 0; n < NB; ++n) {
        m[n] = KVQ_NO_MAX;
        l[n] = 0.0f;
#pragma unroll
        for (int i = 0; i < OUT; ++i) {
            o[n][i] = 0.0f;
        }
    }

    // Logits p of this thread's rows and tokens become weights; outputs so far shrink where a maximum moves.
    auto softmax = [&](auto & p, const auto & mk, const bool masked) {
        constexpr int J = sizeof(p[0])/sizeof(p[0][0]);
        if (a.softcap != 0.0f) {
#pragma unroll
            for (int n = 0; n < NB; ++n) {
#pragma unroll
                for (int j = 0; j < J; ++j) {
                    p[n][j] = a.softcap*KVQ_LOG2E*tanhf(p[n][j]);
                }
            }
        }
        if (masked) {
#pragma unroll
            for (int n = 0; n < NB; ++n) {
#pragma unroll
                for (int j = 0; j < J; ++j) {
                    p[n][j] = fmaf(slope[n], __half2float(__ushort_as_half((unsigned short) mk[n][j])), p[n][j]);
                }
            }
        }
        float m_new[NB];
        bool moved = false;
#pragma unroll
        for (int n = 0; n < NB; ++n) {
            float top = p[n][0];
#pragma unroll
            for (int j = 1; j < J; ++j) {
                top = fmaxf(top, p[n][j]);
            }
            m_new[n] = top;
        }
#pragma unroll
        for (int w = 4; w <= 16; w *= 2) {
#pragma unroll
            for (int n = 0; n < NB; ++n) {
                m_new[n] = fmaxf(m_new[n], __shfl_xor_sync(0xFFFFFFFFu, m_new[n], w));
            }
        }
#pragma unroll
        for (int n = 0; n < NB; ++n) {
            m_new[n] = fmaxf(m[n], m_new[n]);
            moved = moved || m_new[n] != m[n];
        }
        if (__any_sync(0xFFFFFFFFu, moved)) {
#pragma unroll
            for (int n = 0; n < NB; ++n) {
                const float decay = kvq_exp2(m[n] - m_new[n]);
                m[n] = m_new[n];
                l[n] *= decay;
#pragma unroll
                for (int i = 0; i < OUT; ++i) {
                    o[n][i] *= decay;
                }
            }
        }
#pragma unroll
        for (int n = 0; n < NB; ++n) {
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < J; ++j) {
                p[n][j] = kvq_exp2(p[n][j] - m[n]);
                sum += p[n][j];
            }
            l[n] += sum;
        }
    };
    // true when no row sees a token of the tile; masked tells whether the mask matters
    auto hidden_tile = [&](const auto & mk, bool & masked) {
        constexpr int J = sizeof(mk[0])/sizeof(mk[0][0]);
        uint32_t any_bits = 0;
#pragma unroll
        for (int n = 0; n < NB; ++n) {
#pragma unroll
            for (int j = 0; j < J; ++j) {
                any_bits |= mk[n][j];
            }
        }
        masked = __any_sync(0xFFFFFFFFu, any_bits != 0);
        if (!masked) {
            return false;
        }
        bool hidden = true;
#pragma unroll
        for (int n = 0; n < NB; ++n) {
#pragma unroll
            for (int j = 0; j < J; ++j) {
                hidden = hidden && mk[n][j] == 0xFC00u;
            }
        }
        return bool(__all_sync(0xFFFFFFFFu, hidden));
    };

    kvq_bias_place place = { z + slot*S::ROWS*n16, table, step, turn, first_pos }, place16 = { z + slot*S::ROWS*n16, table, step, turn + n16, first_pos16 };

    // the window first: the copies of the cache's first tiles are on their way meanwhile
    const char * mask16 = a.window.mask + (seq % max(a.window.nem3, 1))*a.window.nbm3;
#pragma unroll 1
    for (int token = window0; token < a.window.n; token += window_step) {
        uint32_t mk[NB][KVQ_WINDOW_TILE/8];
#pragma unroll
        for (int n = 0; n < NB; ++n) {
#pragma unroll
            for (int j = 0; j < KVQ_WINDOW_TILE/8; ++j) {
                mk[n][j] = kvq_ld16(mask16 + tok_q[n]*a.window.nbm1 + (token + 8*j + g)*2);
            }
        }
        const int pos[1] = { BIAS ? max(pos_first[a.n_kv + token + lane % KVQ_WINDOW_TILE], 0) : 0 };
        kvq_window_tile<VB, S> rows;
        rows.load_keys(window_k(token), a.window.nbk1, g, t);
        if (!rows.VALUES_LATE) {
            rows.load_values(window_v(token), a.window.nbv1, g, t);
        }
        bool masked;
        if (hidden_tile(mk, masked)) {
            continue;
        }
        float p[NB][KVQ_WINDOW_TILE/8];
        rows.logits(p, window_k(token), a.window.nbk1, q16 + slot*(S::query16_bytes/2), g, t);
        if constexpr (BIAS) {
            kvq_add_bias<S>(p, mk, masked, a.bias, pos, place16, 0, lane);
        }
        if (rows.VALUES_LATE) {
            rows.load_values(window_v(token), a.window.nbv1, g, t);
        }
        softmax(p, mk, masked);
        rows.outputs(o, p);
    }

    for (int tile = tile0; tile < tile1; ++tile) {
        // copies of this tile done, and every warp done with the stage that is filled next
#ifdef KVQ_BULK_COPY
        if constexpr (LINEAR) {
            const int i = tile - tile0;
            kvq_bulk_wait(full_s + i % S::STAGES*8, (i/S::STAGES) & 1);
        } else
#endif
        {
            kvq_cp_wait<S::STAGES - 2>();
        }
        __syncthreads();
        fetch(tile + S::STAGES - 1);

        const char * kt = ring + ((tile - tile0) % S::STAGES)*stage_bytes;
        const char * vt = v_is_k ? kt : kt + k_bytes;
        const int token = tile*tile_tokens + sl*T + g;

        // mask of this thread's rows, tokens 8j + g
        uint32_t mk[NB][2*NI];
#pragma unroll
        for (int n = 0; n < NB; ++n) {
#pragma unroll
            for (int j = 0; j < 2*NI; ++j) {
                if constexpr (LINEAR) {
                    mk[n][j] = a.mask_rows ? kvq_ld16(kt + k_bytes + v_bytes + (tok_q[n]*T + 8*j + g)*2) : 0u;
                } else {
                    mk[n][j] = token + 8*j >= a.n_kv ? 0xFC00u : m_first ? kvq_ld16(m_first + tok_q[n]*a.nbm1 + (token + 8*j)*2) : 0u;
                }
            }
        }
        bool masked;
        if (hidden_tile(mk, masked)) {
            continue;
        }

        // logits: p[n][j] of row 4n + t and token 8j + g
        float p[NB][2*NI];
#pragma unroll
        for (int b = 0; b < S::k_blocks; ++b) {
            kvq_key_rows<KB> rows[NI];
            if constexpr (KB == KVQ_TIERS) {
#pragma unroll
                for (int j = 0; j < 2*NI; ++j) {
                    const uint32_t bits = kvq_ld16(kt + k_at + 8*j*k_stride + b*BK::bytes + BK::scale_off);
                    rows[j/2].scale[j & 1] = bits;
                    rows[j/2].two[j & 1]   = tiers.two(bits);
                    rows[j/2].one[j & 1]   = tiers.one(bits);
                }
            }
            int c[NB][NI][4];
#pragma unroll
            for (int n = 0; n < NB; ++n) {
#pragma unroll
                for (int i = 0; i < NI; ++i) {
                    c[n][i][0] = c[n][i][1] = c[n][i][2] = c[n][i][3] = 0;
                }
            }
#pragma unroll
            for (int s = 0; s < K_STEPS; ++s) {
                uint2 qb[NB];
#pragma unroll
                for (int n = 0; n < NB; ++n) {
                    const int f = (n*S::k_blocks + b)*K_STEPS + s;
                    qb[n] = LINEAR ? q_regs[LINEAR ? f : 0] : *(const uint2 *) (my_q + f*32*8);
                }
#pragma unroll
                for (int i = 0; i < NI; ++i) {
                    const char * at = kt + k_at + 16*i*k_stride + b*BK::bytes + 2*t;
                    const uint4 kf = kvq_key_frag<KB, S::NK>(k_table, rows[i], at, at + 8*k_stride, s, t);
#pragma unroll
                    for (int n = 0; n < NB; ++n) {
                        kvq_mma_s8(c[n][i], kf, qb[n].x, qb[n].y);
                    }
                }
            }
#pragma unroll
            for (int j = 0; j < 2*NI; ++j) {
                float d;
                if constexpr (KB == KVQ_TIERS) {
                    d = __half2float(__ushort_as_half((unsigned short) (rows[j/2].scale[j & 1] & KVQ_TIER_SCALE_MASK)));
                } else {
                    d = kvq_ld_half(kt + k_at + 8*j*k_stride + b*BK::bytes + BK::scale_off);
                }
#pragma unroll
                for (int n = 0; n < NB; ++n) {
                    const float x = float(k_table.shift.join(c[n][j/2][2*(j & 1)], c[n][j/2][2*(j & 1) + 1]));
                    const float ds = d*logit_scale[n];
                    p[n][j] = b == 0 ? x*ds : fmaf(x, ds, p[n][j]);
                }
            }
        }
        if constexpr (BIAS) {
            int pos[T/32];
#pragma unroll
            for (int e = 0; e < T/32; ++e) {
                pos[e] = max(*(const int *) (kt + k_bytes + v_bytes + m_bytes + (sl*T + 32*e + lane)*4), 0);
            }
            kvq_add_bias<S>(p, mk, masked, a.bias, pos, place, tile_tokens, lane);
        }
        softmax(p, mk, masked);

#pragma unroll
        for (int b = 0; b < S::v_blocks; ++b) {
            // weights times value scales as 16-bit fixed point relative to the tile's largest
            float x[NB][2*NI], x_max[NB], from_fixed[NB];
#pragma unroll
            for (int j = 0; j < 2*NI; ++j) {
                const float d = kvq_ld_half(vt + vs_at + 8*j*v_stride + b*BV::bytes);
#pragma unroll
                for (int n = 0; n < NB; ++n) {
                    x[n][j] = p[n][j]*d;
                    x_max[n] = j == 0 ? x[n][j] : fmaxf(x_max[n], x[n][j]);
                }
            }
#pragma unroll
            for (int w = 4; w <= 16; w *= 2) {
#pragma unroll
                for (int n = 0; n < NB; ++n) {
                    x_max[n] = fmaxf(x_max[n], __shfl_xor_sync(0xFFFFFFFFu, x_max[n], w));
                }
            }
            uint2 pb[NB][T/32];
#pragma unroll
            for (int n = 0; n < NB; ++n) {
                const bool some = x_max[n] > 1e-30f;
                const float to_fixed = some ? 65280.0f/x_max[n] : 0.0f;
                from_fixed[n] = some ? x_max[n]*(1.0f/65280.0f) : 0.0f;
#pragma unroll
                for (int s = 0; s < T/32; ++s) {
                    uint32_t f[4];
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        f[i] = __float_as_uint(fmaf(x[n][4*s + i], to_fixed, 8388608.0f));
                    }
                    const uint32_t t01 = kvq_prmt(f[0], f[1], 0x5140), t23 = kvq_prmt(f[2], f[3], 0x5140);
                    const uint32_t va = __shfl_sync(0xFFFFFFFFu, kvq_prmt(t01, t23, pick_a), lane_a);
                    const uint32_t vb = __shfl_sync(0xFFFFFFFFu, kvq_prmt(t01, t23, pick_b), lane_b);
                    pb[n][s] = (g & 1) ? make_uint2(vb, va) : make_uint2(va, vb);
                }
            }
#pragma unroll
            for (int qu = 0; qu < QU; ++qu) {
                int c[NB][VU/2][4];
#pragma unroll
                for (int n = 0; n < NB; ++n) {
#pragma unroll
                    for (int i = 0; i < VU/2; ++i) {
                        c[n][i][0] = c[n][i][1] = c[n][i][2] = c[n][i][3] = 0;
                    }
                }
#pragma unroll
                for (int s = 0; s < T/32; ++s) {
                    uint32_t f[2][VU];
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        uint32_t lo[4], hi[4];
#pragma unroll
                        for (int n = 0; n < 4; ++n) {
                            const char * at = vt + v_at + (32*s + 4*i + 8*n)*v_stride + b*BV::bytes;
                            lo[n] = kvq_ld16(at + 16*qu);
                            hi[n] = VB == 3 ? kvq_hi16<S::NV>(at - 2*g, g + 8*qu) : 0u;
                        }
                        kvq_value_frags<VB>(v_table, lo, hi, f[i]);
                    }
#pragma unroll
                    for (int i = 0; i < VU/2; ++i) {
                        const uint4 vf = make_uint4(f[0][2*i], f[0][2*i + 1], f[1][2*i], f[1][2*i + 1]);
#pragma unroll
                        for (int n = 0; n < NB; ++n) {
                            kvq_mma_s8u8(c[n][i], vf, pb[n][s].x, pb[n][s].y);
                        }
                    }
                }
#pragma unroll
                for (int n = 0; n < NB; ++n) {
#pragma unroll
                    for (int i = 0; i < VU; ++i) {
                        float & acc = o[n][(b*QU + qu)*VU + i];
                        acc = fmaf(float(v_table.shift.join(c[n][i/2][2*(i & 1)], c[n][i/2][2*(i & 1) + 1])), from_fixed[n], acc);
                    }
                }
            }
        }
    }

    if constexpr (MODE == KVQ_SHORT) {
        __syncthreads();            // the ring becomes the place of the results: [head][row][DV], then (maximum, sum)
    }
    float  * own_part = (float *) smem;
    float2 * own_meta = (float2 *) (own_part + 8*S::ROWS*S::DV);
    constexpr float unit = 1.0f/kvq_scale_of<VB>();
    constexpr int group_dims = VB == 4 ? S::NV/2 : S::NV/4;
#pragma unroll
    for (int n = 0; n < NB; ++n) {
#pragma unroll
        for (int w = 4; w <= 16; w *= 2) {
            l[n] += __shfl_xor_sync(0xFFFFFFFFu, l[n], w);
        }
        const int row = group*S::ROWS + 4*n + t;
        if (row >= n_rows) {
            continue;
        }
        const int64_t part = MODE == KVQ_SHORT ? h*S::ROWS + row :
            ((int64_t(seq)*a.n_tok + tok_q[n])*a.n_head + (head0 + h)*a.gqa + row % a.gqa)*a.n_part + split*slices + sl;
        if (vp == 0 && g == 0) {
            (MODE == KVQ_SHORT ? own_meta : a.meta)[part] = make_float2(m[n], l[n]);
        }
        float * out = (MODE == KVQ_SHORT ? own_part : a.part) + part*S::DV + vp*S::v_blocks*S::NV;
#pragma unroll
        for (int b = 0; b < S::v_blocks; ++b) {
#pragma unroll
            for (int qu = 0; qu < QU; ++qu) {
                const int u = g + 8*qu;
                if (u < BV::units) {
#pragma unroll
                    for (int k = 0; k < VU/2; ++k) {
                        // the two byte positions of a unit are neighbouring coordinates
                        const float * c = o[n] + (b*QU + qu)*VU + k;
                        *(float2 *) (out + b*S::NV + k*group_dims + 2*u) = make_float2(c[0]*unit, c[VU/2]*unit);
                    }
                }
            }
        }
    }
    if constexpr (MODE == KVQ_SHORT) {
        // block r of the cluster joins the results of head r, a row a warp
        constexpr int R = kvq_hadamard<S::NV>::regs;
        const int head = split, row = warp;
        kvq_cluster_sync();
        if (row < n_rows) {
            const uint32_t meta = kvq_shared(own_meta + head*S::ROWS + row), part = kvq_shared(own_part + (head*S::ROWS + row)*S::DV + lane);
            float x[R], w[KVQ_CLUSTER], sums[KVQ_CLUSTER], y[KVQ_CLUSTER][R];
#pragma unroll
            for (int i = 0; i < KVQ_CLUSTER; ++i) {
                w[i]    = kvq_cluster_load(meta, i);
                sums[i] = kvq_cluster_load(meta + 4, i);
#pragma unroll
                for (int r = 0; r < R; ++r) {
                    y[i][r] = kvq_cluster_load(part + r*32*4, i);
                }
            }
            const int head_q = head*a.gqa + row % a.gqa;
            const float sink = a.sinks ? a.sinks[head_q]*KVQ_LOG2E : KVQ_NO_MAX;
            float top = sink;
#pragma unroll
            for (int i = 0; i < KVQ_CLUSTER; ++i) {
                top = fmaxf(top, w[i]);
            }
            float sum = a.sinks ? exp2f(sink - top) : 0.0f;
#pragma unroll
            for (int r = 0; r < R; ++r) {
                x[r] = 0.0f;
            }
#pragma unroll
            for (int i = 0; i < KVQ_CLUSTER; ++i) {
                const float f = exp2f(w[i] - top);
                sum = fmaf(f, sums[i], sum);
#pragma unroll
                for (int r = 0; r < R; ++r) {
                    x[r] = fmaf(f, y[i][r], x[r]);
                }
            }
            const float total = sum > 0.0f ? rsqrtf(float(S::NV))/sum : 0.0f;       // a row that sees nothing is zero
            kvq_hadamard_warp<S::NV, true>(x, nullptr, lane);
            kvq_apply_signs<S::NV>(x, lane);
            float * out = a.dst + ((int64_t(seq)*a.n_tok + row/a.gqa)*a.n_head + head_q)*S::DV + lane;
#pragma unroll
            for (int r = 0; r < R; ++r) {
                out[r*32] = x[r]*total;
            }
        }
        kvq_cluster_sync();         // the others may still be reading this block's results
    }
#endif // KVQ_AMPERE
}

template <int KB, int VB, typename S, bool LINEAR, bool BIAS>
static __global__ void __launch_bounds__(256, S::BLOCKS) kvq_decode(const __grid_constant__ kvq_fattn_args a) {
    kvq_decode_body<KB, VB, S, LINEAR ? KVQ_LINEAR : KVQ_GENERAL, BIAS>(a);
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define KVQ_CLUSTER_DIMS __cluster_dims__(KVQ_CLUSTER, 1, 1)
#else
#define KVQ_CLUSTER_DIMS
#endif
template <int KB, int VB, typename S, bool BIAS>
static __global__ void KVQ_CLUSTER_DIMS __launch_bounds__(256, S::BLOCKS) kvq_decode_short(const __grid_constant__ kvq_fattn_args a) {
    kvq_decode_body<KB, VB, S, KVQ_SHORT, BIAS>(a);
}
