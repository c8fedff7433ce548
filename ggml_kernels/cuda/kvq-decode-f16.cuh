// What the decode kernel adds to its int8 products, in f16 tensor-core products of the same shape: the rows of an f16 window,
// and a key bias that the stored keys lack. Columns 2t and 2t+1 of the narrow operand belong to query rows t and t+4, so
// that logits and outputs come out in the lanes that hold them already.
#pragma once

#include "kvq-fattn.cuh"
#include "kvq-tiles.h"

// Places in shared memory of what a bias needs: pairs of (cosine part, sine part) of the query rows, a table of the turns by
// 0 to TILE - 1 in the order of the products' fragments, and a pair list for every warp.
template <typename S> struct kvq_bias_shape {
    static constexpr int PAIRS = (S::DK + 31)/32*16;                // padded with zeros
    static constexpr int slot_bytes  = S::ROWS*PAIRS*8;             // queries of one warp
    static constexpr int table_bytes = S::TILE*PAIRS*4;             // [2 a chunk of 16 pairs][TILE/16][32 lanes] uint4
    static constexpr int turn_bytes  = PAIRS*8;                     // of one warp
    static constexpr int fixed_bytes = table_bytes + 8*turn_bytes;
};

#ifdef KVQ_AMPERE
// Keeps loads behind this point where two blocks share a multiprocessor: in flight all at once, they would take the registers
// of the main loop.
template <typename S> static __device__ __forceinline__ void kvq_hold_loads() {
    if constexpr (S::BLOCKS > 1) {
        asm volatile("" ::: "memory");
    }
}

// query row of column g of the narrow operand
static __device__ __forceinline__ int kvq_column_row(const int g) {
    return (g >> 1) + 4*(g & 1);
}
// 16 rows x 32 values, and the 32 values of a column, both by lane as 16 bytes: values 8t to 8t+7. Products may take the
// values of a row in any order.
static __device__ __forceinline__ void kvq_mma_chunk(float (&c)[4], const uint4 low, const uint4 high, const uint4 b) {
    kvq_mma_f16(c, make_uint4(low.x, high.x, low.y, high.y), b.x, b.y);
    kvq_mma_f16(c, make_uint4(low.z, high.z, low.w, high.w), b.z, b.w);
}

// Asks for n rows of `bytes` each to be brought into the L2 cache.
static __device__ __forceinline__ void kvq_prefetch_rows(const char * rows, const int64_t nb, const int n, const int bytes, const int lane) {
    const int lines = (bytes + 127)/128;
    for (int i = lane; i < n*lines; i += 32) {
        kvq_prefetch_l2(rows + i/lines*nb + i % lines*128);
    }
}

// One tile of a window in registers: all its loads are in flight at once, so that a tile costs one trip to the L2 cache.
template <int VB, typename S> struct kvq_window_tile {
    using BV = kvq_block<VB, S::NV>;
    static constexpr int T = KVQ_WINDOW_TILE, CHUNKS = (S::DK + 31)/32;
    static constexpr int AHEAD = CHUNKS < 4 ? CHUNKS : 4;      // chunks of 32 values of K that are loaded early: up to head size 128 all
    static constexpr int VU = VB == 4 ? 4 : 8, QU = (BV::units + 7)/8, group_dims = S::NV/(VU/2);
    static_assert(T == 16, "a tile is the 16 rows of a product");
    static constexpr bool VALUES_LATE = S::GROUPS == 2 && S::BLOCKS > 1;   // 128 registers do not hold keys and values beside two groups' outputs
    uint4    k[AHEAD][2];
    uint32_t v[S::v_blocks*QU*(VU/2)][4];

    // chunk ch of the row that starts, for this thread, at `row`
    static __device__ __forceinline__ uint4 key(const char * row, const int ch, const int t) {
        return S::DK % 32 == 0 || 32*ch + 8*t < S::DK ? *(const uint4 *) (row + 64*ch) : make_uint4(0, 0, 0, 0);
    }
    // keys, values: the warp's slice of the first row, rows nb bytes apart
    __device__ __forceinline__ void load_keys(const char * keys, const int64_t nb, const int g, const int t) {
#pragma unroll
        for (int ch = 0; ch < AHEAD; ++ch) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                k[ch][e] = key(keys + (g + 8*e)*nb + 16*t, ch, t);
            }
        }
    }
    __device__ __forceinline__ void load_values(const char * values, const int64_t nb, const int g, const int t) {
#pragma unroll
        for (int i = 0; i < S::v_blocks*QU*(VU/2); ++i) {
            const int b = i/(QU*(VU/2)), u = g + 8*(i/(VU/2) % QU), d = b*S::NV + i % (VU/2)*group_dims + 2*u;
            const bool real = BV::units % 8 == 0 || u < BV::units;
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                v[i][e] = real ? *(const uint32_t *) (values + (2*t + (e & 1) + 4*(e & 2))*nb + 2*d) : 0u;
            }
        }
        asm volatile("" ::: "memory");      // none is put off
    }
    // Logits p[n][j] of query row 4n + t and window row 8j + g. q16: the warp's queries, f16 [ROWS][DK + 8], in the domain of the
    // rows, times the logit scale.
    __device__ __forceinline__ void logits(float (&p)[S::GROUPS][T/8], const char * keys, const int64_t nb, const __half * q16, const int g, const int t) const {
        float c[4] = { 0.0f, 0.0f, 0.0f, 0.0f };
        const __half * my_q = q16 + kvq_column_row(g)*(S::DK + 8) + 8*t;
#pragma unroll
        for (int ch = 0; ch < CHUNKS; ++ch) {
            const bool real = S::DK % 32 == 0 || 32*ch + 8*t < S::DK;
            const uint4 q = real && (S::GROUPS == 2 || !(g & 1)) ? *(const uint4 *) (my_q + 32*ch) : make_uint4(0, 0, 0, 0);
            const char * row = keys + g*nb + 16*t;
            kvq_mma_chunk(c, ch < AHEAD ? k[ch < AHEAD ? ch : 0][0] : key(row, ch, t), ch < AHEAD ? k[ch < AHEAD ? ch : 0][1] : key(row + 8*nb, ch, t), q);
        }
#pragma unroll
        for (int n = 0; n < S::GROUPS; ++n) {
            p[n][0] = c[n];
            p[n][1] = c[2 + n];
        }
    }
    // Adds the values times the weights p to the outputs, which are in units of V's levels.
    template <int OUT> __device__ __forceinline__ void outputs(float (&o)[S::GROUPS][OUT], const float (&p)[S::GROUPS][T/8]) const {
        uint32_t pb[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            pb[e] = kvq_transpose(kvq_pack_half2(p[0][e], S::GROUPS == 2 ? p[S::GROUPS - 1][e] : 0.0f));
        }
#pragma unroll
        for (int i = 0; i < S::v_blocks*QU*(VU/2); ++i) {
            // coordinates 2u and 2u + 1 of a group: rows g and g + 8 of a product whose columns are tokens
            const uint32_t (& w)[4] = v[i];
            float c[4] = { 0.0f, 0.0f, 0.0f, 0.0f };
            kvq_mma_f16(c, make_uint4(kvq_prmt(w[0], w[1], 0x5410), kvq_prmt(w[0], w[1], 0x7632), kvq_prmt(w[2], w[3], 0x5410), kvq_prmt(w[2], w[3], 0x7632)), pb[0], pb[1]);
#pragma unroll
            for (int n = 0; n < S::GROUPS; ++n) {
                float * out = o[n] + i/(VU/2)*VU + i % (VU/2);
                out[0]    = fmaf(c[n],     kvq_scale_of<VB>(), out[0]);
                out[VU/2] = fmaf(c[2 + n], kvq_scale_of<VB>(), out[VU/2]);
            }
        }
    }
};

// ---- key bias ----

// Fills the table; every thread of a block takes part.
template <typename S> static __device__ __forceinline__ void kvq_fill_bias_table(const kvq_bias_args & bias, uint4 * table, const int tid, const int n_threads) {
    constexpr int NI = S::TILE/16;
    for (int at = tid; at < kvq_bias_shape<S>::table_bytes/16; at += n_threads) {
        const int lane = at & 31, i = at/32 % NI, half = at/32/NI;
        const int pair = 8*half - 6*(half & 1) + 4*(lane & 3);      // 16*chunk + 4t + 2*(half of the chunk)
        auto turn = [&](const int offset, const int k) {            // the rows below 256 are plain turns
            const float * row = (const float *) (bias.trig + offset*bias.nbt1);
            return k < bias.pairs ? kvq_pack_half2(row[k], row[bias.pairs + k]) : 0u;
        };
        const int offset = 16*i + (lane >> 2);
        table[at] = make_uint4(turn(offset, pair), turn(offset + 8, pair), turn(offset, pair + 1), turn(offset + 8, pair + 1));
    }
}

// Adds the bias to the logits p of T tokens, at most S::TILE. pos: of the first token. Where the visible tokens stand in a row, the queries
// are turned to the first one's position and meet the table; elsewhere every token's turn is made from the long table.
template <typename S, int J> static __device__ __forceinline__ void kvq_add_bias(
        float (&p)[S::GROUPS][J], const uint32_t (&mk)[S::GROUPS][J], const bool masked, const kvq_bias_args & bias, const int * pos,
        const float2 * z, const uint4 * table, float2 * turn, const int lane) {
    using B = kvq_bias_shape<S>;
    constexpr int T = 8*J, NI = T/16, NB = S::GROUPS, EACH = (T + 31)/32, HALF = S::TILE/16*32;
    const int g = lane >> 2, t = lane & 3;
    // lane i looks at tokens i and i + 32
    bool seen[EACH];
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        seen[e] = !masked && (T >= 32 || lane < T);
    }
    if (masked) {
#pragma unroll
        for (int j = 0; j < 2*NI; ++j) {
            bool visible = false;
#pragma unroll
            for (int n = 0; n < NB; ++n) {
                visible = visible || mk[n][j] != 0xFC00u;
            }
            const uint32_t lanes = __ballot_sync(0xFFFFFFFFu, visible);
            seen[j/4] = lane/8 == j % 4 ? (lanes >> 4*(lane & 7) & 15u) != 0 : seen[j/4];
        }
    }
    int base = -1, at[EACH], first[EACH];         // the token's position, 0 where no row sees it; the tile's first one's, if this one is in its place
#pragma unroll
    for (int e = EACH - 1; e >= 0; --e) {
        at[e]    = seen[e] ? max(pos[32*e + lane], 0) : 0;
        first[e] = seen[e] ? at[e] - 32*e - lane : -1;
        base = seen[e] ? first[e] : base;
    }
    const uint32_t some = __ballot_sync(0xFFFFFFFFu, base >= 0);
    base = __shfl_sync(0xFFFFFFFFu, base, some ? __ffs(some) - 1 : 0);
    bool in_a_row = base >= 0;
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        in_a_row = in_a_row && (!seen[e] || first[e] == base);
    }
    in_a_row = __all_sync(0xFFFFFFFFu, in_a_row);

    float c[NI][4];
#pragma unroll
    for (int i = 0; i < NI; ++i) {
        c[i][0] = c[i][1] = c[i][2] = c[i][3] = 0.0f;
    }
    // one group of rows fills the even columns alone; the odd ones repeat it
    const float2 * my_z = z + (NB == 2 ? kvq_column_row(g) : g >> 1)*B::PAIRS + 4*t;
    auto column = [](const float4 x, const float4 y) {
        return make_uint4(kvq_pack_half2(x.x, x.y), kvq_pack_half2(x.z, x.w), kvq_pack_half2(y.x, y.y), kvq_pack_half2(y.z, y.w));
    };
    if (in_a_row) {
        __syncwarp();
        for (int i = lane; i < (bias.pairs + 15)/16*16; i += 32) {
            turn[i] = i < bias.pairs ? kvq_turn(bias, base, i) : make_float2(0.0f, 0.0f);
        }
        __syncwarp();
#pragma unroll 1
        for (int chunk = 0; chunk < bias.pairs; chunk += 16) {
            auto turned = [&](const int k) {      // pairs k and k + 1
                const float4 x = *(const float4 *) (my_z + chunk + k), r = *(const float4 *) (turn + 4*t + chunk + k);
                return make_float4(x.x*r.x + x.y*r.y, x.y*r.x - x.x*r.y, x.z*r.z + x.w*r.w, x.w*r.z - x.z*r.w);
            };
            const uint4 q = column(turned(0), turned(2));
            const uint4 * rows = table + chunk/8*HALF + lane;
#pragma unroll
            for (int i = 0; i < NI; ++i) {
                kvq_mma_f16(c[i], rows[i*32], q.x, q.y);
                kvq_mma_f16(c[i], rows[HALF + i*32], q.z, q.w);
            }
        }
    } else {
#pragma unroll 1
        for (int chunk = 0; chunk < bias.pairs; chunk += 16) {
            const uint4 q = column(*(const float4 *) (my_z + chunk), *(const float4 *) (my_z + chunk + 2));
#pragma unroll
            for (int i = 0; i < NI; ++i) {
                uint32_t r[2][4];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    // of token 8*(2i + e) + g, from the lane that looked; a thread's rows may not see what others in the product do
                    const int j = 2*i + e, where = __shfl_sync(0xFFFFFFFFu, at[j/4], 8*(j % 4) + g);
#pragma unroll
                    for (int k = 0; k < 4; ++k) {
                        const int pair = chunk + 4*t + k;
                        const float2 cs = pair < bias.pairs ? kvq_turn(bias, where, pair) : make_float2(0.0f, 0.0f);
                        r[e][k] = kvq_pack_half2(cs.x, cs.y);
                    }
                    kvq_hold_loads<S>();
                }
                kvq_mma_chunk(c[i], make_uint4(r[0][0], r[0][1], r[0][2], r[0][3]), make_uint4(r[1][0], r[1][1], r[1][2], r[1][3]), q);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < NI; ++i) {
#pragma unroll
        for (int n = 0; n < NB; ++n) {
            p[n][2*i]     += c[i][n];
            p[n][2*i + 1] += c[i][2 + n];
        }
    }
}
#endif // KVQ_AMPERE
