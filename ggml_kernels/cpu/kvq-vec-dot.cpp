// Dot products of cache rows with queries, for matrix products with a cache tensor: rotated int8 queries for the turbo
// types, whose integer sums equal the scalar ones, and plain floats for oscar2.
#include "kvq.h"
#include "kvq-tiered.h"

#include <cassert>

namespace kvq {

template <int BITS, int N> static float dot_row(int n, const uint8_t * x, const uint8_t * y) {
    constexpr int S = tile_stride<N>;
    alignas(32) int8_t level[S] = {}, magnitude[S] = {}, query[S] = {};
    float sum = 0.0f;
    for (int i = 0; i < n/N; i++) {
        const uint8_t * xb = x + i*block_bytes<BITS, N>;
        const uint8_t * yb = y + i*(N + sizeof(float));
        float d;
        memcpy(&d, yb, sizeof(d));
        memcpy(query, yb + sizeof(d), N);
        unpack<BITS, N>(xb, level, magnitude);
        sum += GGML_CPU_FP16_TO_FP32((block_scale_bits<BITS, N>(xb)))*d*(float) dot<N>(level, magnitude, query);
    }
    return sum/codec<BITS>::scale;
}

template <int N> static float dot_row_tiered(int n, const uint8_t * x, const float * y) {
    float total = 0.0f;
    for (int i = 0; i < n/N; i++) {
        const uint8_t * block = x + i*block_bytes<KVQ_TIERED, N>;
        int8_t level[N], magnitude[N];
        unpack_tiered<N>(block, level, magnitude);
        f32x16 products = set1(0.0f);
        for (int j = 0; j < N; j += 16) {
            products = fma(load_i8(level + j), load(y + i*N + j), products);
        }
        total += GGML_CPU_FP16_TO_FP32((block_scale_bits<KVQ_TIERED, N>(block)))*sum(products);
    }
    return total/KVQ_TIER_SCALE;
}

} // namespace kvq

#define KVQ_DEFINE_VEC_DOT(E, F, NAME, FAMILY, BITS, N, BYTES) \
    extern "C" void kvq_cpu_vec_dot_##F(int n, float * s, size_t, const void * x, size_t, const void * y, size_t, int nrc) { \
        assert(nrc == 1 && n % N == 0); \
        GGML_UNUSED(nrc); \
        *s = kvq::dot_row<BITS, N>(n, (const uint8_t *) x, (const uint8_t *) y); \
    }
KVQ_FOR_EACH_TURBO_TYPE(KVQ_DEFINE_VEC_DOT)

#define KVQ_DEFINE_VEC_DOT_TIERED(E, F, NAME, FAMILY, CODE, N, BYTES) \
    extern "C" void kvq_cpu_vec_dot_##F(int n, float * s, size_t, const void * x, size_t, const void * y, size_t, int nrc) { \
        assert(nrc == 1 && n % N == 0); \
        GGML_UNUSED(nrc); \
        *s = kvq::dot_row_tiered<N>(n, (const uint8_t *) x, (const float *) y); \
    }
KVQ_FOR_EACH_TIERED_TYPE(KVQ_DEFINE_VEC_DOT_TIERED)
