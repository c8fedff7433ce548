// Sixteen float lanes, the width in which the codec orders its sums, on AVX-512, AVX2, NEON and plain C++.
#pragma once

#include "ggml-cpu-impl.h"
#include "simd-mappings.h"

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define KVQ_AVX512 1
#endif
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define KVQ_AVX2 1   // also set with KVQ_AVX512: the integer kernels are 256 bits wide
#elif defined(__ARM_NEON) && defined(__aarch64__)
#define KVQ_NEON 1
#endif

#if defined(KVQ_AVX2)
#include <immintrin.h>
#elif defined(KVQ_NEON)
#include <arm_neon.h>
#endif

namespace kvq {

// Multiply-adds named fma() may round once or twice; add() and mul() round each, if the file is compiled without
// contraction.
#if defined(KVQ_AVX512)

struct f32x16 { __m512 v; };

static inline f32x16 load (const float * p)       { return { _mm512_loadu_ps(p) }; }
static inline void   store(float * p, f32x16 a)   { _mm512_storeu_ps(p, a.v); }
static inline f32x16 set1 (float x)               { return { _mm512_set1_ps(x) }; }
static inline f32x16 add  (f32x16 a, f32x16 b)    { return { _mm512_add_ps(a.v, b.v) }; }
static inline f32x16 sub  (f32x16 a, f32x16 b)    { return { _mm512_sub_ps(a.v, b.v) }; }
static inline f32x16 mul  (f32x16 a, f32x16 b)    { return { _mm512_mul_ps(a.v, b.v) }; }
static inline f32x16 div  (f32x16 a, f32x16 b)    { return { _mm512_div_ps(a.v, b.v) }; }
static inline f32x16 max  (f32x16 a, f32x16 b)    { return { _mm512_max_ps(a.v, b.v) }; }
static inline f32x16 min  (f32x16 a, f32x16 b)    { return { _mm512_min_ps(a.v, b.v) }; }
static inline f32x16 abs  (f32x16 a)              { return { _mm512_abs_ps(a.v) }; }
static inline f32x16 fma  (f32x16 a, f32x16 b, f32x16 c) { return { _mm512_fmadd_ps(a.v, b.v, c.v) }; }

static inline f32x16 load_f16(const uint16_t * p) {
    return { _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) p)) };
}

// rounded to nearest even
static inline void store_f16(uint16_t * p, f32x16 a) {
    _mm256_storeu_si256((__m256i *) p, _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

static inline f32x16 load_i8(const int8_t * p) {
    return { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *) p))) };
}

static inline f32x16 load_i32(const int32_t * p) {
    return { _mm512_cvtepi32_ps(_mm512_loadu_si512((const void *) p)) };
}

// where a < b: c, elsewhere d; a NaN takes d
static inline f32x16 select_lt(f32x16 a, f32x16 b, f32x16 c, f32x16 d) {
    return { _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), d.v, c.v) };
}

// 2^n * a for integral n
static inline f32x16 scale_exponent(f32x16 a, f32x16 n) {
    const __m512i e = _mm512_slli_epi32(_mm512_cvtps_epi32(n.v), 23);
    return { _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a.v), e)) };
}

static inline f32x16 round(f32x16 a) {
    return { _mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC) };
}

// rounded to nearest even, saturated
static inline void store_i16(int16_t * p, f32x16 a) {
    _mm256_storeu_si256((__m256i *) p, _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(a.v)));
}

static inline void store_i8(int8_t * p, f32x16 a) {
    _mm_storeu_si128((__m128i *) p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(a.v)));
}

// number of thresholds below each lane
static inline void count_above(f32x16 a, const float * thresholds, int n, uint8_t * out) {
    __m512i count = _mm512_setzero_si512();
    for (int t = 0; t < n; t++) {
        const __mmask16 m = _mm512_cmp_ps_mask(a.v, _mm512_set1_ps(thresholds[t]), _CMP_GT_OQ);
        count = _mm512_mask_add_epi32(count, m, count, _mm512_set1_epi32(1));
    }
    _mm_storeu_si128((__m128i *) out, _mm512_cvtepi32_epi8(count));
}

// lane i becomes a[i] + a[i + H] where bit H of i is clear and a[i - H] - a[i] where it is set
template <int H> static inline f32x16 butterfly(f32x16 a) {
    __m512 p;
    __mmask16 high;
    if constexpr (H == 8) { p = _mm512_shuffle_f32x4(a.v, a.v, 0x4E); high = 0xFF00; }
    if constexpr (H == 4) { p = _mm512_shuffle_f32x4(a.v, a.v, 0xB1); high = 0xF0F0; }
    if constexpr (H == 2) { p = _mm512_permute_ps(a.v, 0x4E);         high = 0xCCCC; }
    if constexpr (H == 1) { p = _mm512_permute_ps(a.v, 0xB1);         high = 0xAAAA; }
    return { _mm512_mask_sub_ps(_mm512_add_ps(a.v, p), high, p, a.v) };
}

// the G = 4 or 8 floats at p, repeated
template <int G> static inline f32x16 repeat(const float * p) {
    if constexpr (G == 4) { return { _mm512_broadcast_f32x4(_mm_loadu_ps(p)) }; }
    else                  { return { _mm512_broadcast_f32x8(_mm256_loadu_ps(p)) }; }
}

static inline float sum_256(__m256 s) {
    const __m128 q = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    const __m128 d = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)));
}

// pairs of lanes 8, 4, 2, 1 apart, in this order
static inline float sum(f32x16 a) {
    return sum_256(_mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1)));
}

static inline float max_of(f32x16 a) { return _mm512_reduce_max_ps(a.v); }

// lane j: sum(a[j]), the same bits, by halving two vectors into one
static inline f32x16 sums_of_16(const f32x16 * a) {
    __m512 x[16];
    for (int i = 0; i < 8; i++) {
        const __m512 p = a[2*i].v, q = a[2*i + 1].v;
        x[i] = _mm512_add_ps(_mm512_shuffle_f32x4(p, q, 0x44), _mm512_shuffle_f32x4(p, q, 0xEE));
    }
    for (int i = 0; i < 4; i++) {
        const __m512 p = x[2*i], q = x[2*i + 1];
        x[i] = _mm512_add_ps(_mm512_shuffle_f32x4(p, q, 0x88), _mm512_shuffle_f32x4(p, q, 0xDD));
    }
    for (int i = 0; i < 2; i++) {
        const __m512 p = x[2*i], q = x[2*i + 1];
        x[i] = _mm512_add_ps(_mm512_shuffle_ps(p, q, 0x44), _mm512_shuffle_ps(p, q, 0xEE));
    }
    const __m512 y = _mm512_add_ps(_mm512_shuffle_ps(x[0], x[1], 0x88), _mm512_shuffle_ps(x[0], x[1], 0xDD));
    return { _mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), y) };
}

#elif defined(KVQ_AVX2)

struct f32x16 { __m256 a, b; };

static inline f32x16 load (const float * p)       { return { _mm256_loadu_ps(p), _mm256_loadu_ps(p + 8) }; }
static inline void   store(float * p, f32x16 x)   { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
static inline f32x16 set1 (float x)               { return { _mm256_set1_ps(x), _mm256_set1_ps(x) }; }
static inline f32x16 add  (f32x16 x, f32x16 y)    { return { _mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b) }; }
static inline f32x16 sub  (f32x16 x, f32x16 y)    { return { _mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b) }; }
static inline f32x16 mul  (f32x16 x, f32x16 y)    { return { _mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b) }; }
static inline f32x16 div  (f32x16 x, f32x16 y)    { return { _mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b) }; }
static inline f32x16 max  (f32x16 x, f32x16 y)    { return { _mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b) }; }
static inline f32x16 min  (f32x16 x, f32x16 y)    { return { _mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b) }; }

static inline f32x16 abs(f32x16 x) {
    const __m256 m = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFFFFFF));
    return { _mm256_and_ps(x.a, m), _mm256_and_ps(x.b, m) };
}

static inline f32x16 fma(f32x16 x, f32x16 y, f32x16 z) {
    return { _mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b) };
}

static inline f32x16 load_f16(const uint16_t * p) {
    return { _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) p)),
             _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) (p + 8))) };
}

static inline void store_f16(uint16_t * p, f32x16 x) {
    _mm_storeu_si128((__m128i *) p,       _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    _mm_storeu_si128((__m128i *) (p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

static inline f32x16 load_i8(const int8_t * p) {
    return { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *) p))),
             _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *) (p + 8)))) };
}

static inline f32x16 load_i32(const int32_t * p) {
    return { _mm256_cvtepi32_ps(_mm256_loadu_si256((const __m256i *) p)),
             _mm256_cvtepi32_ps(_mm256_loadu_si256((const __m256i *) (p + 8))) };
}

static inline f32x16 select_lt(f32x16 x, f32x16 y, f32x16 c, f32x16 d) {
    return { _mm256_blendv_ps(d.a, c.a, _mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ)),
             _mm256_blendv_ps(d.b, c.b, _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ)) };
}

static inline __m256 scale_exponent_256(__m256 a, __m256 n) {
    const __m256i e = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), e));
}

static inline f32x16 scale_exponent(f32x16 x, f32x16 n) {
    return { scale_exponent_256(x.a, n.a), scale_exponent_256(x.b, n.b) };
}

static inline f32x16 round(f32x16 x) {
    return { _mm256_round_ps(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
             _mm256_round_ps(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC) };
}

static inline void store_i16(int16_t * p, f32x16 x) {
    const __m256i w = _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));
    _mm256_storeu_si256((__m256i *) p, _mm256_permute4x64_epi64(w, 0xD8));
}

static inline __m128i pack_i8(__m256i a, __m256i b) {
    const __m256i w = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xD8);
    return _mm_packs_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1));
}

static inline void store_i8(int8_t * p, f32x16 x) {
    _mm_storeu_si128((__m128i *) p, pack_i8(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)));
}

static inline void count_above(f32x16 x, const float * thresholds, int n, uint8_t * out) {
    __m256i ca = _mm256_setzero_si256(), cb = ca;
    for (int t = 0; t < n; t++) {
        const __m256 th = _mm256_set1_ps(thresholds[t]);
        ca = _mm256_sub_epi32(ca, _mm256_castps_si256(_mm256_cmp_ps(x.a, th, _CMP_GT_OQ)));
        cb = _mm256_sub_epi32(cb, _mm256_castps_si256(_mm256_cmp_ps(x.b, th, _CMP_GT_OQ)));
    }
    _mm_storeu_si128((__m128i *) out, pack_i8(ca, cb));
}

template <int H> static inline __m256 butterfly_256(__m256 x) {
    __m256 p, sign;
    if constexpr (H == 4) { p = _mm256_permute2f128_ps(x, x, 1); sign = _mm256_setr_ps(0, 0, 0, 0, -0.0f, -0.0f, -0.0f, -0.0f); }
    if constexpr (H == 2) { p = _mm256_permute_ps(x, 0x4E);      sign = _mm256_setr_ps(0, 0, -0.0f, -0.0f, 0, 0, -0.0f, -0.0f); }
    if constexpr (H == 1) { p = _mm256_permute_ps(x, 0xB1);      sign = _mm256_setr_ps(0, -0.0f, 0, -0.0f, 0, -0.0f, 0, -0.0f); }
    return _mm256_add_ps(p, _mm256_xor_ps(x, sign));
}

template <int H> static inline f32x16 butterfly(f32x16 x) {
    if constexpr (H == 8) { return { _mm256_add_ps(x.a, x.b), _mm256_sub_ps(x.a, x.b) }; }
    else                  { return { butterfly_256<H>(x.a), butterfly_256<H>(x.b) }; }
}

template <int G> static inline f32x16 repeat(const float * p) {
    if constexpr (G == 4) { const __m256 x = _mm256_broadcast_ps((const __m128 *) p); return { x, x }; }
    else                  { const __m256 x = _mm256_loadu_ps(p);                      return { x, x }; }
}

static inline float sum_256(__m256 s) {
    const __m128 q = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    const __m128 d = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)));
}

static inline float sum(f32x16 x) { return sum_256(_mm256_add_ps(x.a, x.b)); }

static inline float max_of(f32x16 x) {
    const __m256 o = _mm256_max_ps(x.a, x.b);
    const __m128 q = _mm_max_ps(_mm256_castps256_ps128(o), _mm256_extractf128_ps(o, 1));
    const __m128 d = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(d, _mm_movehdup_ps(d)));
}

#elif defined(KVQ_NEON)

struct f32x16 { float32x4_t v[4]; };

#define KVQ_EACH(expr) f32x16 r; for (int i = 0; i < 4; i++) { r.v[i] = (expr); } return r
static inline f32x16 load (const float * p)      { KVQ_EACH(vld1q_f32(p + 4*i)); }
static inline void   store(float * p, f32x16 a)  { for (int i = 0; i < 4; i++) { vst1q_f32(p + 4*i, a.v[i]); } }
static inline f32x16 set1 (float x)              { KVQ_EACH(vdupq_n_f32(x)); }
static inline f32x16 add  (f32x16 a, f32x16 b)   { KVQ_EACH(vaddq_f32(a.v[i], b.v[i])); }
static inline f32x16 sub  (f32x16 a, f32x16 b)   { KVQ_EACH(vsubq_f32(a.v[i], b.v[i])); }
static inline f32x16 mul  (f32x16 a, f32x16 b)   { KVQ_EACH(vmulq_f32(a.v[i], b.v[i])); }
static inline f32x16 div  (f32x16 a, f32x16 b)   { KVQ_EACH(vdivq_f32(a.v[i], b.v[i])); }
static inline f32x16 max  (f32x16 a, f32x16 b)   { KVQ_EACH(vmaxq_f32(a.v[i], b.v[i])); }
static inline f32x16 min  (f32x16 a, f32x16 b)   { KVQ_EACH(vminq_f32(a.v[i], b.v[i])); }
static inline f32x16 abs  (f32x16 a)             { KVQ_EACH(vabsq_f32(a.v[i])); }
static inline f32x16 round(f32x16 a)             { KVQ_EACH(vrndnq_f32(a.v[i])); }
static inline f32x16 fma  (f32x16 a, f32x16 b, f32x16 c) { KVQ_EACH(vfmaq_f32(c.v[i], a.v[i], b.v[i])); }

static inline f32x16 load_f16(const uint16_t * p) {
    KVQ_EACH(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4*i))));
}

static inline void store_f16(uint16_t * p, f32x16 a) {
    for (int i = 0; i < 4; i++) { vst1_u16(p + 4*i, vreinterpret_u16_f16(vcvt_f16_f32(a.v[i]))); }
}

static inline f32x16 load_i8(const int8_t * p) {
    const int8x16_t x = vld1q_s8(p);
    const int16x8_t l = vmovl_s8(vget_low_s8(x)), h = vmovl_s8(vget_high_s8(x));
    return {{ vcvtq_f32_s32(vmovl_s16(vget_low_s16(l))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(l))),
              vcvtq_f32_s32(vmovl_s16(vget_low_s16(h))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(h))) }};
}

static inline f32x16 load_i32(const int32_t * p) { KVQ_EACH(vcvtq_f32_s32(vld1q_s32(p + 4*i))); }

static inline f32x16 select_lt(f32x16 a, f32x16 b, f32x16 c, f32x16 d) {
    KVQ_EACH(vbslq_f32(vcltq_f32(a.v[i], b.v[i]), c.v[i], d.v[i]));
}

static inline f32x16 scale_exponent(f32x16 a, f32x16 n) {
    KVQ_EACH(vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(a.v[i]), vshlq_n_s32(vcvtnq_s32_f32(n.v[i]), 23))));
}

static inline int16x8_t pack_i16(int32x4_t a, int32x4_t b) { return vcombine_s16(vqmovn_s32(a), vqmovn_s32(b)); }

static inline void store_i16(int16_t * p, f32x16 a) {
    vst1q_s16(p,     pack_i16(vcvtnq_s32_f32(a.v[0]), vcvtnq_s32_f32(a.v[1])));
    vst1q_s16(p + 8, pack_i16(vcvtnq_s32_f32(a.v[2]), vcvtnq_s32_f32(a.v[3])));
}

static inline void store_i8(int8_t * p, f32x16 a) {
    const int16x8_t l = pack_i16(vcvtnq_s32_f32(a.v[0]), vcvtnq_s32_f32(a.v[1]));
    const int16x8_t h = pack_i16(vcvtnq_s32_f32(a.v[2]), vcvtnq_s32_f32(a.v[3]));
    vst1q_s8(p, vcombine_s8(vqmovn_s16(l), vqmovn_s16(h)));
}

static inline void count_above(f32x16 a, const float * thresholds, int n, uint8_t * out) {
    int32x4_t count[4] = { vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0) };
    for (int t = 0; t < n; t++) {
        for (int i = 0; i < 4; i++) {
            const uint32x4_t m = vcgtq_f32(a.v[i], vdupq_n_f32(thresholds[t]));
            count[i] = vsubq_s32(count[i], vreinterpretq_s32_u32(m));
        }
    }
    const int16x8_t l = pack_i16(count[0], count[1]), h = pack_i16(count[2], count[3]);
    vst1q_s8((int8_t *) out, vcombine_s8(vqmovn_s16(l), vqmovn_s16(h)));
}

static inline float32x4_t flip(float32x4_t x, uint32x4_t sign) {
    return vreinterpretq_f32_u32(veorq_u32(vreinterpretq_u32_f32(x), sign));
}

template <int H> static inline f32x16 butterfly(f32x16 a) {
    if constexpr (H == 8) {
        return {{ vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3]),
                  vsubq_f32(a.v[0], a.v[2]), vsubq_f32(a.v[1], a.v[3]) }};
    } else if constexpr (H == 4) {
        return {{ vaddq_f32(a.v[0], a.v[1]), vsubq_f32(a.v[0], a.v[1]),
                  vaddq_f32(a.v[2], a.v[3]), vsubq_f32(a.v[2], a.v[3]) }};
    } else if constexpr (H == 2) {
        const uint32_t minus[4] = { 0, 0, 0x80000000u, 0x80000000u };
        const uint32x4_t sign = vld1q_u32(minus);
        KVQ_EACH(vaddq_f32(vextq_f32(a.v[i], a.v[i], 2), flip(a.v[i], sign)));
    } else {
        const uint32_t minus[4] = { 0, 0x80000000u, 0, 0x80000000u };
        const uint32x4_t sign = vld1q_u32(minus);
        KVQ_EACH(vaddq_f32(vrev64q_f32(a.v[i]), flip(a.v[i], sign)));
    }
}

template <int G> static inline f32x16 repeat(const float * p) { KVQ_EACH(vld1q_f32(p + (G == 4 ? 0 : 4*(i & 1)))); }

static inline float sum(f32x16 a) {
    const float32x4_t q = vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3]));
    const float32x2_t d = vadd_f32(vget_low_f32(q), vget_high_f32(q));
    return vget_lane_f32(d, 0) + vget_lane_f32(d, 1);
}

static inline float max_of(f32x16 a) {
    return vmaxvq_f32(vmaxq_f32(vmaxq_f32(a.v[0], a.v[1]), vmaxq_f32(a.v[2], a.v[3])));
}
#undef KVQ_EACH

#else

struct f32x16 { float v[16]; };

#define KVQ_EACH(expr) f32x16 r; for (int i = 0; i < 16; i++) { r.v[i] = (expr); } return r
static inline f32x16 load (const float * p)      { KVQ_EACH(p[i]); }
static inline void   store(float * p, f32x16 a)  { memcpy(p, a.v, sizeof(a.v)); }
static inline f32x16 set1 (float x)              { KVQ_EACH(x); }
static inline f32x16 add  (f32x16 a, f32x16 b)   { KVQ_EACH(a.v[i] + b.v[i]); }
static inline f32x16 sub  (f32x16 a, f32x16 b)   { KVQ_EACH(a.v[i] - b.v[i]); }
static inline f32x16 mul  (f32x16 a, f32x16 b)   { KVQ_EACH(a.v[i]*b.v[i]); }
static inline f32x16 div  (f32x16 a, f32x16 b)   { KVQ_EACH(a.v[i]/b.v[i]); }
static inline f32x16 max  (f32x16 a, f32x16 b)   { KVQ_EACH(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
static inline f32x16 min  (f32x16 a, f32x16 b)   { KVQ_EACH(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
static inline f32x16 abs  (f32x16 a)             { KVQ_EACH(fabsf(a.v[i])); }
static inline f32x16 round(f32x16 a)             { KVQ_EACH(rintf(a.v[i])); }
static inline f32x16 fma  (f32x16 a, f32x16 b, f32x16 c) { KVQ_EACH(a.v[i]*b.v[i] + c.v[i]); }
static inline f32x16 load_f16(const uint16_t * p) { KVQ_EACH(GGML_CPU_FP16_TO_FP32(p[i])); }
static inline void   store_f16(uint16_t * p, f32x16 a) { for (int i = 0; i < 16; i++) { p[i] = GGML_CPU_FP32_TO_FP16(a.v[i]); } }
static inline f32x16 load_i8 (const int8_t * p)   { KVQ_EACH((float) p[i]); }
static inline f32x16 load_i32(const int32_t * p)  { KVQ_EACH((float) p[i]); }

static inline f32x16 select_lt(f32x16 a, f32x16 b, f32x16 c, f32x16 d) { KVQ_EACH(a.v[i] < b.v[i] ? c.v[i] : d.v[i]); }
static inline f32x16 scale_exponent(f32x16 a, f32x16 n)                { KVQ_EACH(ldexpf(a.v[i], (int) n.v[i])); }

// NaN, which converts to no integer, becomes the lower bound
static inline int saturate(float x, float bound) {
    return x > -bound ? x < bound ? (int) rintf(x) : (int) bound : (int) -bound;
}

static inline void store_i16(int16_t * p, f32x16 a) { for (int i = 0; i < 16; i++) { p[i] = (int16_t) saturate(a.v[i], 32767.0f); } }
static inline void store_i8 (int8_t * p, f32x16 a)  { for (int i = 0; i < 16; i++) { p[i] = (int8_t) saturate(a.v[i], 127.0f); } }

static inline void count_above(f32x16 a, const float * thresholds, int n, uint8_t * out) {
    for (int i = 0; i < 16; i++) {
        uint8_t count = 0;
        for (int t = 0; t < n; t++) {
            count += a.v[i] > thresholds[t];
        }
        out[i] = count;
    }
}

template <int H> static inline f32x16 butterfly(f32x16 a) { KVQ_EACH(i & H ? a.v[i - H] - a.v[i] : a.v[i] + a.v[i + H]); }
template <int G> static inline f32x16 repeat(const float * p) { KVQ_EACH(p[i % G]); }

static inline float sum(f32x16 a) {
    for (int w = 8; w >= 1; w /= 2) {
        for (int i = 0; i < w; i++) {
            a.v[i] += a.v[i + w];
        }
    }
    return a.v[0];
}

static inline float max_of(f32x16 a) {
    float m = a.v[0];
    for (int i = 1; i < 16; i++) {
        m = a.v[i] > m ? a.v[i] : m;
    }
    return m;
}
#undef KVQ_EACH

#endif

// e^x for x <= 0 to 2 ulp; 0 below -87, so that -inf (a masked logit) gives exactly 0. Cody-Waite reduction by ln 2
// and the polynomial of Cephes' expf.
static inline f32x16 exp_nonpositive(f32x16 x) {
    const f32x16 lowest = set1(-87.0f);
    const f32x16 c = max(x, lowest);
    const f32x16 n = round(mul(c, set1(1.44269504f)));
    const f32x16 r = fma(n, set1(2.12194440e-4f), fma(n, set1(-0.693359375f), c));
    f32x16 p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    p = add(fma(p, mul(r, r), r), set1(1.0f));
    return select_lt(x, lowest, set1(0.0f), scale_exponent(p, n));
}

// tanh by e^(-2|x|)
static inline f32x16 tanh(f32x16 x) {
    const f32x16 e = exp_nonpositive(mul(abs(x), set1(-2.0f)));
    const f32x16 t = div(sub(set1(1.0f), e), add(set1(1.0f), e));
    return select_lt(x, set1(0.0f), sub(set1(0.0f), t), t);
}

} // namespace kvq
