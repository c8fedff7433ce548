// Scalar reference of the turbo codecs: the definition that every SIMD, CUDA and Metal kernel is tested against.
// Bit-exact with pykvq/codecs/turbo.py, so compile it without contraction of multiply-adds.
#include "kvq.h"
#include "kvq-lanes.h"
#include "kvq-tables.h"

#define GGML_COMMON_DECL_C
#include "ggml-common.h"
#include "ggml-impl.h"

#include <assert.h>
#include <math.h>
#include <string.h>

#define KVQ_MAX_BLOCK 128

// ---- rotation ----

// order of the Paley factor of H_n, 1 for a power of two; also for the n/4 and n/2 of the tiers of a block
static int paley_order(int n) {
    return n % 5 == 0 ? 20 : n % 3 == 0 ? 12 : n % 7 == 0 ? 28 : 1;
}

static const uint32_t * paley_rows(int m) {
    switch (m) {
        case 12: return KVQ_PALEY_12;
        case 20: return KVQ_PALEY_20;
        case 28: return KVQ_PALEY_28;
        default: return NULL;
    }
}

// butterflies of stride 1, 2, ... inside every group of `group` consecutive values
static void sylvester(float * v, int n, int group) {
    for (int h = 1; h < group; h *= 2) {
        for (int i = 0; i < n; i += 2*h) {
            for (int j = i; j < i + h; j++) {
                const float a = v[j], b = v[j + h];
                v[j]     = a + b;
                v[j + h] = a - b;
            }
        }
    }
}

// mixes the m groups of n/m values with the Paley matrix or its transpose
static void paley_mix(float * v, int n, int m, bool transpose) {
    const uint32_t * rows = paley_rows(m);
    const int group = n/m;
    float out[KVQ_MAX_BLOCK];
    for (int r = 0; r < m; r++) {
        for (int b = 0; b < group; b++) {
            float sum = 0.0f;
            for (int a = 0; a < m; a++) {
                const bool minus = transpose ? (rows[a] >> r) & 1 : (rows[r] >> a) & 1;
                sum = minus ? sum - v[a*group + b] : sum + v[a*group + b];
            }
            out[r*group + b] = sum;
        }
    }
    memcpy(v, out, n*sizeof(float));
}

void kvq_rotate_ref(const float * x, float * y, int n) {
    const int m = paley_order(n);
    for (int i = 0; i < n; i++) {
        y[i] = KVQ_SIGNS[i]*x[i];
    }
    sylvester(y, n, n/m);
    if (m > 1) {
        paley_mix(y, n, m, false);
    }
}

void kvq_unrotate_ref(const float * y, float * x, int n) {
    const int m = paley_order(n);
    memmove(x, y, n*sizeof(float));
    if (m > 1) {
        paley_mix(x, n, m, true);
    }
    sylvester(x, n, n/m);
    for (int i = 0; i < n; i++) {
        x[i] *= KVQ_SIGNS[i];
    }
}

// ---- codes ----

static const float * thresholds(int bits) {
    return bits == 2 ? KVQ_THRESHOLDS_2 : bits == 3 ? KVQ_THRESHOLDS_3 : KVQ_THRESHOLDS_4;
}

static const int8_t * levels(int bits) {
    return bits == 2 ? KVQ_LEVELS_2 : bits == 3 ? KVQ_LEVELS_3 : KVQ_LEVELS_4;
}

static float scale(int bits) {
    return bits == 2 ? KVQ_SCALE_2 : bits == 3 ? KVQ_SCALE_3 : KVQ_SCALE_4;
}

// code i sits in plane byte i % (n/4) at bits 2*(i/(n/4)); the third bit has a plane of its own; see docs/formats.md
static void pack(const uint8_t * code, uint8_t * out, int bits, int n) {
    memset(out, 0, n*bits/8);
    if (bits == 4) {
        for (int b = 0; b < n/2; b++) {
            out[b] = code[b] | (code[n/2 + b] << 4);
        }
        return;
    }
    const int q = n/4;
    uint8_t * high = out + q;
    for (int i = 0; i < n; i++) {
        const int k = i / q, b = i % q;
        out[b] |= (code[i] & 3) << (2*k);
        if (bits == 3) {
            high[b % (q/2)] |= (code[i] >> 2) << (2*k + b/(q/2));
        }
    }
}

static uint8_t unpack(const uint8_t * in, int bits, int n, int i) {
    if (bits == 4) {
        return i < n/2 ? in[i] & 15 : in[i - n/2] >> 4;
    }
    const int q = n/4, k = i / q, b = i % q;
    uint8_t code = (in[b] >> (2*k)) & 3;
    if (bits == 3) {
        code |= ((in[q + b % (q/2)] >> (2*k + b/(q/2))) & 1) << 2;
    }
    return code;
}

static void quantize_block(const float * x, uint8_t * out, int bits, int n) {
    float y[KVQ_MAX_BLOCK];
    uint8_t code[KVQ_MAX_BLOCK];

    kvq_rotate_ref(x, y, n);

    const float sigma = sqrtf(kvq_dot_lanes(y, y, n)/n);
    int32_t den = 0;
    for (int i = 0; i < n; i++) {
        code[i] = 0;
        for (int t = 0; t < (1 << bits) - 1; t++) {
            code[i] += y[i] > thresholds(bits)[t]*sigma;
        }
        const int32_t c = levels(bits)[code[i]];
        den += c*c;
    }
    const float d = sigma*scale(bits)/sqrtf((float) den);   // keeps the length of the block; docs/codec-search.md says why

    const ggml_fp16_t d16 = GGML_FP32_TO_FP16(d > 65504.0f ? 65504.0f : d);
    pack(code, out, bits, n);
    memcpy(out + n*bits/8, &d16, sizeof(d16));
}

static void dequantize_block(const uint8_t * in, float * x, int bits, int n) {
    ggml_fp16_t d16;
    memcpy(&d16, in + n*bits/8, sizeof(d16));

    float c[KVQ_MAX_BLOCK];
    for (int i = 0; i < n; i++) {
        c[i] = levels(bits)[unpack(in, bits, n, i)];
    }
    kvq_unrotate_ref(c, x, n);

    const float d = GGML_FP16_TO_FP32(d16)*(1.0f/(scale(bits)*sqrtf((float) n)));
    for (int i = 0; i < n; i++) {
        x[i] *= d;
    }
}

static void quantize_rows(const float * x, void * y, int64_t k, int bits, int n) {
    assert(k % n == 0);
    const int bytes = n*bits/8 + 2;
    for (int64_t i = 0; i < k/n; i++) {
        quantize_block(x + i*n, (uint8_t *) y + i*bytes, bits, n);
    }
}

static void dequantize_rows(const void * x, float * y, int64_t k, int bits, int n) {
    assert(k % n == 0);
    const int bytes = n*bits/8 + 2;
    for (int64_t i = 0; i < k/n; i++) {
        dequantize_block((const uint8_t *) x + i*bytes, y + i*n, bits, n);
    }
}

// ---- f16 windows ----

static void quantize_window(const float * x, void * out, int64_t k, int n) {
    assert(k % n == 0);
    const float norm = 1.0f/sqrtf((float) n);
    for (int64_t i = 0; i < k; i += n) {
        float y[KVQ_MAX_BLOCK];
        kvq_rotate_ref(x + i, y, n);
        for (int j = 0; j < n; j++) {
            ((ggml_fp16_t *) out)[i + j] = GGML_FP32_TO_FP16(y[j]*norm);
        }
    }
}

static void dequantize_window(const void * in, float * x, int64_t k, int n) {
    assert(k % n == 0);
    const float norm = 1.0f/sqrtf((float) n);
    for (int64_t i = 0; i < k; i += n) {
        float y[KVQ_MAX_BLOCK];
        for (int j = 0; j < n; j++) {
            y[j] = GGML_FP16_TO_FP32(((const ggml_fp16_t *) in)[i + j]);
        }
        kvq_unrotate_ref(y, x + i, n);
        for (int j = 0; j < n; j++) {
            x[i + j] *= norm;
        }
    }
}

// ---- rotated int8 queries ----

static void quantize_activation(const float * x, void * out, int64_t k, int n) {
    assert(k % n == 0);
    for (int64_t i = 0; i < k/n; i++) {
        float y[KVQ_MAX_BLOCK];
        kvq_rotate_ref(x + i*n, y, n);

        const float norm = 1.0f/sqrtf((float) n);
        float amax = 0.0f;
        for (int j = 0; j < n; j++) {
            y[j] *= norm;
            amax = fmaxf(amax, fabsf(y[j]));
        }
        const float d  = amax/127.0f;
        const float id = amax > 0.0f ? 127.0f/amax : 0.0f;

        uint8_t * block = (uint8_t *) out + i*(n + sizeof(float));
        memcpy(block, &d, sizeof(d));
        for (int j = 0; j < n; j++) {
            block[sizeof(d) + j] = (uint8_t) (int8_t) rintf(y[j]*id);
        }
    }
}

static void dequantize_activation(const void * in, float * x, int64_t k, int n) {
    assert(k % n == 0);
    for (int64_t i = 0; i < k/n; i++) {
        const uint8_t * block = (const uint8_t *) in + i*(n + sizeof(float));
        float d, y[KVQ_MAX_BLOCK];
        memcpy(&d, block, sizeof(d));
        for (int j = 0; j < n; j++) {
            y[j] = (int8_t) block[sizeof(d) + j];
        }
        kvq_unrotate_ref(y, x + i*n, n);
        for (int j = 0; j < n; j++) {
            x[i*n + j] *= d/sqrtf((float) n);
        }
    }
}

// ---- one function per type, for the trait tables ----

#define DEFINE_CACHE_TYPE(E, F, NAME, FAMILY, BITS, N, BYTES) \
    void kvq_quantize_row_##F##_ref(const float * x, void * y, int64_t k) { quantize_rows  (x, y, k, BITS, N); } \
    void kvq_dequantize_row_##F    (const void * x, float * y, int64_t k) { dequantize_rows(x, y, k, BITS, N); }
KVQ_FOR_EACH_TURBO_TYPE(DEFINE_CACHE_TYPE)

#define DEFINE_WINDOW_TYPE(E, F, NAME, N, BYTES) \
    void kvq_quantize_row_##F##_ref(const float * x, void * y, int64_t k) { quantize_window  (x, y, k, N); } \
    void kvq_dequantize_row_##F    (const void * x, float * y, int64_t k) { dequantize_window(x, y, k, N); }
KVQ_FOR_EACH_WINDOW_TYPE(DEFINE_WINDOW_TYPE)

#define DEFINE_ACTIVATION_TYPE(E, F, NAME, N, BYTES) \
    void kvq_quantize_row_##F##_ref(const float * x, void * y, int64_t k) { quantize_activation  (x, y, k, N); } \
    void kvq_dequantize_row_##F    (const void * x, float * y, int64_t k) { dequantize_activation(x, y, k, N); }
KVQ_FOR_EACH_ACTIVATION_TYPE(DEFINE_ACTIVATION_TYPE)

void kvq_quantize_row_ref(enum ggml_type type, const float * x, void * y, int64_t k) {
    ggml_get_type_traits(type)->from_float_ref(x, y, k);
}

void kvq_dequantize_row_ref(enum ggml_type type, const void * x, float * y, int64_t k) {
    ggml_get_type_traits(type)->to_float(x, y, k);
}

const int8_t * kvq_levels(enum ggml_type type) { return levels(kvq_bits(type)); }
float          kvq_scale (enum ggml_type type) { return scale (kvq_bits(type)); }
