// What the attention kernels share: function constants, masks, and queries in the working domain.
//
// Keys and values stay as they are stored: logits are products of rotated queries and levels, outputs are sums of levels, and
// the rotation is undone once a row. The f16 window of a turbo type is stored rotated, so it takes part without more ado.
#pragma once

#include "kvq-codec.h"

constant int  FC_k_store [[function_constant(KVQ_FC_K_STORE)]];
constant int  FC_v_store [[function_constant(KVQ_FC_V_STORE)]];
constant int  FC_rows    [[function_constant(KVQ_FC_ROWS)]];
constant bool FC_mask    [[function_constant(KVQ_FC_MASK)]];
constant bool FC_softcap [[function_constant(KVQ_FC_SOFTCAP)]];
constant bool FC_slope   [[function_constant(KVQ_FC_SLOPE)]];
constant bool FC_window  [[function_constant(KVQ_FC_WINDOW)]];
constant bool FC_sinks   [[function_constant(KVQ_FC_SINKS)]];
constant int  FC_rot     [[function_constant(KVQ_FC_ROT)]];

#define KVQ_NO_LOGIT (-FLT_MAX/2)       // below every logit; fast mathematics knows no infinity

struct kvq_row { int token, head; bool valid; };

static inline kvq_row kvq_row_at(constant kvq_metal_args & args, int row, int head_kv) {
    const bool valid = row < args.n_tok*args.gqa;
    const int r = valid ? row : 0;
    return { r/args.gqa, head_kv*args.gqa + r % args.gqa, valid };
}

// ALiBi
static inline float kvq_slope(constant kvq_metal_args & args, int head) {
    if (!FC_slope) {
        return 1.0f;
    }
    return head < args.n_head_log2 ? pow(args.m0, (float) (head + 1)) : pow(args.m1, (float) (2*(head - args.n_head_log2) + 1));
}

// What the mask adds to the logit of a row and a token; false where the token is hidden.
static inline bool kvq_mask(constant kvq_metal_part & part, device const char * mask, bool masked, kvq_row row, int sequence, int token, thread float & bias) {
    bias = 0.0f;
    if (!row.valid || token >= part.n) {
        return false;
    }
    if (!masked) {
        return true;
    }
    const half m = ((device const half *) (mask + row.token*part.nbm1 + (sequence % part.nem3)*part.nbm3))[token];
    bias = (float) m;
    return m > -MAXHALF;
}

// One block of a query, scaled and in the domain of the keys: value i in lane i % 32, register i/32.
template <short N> void kvq_load_query(constant kvq_metal_args & args, device const float * q, thread float (&x)[KVQ_REGS(N)], bool valid,
        threadgroup float * buf, ushort lane) {
    KVQ_UNROLL (short r = 0; r < KVQ_REGS(N); ++r) {
        x[r] = valid && r*32 + lane < N ? q[r*32 + lane] : 0.0f;
    }
    float scale = args.scale;
    if (kvq_rotated(FC_k_store)) {
        kvq_rotate<N>(x, buf, lane);
        scale *= rsqrt((float) N);
    }
    KVQ_UNROLL (short r = 0; r < KVQ_REGS(N); ++r) {
        x[r] *= scale;
    }
}

// ---- key bias: z, made of query and bias once a row, meets the cosines and sines of a token's position ----

// a row's z of the f-th pair that carries the bias, for the cosine and for the sine
static inline float2 kvq_bias_pair(constant kvq_metal_args & args, device const char * bias_q, device const char * bias, kvq_row row, int head_kv,
        int sequence, short f) {
    const short pair = args.bias.pair[f];
    const short first = args.bias.interleaved ? 2*pair : pair, second = args.bias.interleaved ? 2*pair + 1 : pair + args.bias.all;
    device const float * x = (device const float *) (bias_q + row.token*args.bias.nbq1 + row.head*args.bias.nbq2 + sequence*args.bias.nbq3);
    device const float * y = (device const float *) (bias + head_kv*args.bias.nbb1);
    if (!row.valid || f >= args.bias.n) {
        return float2(0.0f, 0.0f);
    }
    return float2((x[first]*y[first] + x[second]*y[second])*args.scale, (x[second]*y[first] - x[first]*y[second])*args.scale);
}

// cosine and sine of a position: the turn by its multiple of 256, then by the rest
static inline float2 kvq_turn(constant kvq_metal_args & args, device const char * trig, int position, short f) {
    device const float * a = (device const float *) (trig + (256 + min(position >> 8, args.bias.steps - 1))*args.bias.nbt1);
    device const float * c = (device const float *) (trig + (position & 255)*args.bias.nbt1);
    const short i = args.bias.pair[f], j = i + args.bias.all;
    return float2(a[i]*c[i] - a[j]*c[j], a[j]*c[i] + a[i]*c[j]);
}

static inline device const int * kvq_positions(constant kvq_metal_args & args, constant kvq_metal_part & part, device const char * positions, int sequence) {
    return (device const int *) (positions + sequence/args.bias.seqs*args.bias.nbp1) + part.first;
}

// soft cap and mask
static inline float kvq_finish_logit(constant kvq_metal_args & args, float logit, float slope, float bias) {
    if (FC_softcap) {
        logit = args.softcap*precise::tanh(logit);
    }
    return logit + (FC_slope ? slope*bias : bias);
}

// Undoes the rotation of one block of an output and stores it.
template <short N> void kvq_store_output(thread float (&x)[KVQ_REGS(N)], float factor, device float * out, threadgroup float * buf, ushort lane) {
    if (kvq_rotated(FC_v_store)) {
        kvq_unrotate<N>(x, buf, lane);
        factor *= rsqrt((float) N);
    }
    KVQ_UNROLL (short r = 0; r < KVQ_REGS(N); ++r) {
        if (r*32 + lane < N) {
            out[r*32 + lane] = x[r]*factor;
        }
    }
}
