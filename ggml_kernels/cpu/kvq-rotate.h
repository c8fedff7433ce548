// The signed Hadamard rotation of one block, in the operation order of the scalar reference.
#pragma once

#include "kvq-simd.h"
#include "kvq-tables.h"

namespace kvq {

template <int N> constexpr int paley_order = N == 80 ? 20 : N == 96 ? 12 : N == 112 ? 28 : 1;

// Signs of the Paley factor, sixteen outputs (16/G rows of G values) to a vector, for each of the M inputs.
template <int N, bool transpose> struct paley_signs {
    static constexpr int M = paley_order<N>, G = N/M;
    float sign[N/16][M][16];

    paley_signs() {
        const uint32_t * rows = N == 80 ? KVQ_PALEY_20 : N == 96 ? KVQ_PALEY_12 : KVQ_PALEY_28;
        for (int o = 0; o < N; o++) {
            for (int a = 0; a < M; a++) {
                const int r = o/G;
                sign[o/16][a][o % 16] = ((transpose ? rows[a] >> r : rows[r] >> a) & 1) ? -1.0f : 1.0f;
            }
        }
    }
};

template <int N, bool transpose> static inline void paley_mix(f32x16 * v) {
    static const paley_signs<N, transpose> table;
    constexpr int M = paley_order<N>, G = N/M;
    float in[N];
    for (int i = 0; i < N/16; i++) {
        store(in + 16*i, v[i]);
    }
    for (int i = 0; i < N/16; i++) {
        f32x16 acc = set1(0.0f);
        for (int a = 0; a < M; a++) {
            acc = add(acc, mul(load(table.sign[i][a]), repeat<G>(in + G*a)));   // the product is exact
        }
        v[i] = acc;
    }
}

template <int N> static inline void sylvester(f32x16 * v) {
    constexpr int G = N/paley_order<N>;
    for (int i = 0; i < N/16; i++) {
        f32x16 x = v[i];
        x = butterfly<1>(x);
        x = butterfly<2>(x);
        if constexpr (G >  4) { x = butterfly<4>(x); }
        if constexpr (G >  8) { x = butterfly<8>(x); }
        v[i] = x;
    }
    if constexpr (G > 16) {
        for (int h = 1; h < G/16; h *= 2) {
            for (int i = 0; i < N/16; i += 2*h) {
                for (int j = i; j < i + h; j++) {
                    const f32x16 a = v[j], b = v[j + h];
                    v[j]     = add(a, b);
                    v[j + h] = sub(a, b);
                }
            }
        }
    }
}

// y = H (signs * x), unnormalised
template <int N> static inline void rotate(const float * x, f32x16 * y) {
    for (int i = 0; i < N/16; i++) {
        y[i] = mul(load(KVQ_SIGNS + 16*i), load(x + 16*i));
    }
    sylvester<N>(y);
    if constexpr (paley_order<N> > 1) {
        paley_mix<N, false>(y);
    }
}

// x = factor * signs * (H^T y)
template <int N> static inline void unrotate(const float * y, float factor, float * x) {
    f32x16 v[N/16];
    for (int i = 0; i < N/16; i++) {
        v[i] = load(y + 16*i);
    }
    if constexpr (paley_order<N> > 1) {
        paley_mix<N, true>(v);
    }
    sylvester<N>(v);
    for (int i = 0; i < N/16; i++) {
        store(x + 16*i, mul(mul(v[i], load(KVQ_SIGNS + 16*i)), set1(factor)));
    }
}

// One block to int8, after an orthonormal rotation if `rotated`; returns the value of one unit.
template <int N, bool rotated = true> static inline float quantize_query(const float * x, int8_t * q) {
    f32x16 y[N/16];
    if constexpr (rotated) {
        rotate<N>(x, y);
    }

    const f32x16 norm = set1(1.0f/sqrtf((float) N));
    f32x16 top = set1(0.0f);
    for (int i = 0; i < N/16; i++) {
        y[i] = rotated ? mul(y[i], norm) : load(x + 16*i);
        top  = max(abs(y[i]), top);
    }
    const float amax = max_of(top);
    const f32x16 id = set1(amax > 0.0f ? 127.0f/amax : 0.0f);
    for (int i = 0; i < N/16; i++) {
        store_i8(q + 16*i, mul(y[i], id));
    }
    return amax/127.0f;
}

// y = factor * x, after an orthonormal rotation if `rotated`
template <int N, bool rotated> static inline void turn_query(const float * x, float factor, float * y) {
    f32x16 v[N/16];
    if constexpr (rotated) {
        rotate<N>(x, v);
        factor /= sqrtf((float) N);
    }
    for (int i = 0; i < N/16; i++) {
        store(y + 16*i, mul(rotated ? v[i] : load(x + 16*i), set1(factor)));
    }
}

// x = factor * y: the counterpart of unrotate for types without a rotation, whose factor counts sqrt(N) too
template <int N> static inline void rescale(const float * y, float factor, float * x) {
    const f32x16 f = set1(factor);
    for (int i = 0; i < N; i += 16) {
        store(x + i, mul(load(y + i), f));
    }
}

} // namespace kvq
