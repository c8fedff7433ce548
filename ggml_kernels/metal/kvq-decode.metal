// Attention for few query rows: a threadgroup takes the rows of one KV head, so that every key and value is read and unpacked
// once for all query heads of a group. The context is split over simdgroups and threadgroups; a second kernel joins the parts.
//
// Logits: a lane takes a token and needs no other. Outputs: lanes take neighbouring units of one token, or of a few.
#include "kvq-attn.h"

// lanes that share a token's values, a pair of units each; pairs of a lane
#define KVQ_LANES(DV) ((DV)/8 <= 8 ? 8 : (DV)/8 <= 16 ? 16 : 32)
#define KVQ_PAIRS(DV) (((DV)/8 + KVQ_LANES(DV) - 1)/KVQ_LANES(DV))

#define KVQ_ROWS(r) KVQ_UNROLL (short r = 0; r < FC_rows; ++r)

template <short R, short P> struct kvq_state {
    float  top[R], sum[R];              // largest logit, sum of weights; the same in all lanes
    float4 out[R][P][2];                // of this lane's units
};

struct kvq_shared {
    threadgroup float  * k_levels;
    threadgroup float  * v_levels;
    threadgroup float4 * query;         // [rows][DK/4] in the order of units
    threadgroup float  * weights;       // of this simdgroup: [rows][32]
    threadgroup float  * scales;        // [blocks of a value][32]
    threadgroup float2 * z;             // key bias: [rows][pairs]
    threadgroup float2 * turned;        // the same of this simdgroup, turned to the first position of a tile
};

// Adds the key bias to the logits of a lane's token. Mostly the positions of a tile are in a row: then z is turned to the first
// once for all lanes, and the rest of the turn is a row of the table.
template <short R> void kvq_add_bias(constant kvq_metal_args & args, device const char * trig, int position, bool any, kvq_shared sh, ushort lane, thread float (&logit)[R]) {
    const int leader = simd_min(any ? (int) lane : 31);
    const int base = simd_shuffle(position, (ushort) leader) - leader;
    const short pairs = FC_rot/2;
    if (simd_all(!any || position == base + lane) && base >= 0) {
        for (short i = lane; i < FC_rows*pairs; i += 32) {
            const float2 z = sh.z[i], t = kvq_turn(args, trig, base, i % pairs);
            sh.turned[i] = float2(z[0]*t[0] + z[1]*t[1], z[1]*t[0] - z[0]*t[1]);
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);
        device const float * c = (device const float *) (trig + lane*args.bias.nbt1);
        for (short f = 0; f < pairs; ++f) {
            const short pair = args.bias.pair[f];
            const float2 t = float2(c[pair], c[pair + args.bias.all]);
            KVQ_ROWS (r) {
                logit[r] += dot(sh.turned[r*pairs + f], t);
            }
        }
    } else if (any) {
        for (short f = 0; f < pairs; ++f) {
            const float2 t = kvq_turn(args, trig, position, f);
            KVQ_ROWS (r) {
                logit[r] += dot(sh.z[r*pairs + f], t);
            }
        }
    }
}

// logits of one token
template <short DK, short N, short R> void kvq_logits(short store, device const uchar * key, kvq_shared sh, thread float (&logit)[R]) {
    KVQ_ROWS (r) {
        logit[r] = 0.0f;
    }
    for (short blk = 0; blk < DK/N; ++blk) {
        device const uchar * block = key + blk*kvq_bytes(store, N);
        const kvq_tiers tiers = kvq_tiers_of<N>(store, block);
        float part[R];
        KVQ_ROWS (r) {
            part[r] = 0.0f;
        }
        for (short b = 0; b < N/4; b += 2) {
            float4 first, second;
            kvq_pair<N>(store, block, b, sh.k_levels, tiers, first, second);
            KVQ_ROWS (r) {
                threadgroup const float4 * q = sh.query + r*(DK/4) + blk*(N/4) + b;
                part[r] += dot(first, q[0]) + dot(second, q[1]);
            }
        }
        const float d = kvq_scale_of<N>(store, block);
        KVQ_ROWS (r) {
            logit[r] += d*part[r];
        }
    }
}

// 32 tokens from `first` on
template <short DK, short DV, short N, short NV, short R> void kvq_decode_tile(
        constant kvq_metal_args & args, constant kvq_metal_part & part, short k_store, short v_store,
        device const uchar * k, device const uchar * v, device const char * mask, bool masked, int first, int group, int head_kv, int sequence,
        device const char * trig, device const char * positions, kvq_shared sh, ushort lane, thread kvq_state<R, KVQ_PAIRS(DV)> & state) {
    const int token = first + lane;
    float bias[R];
    bool  shown[R];
    bool  any = false;
    KVQ_ROWS (r) {
        shown[r] = kvq_mask(part, mask, masked, kvq_row_at(args, group*FC_rows + r, head_kv), sequence, token, bias[r]);
        any = any || shown[r];
    }
    if (!simd_any(any)) {
        return;
    }
    float logit[R];
    if (any) {
        kvq_logits<DK, N, R>(k_store, k + token*part.nbk1, sh, logit);
        for (short blk = 0; blk < DV/NV; ++blk) {
            sh.scales[blk*KVQ_TILE + lane] = kvq_scale_of<NV>(v_store, v + token*part.nbv1 + blk*kvq_bytes(v_store, NV));
        }
    }
    if (FC_rot) {
        kvq_add_bias<R>(args, trig, any ? kvq_positions(args, part, positions, sequence)[token] : 0, any, sh, lane, logit);
    }
    KVQ_ROWS (r) {
        const int head = kvq_row_at(args, group*FC_rows + r, head_kv).head;
        const float s = shown[r] ? kvq_finish_logit(args, logit[r], kvq_slope(args, head), bias[r]) : KVQ_NO_LOGIT;
        const float top = max(state.top[r], simd_max(s)), keep = exp(state.top[r] - top);
        const float weight = shown[r] ? exp(s - top) : 0.0f;
        state.top[r] = top;
        state.sum[r] = state.sum[r]*keep + simd_sum(weight);
        KVQ_UNROLL (short p = 0; p < KVQ_PAIRS(DV); ++p) {
            state.out[r][p][0] *= keep;
            state.out[r][p][1] *= keep;
        }
        sh.weights[r*KVQ_TILE + lane] = weight;
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);

    constexpr short L = KVQ_LANES(DV);
    for (short j = lane/L; j < KVQ_TILE; j += 32/L) {
        float weight[R];
        float all = 0.0f;
        KVQ_ROWS (r) {
            weight[r] = sh.weights[r*KVQ_TILE + j];
            all += weight[r];
        }
        if (all == 0.0f) {
            continue;           // hidden, or too small to count
        }
        device const uchar * value = v + (first + j)*part.nbv1;
        KVQ_UNROLL (short p = 0; p < KVQ_PAIRS(DV); ++p) {
            const short unit = 2*(lane % L + p*L), blk = unit/(NV/4);
            if (unit < DV/4) {
                float4 a, b;
                kvq_pair<NV>(v_store, value + blk*kvq_bytes(v_store, NV), unit % (NV/4), sh.v_levels, kvq_tiers(), a, b);
                const float d = sh.scales[blk*KVQ_TILE + j];
                KVQ_ROWS (r) {
                    state.out[r][p][0] += a*(d*weight[r]);
                    state.out[r][p][1] += b*(d*weight[r]);
                }
            }
        }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
}

// DK, DV: head sizes; N, NV: values of a block; R: most rows of a threadgroup
template <short DK, short DV, short N, short NV, short R> kernel void kernel_kvq_decode(
        constant kvq_metal_args & args,
        device const char  * q,
        device const uchar * k,
        device const uchar * v,
        device const char  * mask,
        device const uchar * k16,
        device const uchar * v16,
        device const char  * mask16,
        device       float * partial,
        device const char  * bias_q,
        device const char  * bias,
        device const char  * trig,
        device const char  * positions,
        threadgroup  float * shared [[threadgroup(0)]],
        uint3  at    [[threadgroup_position_in_grid]],
        ushort lane  [[thread_index_in_simdgroup]],
        ushort sg    [[simdgroup_index_in_threadgroup]],
        ushort index [[thread_index_in_threadgroup]]) {
    constexpr short P = KVQ_PAIRS(DV), L = KVQ_LANES(DV), NBV = DV/NV;
    const int group = at.y % args.row_groups, head_kv = at.y/args.row_groups, sequence = at.z, split = at.x;

    kvq_shared sh;
    sh.k_levels = shared;
    sh.v_levels = shared + 48;
    sh.query    = (threadgroup float4 *) (shared + KVQ_TABLES);
    sh.z        = (threadgroup float2 *) (shared + KVQ_TABLES + FC_rows*DK);
    sh.weights  = shared + KVQ_TABLES + FC_rows*(DK + FC_rot) + sg*KVQ_DECODE_SCRATCH(FC_rows, NBV, FC_rot);
    sh.scales   = sh.weights + FC_rows*KVQ_TILE;
    sh.turned   = (threadgroup float2 *) (sh.weights + KVQ_DECODE_OWN(FC_rows, NBV));

    kvq_load_levels(FC_k_store, sh.k_levels, index, 32*KVQ_SIMDGROUPS);
    kvq_load_levels(FC_v_store, sh.v_levels, index, 32*KVQ_SIMDGROUPS);
    for (short r = sg; r < FC_rows; r += KVQ_SIMDGROUPS) {
        const kvq_row row = kvq_row_at(args, group*FC_rows + r, head_kv);
        device const float * from = (device const float *) (q + row.token*args.nbq1 + row.head*args.nbq2 + sequence*args.nbq3);
        for (short blk = 0; blk < DK/N; ++blk) {
            float x[KVQ_REGS(N)];
            kvq_load_query<N>(args, from + blk*N, x, row.valid, sh.weights, lane);
            KVQ_UNROLL (short j = 0; j < KVQ_REGS(N); ++j) {
                const short i = j*32 + lane;
                if (i < N) {
                    ((threadgroup float *) sh.query)[r*DK + blk*N + 4*(i % (N/4)) + i/(N/4)] = x[j];
                }
            }
        }
    }
    for (short i = index; i < FC_rows*(FC_rot/2); i += 32*KVQ_SIMDGROUPS) {
        sh.z[i] = kvq_bias_pair(args, bias_q, bias, kvq_row_at(args, group*FC_rows + i/(FC_rot/2), head_kv), head_kv, sequence, i % (FC_rot/2));
    }
    kvq_state<R, P> state;
    KVQ_ROWS (r) {
        state.top[r] = KVQ_NO_LOGIT;
        state.sum[r] = 0.0f;
        KVQ_UNROLL (short p = 0; p < P; ++p) {
            state.out[r][p][0] = state.out[r][p][1] = float4(0.0f);
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    // tiles of the cache, then of the window, dealt to splits and simdgroups in turn
    const int tiles = (args.part[0].n + KVQ_TILE - 1)/KVQ_TILE, step = args.n_split*KVQ_SIMDGROUPS;
    int tile = split*KVQ_SIMDGROUPS + sg;
    {
        device const uchar * kh = k + head_kv*args.part[0].nbk2 + sequence*args.part[0].nbk3;
        device const uchar * vh = v + head_kv*args.part[0].nbv2 + sequence*args.part[0].nbv3;
        for (; tile < tiles; tile += step) {
            kvq_decode_tile<DK, DV, N, NV, R>(args, args.part[0], FC_k_store, FC_v_store, kh, vh, mask, FC_mask, tile*KVQ_TILE,
                group, head_kv, sequence, trig, positions, sh, lane, state);
        }
    }
    if (FC_window) {
        device const uchar * kh = k16 + head_kv*args.part[1].nbk2 + sequence*args.part[1].nbk3;
        device const uchar * vh = v16 + head_kv*args.part[1].nbv2 + sequence*args.part[1].nbv3;
        for (; (tile - tiles)*KVQ_TILE < args.part[1].n; tile += step) {
            kvq_decode_tile<DK, DV, N, NV, R>(args, args.part[1], KVQ_STORE_F16, KVQ_STORE_F16, kh, vh, mask16, true, (tile - tiles)*KVQ_TILE,
                group, head_kv, sequence, trig, positions, sh, lane, state);
        }
    }

    // join lanes that took other tokens of the same units, then simdgroups
    threadgroup_barrier(mem_flags::mem_threadgroup);
    threadgroup float * outs = shared, * meta = shared + KVQ_SIMDGROUPS*FC_rows*DV;
    KVQ_ROWS (r) {
        KVQ_UNROLL (short p = 0; p < P; ++p) {
            KVQ_UNROLL (short e = 0; e < 2; ++e) {
                float4 x = state.out[r][p][e];
                for (short w = L; w < 32; w *= 2) {
                    KVQ_UNROLL (short c = 0; c < 4; ++c) {
                        x[c] += simd_shuffle_xor(x[c], (ushort) w);
                    }
                }
                const short unit = 2*(lane % L + p*L) + e;
                if (lane < L && unit < DV/4) {
                    KVQ_UNROLL (short c = 0; c < 4; ++c) {
                        outs[(sg*FC_rows + r)*DV + unit/(NV/4)*NV + c*(NV/4) + unit % (NV/4)] = x[c];
                    }
                }
            }
        }
        if (lane == 0) {
            meta[2*(sg*FC_rows + r)]     = state.top[r];
            meta[2*(sg*FC_rows + r) + 1] = state.sum[r];
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    device float * parts = partial, * metas = partial + (uint64_t) args.n_head*args.n_tok*(uint64_t) args.n_seq*args.n_split*DV;
    for (short r = sg; r < FC_rows; r += KVQ_SIMDGROUPS) {
        const kvq_row row = kvq_row_at(args, group*FC_rows + r, head_kv);
        if (!row.valid) {
            continue;
        }
        float top = KVQ_NO_LOGIT, sum = 0.0f, weight[KVQ_SIMDGROUPS];
        KVQ_UNROLL (short s = 0; s < KVQ_SIMDGROUPS; ++s) {
            top = max(top, meta[2*(s*FC_rows + r)]);
        }
        KVQ_UNROLL (short s = 0; s < KVQ_SIMDGROUPS; ++s) {
            weight[s] = exp(meta[2*(s*FC_rows + r)] - top);
            sum += weight[s]*meta[2*(s*FC_rows + r) + 1];
        }
        const uint64_t part = (((uint64_t) sequence*args.n_tok + row.token)*args.n_head + row.head)*args.n_split + split;
        for (short i = lane; i < DV; i += 32) {
            float x = 0.0f;
            KVQ_UNROLL (short s = 0; s < KVQ_SIMDGROUPS; ++s) {
                x += weight[s]*outs[(s*FC_rows + r)*DV + i];
            }
            parts[part*DV + i] = x;
        }
        if (lane == 0) {
            metas[2*part]     = top;
            metas[2*part + 1] = sum;
        }
    }
}

// Joins the parts of one output row, a simdgroup a block.
template <short DV, short NV> kernel void kernel_kvq_combine(
        constant kvq_metal_args & args,
        device const float * partial,
        device const float * sinks,
        device       float * dst,
        threadgroup  float * shared [[threadgroup(0)]],
        uint   row  [[threadgroup_position_in_grid]],
        uint   rows [[threadgroups_per_grid]],
        ushort lane [[thread_index_in_simdgroup]],
        ushort blk  [[simdgroup_index_in_threadgroup]]) {
    device const float * parts = partial + (uint64_t) row*args.n_split*DV, * metas = partial + (uint64_t) rows*args.n_split*DV + (uint64_t) row*args.n_split*2;
    float top = KVQ_NO_LOGIT;
    for (int s = lane; s < args.n_split; s += 32) {
        top = max(top, metas[2*s]);
    }
    top = simd_max(top);
    float sink = 0.0f;
    if (FC_sinks) {
        const float logit = sinks[row % args.n_head];
        const float higher = max(top, logit);
        sink = exp(logit - higher);
        top = higher;
    }
    float sum = 0.0f;
    for (int s = lane; s < args.n_split; s += 32) {
        sum += metas[2*s + 1]*exp(metas[2*s] - top);
    }
    sum = simd_sum(sum) + sink;

    float x[KVQ_REGS(NV)];
    KVQ_UNROLL (short r = 0; r < KVQ_REGS(NV); ++r) {
        x[r] = 0.0f;
    }
    for (int s = 0; s < args.n_split; ++s) {
        const float weight = exp(metas[2*s] - top);
        KVQ_UNROLL (short r = 0; r < KVQ_REGS(NV); ++r) {
            if (r*32 + lane < NV) {
                x[r] += weight*parts[s*DV + blk*NV + r*32 + lane];
            }
        }
    }
    kvq_store_output<NV>(x, sum == 0.0f ? 0.0f : 1.0f/sum, dst + (uint64_t) row*DV + blk*NV, shared + blk*NV, lane);
}

typedef decltype(kernel_kvq_decode<128, 128, 128, 128, 8>) kvq_decode_t;
typedef decltype(kernel_kvq_combine<128, 128>)             kvq_combine_t;

template [[host_name("kernel_kvq_decode_64_64")]]   kernel kvq_decode_t kernel_kvq_decode<64,  64,  64,  64,  8>;
template [[host_name("kernel_kvq_decode_80_80")]]   kernel kvq_decode_t kernel_kvq_decode<80,  80,  80,  80,  8>;
template [[host_name("kernel_kvq_decode_96_96")]]   kernel kvq_decode_t kernel_kvq_decode<96,  96,  96,  96,  8>;
template [[host_name("kernel_kvq_decode_112_112")]] kernel kvq_decode_t kernel_kvq_decode<112, 112, 112, 112, 8>;
template [[host_name("kernel_kvq_decode_128_128")]] kernel kvq_decode_t kernel_kvq_decode<128, 128, 128, 128, 8>;
template [[host_name("kernel_kvq_decode_192_192")]] kernel kvq_decode_t kernel_kvq_decode<192, 192, 64,  64,  4>;
template [[host_name("kernel_kvq_decode_192_128")]] kernel kvq_decode_t kernel_kvq_decode<192, 128, 64,  128, 4>;
template [[host_name("kernel_kvq_decode_256_256")]] kernel kvq_decode_t kernel_kvq_decode<256, 256, 128, 128, 4>;
template [[host_name("kernel_kvq_decode_512_512")]] kernel kvq_decode_t kernel_kvq_decode<512, 512, 128, 128, 2>;
template [[host_name("kernel_kvq_decode_576_512")]] kernel kvq_decode_t kernel_kvq_decode<576, 512, 64,  64,  2>;

template [[host_name("kernel_kvq_combine_64_64")]]   kernel kvq_combine_t kernel_kvq_combine<64,  64>;
template [[host_name("kernel_kvq_combine_80_80")]]   kernel kvq_combine_t kernel_kvq_combine<80,  80>;
template [[host_name("kernel_kvq_combine_96_96")]]   kernel kvq_combine_t kernel_kvq_combine<96,  96>;
template [[host_name("kernel_kvq_combine_112_112")]] kernel kvq_combine_t kernel_kvq_combine<112, 112>;
template [[host_name("kernel_kvq_combine_128_128")]] kernel kvq_combine_t kernel_kvq_combine<128, 128>;
template [[host_name("kernel_kvq_combine_192_64")]]  kernel kvq_combine_t kernel_kvq_combine<192, 64>;
template [[host_name("kernel_kvq_combine_256_128")]] kernel kvq_combine_t kernel_kvq_combine<256, 128>;
template [[host_name("kernel_kvq_combine_512_128")]] kernel kvq_combine_t kernel_kvq_combine<512, 128>;
template [[host_name("kernel_kvq_combine_512_64")]]  kernel kvq_combine_t kernel_kvq_combine<512, 64>;
