// The prefill kernel of compute capability 9.0: warpgroup products (wgmma) on tiles that a warpgroup of their own dequantises.
//
// Warpgroups 0 and 1 copy compressed rows of K and V and write them as f16 tiles into a ring; warpgroups 2 and 3 take 64
// query rows each, keep queries and outputs in registers, and overlap the products of one tile with the softmax of the next.
// The tiles of an f16 window follow those of the cache. With a key bias a third tile holds the cosines and sines of the tokens'
// positions; what the query rows meet them with takes the place of the queries in shared memory.
// Compile for sm_90a: other targets get an empty kernel.
#pragma once

#include "kvq-prefill.cuh"

#include <type_traits>

template <int D_, int N_, int STAGES_, int BIAS_ = 0> struct kvq_hopper_shape {
    static constexpr int D = D_, N = N_;             // head size of K and V, values per block of our types
    static constexpr int BIAS = BIAS_;               // pairs of a key bias, a multiple of 16
    static constexpr int STAGES = STAGES_;           // tiles of K and V in the ring
    static constexpr int TILE = 64;                  // tokens
    static constexpr int ROWS = 128;                 // query rows of a block
    static constexpr int PANELS = D/64;              // a tile's row is cut into 128 bytes
    static constexpr int PANEL_BYTES = TILE*128;
    static constexpr int TILE_BYTES = PANELS*PANEL_BYTES;
    static constexpr int SQ = D + 8;                 // row stride of the queries in halves
    static constexpr int TURN_BYTES = (BIAS + 31)/32*PANEL_BYTES;
    static constexpr int LOW = BIAS + 2;             // row stride of the turns by 0 to 7, in float2
    static constexpr int bias_bytes = BIAS ? 8*8*(LOW + BIAS) : 0;      // those, and the turns of every producing warp
    static constexpr int fixed_bytes = STAGES*(2*TILE_BYTES + TURN_BYTES) + 2*ROWS*SQ + 16*STAGES + bias_bytes + 1024;
    static_assert(TURN_BYTES <= ROWS*SQ, "what rows meet turns with, for two warpgroups, takes the place of the queries");
};

#ifdef KVQ_AMPERE
// Where coordinate i of a head stands in a tile's row, and back: unpacking writes the 8 values of a chunk in the order in
// which they come out of a unit (of two units for 4-bit codes). Products do not care, as long as both operands agree.
template <int N> static __device__ __forceinline__ int kvq_tile_position(const int store, const int coordinate) {
    const int b = coordinate/N*N, i = coordinate - b;
    if (store == KVQ_STORE_TURBO4) {
        const int h = i/(N/2), r = i % (N/2);
        return b + r/4*8 + ((r/2) & 1)*4 + h*2 + (r & 1);
    }
    if (store <= KVQ_STORE_TURBO3) {
        const int k = i/(N/4), r = i % (N/4);
        return b + r/2*8 + k*2 + (r & 1);
    }
    if (store == KVQ_STORE_OSCAR2) {
        if (i < N/4) {
            const int h = i/(N/8), r = i % (N/8);
            return b + r/4*8 + ((r/2) & 1)*4 + h*2 + (r & 1);
        }
        const int tier = i < N/2 ? N/4 : N/2, k = (i - tier)/(N/16), r = (i - tier) % (N/16);
        return b + (tier == N/4 ? N/32 + r/2 : N/16 + r/2*2 + (k >> 2))*8 + (k & 3)*2 + (r & 1);
    }
    return coordinate;
}
// coordinate of the even position 8j + 2t
template <int N> static __device__ __forceinline__ int kvq_tile_coordinate(const int store, const int j, const int t) {
    const int b = j*8/N*N, v = j - b/8;
    if (store == KVQ_STORE_OSCAR2) {
        return b + (v < N/32 ? (t & 1)*(N/8) + 4*v + (t >> 1)*2 : v < N/16 ? N/4 + t*(N/16) + 2*(v - N/32) : N/2 + (4*(v & 1) + t)*(N/16) + (v - N/16)/2*2);
    }
    return store == KVQ_STORE_TURBO4 ? b + (t & 1)*(N/2) + v*4 + (t >> 1)*2 : store <= KVQ_STORE_TURBO3 ? b + t*(N/4) + v*2 : 8*j + 2*t;
}

// Chunk u (8 positions) of one token's row as four pairs of halves; block: the token's quantisation block.
template <int BITS, int N> static __device__ __forceinline__ uint4 kvq_turbo_chunk(const kvq_tables<BITS, 128> & table, const char * block, const int u, const __half2 d) {
    __half2 w[4];
    if constexpr (BITS == 4) {
        const uint32_t r0 = table.one(kvq_ld16(block + 4*u)), r1 = table.one(kvq_ld16(block + 4*u + 2));
        w[0] = kvq_two_levels<0x4240>(r0, d);
        w[1] = kvq_two_levels<0x4341>(r0, d);
        w[2] = kvq_two_levels<0x4240>(r1, d);
        w[3] = kvq_two_levels<0x4341>(r1, d);
    } else {
        uint32_t r0, r1;
        kvq_unit_pair(table, kvq_ld16(block + 2*u), BITS == 3 ? kvq_hi16<N>(block, u) : 0u, r0, r1);
        w[0] = kvq_two_levels<0x4240>(r0, d);
        w[1] = kvq_two_levels<0x4240>(r1, d);
        w[2] = kvq_two_levels<0x4341>(r0, d);
        w[3] = kvq_two_levels<0x4341>(r1, d);
    }
    return *(const uint4 *) w;
}

// Dequantises a tile into swizzled panels. A warp takes 8 tokens at once, 4 lanes each: reads and writes meet no bank twice.
template <int BITS, typename S> static __device__ __forceinline__ void kvq_fill_turbo(
        const char * raw, const int stride, const int shift0, const int shift1, char * tile, const int warp, const int lane) {
    using B = kvq_block<BITS, S::N>;
    constexpr int CHUNKS = S::N/8;
    const int q = lane >> 3, tk = lane & 7;
    const kvq_tables<BITS, 128> table;
#pragma unroll
    for (int pass = 0; pass < S::TILE/32; ++pass) {
        const int tok = (pass*4 + warp)*8 + tk;
        const char * row = raw + tok*stride + ((tok & 1) ? shift1 : shift0);
#pragma unroll
        for (int b = 0; b < S::D/S::N; ++b) {
            const char * block = row + b*B::bytes;
            const __half2 d = __float2half2_rn(kvq_ld_half(block + B::scale_off)*0.03125f);
#pragma unroll
            for (int i = 0; i < CHUNKS/4; ++i) {
                const int u = q + 4*i, c = b*CHUNKS + u;
                *(uint4 *) (tile + (c/8)*S::PANEL_BYTES + tok*128 + ((c ^ tk) & 7)*16) = kvq_turbo_chunk<BITS, S::N>(table, block, u, d);
            }
        }
    }
}

template <typename S> static __device__ __forceinline__ void kvq_fill_tiers(
        const char * raw, const int stride, const int shift0, const int shift1, char * tile, const int warp, const int lane) {
    constexpr int CHUNKS = S::N/8;
    const int q = lane >> 3, tk = lane & 7;
    const kvq_tier_tables tiers(lane);
    const kvq_tables<4, 128> table;
#pragma unroll
    for (int pass = 0; pass < S::TILE/32; ++pass) {
        const int tok = (pass*4 + warp)*8 + tk;
        const char * row = raw + tok*stride + ((tok & 1) ? shift1 : shift0);
#pragma unroll
        for (int b = 0; b < S::D/S::N; ++b) {
            const char * block = row + b*kvq_block<KVQ_TIERS, S::N>::bytes;
            const uint32_t bits = kvq_ld16(block + S::N/4), two = tiers.two(bits), one = tiers.one(bits);
            const __half2 d = __float2half2_rn(__half2float(__ushort_as_half((unsigned short) (bits & KVQ_TIER_SCALE_MASK)))*0.03125f);
#pragma unroll
            for (int i = 0; i < CHUNKS/4; ++i) {
                const int u = q + 4*i, c = b*CHUNKS + u;
                *(uint4 *) (tile + (c/8)*S::PANEL_BYTES + tok*128 + ((c ^ tk) & 7)*16) = kvq_tier_chunk<S::N>(table, block, u, d, two, one);
            }
        }
    }
}

// TILE rows of an f16 window, in the order of values that the tiles of `store` have.
template <typename S> static __device__ __forceinline__ void kvq_fill_window(const int store, const char * rows, const int64_t nb, char * tile, const int tid) {
    const bool in_order = store == KVQ_STORE_F16 || store == KVQ_STORE_Q8_0;
#pragma unroll 4
    for (int i = tid; i < S::TILE*S::D/8; i += 128) {
        const int tok = i/(S::D/8), c = i % (S::D/8);
        const char * row = rows + tok*nb;
        uint4 w;
        if (in_order) {
            w = *(const uint4 *) (row + 16*c);
        } else {
            auto pair = [&](const int t) { return *(const uint32_t *) (row + 2*kvq_tile_coordinate<S::N>(store, c, t)); };
            w = make_uint4(pair(0), pair(1), pair(2), pair(3));
        }
        *(uint4 *) (tile + (c/8)*S::PANEL_BYTES + tok*128 + ((c ^ tok) & 7)*16) = w;
    }
}

template <typename S> static __device__ __forceinline__ void kvq_fill_tile(
        const int store, const char * raw, const int stride, const int shift0, const int shift1, char * tile, const int warp, const int lane) {
    if (store == KVQ_STORE_TURBO2) {
        kvq_fill_turbo<2, S>(raw, stride, shift0, shift1, tile, warp, lane);
    } else if (store == KVQ_STORE_TURBO3) {
        kvq_fill_turbo<3, S>(raw, stride, shift0, shift1, tile, warp, lane);
    } else if (store == KVQ_STORE_TURBO4) {
        kvq_fill_turbo<4, S>(raw, stride, shift0, shift1, tile, warp, lane);
    } else if (store == KVQ_STORE_OSCAR2) {
        kvq_fill_tiers<S>(raw, stride, shift0, shift1, tile, warp, lane);
    } else {
#pragma unroll 4
        for (int i = warp*32 + lane; i < S::TILE*S::D/8; i += 128) {
            const int tok = i/(S::D/8), c = i % (S::D/8);
            const char * row = raw + tok*stride + ((tok & 1) ? shift1 : shift0);
            uint4 w;
            if (store == KVQ_STORE_F16) {
                const char * at = row + 16*c;
                if (((uintptr_t) at & 15) == 0) {
                    w = *(const uint4 *) at;
                } else {
                    auto two = [&](const int k) { return kvq_ld16(at + 4*k) | (kvq_ld16(at + 4*k + 2) << 16); };
                    w = make_uint4(two(0), two(1), two(2), two(3));
                }
            } else {
                const char * block = row + (c/4)*34, * at = block + 2 + 8*(c % 4);
                const __half2 d = __float2half2_rn(kvq_ld_half(block));
                const uint32_t x = (kvq_ld16(at    ) | (kvq_ld16(at + 2) << 16)) ^ 0x80808080u;
                const uint32_t y = (kvq_ld16(at + 4) | (kvq_ld16(at + 6) << 16)) ^ 0x80808080u;
                const __half2 h[4] = { kvq_two_levels<0x4140>(x, d), kvq_two_levels<0x4342>(x, d), kvq_two_levels<0x4140>(y, d), kvq_two_levels<0x4342>(y, d) };
                w = *(const uint4 *) h;
            }
            *(uint4 *) (tile + (c/8)*S::PANEL_BYTES + tok*128 + ((c ^ tok) & 7)*16) = w;
        }
    }
}

struct kvq_no_turns {
    __device__ kvq_no_turns(const kvq_bias_args &, const float2 *, float2 *, int, int) {}
};
// Writes the cosines and sines of a tile's positions; of 8 producing warps each has 8 tokens, a lane 4 of every 16 pairs of one token.
template <typename S> struct kvq_turn_filler {
    static constexpr int EACH = (S::BIAS + 31)/32, AGAIN = 32;      // tiles after which the turn is read again: steps add up rounding errors
    const kvq_bias_args & bias;
    const float2 * low;                 // [8][LOW]
    float2       * turn;                // of this warp
    float2 here[EACH], step[EACH];      // turns of pairs lane and lane + 32 by the first token's position, and by a tile
    int    at, warp, lane;

    __device__ __forceinline__ kvq_turn_filler(const kvq_bias_args & bias, const float2 * low, float2 * turns, const int warp, const int lane)
        : bias(bias), low(low), turn(turns + warp*S::BIAS), at(-2*S::TILE), warp(warp), lane(lane) {
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            here[e] = make_float2(1.0f, 0.0f);
            step[e] = kvq_turn_row(bias, S::TILE, bias.list[lane + 32*e]);
        }
    }
    // pos: of this lane's token; factor: of what is written
    __device__ __forceinline__ void fill(char * tile, const int pos, const float factor) {
        const int b = lane >> 2, q = lane & 3, base = __shfl_sync(0xFFFFFFFFu, pos, 0);
        const bool in_a_row = __all_sync(0xFFFFFFFFu, pos == base + b);
        if (in_a_row) {
            const bool next = base == at + S::TILE && base/S::TILE % AGAIN != 0;
            at = base;
            __syncwarp();
#pragma unroll
            for (int e = 0; e < EACH; ++e) {
                here[e] = next ? kvq_turn_on(here[e], step[e]) : kvq_turn(bias, base, bias.list[lane + 32*e]);
                if (lane + 32*e < S::BIAS) {
                    turn[lane + 32*e] = make_float2(here[e].x*factor, here[e].y*factor);
                }
            }
            __syncwarp();
        }
#pragma unroll
        for (int c = 0; c < S::BIAS/16; ++c) {
            uint32_t w[4];
            if (in_a_row) {
#pragma unroll
                for (int k = 0; k < 4; k += 2) {
                    const float4 x = *(const float4 *) (turn + 16*c + 4*q + k), y = *(const float4 *) (low + b*S::LOW + 16*c + 4*q + k);
                    const float2 u = kvq_turn_on(make_float2(x.x, x.y), make_float2(y.x, y.y)), v = kvq_turn_on(make_float2(x.z, x.w), make_float2(y.z, y.w));
                    w[k]     = kvq_pack_half2(u.x, u.y);
                    w[k + 1] = kvq_pack_half2(v.x, v.y);
                }
            } else {
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    const float2 u = kvq_turn(bias, pos, bias.list[16*c + 4*q + k]);
                    w[k] = kvq_pack_half2(u.x*factor, u.y*factor);
                }
            }
            *(uint4 *) (tile + c/2*S::PANEL_BYTES + (8*warp + b)*128 + (((4*c + q) ^ b) & 7)*16) = make_uint4(w[0], w[1], w[2], w[3]);
        }
    }
};
#endif // KVQ_AMPERE

template <typename S>
static __global__ void __launch_bounds__(512, 1) kvq_hopper(const __grid_constant__ kvq_fattn_args a) {
#ifdef KVQ_WGMMA
    constexpr int T = S::TILE, KS = S::D/16, NT = T/8, OUT = S::D/2;
    const int lane = threadIdx.x & 31, warp = threadIdx.y, group = warp/4, g = lane >> 2, t = lane & 3;
    const int head_kv = blockIdx.y;
    const int seq = blockIdx.z/a.n_split, split = blockIdx.z % a.n_split;
    const int n_rows = a.gqa*a.n_tok;
    const int n_cache = (a.n_kv + T - 1)/T, n_tiles = n_cache + a.window.n/T;      // tiles of the cache, and with those of the window
    const int tile0 = int(int64_t(split)*n_tiles/a.n_split), tile1 = int(int64_t(split + 1)*n_tiles/a.n_split);

    extern __shared__ __align__(16) char smem_any[];
    char * smem = smem_any + ((1024 - (kvq_shared(smem_any) & 1023)) & 1023);     // swizzled panels start at multiples of 1024
    char * ring = smem;                                                    // [STAGES][K tile, V tile]
    char * turns = ring + 2*S::STAGES*S::TILE_BYTES;                       // [STAGES], with a bias
    __half * sq = (__half *) (turns + S::STAGES*S::TURN_BYTES);            // [ROWS][SQ]
    const uint32_t full_s = kvq_shared(sq + S::ROWS*S::SQ), empty_s = full_s + 8*S::STAGES;
    [[maybe_unused]] float2 * low = (float2 *) ((char *) (sq + S::ROWS*S::SQ) + 16*S::STAGES);
    char * raw = (char *) (sq + S::ROWS*S::SQ) + 16*S::STAGES + S::bias_bytes;     // [2][K window], [2][V window]
    if (warp == 0 && lane < S::STAGES) {
        kvq_barrier_init(full_s + 8*lane, 256);        // every thread of the producers
        kvq_barrier_init(empty_s + 8*lane, 8);         // every warp of the consumers
    }
    kvq_bulk_fence();
    if constexpr (S::BIAS > 0) {
        for (int i = warp*32 + lane; i < 8*S::BIAS; i += 512) {
            low[i/S::BIAS*S::LOW + i % S::BIAS] = kvq_turn_row(a.bias, i/S::BIAS, a.bias.list[i % S::BIAS]);
        }
    }
    __syncthreads();
    kvq_pdl_wait();
    kvq_pdl_launch();

    if (group < 2) {
        kvq_fewer_registers<(S::BIAS > 0) ? 72 : 64>();
        const kvq_operand & op = group == 0 ? a.k : a.v;
        const int in_group = warp & 3, tid = in_group*32 + lane, bytes = T*op.stride;
        const char * my_raw = raw + (group == 0 ? 0 : 2*T*a.k.stride);
        const uint32_t raw_s = kvq_shared(my_raw);
        const char * first = op.data + seq*op.nb3 + head_kv*op.nb2;
        const int shift0 = int((uintptr_t) first & (op.gran - 1)), shift1 = (shift0 + int(op.nb1 & 3)) & (op.gran - 1);
        const kvq_copier copier(op.chunks, op.nb1, op.stride, tid, 128);
        const bool fast = op.gran == 16 && kvq_copier::possible(T, op.chunks, op.nb1);
        const char * aligned = (const char *) ((uintptr_t) first & ~uintptr_t(15));
        auto fetch = [&](const int tile) {
            if (tile < min(tile1, n_cache)) {
                const uint32_t at = raw_s + uint32_t((tile - tile0) & 1)*bytes;
                if (fast) {
                    copier.copy(at, aligned + int64_t(tile)*T*op.nb1, T, a.n_kv - tile*T);
                } else {
                    kvq_copy_window(op, first, at, tile*T, T, a.n_kv, tid, 128);
                }
            }
            kvq_cp_commit();
        };
        fetch(tile0);
        fetch(tile0 + 1);
        // position of this lane's token in a tile; those past the end count on
        [[maybe_unused]] auto position = [&](const int tile) {
            const int * pos = (const int *) (a.bias.pos + seq/a.bias.seqs*a.bias.nbp1);
            const int i = min(tile, tile1 - 1)*T + 8*warp + g, from = i < n_cache*T ? min(i, a.n_kv - 1) : i - n_cache*T + a.n_kv;
            return max(pos[from], 0) + (i < n_cache*T ? i - from : 0);
        };
        using turn_filler = std::conditional_t<(S::BIAS > 0), kvq_turn_filler<S>, kvq_no_turns>;
        [[maybe_unused]] turn_filler turner(a.bias, low, low + 8*S::LOW, warp, lane);
        [[maybe_unused]] int pos = S::BIAS > 0 && tile0 < tile1 ? position(tile0) : 0;
        for (int tile = tile0; tile < tile1; ++tile) {
            const int i = tile - tile0, slot = i % S::STAGES;
            if (i >= S::STAGES) {
                kvq_bulk_wait(empty_s + 8*slot, (i/S::STAGES - 1) & 1);
            }
            kvq_cp_wait<1>();
            kvq_producers_sync(group);
            char * filled = ring + (slot*2 + group)*S::TILE_BYTES;
            if (tile < n_cache) {
                kvq_fill_tile<S>(op.store, my_raw + (i & 1)*bytes, op.stride, shift0, shift1, filled, in_group, lane);
            } else {
                const kvq_f16_window & w = a.window;
                const char * rows = group == 0 ? w.k + seq*w.nbk3 + head_kv*w.nbk2 : w.v + seq*w.nbv3 + head_kv*w.nbv2;
                const int64_t nb = group == 0 ? w.nbk1 : w.nbv1;
                kvq_fill_window<S>(op.store, rows + (tile - n_cache)*T*nb, nb, filled, tid);
            }
            if constexpr (S::BIAS > 0) {
                turner.fill(turns + slot*S::TURN_BYTES, pos, tile < n_cache ? 1.0f : kvq_tile_factor(a.k.store));
                pos = position(tile + 1);
            }
            kvq_async_fence();
            kvq_barrier_arrive(full_s + 8*slot);
            kvq_producers_sync(group);          // the raw rows are read: their place is free
            fetch(tile + 2);
        }
        return;
    }

    kvq_more_registers<(S::BIAS > 0) ? 184 : 192>();
    const int row0 = blockIdx.x*S::ROWS + (warp - 8)*16;
    // this warp's query rows, rotated when K is, times the logit scale
    const float logit_scale = a.scale*(a.softcap != 0.0f ? 1.0f : KVQ_LOG2E)*kvq_tile_factor(a.k.store);
    __half * my_q = sq + (warp - 8)*16*S::SQ;
    for (int r = 0; r < 16; ++r) {
        const int row = row0 + r;
        const int tok = row < n_rows ? row/a.gqa : 0, head = head_kv*a.gqa + (row < n_rows ? row % a.gqa : 0);
        const float * q = (const float *) (a.q + seq*a.nbq3 + tok*a.nbq1 + head*a.nbq2);
#pragma unroll
        for (int b = 0; b < S::D/S::N; ++b) {
            constexpr int R = kvq_hadamard<S::N>::regs;
            float x[R];
            float factor = logit_scale;
#pragma unroll
            for (int j = 0; j < R; ++j) {
                x[j] = row < n_rows ? q[b*S::N + j*32 + lane] : 0.0f;
            }
            if (a.k.store <= KVQ_STORE_TURBO4) {
                kvq_apply_signs<S::N>(x, lane);
                kvq_hadamard_warp<S::N, false>(x, nullptr, lane);
                factor *= rsqrtf(float(S::N));
            }
#pragma unroll
            for (int j = 0; j < R; ++j) {
                my_q[r*S::SQ + kvq_tile_position<S::N>(a.k.store, b*S::N + j*32 + lane)] = __float2half_rn(x[j]*factor);
            }
        }
    }
    __syncwarp();
    uint32_t qa[KS][4];
#pragma unroll
    for (int s = 0; s < KS; ++s) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            qa[s][i] = *(const uint32_t *) (my_q + (g + 8*(i & 1))*S::SQ + 16*s + 8*(i >> 1) + 2*t);
        }
    }

    // what this warp's rows meet the turns with
    [[maybe_unused]] char * meets = (char *) sq + (group - 2)*S::TURN_BYTES;
    if constexpr (S::BIAS > 0) {
        kvq_consumers_sync();           // every warp has its queries in registers
        const float scale = a.scale*(a.softcap != 0.0f ? 1.0f : KVQ_LOG2E);
#pragma unroll 4
        for (int i = lane; i < 16*S::BIAS; i += 32) {
            const int r = i/S::BIAS, k = i % S::BIAS, row = row0 + r, in_group = (warp & 3)*16 + r;
            const int tok = row < n_rows ? row/a.gqa : 0, head = head_kv*a.gqa + (row < n_rows ? row % a.gqa : 0);
            const float2 z = kvq_bias_query(a.bias, seq, tok, head, head_kv, k, row < n_rows ? scale : 0.0f);
            *(uint32_t *) (meets + k/32*S::PANEL_BYTES + in_group*128 + ((k/4 ^ in_group) & 7)*16 + (k & 3)*4) = kvq_pack_half2(z.x, z.y);
        }
        kvq_async_fence();
        kvq_consumers_sync();
    }

    // this thread's rows g and g + 8 of the warp's 16
    const char * mask_row[2];
    float slope[2], m[2], l[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int row = row0 + g + 8*i < n_rows ? row0 + g + 8*i : n_rows - 1;
        mask_row[i] = a.mask ? a.mask + (seq % a.nem3)*a.nbm3 + (row/a.gqa)*a.nbm1 : nullptr;
        slope[i] = kvq_slope(a, head_kv*a.gqa + row % a.gqa)*KVQ_LOG2E;
        m[i] = KVQ_NO_MAX;
        l[i] = 0.0f;
    }
    float o[OUT], p[32];
    uint32_t pa[T/16][4];
#pragma unroll
    for (int i = 0; i < OUT; ++i) {
        o[i] = 0.0f;
    }

    auto logits = [&](const int slot) {
        const uint32_t k_tile = kvq_shared(ring + slot*2*S::TILE_BYTES);
#pragma unroll
        for (int s = 0; s < KS; ++s) {
            kvq_wgmma<false>(p, qa[s], kvq_wgmma_matrix(k_tile + s/4*S::PANEL_BYTES + s % 4*32, 1024, 16), s > 0);
        }
        if constexpr (S::BIAS > 0) {
            const uint32_t at = kvq_shared(turns + slot*S::TURN_BYTES), meets_s = kvq_shared(meets);
#pragma unroll
            for (int s = 0; s < S::BIAS/8; ++s) {
                const uint32_t step = s/4*S::PANEL_BYTES + s % 4*32;
                kvq_wgmma_add(p, kvq_wgmma_matrix(meets_s + step, 1024, 16), kvq_wgmma_matrix(at + step, 1024, 16));
            }
        }
        kvq_wgmma_commit();
    };
    auto outputs = [&](const int slot) {
        const uint32_t v_tile = kvq_shared(ring + slot*2*S::TILE_BYTES + S::TILE_BYTES);
#pragma unroll
        for (int s = 0; s < T/16; ++s) {
            kvq_wgmma<true>(o, pa[s], kvq_wgmma_matrix(v_tile + s*2048, 1024, S::PANEL_BYTES), 1);
        }
        kvq_wgmma_commit();
    };
    // mask of a tile, two tokens a word
    uint32_t mk[2][NT];
    auto load_mask = [&](const int tile) {
        if (tile >= n_cache) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int row = min(row0 + g + 8*i, n_rows - 1);
                const char * mask = a.window.mask + (seq % a.window.nem3)*a.window.nbm3 + (row/a.gqa)*a.window.nbm1 + ((tile - n_cache)*T + 2*t)*2;
#pragma unroll
                for (int j = 0; j < NT; ++j) {
                    mk[i][j] = *(const uint32_t *) (mask + 16*j);
                }
            }
            return;
        }
        const int token = tile*T + 2*t;
        const bool whole = (tile + 1)*T <= a.n_kv && (a.nbm1 & 3) == 0;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int j = 0; j < NT; ++j) {
                const int c = token + 8*j;
                if (whole) {
                    mk[i][j] = a.mask ? *(const uint32_t *) (mask_row[i] + 2*c) : 0u;
                } else {
                    const uint32_t lo = c     >= a.n_kv ? 0xFC00u : a.mask ? kvq_ld16(mask_row[i] + 2*c)     : 0u;
                    const uint32_t hi = c + 1 >= a.n_kv ? 0xFC00u : a.mask ? kvq_ld16(mask_row[i] + 2*c + 2) : 0u;
                    mk[i][j] = lo | (hi << 16);
                }
            }
        }
    };
    float decay[2];
    // logits p become weights; m moves on; decay says by how much older outputs shrink
    auto softmax = [&](const int tile) {
        if (tile >= n_cache) {          // the window's rows have no units of levels
            const float unit_k = 1.0f/kvq_tile_factor(a.k.store);
#pragma unroll
            for (int i = 0; i < 32; ++i) {
                p[i] *= unit_k;
            }
        }
        if (a.softcap != 0.0f) {
#pragma unroll
            for (int i = 0; i < 32; ++i) {
                p[i] = a.softcap*KVQ_LOG2E*tanhf(p[i]);
            }
        }
        uint32_t any_bits = 0;
#pragma unroll
        for (int j = 0; j < NT; ++j) {
            any_bits |= mk[0][j] | mk[1][j];
        }
        if (__any_sync(0xFFFFFFFFu, any_bits != 0)) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
#pragma unroll
                for (int j = 0; j < NT; ++j) {
                    const float2 mf = __half22float2(*(const __half2 *) &mk[i][j]);
                    p[4*j + 2*i]     = fmaf(slope[i], mf.x, p[4*j + 2*i]);
                    p[4*j + 2*i + 1] = fmaf(slope[i], mf.y, p[4*j + 2*i + 1]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float top = m[i];
#pragma unroll
            for (int j = 0; j < NT; ++j) {
                top = fmaxf(top, fmaxf(p[4*j + 2*i], p[4*j + 2*i + 1]));
            }
            top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, 1));
            top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, 2));
            decay[i] = kvq_exp2(m[i] - top);
            m[i] = top;
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < NT; ++j) {
                p[4*j + 2*i]     = kvq_exp2(p[4*j + 2*i] - top);
                p[4*j + 2*i + 1] = kvq_exp2(p[4*j + 2*i + 1] - top);
                sum += p[4*j + 2*i] + p[4*j + 2*i + 1];
            }
            l[i] = fmaf(l[i], decay[i], sum);
        }
    };
    auto pack_weights = [&](const int tile) {
        if (tile >= n_cache) {
            const float unit_v = 1.0f/kvq_tile_factor(a.v.store);
#pragma unroll
            for (int i = 0; i < 32; ++i) {
                p[i] *= unit_v;
            }
        }
#pragma unroll
        for (int s = 0; s < T/16; ++s) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const __half2 w = __floats2half2_rn(p[8*s + 2*i], p[8*s + 2*i + 1]);
                pa[s][i] = *(const uint32_t *) &w;
            }
        }
    };
    auto shrink = [&]() {
        if (__any_sync(0xFFFFFFFFu, decay[0] != 1.0f || decay[1] != 1.0f)) {
#pragma unroll
            for (int i = 0; i < OUT; ++i) {
                o[i] *= decay[(i >> 1) & 1];
            }
        }
    };

    if (tile0 < tile1) {
        load_mask(tile0);
        kvq_bulk_wait(full_s, 0);
        kvq_wgmma_fence();
        logits(0);
        kvq_wgmma_wait<0>();
        kvq_wgmma_hold(p);
        softmax(tile0);
        load_mask(min(tile0 + 1, tile1 - 1));       // a tile ahead of its use
        pack_weights(tile0);
    }
    for (int tile = tile0 + 1; tile < tile1; ++tile) {
        const int i = tile - tile0, slot = i % S::STAGES, before = (i - 1) % S::STAGES;
        kvq_bulk_wait(full_s + 8*slot, (i/S::STAGES) & 1);
        kvq_wgmma_hold(p);
        kvq_wgmma_hold(o);
        kvq_wgmma_fence();
        logits(slot);
        outputs(before);
        kvq_wgmma_wait<1>();
        kvq_wgmma_hold(p);
        softmax(tile);
        load_mask(min(tile + 1, tile1 - 1));
        kvq_wgmma_wait<0>();
        kvq_wgmma_hold(o);
        if (lane == 0) {
            kvq_barrier_arrive(empty_s + 8*before);
        }
        shrink();
        pack_weights(tile);
    }
    if (tile0 < tile1) {
        kvq_wgmma_hold(o);
        kvq_wgmma_fence();
        outputs((tile1 - 1 - tile0) % S::STAGES);
        kvq_wgmma_wait<0>();
        kvq_wgmma_hold(o);
    }

    const float unit = kvq_tile_factor(a.v.store);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        l[i] += __shfl_xor_sync(0xFFFFFFFFu, l[i], 1);
        l[i] += __shfl_xor_sync(0xFFFFFFFFu, l[i], 2);
        const int row = row0 + g + 8*i;
        if (row >= n_rows) {
            continue;
        }
        const int64_t part = ((int64_t(seq)*a.n_tok + row/a.gqa)*a.n_head + head_kv*a.gqa + row % a.gqa)*a.n_part + split;
        if (t == 0) {
            a.meta[part] = make_float2(m[i], l[i]);
        }
        float * out = a.part + part*S::D;
#pragma unroll
        for (int j = 0; j < S::D/8; ++j) {
            *(float2 *) (out + kvq_tile_coordinate<S::N>(a.v.store, j, t)) = make_float2(o[4*j + 2*i]*unit, o[4*j + 2*i + 1]*unit);
        }
    }
#endif // KVQ_WGMMA
}
