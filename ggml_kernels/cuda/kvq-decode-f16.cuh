// What the decode kernel adds to its int8 products, in f16 tensor-core products of the same shape: the rows of an f16 window,
// and a key bias that the stored keys lack. Columns 2t and 2t+1 of the narrow operand belong to query rows t and t+4, so
// that logits and outputs come out in the lanes that hold them already.
#pragma once

#include "kvq-fattn.cuh"
#include "kvq-tiles.h"

// What a bias needs in shared memory for every 16 pairs: (cosine part, sine part) of the query rows, a table of the turns by
// 0 to TILE - 1 in the order of the products' fragments, for every warp the turns by a position of the cache and by one of the
// window, and those from one tile to the next.
template <typename S> struct kvq_bias_shape {
    static constexpr int slot_bytes  = S::ROWS*16*8;                // queries of one warp
    static constexpr int table_bytes = S::TILE*16*4;                // [2][TILE/16][32 lanes] uint4
    static constexpr int turn_bytes  = 2*16*8;                      // of one warp
    static constexpr int step_bytes  = 16*8;
    static constexpr int fixed_bytes = table_bytes + 8*turn_bytes + step_bytes;
};

#ifdef KVQ_AMPERE
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

// Where a warp finds its part of a bias in shared memory, and the position that its list of turns is for.
struct kvq_bias_place {
    const float2 * z;           // [ROWS][16*chunks], the queries
    const uint4  * table;
    const float2 * step;
    float2       * turn;
    int            at;
};

// Fills the table; every thread of a block takes part.
template <typename S> static __device__ __forceinline__ void kvq_fill_bias_table(const kvq_bias_args & bias, uint4 * table, const int tid, const int n_threads) {
    constexpr int NI = S::TILE/16;
    for (int at = tid; at < bias.chunks*2*NI*32; at += n_threads) {
        const int lane = at & 31, i = at/32 % NI, half = at/32/NI;
        const int first = 8*half - 6*(half & 1) + 4*(lane & 3);     // 16*chunk + 4t + 2*(half of the chunk)
        uint32_t w[2][2];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            // turns by 0..7 and by 8, 16, ...: a quarter of the table's rows
            const int pair = bias.list[first + k];
            const float2 low = kvq_turn_row(bias, lane >> 2, pair);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float2 x = kvq_turn_on(kvq_turn_row(bias, 16*i + 8*e, pair), low);
                w[k][e] = kvq_pack_half2(x.x, x.y);
            }
        }
        table[at] = make_uint4(w[0][0], w[0][1], w[1][0], w[1][1]);
    }
}

// Adds the bias to the logits p of T tokens, at most S::TILE. pos: of tokens lane and lane + 32, not negative; step: tokens to the
// warp's next tile. Where the visible tokens stand in a row, the queries are turned to the first one's position and meet the table;
// elsewhere tokens less than S::TILE positions apart are taken together, each with its row of the table.
template <typename S, int J> static __device__ __forceinline__ void kvq_add_bias(
        float (&p)[S::GROUPS][J], const uint32_t (&mk)[S::GROUPS][J], const bool masked, const kvq_bias_args & bias, const int (&pos)[(J + 3)/4],
        kvq_bias_place & place, const int step, const int lane) {
    constexpr int T = 8*J, NI = T/16, NB = S::GROUPS, EACH = (T + 31)/32, HALF = S::TILE/16*32;
    const int g = lane >> 2, t = lane & 3, n16 = 16*bias.chunks;
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
    // position of the tile's first token, if the first visible one is in its place
    int base = -1;
#pragma unroll
    for (int e = EACH - 1; e >= 0; --e) {
        base = seen[e] ? pos[e] - 32*e - lane : base;
    }
    const uint32_t some = __ballot_sync(0xFFFFFFFFu, base >= 0);
    base = __shfl_sync(0xFFFFFFFFu, base, some ? __ffs(some) - 1 : 0);
    bool in_a_row = base >= 0;
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        in_a_row = in_a_row && (!seen[e] || pos[e] - 32*e - lane == base);
    }
    in_a_row = __all_sync(0xFFFFFFFFu, in_a_row);

    auto turn_to = [&](const int at) {
        if (at == place.at) {
            return;
        }
        __syncwarp();
        if (at == place.at + step) {
#pragma unroll 1
            for (int i = lane; i < n16; i += 32) {
                place.turn[i] = kvq_turn_on(place.turn[i], place.step[i]);
            }
        } else {
#pragma unroll 1
            for (int i = lane; i < n16; i += 32) {
                place.turn[i] = kvq_turn(bias, at, bias.list[i]);
            }
        }
        __syncwarp();
        place.at = at;
    };
    // one group of rows fills the even columns alone; the odd ones repeat it
    const float2 * my_z = place.z + (NB == 2 ? kvq_column_row(g) : g >> 1)*n16 + 4*t, * my_turn = place.turn + 4*t;
    auto column = [&](const int chunk) {        // 4 pairs of a column, turned
        uint32_t w[4];
#pragma unroll
        for (int k = 0; k < 4; k += 2) {
            const float4 x = *(const float4 *) (my_z + chunk + k), r = *(const float4 *) (my_turn + chunk + k);
            const float2 a = kvq_turn_back(make_float2(x.x, x.y), make_float2(r.x, r.y)), b = kvq_turn_back(make_float2(x.z, x.w), make_float2(r.z, r.w));
            w[k]     = kvq_pack_half2(a.x, a.y);
            w[k + 1] = kvq_pack_half2(b.x, b.y);
        }
        return make_uint4(w[0], w[1], w[2], w[3]);
    };
    float c[NI][4];
#pragma unroll
    for (int i = 0; i < NI; ++i) {
        c[i][0] = c[i][1] = c[i][2] = c[i][3] = 0.0f;
    }
    if (in_a_row) {
        turn_to(base);
#pragma unroll 1
        for (int chunk = 0; chunk < n16; chunk += 16) {
            const uint4 q = column(chunk);
            const uint4 * rows = place.table + chunk/8*HALF + lane;
#pragma unroll
            for (int i = 0; i < NI; ++i) {
                kvq_mma_f16(c[i], rows[i*32], q.x, q.y);
                kvq_mma_f16(c[i], rows[HALF + i*32], q.z, q.w);
            }
        }
    } else {
#pragma unroll 1
        while (true) {
            uint32_t left[EACH];
            int from = 0;
#pragma unroll
            for (int e = EACH - 1; e >= 0; --e) {
                left[e] = __ballot_sync(0xFFFFFFFFu, seen[e]);
                from = left[e] ? __shfl_sync(0xFFFFFFFFu, pos[e], __ffs(left[e]) - 1) : from;
            }
            if ((left[0] | left[EACH - 1]) == 0) {
                break;
            }
            int row[EACH];          // of the table, -1: not in this round
#pragma unroll
            for (int e = 0; e < EACH; ++e) {
                row[e] = seen[e] && uint32_t(pos[e] - from) < uint32_t(S::TILE) ? pos[e] - from : -1;
                seen[e] = seen[e] && row[e] < 0;
            }
            turn_to(from);
#pragma unroll 1
            for (int chunk = 0; chunk < n16; chunk += 16) {
                const uint4 q = column(chunk);
                const uint32_t * words = (const uint32_t *) (place.table + chunk/8*HALF + t);
#pragma unroll
                for (int i = 0; i < NI; ++i) {
                    uint32_t r[2][4];
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const int j = 2*i + e, o = __shfl_sync(0xFFFFFFFFu, row[j/4], 8*(j % 4) + g);       // of token 8j + g
#pragma unroll
                        for (int k = 0; k < 4; ++k) {
                            r[e][k] = o >= 0 ? words[(k/2*HALF + o/16*32 + (o & 7)*4)*4 + 2*(k & 1) + ((o >> 3) & 1)] : 0u;
                        }
                    }
                    kvq_mma_chunk(c[i], make_uint4(r[0][0], r[0][1], r[0][2], r[0][3]), make_uint4(r[1][0], r[1][1], r[1][2], r[1][3]), q);
                }
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
