// The four products of an attention tile: logits and weighted sums, over packed blocks and over floats. A tile is up to
// 64 tokens of one KV head, met by up to 32 query rows that share it; each block is unpacked once for all of them.
//
// The result of a row does not depend, to the last bit, on the rows that it is computed with. A token that none of them
// sees has a null pointer and costs nothing; the logits of hidden tokens are unspecified, their weights zero.
#pragma once

#include "kvq-rotate.h"
#include "kvq-tiered.h"

namespace kvq {

constexpr int TILE = 64;   // tokens
constexpr int ROWS = 32;   // query rows

static inline int round_up(int n, int m) { return (n + m - 1)/m*m; }

// Blocks of one head lie apart by those of the other heads, which hardware prefetchers follow badly. `ahead` may lead
// past the tensor: a prefetch does not fault.
template <int BYTES> static inline void prefetch(const uint8_t * block, size_t ahead) {
#if defined(__GNUC__)
    const uintptr_t p = (uintptr_t) block + ahead;
    __builtin_prefetch((const void *) p);
    __builtin_prefetch((const void *) (p + BYTES - 1));
#else
    (void) block; (void) ahead;
#endif
}

// ---- packed keys ----

// levels, magnitudes and scales of the block at `offset` of each token
template <int CODE, int N>
static void unpack_keys(const uint8_t * const * token, size_t offset, int n, size_t ahead, int8_t * level, int8_t * magnitude, uint16_t * d) {
    for (int t = 0; t < n; t++) {
        if (!token[t]) {
            d[t] = 0;
            continue;
        }
        const uint8_t * block = token[t] + offset;
        prefetch<block_bytes<CODE, N>>(block, ahead);
        unpack_block<CODE, N>(block, level + t*tile_stride<N>, magnitude + t*tile_stride<N>);
        d[t] = block_scale_bits<CODE, N>(block);
    }
}

// logit[r][t] (+)= level[t] . query[r] * d[t] * unit[r]; n is a multiple of 16
template <int N>
static void add_logits(const int8_t * level, const int8_t * magnitude, const uint16_t * d, int n, const int8_t * query,
                       size_t query_stride, const float * unit, size_t unit_stride, int rows, float * logit, bool add_to) {
    for (int r = 0; r < rows; r++) {
        const int8_t * q = query + r*query_stride;
        const f32x16 u = set1(unit[r*unit_stride]);
        for (int t = 0; t < n; t += 16) {
            int32_t s[16];
            dot8<N>(level + (t + 0)*tile_stride<N>, magnitude + (t + 0)*tile_stride<N>, q, s);
            dot8<N>(level + (t + 8)*tile_stride<N>, magnitude + (t + 8)*tile_stride<N>, q, s + 8);
            const f32x16 x = mul(mul(load_i32(s), load_f16(d + t)), u);
            float * out = logit + r*TILE + t;
            store(out, add_to ? add(x, load(out)) : x);
        }
    }
}

// ---- packed values ----

// Values meet weights of 15 bits, in integer sums that are exact over a tile: twice the products per instruction of
// float, and no conversion of the levels.
#if defined(KVQ_AVX2)

// rows acc[r][0..8*C) = acc*alpha + scale * sum of pairs; C accumulators of eight coordinates
template <int R, int C>
static inline void add_pairs(const int8_t * value, int n_value, const int16_t * weight, int pairs, const float * alpha,
                             const float * scale, float * acc, size_t stride) {
    __m256i sum[R][C];
    for (int r = 0; r < R; r++) {
        for (int c = 0; c < C; c++) {
            sum[r][c] = _mm256_setzero_si256();
        }
    }
    for (int p = 0; p < pairs; p++) {
        __m256i v[C];
        for (int c = 0; c < C; c++) {
            v[c] = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *) (value + 2*p*n_value + 16*c)));
        }
        for (int r = 0; r < R; r++) {
            int32_t two;
            memcpy(&two, weight + r*TILE + 2*p, sizeof(two));
            const __m256i w = _mm256_set1_epi32(two);
            for (int c = 0; c < C; c++) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
                sum[r][c] = _mm256_dpwssd_epi32(sum[r][c], v[c], w);
#elif defined(__AVXVNNI__)
                sum[r][c] = _mm256_dpwssd_avx_epi32(sum[r][c], v[c], w);
#else
                sum[r][c] = _mm256_add_epi32(sum[r][c], _mm256_madd_epi16(v[c], w));
#endif
            }
        }
    }
    for (int r = 0; r < R; r++) {
        for (int c = 0; c < C; c++) {
            float * out = acc + r*stride + 8*c;
            const __m256 old = _mm256_mul_ps(_mm256_loadu_ps(out), _mm256_set1_ps(alpha[r]));
            _mm256_storeu_ps(out, _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[r][c]), _mm256_set1_ps(scale[r]), old));
        }
    }
}

template <int R>
static inline void add_row_block(const int8_t * value, int n_value, const int16_t * weight, int tokens, const float * alpha,
                                 const float * scale, float * acc, size_t stride) {
    constexpr int C = R <= 2 ? 4 : 2;   // as many accumulators as registers hold
    const int pairs = tokens/2;
    int i = 0;
    for (; i + 8*C <= n_value; i += 8*C) {
        add_pairs<R, C>(value + 2*i, n_value, weight, pairs, alpha, scale, acc + i, stride);
    }
    if (i < n_value) {
        add_pairs<R, 2>(value + 2*i, n_value, weight, pairs, alpha, scale, acc + i, stride);
    }
}

template <int CODE, int N>
static inline void unpack_values(const uint8_t * const * token, size_t offset, int n, int8_t * value) {
    for (int t = 0; t < n; t += 2) {
        const uint8_t * first = token[t], * second = token[t + 1];
        if (first || second) {
            // the weight of a missing partner is zero
            unpack_block_pair<CODE, N>((first ? first : second) + offset, (second ? second : first) + offset, value + t*N);
        }
    }
}

#else

template <int R>
static inline void add_row_block(const int8_t * value, int n_value, const int16_t * weight, int tokens, const float * alpha,
                                 const float * scale, float * acc, size_t stride) {
    for (int i = 0; i < n_value; i += 16) {
#if defined(KVQ_NEON)
        int32x4_t sum[R][4];
        for (int r = 0; r < R; r++) {
            for (int c = 0; c < 4; c++) {
                sum[r][c] = vdupq_n_s32(0);
            }
        }
        for (int t = 0; t < tokens; t++) {
            const int8x16_t v = vld1q_s8(value + t*n_value + i);
            const int16x8_t l = vmovl_s8(vget_low_s8(v)), h = vmovl_s8(vget_high_s8(v));
            for (int r = 0; r < R; r++) {
                const int16x4_t w = vld1_dup_s16(weight + r*TILE + t);
                sum[r][0] = vmlal_s16(sum[r][0], vget_low_s16(l),  w);
                sum[r][1] = vmlal_s16(sum[r][1], vget_high_s16(l), w);
                sum[r][2] = vmlal_s16(sum[r][2], vget_low_s16(h),  w);
                sum[r][3] = vmlal_s16(sum[r][3], vget_high_s16(h), w);
            }
        }
        int32_t whole[R][16];
        for (int r = 0; r < R; r++) {
            for (int c = 0; c < 4; c++) {
                vst1q_s32(&whole[r][4*c], sum[r][c]);
            }
        }
#else
        int32_t whole[R][16] = {};
        for (int t = 0; t < tokens; t++) {
            for (int r = 0; r < R; r++) {
                for (int c = 0; c < 16; c++) {
                    whole[r][c] += weight[r*TILE + t]*value[t*n_value + i + c];
                }
            }
        }
#endif
        for (int r = 0; r < R; r++) {
            float * out = acc + r*stride + i;
            store(out, fma(load_i32(whole[r]), set1(scale[r]), mul(load(out), set1(alpha[r]))));
        }
    }
}

template <int CODE, int N>
static inline void unpack_values(const uint8_t * const * token, size_t offset, int n, int8_t * value) {
    for (int t = 0; t < n; t++) {
        if (token[t]) {
            unpack_block<CODE, N>(token[t] + offset, value + t*N, nullptr);
        }
    }
}

#endif

// acc[r] = acc[r]*alpha[r] + beta[r] * sum over t of weight[r][t] * d[t] * level[t], for weights in [0, 1]
template <int CODE, int N>
static void add_values(const uint8_t * const * token, size_t offset, int n, size_t ahead, const float * weight, const float * alpha,
                       const float * beta, int rows, float * acc, size_t stride, int8_t * value, int16_t * fixed) {
    uint16_t bits[TILE];
    for (int t = 0; t < n; t++) {
        bits[t] = 0;
        if (token[t]) {
            bits[t] = block_scale_bits<CODE, N>(token[t] + offset);
            prefetch<block_bytes<CODE, N>>(token[t] + offset, ahead);
        }
    }
    const f32x16 finite = set1(65520.0f), zero = set1(0.0f);
    float d[TILE];
    for (int t = 0; t < n; t += 16) {
        // only a damaged block has no finite scale; no weight fits it
        const f32x16 x = load_f16(bits + t);
        store(d + t, select_lt(abs(x), finite, x, zero));
    }

    float scale[ROWS];
    for (int r = 0; r < rows; r++) {
        f32x16 w[TILE/16], tops = zero;
        for (int t = 0; t < n; t += 16) {
            w[t/16] = mul(load(weight + r*TILE + t), load(d + t));
            tops = max(abs(w[t/16]), tops);
        }
        const float top = max_of(tops);
        const bool any = top > 1e-30f;   // below, its reciprocal would overflow
        const f32x16 to_fixed = set1(any ? 32767.0f/top : 0.0f);
        for (int t = 0; t < n; t += 16) {
            store_i16(fixed + r*TILE + t, mul(w[t/16], to_fixed));
        }
        scale[r] = any ? beta[r]*(top*(1.0f/32767.0f)) : 0.0f;
    }
    unpack_values<CODE, N>(token, offset, n, value);
    for (int r = 0; r < rows; ) {
        const int left = rows - r;
#define KVQ_ROWS(R) add_row_block<R>(value, N, fixed + r*TILE, n, alpha + r, scale + r, acc + r*stride, stride); r += R
        if      (left >= 6) { KVQ_ROWS(6); }
        else if (left == 5) { KVQ_ROWS(5); }
        else if (left == 4) { KVQ_ROWS(4); }
        else if (left == 3) { KVQ_ROWS(3); }
        else if (left == 2) { KVQ_ROWS(2); }
        else                { KVQ_ROWS(1); }
#undef KVQ_ROWS
    }
}

// ---- kernels by type ----

struct packed_kernels {
    int   block;        // values
    int   bytes;        // of a block
    int   stride;       // of a block of levels or of a query in a tile
    float unit;         // one int8 level in units of the block's scale
    float (*quantize_query)(const float * x, int8_t * q);
    void  (*turn_query)(const float * x, float factor, float * y);   // for the rows of a window
    void  (*unpack_keys)(const uint8_t * const * token, size_t offset, int n, size_t ahead, int8_t * level, int8_t * magnitude, uint16_t * d);
    void  (*add_logits)(const int8_t * level, const int8_t * magnitude, const uint16_t * d, int n, const int8_t * query,
                        size_t query_stride, const float * unit, size_t unit_stride, int rows, float * logit, bool add_to);
    void  (*add_values)(const uint8_t * const * token, size_t offset, int n, size_t ahead, const float * weight, const float * alpha,
                        const float * beta, int rows, float * acc, size_t stride, int8_t * value, int16_t * fixed);
    float value_unit;   // the same with the norm of the rotation, for sums of values
    void  (*finish)(const float * y, float factor, float * x);   // a block of such a sum to plain values
};

// ---- float keys and values, for a partner of another type and for f16 windows ----

// n halves to floats; both have room for a multiple of sixteen
static inline void halves_to_float(const uint16_t * x, float * y, int64_t n) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        store(y + i, load_f16(x + i));
    }
    for (; i < n; i++) {
        y[i] = GGML_CPU_FP16_TO_FP32(x[i]);
    }
}

// logit[r][t] = key[t] . query[r], rows of n floats, n and the tokens multiples of 16
static inline void float_logits(const float * key, int tokens, const float * query, int n, int rows, float * logit) {
#if defined(KVQ_AVX512)
    constexpr int T = 16;
#else
    constexpr int T = 4;
#endif
    for (int t = 0; t < tokens; t += T) {
        const float * k = key + (size_t) t*n;
        for (int r = 0; r < rows; r++) {
            const float * q = query + (size_t) r*n;
            f32x16 s[T];
            for (int j = 0; j < T; j++) {
                s[j] = set1(0.0f);
            }
            for (int i = 0; i < n; i += 16) {
                const f32x16 x = load(q + i);
                for (int j = 0; j < T; j++) {
                    s[j] = fma(x, load(k + (size_t) j*n + i), s[j]);
                }
            }
#if defined(KVQ_AVX512)
            store(logit + r*TILE + t, sums_of_16(s));
#else
            for (int j = 0; j < T; j++) {
                logit[r*TILE + t + j] = sum(s[j]);
            }
#endif
        }
    }
}

// R rows by C times 16 columns in registers
template <int R, int C>
static inline void float_block(const float * value, int tokens, int n, const float * weight, const float * alpha, const float * beta,
                               float * acc, size_t stride) {
    f32x16 s[R][C];
    for (int r = 0; r < R; r++) {
        for (int c = 0; c < C; c++) {
            s[r][c] = set1(0.0f);
        }
    }
    for (int t = 0; t < tokens; t++) {
        f32x16 v[C];
        for (int c = 0; c < C; c++) {
            v[c] = load(value + (size_t) t*n + 16*c);
        }
        for (int r = 0; r < R; r++) {
            const f32x16 w = set1(weight[r*TILE + t]);
            for (int c = 0; c < C; c++) {
                s[r][c] = fma(v[c], w, s[r][c]);
            }
        }
    }
    for (int r = 0; r < R; r++) {
        for (int c = 0; c < C; c++) {
            float * out = acc + r*stride + 16*c;
            store(out, fma(s[r][c], set1(beta[r]), mul(load(out), set1(alpha[r]))));
        }
    }
}

template <int R>
static inline void float_row_block(const float * value, int tokens, int n, const float * weight, const float * alpha,
                                   const float * beta, float * acc, size_t stride) {
    int i = 0;
    for (; i + 32 <= n; i += 32) {
        float_block<R, 2>(value + i, tokens, n, weight, alpha, beta, acc + i, stride);
    }
    for (; i < n; i += 16) {
        float_block<R, 1>(value + i, tokens, n, weight, alpha, beta, acc + i, stride);
    }
}

// acc[r] = acc[r]*alpha[r] + beta[r] * sum over t of weight[r][t] * value[t]
static inline void float_values(const float * value, int tokens, int n, const float * weight, const float * alpha,
                                const float * beta, int rows, float * acc, size_t stride) {
    for (int r = 0; r < rows; ) {
#define KVQ_ROWS(R) float_row_block<R>(value, tokens, n, weight + r*TILE, alpha + r, beta + r, acc + r*stride, stride); r += R
        switch (rows - r) {
            case 1:  KVQ_ROWS(1); break;
            case 2:  KVQ_ROWS(2); break;
            default: KVQ_ROWS(3); break;
        }
#undef KVQ_ROWS
    }
}

} // namespace kvq
