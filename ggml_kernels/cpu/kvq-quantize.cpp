// Cache writes: rotation, codes and scale of a block, bit-exact with the scalar reference. Compile without contraction
// of multiply-adds: the codec rounds each product.
#include "kvq.h"
#include "kvq-codes.h"
#include "kvq-rotate.h"
#include "kvq-tiered.h"

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

    int32_t den = 0;
    for (int i = 0; i < N; i++) {
        den += level[i]*level[i];
    }
    const float d = sigma*codec<BITS>::scale/sqrtf((float) den);

    const ggml_fp16_t d16 = GGML_FP32_TO_FP16(d > 65504.0f ? 65504.0f : d);
    pack<BITS, N>(code, out);
    memcpy(out + N*BITS/8, &d16, sizeof(d16));
}

// sum over n values of a vector in the order of the scalar reference; n need not be a multiple of sixteen
template <int N> static inline float tier_squares(const float * y) {
    float lane[16] = {};
    for (int i = 0; i < N; i++) {
        lane[i % 16] += y[i]*y[i];
    }
    return sum(load(lane));
}

template <int N, int T> static inline void tier_codes(const float * y, const float * thresholds, float sigma, uint8_t * code) {
    memset(code, 0, N);
    for (int j = 0; j < T; j++) {
        const float t = thresholds[j]*sigma;
        for (int i = 0; i < N; i++) {
            code[i] += y[i] > t;
        }
    }
}

template <int N, int T> static inline int tier_spread(const float * y, const float * edges, float sigma) {
    const float own = sqrtf(tier_squares<N>(y)/N);
    int spread = 0;
    for (int j = 0; j < T; j++) {
        spread += own > edges[j]*sigma;
    }
    return spread;
}

template <int N> static inline void quantize_tiered_block(const float * y, uint8_t * out) {
    constexpr int A = N/8, W = N/16;
    uint8_t code[N];
    const float sigma = sqrtf(tier_squares<N/4>(y)/(N/4));
    tier_codes<N/4, 15>(y, KVQ_TIER_THRESHOLDS_4, sigma, code);

    float lane[16] = {};
    int32_t den = 0;
    for (int i = 0; i < N/4; i++) {
        const int32_t c = KVQ_TIER_LEVELS_4[code[i]];
        lane[i % 16] += y[i]*(float) c;
        den += c*c;
    }
    const float d = sum(load(lane))/(float) den * KVQ_TIER_SCALE;

    const int two = tier_spread<N/4, 3>(y + N/4, KVQ_TIER_EDGES_2, sigma);
    const int one = tier_spread<N/2, 7>(y + N/2, KVQ_TIER_EDGES_1, sigma);
    tier_codes<N/4, 3>(y + N/4, KVQ_TIER_THRESHOLDS_2, KVQ_TIER_RATIOS_2[two]*sigma, code + N/4);
    tier_codes<N/2, 1>(y + N/2, KVQ_TIER_THRESHOLDS_1, KVQ_TIER_RATIOS_1[one]*sigma, code + N/2);

    for (int b = 0; b < A; b++) {
        out[b] = code[b] | code[A + b] << 4;
    }
    for (int b = 0; b < W; b++) {
        uint8_t pairs = 0, bits = 0;
        for (int k = 0; k < 4; k++) {
            pairs |= code[N/4 + k*W + b] << 2*k;
        }
        for (int k = 0; k < 8; k++) {
            bits |= code[N/2 + k*W + b] << k;
        }
        out[A + b]     = pairs;
        out[A + W + b] = bits;
    }
    const uint16_t last = kvq_tier_scale_bits(GGML_FP32_TO_FP16(d > 65504.0f ? 65504.0f : d)) | two << 3 | one;
    memcpy(out + N/4, &last, sizeof(last));
}

template <int CODE, int N> static void quantize_row(const float * x, uint8_t * y, int64_t k) {
    assert(k % N == 0);
    for (int64_t i = 0; i < k/N; i++) {
        if constexpr (CODE == KVQ_TIERED) {
            quantize_tiered_block<N>(x + i*N, y + i*block_bytes<CODE, N>);
        } else {
            quantize_block<CODE, N>(x + i*N, y + i*block_bytes<CODE, N>);
        }
    }
}

template <int N> static void quantize_window(const float * x, uint16_t * y, int64_t k) {
    assert(k % N == 0);
    const f32x16 norm = set1(1.0f/sqrtf((float) N));
    for (int64_t i = 0; i < k; i += N) {
        f32x16 v[N/16];
        rotate<N>(x + i, v);
        for (int j = 0; j < N/16; j++) {
            store_f16(y + i + 16*j, mul(v[j], norm));
        }
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

#define KVQ_DEFINE_QUANTIZE(E, F, NAME, FAMILY, CODE, N, BYTES) \
    extern "C" void kvq_cpu_quantize_row_##F(const float * x, void * y, int64_t k) { \
        static_assert(kvq::block_bytes<CODE, N> == BYTES, "layout"); \
        kvq::quantize_row<CODE, N>(x, (uint8_t *) y, k); \
    }
KVQ_FOR_EACH_CACHE_TYPE(KVQ_DEFINE_QUANTIZE)

#define KVQ_DEFINE_QUANTIZE_WINDOW(E, F, NAME, N, BYTES) \
    extern "C" void kvq_cpu_quantize_row_##F(const float * x, void * y, int64_t k) { \
        kvq::quantize_window<N>(x, (uint16_t *) y, k); \
    }
KVQ_FOR_EACH_WINDOW_TYPE(KVQ_DEFINE_QUANTIZE_WINDOW)

#define KVQ_DEFINE_QUANTIZE_ACTIVATION(E, F, NAME, N, BYTES) \
    extern "C" void kvq_cpu_quantize_row_##F(const float * x, void * y, int64_t k) { \
        kvq::quantize_queries<N>(x, (uint8_t *) y, k); \
    }
KVQ_FOR_EACH_ACTIVATION_TYPE(KVQ_DEFINE_QUANTIZE_ACTIVATION)
