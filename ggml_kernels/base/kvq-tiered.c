// Scalar reference of oscar2: tiers of unequal bits over coordinates that a calibrated transform has put in order of
// importance and mixed. Bit-exact with pykvq/codecs/oscar2.py, so compile it without contraction of multiply-adds.
#include "kvq.h"
#include "kvq-lanes.h"
#include "kvq-tables.h"
#include "kvq-tiers.h"

#define GGML_COMMON_DECL_C
#include "ggml-common.h"
#include "ggml-impl.h"

#include <assert.h>
#include <math.h>
#include <string.h>

#define MAX_BLOCK 128

static void find_codes(const float * y, int n, const float * thresholds, int n_thresholds, float sigma, uint8_t * code) {
    for (int i = 0; i < n; i++) {
        code[i] = 0;
        for (int j = 0; j < n_thresholds; j++) {
            code[i] += y[i] > thresholds[j]*sigma;
        }
    }
}

// the spread, of n_edges + 1, that is nearest to that of the tier
static int find_spread(const float * y, int n, const float * edges, int n_edges, float sigma) {
    const float own = sqrtf(kvq_dot_lanes(y, y, n)/n);
    int spread = 0;
    for (int j = 0; j < n_edges; j++) {
        spread += own > edges[j]*sigma;
    }
    return spread;
}

static void quantize_block(const float * y, uint8_t * out, int n) {
    const float sigma = sqrtf(kvq_dot_lanes(y, y, n/4)/(n/4));
    uint8_t code[MAX_BLOCK];
    find_codes(y, n/4, KVQ_TIER_THRESHOLDS_4, 15, sigma, code);

    float level[MAX_BLOCK/4];
    int32_t den = 0;
    for (int i = 0; i < n/4; i++) {
        const int32_t c = KVQ_TIER_LEVELS_4[code[i]];
        level[i] = (float) c;
        den += c*c;
    }
    const float d = kvq_dot_lanes(y, level, n/4)/(float) den * KVQ_TIER_SCALE;

    const int two = find_spread(y + n/4, n/4, KVQ_TIER_EDGES_2, 3, sigma);
    const int one = find_spread(y + n/2, n/2, KVQ_TIER_EDGES_1, 7, sigma);
    find_codes(y + n/4, n/4, KVQ_TIER_THRESHOLDS_2, 3, KVQ_TIER_RATIOS_2[two]*sigma, code + n/4);
    find_codes(y + n/2, n/2, KVQ_TIER_THRESHOLDS_1, 1, KVQ_TIER_RATIOS_1[one]*sigma, code + n/2);

    memset(out, 0, n/4);
    for (int i = 0; i < n; i++) {
        const kvq_place p = kvq_place_of(i, n);
        out[p.byte] |= code[i] << p.shift;
    }
    const uint16_t bits = kvq_tier_scale_bits(GGML_FP32_TO_FP16(d > 65504.0f ? 65504.0f : d)) | two << 3 | one;
    memcpy(out + n/4, &bits, sizeof(bits));
}

static void dequantize_block(const uint8_t * in, float * y, int n) {
    uint16_t bits;
    memcpy(&bits, in + n/4, sizeof(bits));
    const float d = GGML_FP16_TO_FP32((ggml_fp16_t) (bits & KVQ_TIER_SCALE_MASK))*(1.0f/KVQ_TIER_SCALE);
    const int8_t * four = KVQ_TIER_LEVELS_4;
    const int8_t * two  = KVQ_TIER_LEVELS_2 + 4*KVQ_TIER_SPREAD_2(bits);
    const int8_t * one  = KVQ_TIER_LEVELS_1 + 2*KVQ_TIER_SPREAD_1(bits);
    for (int i = 0; i < n; i++) {
        const kvq_place p = kvq_place_of(i, n);
        const int code = in[p.byte] >> p.shift;
        y[i] = (i < n/4 ? four[code & 15] : i < n/2 ? two[code & 3] : one[code & 1])*d;
    }
}

#define DEFINE_TIERED_TYPE(E, F, NAME, FAMILY, CODE, N, BYTES) \
    void kvq_quantize_row_##F##_ref(const float * x, void * y, int64_t k) { \
        assert(k % N == 0); \
        for (int64_t i = 0; i < k/N; i++) { \
            quantize_block(x + i*N, (uint8_t *) y + i*BYTES, N); \
        } \
    } \
    void kvq_dequantize_row_##F(const void * x, float * y, int64_t k) { \
        assert(k % N == 0); \
        for (int64_t i = 0; i < k/N; i++) { \
            dequantize_block((const uint8_t *) x + i*BYTES, y + i*N, N); \
        } \
    }
KVQ_FOR_EACH_TIERED_TYPE(DEFINE_TIERED_TYPE)
