// RMS norm and RoPE of queries and keys inside launches that read them: the formulas and precision of upstream's kernels.
#pragma once

#include "kvq-codec.cuh"
#include "kvq-ptx.cuh"
#include "kvq-rotary.h"

// cosine and sine of the turn of a pair of values
static __device__ __forceinline__ float2 kvq_angle(const kvq_rotary & t, const int pair, const int pos) {
    float angle = pos*powf(t.theta_scale, float(pair));
    if (t.factors) {
        angle /= t.factors[pair];
    }
    float theta = t.freq_scale*angle, scale = t.attn_factor;
    if (t.ext_factor != 0.0f) {                 // YaRN
        const float ramp = (pair - t.corr[0])/fmaxf(0.001f, t.corr[1] - t.corr[0]);
        const float mix = (1.0f - fminf(1.0f, fmaxf(0.0f, ramp)))*t.ext_factor;
        theta = theta*(1.0f - mix) + angle*mix;
        scale *= 1.0f + 0.1f*logf(1.0f/t.freq_scale);
    }
    return make_float2(cosf(theta)*scale, sinf(theta)*scale);
}

static __device__ __forceinline__ float kvq_sum_warp(float x) {
#pragma unroll
    for (int w = 16; w >= 1; w /= 2) {
        x += __shfl_xor_sync(0xFFFFFFFFu, x, w);
    }
    return x;
}

// what the norm multiplies a row by whose squares sum up to `squares`
static __device__ __forceinline__ float kvq_norm(const kvq_rotary & t, const float squares) {
    return t.weight ? rsqrtf(squares/t.d + t.eps) : 1.0f;
}

// The values from `begin` on that a lane holds of a row that turns: each is a sum of itself and its partner. What it takes is made before the launch waits.
template <int N> struct kvq_rotary_block {
    static constexpr int R = kvq_hadamard<N>::regs;
    const float * row;
    float own[R], other[R];
    int partner[R];

    __device__ __forceinline__ void prepare(const kvq_rotary & t, const int head, const int token, const int begin, const int lane) {
        row = (const float *) (t.x + head*t.nbx1 + token*t.nbx2);
        const int half = t.n_dims/2, pos = t.pos[token];
#pragma unroll
        for (int r = 0; r < R; ++r) {
            const int i = begin + (r*32 + lane < N ? r*32 + lane : 0);
            own[r] = 1.0f;
            other[r] = 0.0f;
            partner[r] = i;
            if (i < t.n_dims) {
                const bool first = t.neox ? i < half : i % 2 == 0;
                const float2 angle = kvq_angle(t, t.neox ? (first ? i : i - half) : i/2, pos);
                partner[r] = t.neox ? (first ? i + half : i - half) : i ^ 1;
                own[r]   = angle.x;
                other[r] = first ? -angle.y : angle.y;
            }
            if (t.weight) {
                own[r]   *= t.weight[i];
                other[r] *= t.weight[partner[r]];
            }
        }
    }

    __device__ __forceinline__ void load(const kvq_rotary & t, const int begin, float * x, const int lane) const {
        float y[R], squares = 0.0f;
#pragma unroll
        for (int r = 0; r < R; ++r) {
            x[r] = r*32 + lane < N ? row[begin + r*32 + lane] : 0.0f;
            y[r] = r*32 + lane < N ? row[partner[r]] : 0.0f;
        }
        if (t.weight) {
#pragma unroll 4
            for (int i = lane; i < t.d; i += 32) {
                squares += row[i]*row[i];
            }
            squares = kvq_sum_warp(squares);
        }
        const float scale = kvq_norm(t, squares);
#pragma unroll
        for (int r = 0; r < R; ++r) {
            x[r] = scale*(x[r]*own[r] + y[r]*other[r]);
        }
    }
};

// Row number `row` of t.y, one warp, with the wait for the launch before.
static __device__ __forceinline__ void kvq_rotary_row(const kvq_rotary & t, const int row, const int lane) {
    constexpr int P = 4;                        // pairs of a lane that are worked on at once
    const int token = row/t.n_head, head = row - token*t.n_head, half = t.n_dims/2, pos = t.pos[token];
    const float * x = (const float *) (t.x + head*t.nbx1 + token*t.nbx2);
    float * y = t.y + int64_t(row)*t.d;
    float scale = 1.0f;
    for (int begin = 0; begin < t.d/2; begin += 32*P) {
        float2 angle[P], weight[P], v[P];
        int a[P], b[P];
#pragma unroll
        for (int p = 0; p < P; ++p) {
            const int pair = begin + p*32 + lane;
            const bool turns = pair < half, there = pair < t.d/2;
            a[p] = turns && t.neox ? pair : there ? 2*pair : 0;
            b[p] = turns && t.neox ? pair + half : there ? 2*pair + 1 : 0;
            angle[p]  = turns ? kvq_angle(t, pair, pos) : make_float2(1.0f, 0.0f);
            weight[p] = t.weight ? make_float2(t.weight[a[p]], t.weight[b[p]]) : make_float2(1.0f, 1.0f);
        }
        if (begin == 0) {
            kvq_pdl_wait();
            kvq_pdl_launch();
        }
#pragma unroll
        for (int p = 0; p < P; ++p) {
            v[p] = begin + p*32 + lane < t.d/2 ? make_float2(x[a[p]], x[b[p]]) : make_float2(0.0f, 0.0f);
        }
        if (begin == 0 && t.weight) {
            float squares = 0.0f;
#pragma unroll
            for (int p = 0; p < P; ++p) {
                squares += v[p].x*v[p].x + v[p].y*v[p].y;
            }
            // the first P*32 pairs are not the first values of the row, the others are what is left
            for (int pair = 32*P + lane; pair < t.d/2; pair += 32) {
                const int i = pair < half && t.neox ? pair : 2*pair, j = pair < half && t.neox ? pair + half : 2*pair + 1;
                squares += x[i]*x[i] + x[j]*x[j];
            }
            scale = kvq_norm(t, kvq_sum_warp(squares));
        }
#pragma unroll
        for (int p = 0; p < P; ++p) {
            const float first = scale*v[p].x*weight[p].x, second = scale*v[p].y*weight[p].y;
            if (begin + p*32 + lane < t.d/2) {
                y[a[p]] = first*angle[p].x - second*angle[p].y;
                y[b[p]] = first*angle[p].y + second*angle[p].x;
            }
        }
    }
}
