// Attention for many query rows, with the products of simdgroup matrices. A threadgroup takes ROWS rows of one KV head, the query
// heads of a group beside each other; tiles of 32 keys or values are unpacked to f16 once for all of them, CHUNK coordinates
// at a time.
#include "kvq-attn.h"

struct kvq_tile_memory {
    threadgroup half  * query;          // [ROWS][DK]
    threadgroup half  * tile;           // [32][CHUNK]
    threadgroup half  * z;              // key bias: [ROWS][values that it turns], cosines and sines in turn
    threadgroup float * logits;         // [ROWS][32], then the weights
    threadgroup float * diagonal;       // [ROWS/8][8][8]: what earlier outputs are multiplied with
    threadgroup float * k_levels;
    threadgroup float * v_levels;
    threadgroup float * scratch;        // 128 of this simdgroup
    threadgroup int   * shown;          // [2][simdgroups]
};

// CHUNK coordinates from `offset` on of the tile's vectors; zeros behind the last token
template <short N, short CHUNK> void kvq_unpack_tile(short store, device const uchar * rows, uint64_t stride, int n, short offset,
        threadgroup half * tile, threadgroup const float * levels, ushort index) {
    constexpr short blocks = CHUNK/N, pairs = N/8;
    for (short i = index; i < KVQ_TILE*blocks*pairs; i += 32*KVQ_SIMDGROUPS) {
        const short token = i/(blocks*pairs), blk = i/pairs % blocks, b = 2*(i % pairs);
        float4 first = float4(0.0f), second = float4(0.0f);
        if (token < n) {
            device const uchar * block = rows + token*stride + (offset/N + blk)*kvq_bytes(store, N);
            kvq_pair<N>(store, block, b, levels, kvq_tiers_of<N>(store, block), first, second);
            const float d = kvq_scale_of<N>(store, block);
            first  *= d;
            second *= d;
        }
        KVQ_UNROLL (short k = 0; k < 4; ++k) {
            *(threadgroup half2 *) (tile + token*CHUNK + blk*N + k*(N/4) + b) = half2((half) first[k], (half) second[k]);
        }
    }
}

// Cosines and sines of the tile's positions for `n` values from `offset` on, as keys that meet z; [32][n]
static inline void kvq_turn_tile(constant kvq_metal_args & args, device const char * trig, device const int * positions, int left, short offset, short n,
        threadgroup half * tile, ushort index) {
    const short pairs = n/2;
    for (short i = index; i < KVQ_TILE*pairs; i += 32*KVQ_SIMDGROUPS) {
        const short token = i/pairs, f = i % pairs;
        const float2 t = token < left ? kvq_turn(args, trig, max(positions[token], 0), offset/2 + f) : float2(0.0f, 0.0f);
        *(threadgroup half2 *) (tile + token*n + 2*f) = half2((half) t[0], (half) t[1]);
    }
}

// outputs of this simdgroup: 8 x 8 matrices of column blocks sg, sg + 4, ... of every chunk
template <short ROWS, short DV, short CHUNK> struct kvq_outputs {
    simdgroup_float8x8 m[DV/CHUNK][(CHUNK/8 + KVQ_SIMDGROUPS - 1)/KVQ_SIMDGROUPS][ROWS/8];
};

template <short DK, short DV, short N, short NV, short ROWS, short CK, short CV> void kvq_prefill_tile(
        constant kvq_metal_args & args, constant kvq_metal_part & part, short k_store, short v_store,
        device const uchar * k, device const uchar * v, device const char * mask, bool masked, int first, int row0, int head_kv, int sequence,
        device const char * trig, device const char * positions, kvq_tile_memory sh, ushort lane, ushort sg, ushort index, short parity,
        thread float (&top)[ROWS/KVQ_SIMDGROUPS], thread float (&sum)[ROWS/KVQ_SIMDGROUPS], thread kvq_outputs<ROWS, DV, CV> & out) {
    const int left = part.n - first;

    // nothing to do where the mask hides the tile from all rows
    bool any = false;
    float bias[ROWS/KVQ_SIMDGROUPS];
    bool  shown[ROWS/KVQ_SIMDGROUPS];
    KVQ_UNROLL (short j = 0; j < ROWS/KVQ_SIMDGROUPS; ++j) {
        shown[j] = kvq_mask(part, mask, masked, kvq_row_at(args, row0 + j*KVQ_SIMDGROUPS + sg, head_kv), sequence, first + lane, bias[j]);
        any = any || shown[j];
    }
    any = simd_any(any);
    if (lane == 0) {
        sh.shown[parity*KVQ_SIMDGROUPS + sg] = any;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    any = false;
    KVQ_UNROLL (short s = 0; s < KVQ_SIMDGROUPS; ++s) {
        any = any || sh.shown[parity*KVQ_SIMDGROUPS + s];
    }
    if (!any) {
        return;
    }

    // logits: a simdgroup takes 8 tokens
    simdgroup_float8x8 logits[ROWS/8];
    KVQ_UNROLL (short r = 0; r < ROWS/8; ++r) {
        logits[r] = make_filled_simdgroup_matrix<float, 8>(0.0f);
    }
    for (short c = 0; c < DK/CK; ++c) {
        kvq_unpack_tile<N, CK>(k_store, k + first*part.nbk1, part.nbk1, left, c*CK, sh.tile, sh.k_levels, index);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (short i = 0; i < CK/8; ++i) {
            simdgroup_half8x8 key, query;
            simdgroup_load(key, sh.tile + 8*sg*CK + 8*i, CK, 0, true);
            KVQ_UNROLL (short r = 0; r < ROWS/8; ++r) {
                simdgroup_load(query, sh.query + 8*r*DK + c*CK + 8*i, DK);
                simdgroup_multiply_accumulate(logits[r], query, key, logits[r]);
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    constexpr short CHUNK = CK > CV ? CK : CV;
    for (short offset = 0; offset < FC_rot; offset += CHUNK) {
        const short n = min((int) CHUNK, FC_rot - offset);
        kvq_turn_tile(args, trig, kvq_positions(args, part, positions, sequence) + first, left, offset, n, sh.tile, index);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (short i = 0; i < n/8; ++i) {
            simdgroup_half8x8 turn, z;
            simdgroup_load(turn, sh.tile + 8*sg*n + 8*i, n, 0, true);
            KVQ_UNROLL (short r = 0; r < ROWS/8; ++r) {
                simdgroup_load(z, sh.z + 8*r*FC_rot + offset + 8*i, FC_rot);
                simdgroup_multiply_accumulate(logits[r], z, turn, logits[r]);
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    KVQ_UNROLL (short r = 0; r < ROWS/8; ++r) {
        simdgroup_store(logits[r], sh.logits + 8*r*KVQ_TILE + 8*sg, KVQ_TILE);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    // softmax: a simdgroup takes every fourth row, a lane a token
    KVQ_UNROLL (short j = 0; j < ROWS/KVQ_SIMDGROUPS; ++j) {
        const short r = j*KVQ_SIMDGROUPS + sg;
        const int head = kvq_row_at(args, row0 + r, head_kv).head;
        const float s = shown[j] ? kvq_finish_logit(args, sh.logits[r*KVQ_TILE + lane], kvq_slope(args, head), bias[j]) : KVQ_NO_LOGIT;
        const float higher = max(top[j], simd_max(s)), keep = exp(top[j] - higher);
        const float weight = shown[j] ? exp(s - higher) : 0.0f;
        top[j] = higher;
        sum[j] = sum[j]*keep + simd_sum(weight);
        sh.logits[r*KVQ_TILE + lane] = weight;
        if (lane == 0) {
            sh.diagonal[r/8*64 + r % 8*9] = keep;
        }
    }

    KVQ_UNROLL (short c = 0; c < DV/CV; ++c) {
        kvq_unpack_tile<NV, CV>(v_store, v + first*part.nbv1, part.nbv1, left, c*CV, sh.tile, sh.v_levels, index);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        KVQ_UNROLL (short b = 0; b < (CV/8 + KVQ_SIMDGROUPS - 1)/KVQ_SIMDGROUPS; ++b) {
            const short column = b*KVQ_SIMDGROUPS + sg;
            if (column < CV/8) {
                KVQ_UNROLL (short r = 0; r < ROWS/8; ++r) {
                    simdgroup_float8x8 keep;
                    simdgroup_load(keep, sh.diagonal + r*64, 8);
                    simdgroup_multiply(out.m[c][b][r], keep, out.m[c][b][r]);
                }
                for (short t = 0; t < KVQ_TILE/8; ++t) {
                    simdgroup_half8x8 value;
                    simdgroup_float8x8 weights;
                    simdgroup_load(value, sh.tile + 8*t*CV + 8*column, CV);
                    KVQ_UNROLL (short r = 0; r < ROWS/8; ++r) {
                        simdgroup_load(weights, sh.logits + 8*r*KVQ_TILE + 8*t, KVQ_TILE);
                        simdgroup_multiply_accumulate(out.m[c][b][r], weights, value, out.m[c][b][r]);
                    }
                }
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
}

template <short DK, short DV, short N, short NV, short ROWS, short CK, short CV> kernel void kernel_kvq_prefill(
        constant kvq_metal_args & args,
        device const char  * q,
        device const uchar * k,
        device const uchar * v,
        device const char  * mask,
        device const uchar * k16,
        device const uchar * v16,
        device const char  * mask16,
        device const float * sinks,
        device       float * dst,
        device const char  * bias_q,
        device const char  * bias,
        device const char  * trig,
        device const char  * positions,
        threadgroup  float * shared [[threadgroup(0)]],
        uint3  at    [[threadgroup_position_in_grid]],
        ushort lane  [[thread_index_in_simdgroup]],
        ushort sg    [[simdgroup_index_in_threadgroup]],
        ushort index [[thread_index_in_threadgroup]]) {
    constexpr short CHUNK = CK > CV ? CK : CV;
    const int row0 = at.x*ROWS, head_kv = at.y, sequence = at.z;

    kvq_tile_memory sh;
    sh.query    = (threadgroup half *) shared;
    sh.tile     = sh.query + ROWS*DK;
    sh.z        = sh.tile + KVQ_TILE*CHUNK;
    sh.logits   = (threadgroup float *) (sh.z + ROWS*FC_rot);
    sh.diagonal = sh.logits + ROWS*KVQ_TILE;
    sh.k_levels = sh.diagonal + 8*ROWS;
    sh.v_levels = sh.k_levels + 48;
    sh.scratch  = sh.k_levels + KVQ_TABLES + 128*sg;
    sh.shown    = (threadgroup int *) (sh.k_levels + KVQ_TABLES + 128*KVQ_SIMDGROUPS);

    kvq_load_levels(FC_k_store, sh.k_levels, index, 32*KVQ_SIMDGROUPS);
    kvq_load_levels(FC_v_store, sh.v_levels, index, 32*KVQ_SIMDGROUPS);
    for (short i = index; i < 8*ROWS; i += 32*KVQ_SIMDGROUPS) {
        sh.diagonal[i] = 0.0f;
    }
    for (short r = sg; r < ROWS; r += KVQ_SIMDGROUPS) {
        const kvq_row row = kvq_row_at(args, row0 + r, head_kv);
        device const float * from = (device const float *) (q + row.token*args.nbq1 + row.head*args.nbq2 + sequence*args.nbq3);
        for (short blk = 0; blk < DK/N; ++blk) {
            float x[KVQ_REGS(N)];
            kvq_load_query<N>(args, from + blk*N, x, row.valid, sh.scratch, lane);
            KVQ_UNROLL (short j = 0; j < KVQ_REGS(N); ++j) {
                if (j*32 + lane < N) {
                    sh.query[r*DK + blk*N + j*32 + lane] = (half) x[j];
                }
            }
        }
    }
    for (short i = index; i < ROWS*(FC_rot/2); i += 32*KVQ_SIMDGROUPS) {
        const short r = i/(FC_rot/2), f = i % (FC_rot/2);
        const float2 z = kvq_bias_pair(args, bias_q, bias, kvq_row_at(args, row0 + r, head_kv), head_kv, sequence, f);
        sh.z[r*FC_rot + 2*f]     = (half) z[0];
        sh.z[r*FC_rot + 2*f + 1] = (half) z[1];
    }
    float top[ROWS/KVQ_SIMDGROUPS], sum[ROWS/KVQ_SIMDGROUPS];
    KVQ_UNROLL (short j = 0; j < ROWS/KVQ_SIMDGROUPS; ++j) {
        top[j] = KVQ_NO_LOGIT;
        sum[j] = 0.0f;
    }
    kvq_outputs<ROWS, DV, CV> out;
    KVQ_UNROLL (short c = 0; c < DV/CV; ++c) {
        KVQ_UNROLL (short b = 0; b < (CV/8 + KVQ_SIMDGROUPS - 1)/KVQ_SIMDGROUPS; ++b) {
            KVQ_UNROLL (short r = 0; r < ROWS/8; ++r) {
                out.m[c][b][r] = make_filled_simdgroup_matrix<float, 8>(0.0f);
            }
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    short parity = 0;
    {
        device const uchar * kh = k + head_kv*args.part[0].nbk2 + sequence*args.part[0].nbk3;
        device const uchar * vh = v + head_kv*args.part[0].nbv2 + sequence*args.part[0].nbv3;
        for (int first = 0; first < args.part[0].n; first += KVQ_TILE, parity ^= 1) {
            kvq_prefill_tile<DK, DV, N, NV, ROWS, CK, CV>(args, args.part[0], FC_k_store, FC_v_store, kh, vh, mask, FC_mask, first, row0, head_kv, sequence,
                trig, positions, sh, lane, sg, index, parity, top, sum, out);
        }
    }
    if (FC_window) {
        device const uchar * kh = k16 + head_kv*args.part[1].nbk2 + sequence*args.part[1].nbk3;
        device const uchar * vh = v16 + head_kv*args.part[1].nbv2 + sequence*args.part[1].nbv3;
        for (int first = 0; first < args.part[1].n; first += KVQ_TILE, parity ^= 1) {
            kvq_prefill_tile<DK, DV, N, NV, ROWS, CK, CV>(args, args.part[1], KVQ_STORE_F16, KVQ_STORE_F16, kh, vh, mask16, true, first, row0, head_kv, sequence,
                trig, positions, sh, lane, sg, index, parity, top, sum, out);
        }
    }

    // a chunk of the outputs at a time, in the place of queries and tile
    threadgroup float * outs = shared;
    KVQ_UNROLL (short c = 0; c < DV/CV; ++c) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        KVQ_UNROLL (short b = 0; b < (CV/8 + KVQ_SIMDGROUPS - 1)/KVQ_SIMDGROUPS; ++b) {
            const short column = b*KVQ_SIMDGROUPS + sg;
            if (column < CV/8) {
                KVQ_UNROLL (short r = 0; r < ROWS/8; ++r) {
                    simdgroup_store(out.m[c][b][r], outs + 8*r*CV + 8*column, CV);
                }
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        KVQ_UNROLL (short j = 0; j < ROWS/KVQ_SIMDGROUPS; ++j) {
            const short r = j*KVQ_SIMDGROUPS + sg;
            const kvq_row row = kvq_row_at(args, row0 + r, head_kv);
            if (!row.valid) {
                continue;
            }
            float total = sum[j], factor = 1.0f;
            if (FC_sinks) {
                const float logit = sinks[row.head], higher = max(top[j], logit);
                factor = exp(top[j] - higher);
                total  = total*factor + exp(logit - higher);
            }
            factor = total == 0.0f ? 0.0f : factor/total;
            for (short blk = 0; blk < CV/NV; ++blk) {
                float x[KVQ_REGS(NV)];
                KVQ_UNROLL (short i = 0; i < KVQ_REGS(NV); ++i) {
                    x[i] = i*32 + lane < NV ? outs[r*CV + blk*NV + i*32 + lane] : 0.0f;
                }
                device float * to = dst + (((uint64_t) sequence*args.n_tok + row.token)*args.n_head + row.head)*DV + c*CV + blk*NV;
                kvq_store_output<NV>(x, factor, to, sh.scratch, lane);
            }
        }
    }
}

typedef decltype(kernel_kvq_prefill<128, 128, 128, 128, 32, 128, 128>) kvq_prefill_t;

template [[host_name("kernel_kvq_prefill_64_64")]]   kernel kvq_prefill_t kernel_kvq_prefill<64,  64,  64,  64,  32, 64,  64>;
template [[host_name("kernel_kvq_prefill_80_80")]]   kernel kvq_prefill_t kernel_kvq_prefill<80,  80,  80,  80,  32, 80,  80>;
template [[host_name("kernel_kvq_prefill_96_96")]]   kernel kvq_prefill_t kernel_kvq_prefill<96,  96,  96,  96,  32, 96,  96>;
template [[host_name("kernel_kvq_prefill_112_112")]] kernel kvq_prefill_t kernel_kvq_prefill<112, 112, 112, 112, 32, 112, 112>;
template [[host_name("kernel_kvq_prefill_128_128")]] kernel kvq_prefill_t kernel_kvq_prefill<128, 128, 128, 128, 32, 128, 128>;
template [[host_name("kernel_kvq_prefill_192_192")]] kernel kvq_prefill_t kernel_kvq_prefill<192, 192, 64,  64,  32, 64,  64>;
template [[host_name("kernel_kvq_prefill_192_128")]] kernel kvq_prefill_t kernel_kvq_prefill<192, 128, 64,  128, 32, 64,  128>;
template [[host_name("kernel_kvq_prefill_256_256")]] kernel kvq_prefill_t kernel_kvq_prefill<256, 256, 128, 128, 16, 128, 128>;
template [[host_name("kernel_kvq_prefill_512_512")]] kernel kvq_prefill_t kernel_kvq_prefill<512, 512, 128, 128, 8,  128, 128>;
template [[host_name("kernel_kvq_prefill_576_512")]] kernel kvq_prefill_t kernel_kvq_prefill<576, 512, 64,  64,  8,  192, 128>;
