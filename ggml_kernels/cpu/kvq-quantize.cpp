// Cache writes: rotation, codes and scale of a block, bit-exact with the scalar reference. Compile without contraction
// of multiply-adds: the codec rounds each product.
#include "kvq.h"
#include "kvq-codes.h"
#include "kvq-rotate.h"

#include <cassert>

namespace kvq {

static inline uint64_t load8(const uint8_t * p) {
    uint64_t x;
    memcpy(&x, p, sizeof(x));
    return x;
}

static inline void store8(uint8_t * p, uint64_t x) { memcpy(p, &x, sizeof(x)); }

// Eight bytes at a time; the last eight of a plane overlap those before where its size is no multiple of eight.
template <int BITS, int N> static inline void pack(const uint8_t * code, uint8_t * out) {
    constexpr int Q = N/4, H = N/8;
    if constexpr (BITS == 4) {
        for (int b = 0; b < N/2; b += 8) {
            store8(out + b, load8(code + b) | load8(code + N/2 + b) << 4);
        }
        return;
    }
    const uint64_t ones = 0x0101010101010101ull;
    for (int i = 0; i < Q; i += 8) {
        const int b = i + 8 <= Q ? i : Q - 8;
        uint64_t plane = 0;
        for (int k = 0; k < 4; k++) {
            plane |= (load8(code + k*Q + b) & 3*ones) << (2*k);
        }
        store8(out + b, plane);
    }
    if constexpr (BITS == 3) {
        for (int i = 0; i < H; i += 8) {
            const int b = i + 8 <= H ? i : H - 8;
            uint64_t plane = 0;
            for (int k = 0; k < 4; k++) {
                plane |= ((load8(code + k*Q +     b) >> 2) & ones) << (2*k);
                plane |= ((load8(code + k*Q + H + b) >> 2) & ones) << (2*k + 1);
            }
            store8(out + Q + b, plane);
        }
    }
}

template <int BITS, int N> static inline void quantize_block(const float * x, uint8_t * out) {
    f32x16 y[N/16];
    rotate<N>(x, y);

    f32x16 squares = set1(0.0f);
    for (int i = 0; i < N/16; i++) {
        squares = add(squares, mul(y[i], y[i]));
    }
    const float sigma = sqrtf(sum(squares)/N);

    constexpr int T = (1 << BITS) - 1;
    float threshold[T];
    for (int t = 0; t < T; t++) {
        threshold[t] = codec<BITS>::thresholds()[t]*sigma;
    }

    uint8_t code[N];
    int8_t  level[N];
    for (int i = 0; i < N/16; i++) {
        count_above(y[i], threshold, T, code + 16*i);
    }
    lookup<BITS, N>(code, level);

    f32x16 products = set1(0.0f);
    int32_t den = 0;
    for (int i = 0; i < N/16; i++) {
        products = add(products, mul(y[i], load_i8(level + 16*i)));
    }
    for (int i = 0; i < N; i++) {
        den += level[i]*level[i];
    }
    const float d = sum(products)/(float) den * (codec<BITS>::scale/sqrtf((float) N));

    const ggml_fp16_t d16 = GGML_FP32_TO_FP16(d > 65504.0f ? 65504.0f : d);
    pack<BITS, N>(code, out);
    memcpy(out + N*BITS/8, &d16, sizeof(d16));
}

template <int BITS, int N> static void quantize_row(const float * x, uint8_t * y, int64_t k) {
    assert(k % N == 0);
    for (int64_t i = 0; i < k/N; i++) {
        quantize_block<BITS, N>(x + i*N, y + i*block_bytes<BITS, N>);
    }
}

template <int N> static void quantize_queries(const float * x, uint8_t * y, int64_t k) {
    assert(k % N == 0);
    for (int64_t i = 0; i < k/N; i++) {
        uint8_t * block = y + i*(N + sizeof(float));
        const float d = quantize_query<N>(x + i*N, (int8_t *) block + sizeof(float));
        memcpy(block, &d, sizeof(d));
    }
}

} // namespace kvq

#define KVQ_DEFINE_QUANTIZE(E, F, NAME, FAMILY, BITS, N, BYTES) \
    extern "C" void kvq_cpu_quantize_row_##F(const float * x, void * y, int64_t k) { \
        static_assert(kvq::block_bytes<BITS, N> == BYTES, "layout"); \
        kvq::quantize_row<BITS, N>(x, (uint8_t *) y, k); \
    }
KVQ_FOR_EACH_CACHE_TYPE(KVQ_DEFINE_QUANTIZE)

#define KVQ_DEFINE_QUANTIZE_ACTIVATION(E, F, NAME, N, BYTES) \
    extern "C" void kvq_cpu_quantize_row_##F(const float * x, void * y, int64_t k) { \
        kvq::quantize_queries<N>(x, (uint8_t *) y, k); \
    }
KVQ_FOR_EACH_ACTIVATION_TYPE(KVQ_DEFINE_QUANTIZE_ACTIVATION)
