// Blocks of codes to int8 levels, and integer dot products of levels with int8 queries.
#pragma once

#include "kvq-simd.h"
#include "kvq-tiers.h"
#include "kvq-types.h"

namespace kvq {

// bytes of the codes of a block; CODE is a number of bits or KVQ_TIERED
template <int CODE, int N> constexpr int code_bytes = N*(CODE == KVQ_TIERED ? 2 : CODE)/8;
template <int CODE, int N> constexpr int block_bytes = code_bytes<CODE, N> + (int) sizeof(uint16_t);

template <int BITS> struct codec;
template <> struct codec<2> {
    static constexpr float scale = KVQ_SCALE_2;
    static const int8_t * levels()     { return KVQ_LEVELS_2; }
    static const float  * thresholds() { return KVQ_THRESHOLDS_2; }
};
template <> struct codec<3> {
    static constexpr float scale = KVQ_SCALE_3;
    static const int8_t * levels()     { return KVQ_LEVELS_3; }
    static const float  * thresholds() { return KVQ_THRESHOLDS_3; }
};
template <> struct codec<4> {
    static constexpr float scale = KVQ_SCALE_4;
    static const int8_t * levels()     { return KVQ_LEVELS_4; }
    static const float  * thresholds() { return KVQ_THRESHOLDS_4; }
};

template <int CODE, int N> static inline uint16_t block_scale_bits(const uint8_t * block) {
    uint16_t d;
    memcpy(&d, block + code_bytes<CODE, N>, sizeof(d));
    return CODE == KVQ_TIERED ? d & KVQ_TIER_SCALE_MASK : d;
}

// Levels of a block in a tile: padded with zeros to whole vectors.
#if defined(KVQ_AVX2)
constexpr int tile_align = 32;
#else
constexpr int tile_align = 16;
#endif
template <int N> constexpr int tile_stride = (N + tile_align - 1)/tile_align*tile_align;

#if defined(KVQ_AVX2)

// the levels of a family, repeated to fill both halves of a shuffle
template <int BITS> static inline __m256i level_table(bool magnitude) {
    alignas(16) int8_t t[16];
    for (int i = 0; i < 16; i++) {
        const int8_t c = codec<BITS>::levels()[i & ((1 << BITS) - 1)];
        t[i] = magnitude && c < 0 ? -c : c;
    }
    return _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i *) t));
}

template <int BITS, int N> static inline void lookup(const uint8_t * code, int8_t * level) {
    const __m128i table = _mm256_castsi256_si128(level_table<BITS>(false));
    for (int i = 0; i < N; i += 16) {
        const __m128i c = _mm_loadu_si128((const __m128i *) (code + i));
        _mm_storeu_si128((__m128i *) (level + i), _mm_shuffle_epi8(table, c));
    }
}

// sixteen bytes of the low plane
static inline __m128i plane_low(const uint8_t * block, int b) { return _mm_loadu_si128((const __m128i *) (block + b)); }

// sixteen bytes, bit 2k of byte i = high bit of coordinate k*N/4 + b + i; every load stays inside the block
template <int N> static inline __m128i plane_high(const uint8_t * block, int b) {
    constexpr int Q = N/4, H = N/8;
    if constexpr (N == 64) {
        const __m128i h = _mm_loadl_epi64((const __m128i *) (block + Q));
        return _mm_unpacklo_epi64(h, _mm_srli_epi64(h, 1));
    } else if constexpr (N == 128) {
        const __m128i h = _mm_loadu_si128((const __m128i *) (block + Q));
        return b == 0 ? h : _mm_srli_epi64(h, 1);
    } else {
        constexpr int from = Q + H + 2 - 16;   // the last sixteen bytes of the block
        const __m128i lane = _mm_add_epi8(_mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                          _mm_set1_epi8((char) b));
        const __m128i second = _mm_cmpgt_epi8(lane, _mm_set1_epi8(H - 1));
        const __m128i j = _mm_sub_epi8(lane, _mm_and_si128(second, _mm_set1_epi8(H)));
        const __m128i h = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *) (block + from)),
                                           _mm_add_epi8(j, _mm_set1_epi8(Q - from)));
        return _mm_blendv_epi8(h, _mm_srli_epi64(h, 1), second);
    }
}

// codes of step k from two vectors of plane bytes
template <int BITS, int K> static inline __m256i plane_codes(__m256i low, __m256i high) {
    const __m256i l = _mm256_and_si256(K == 0 ? low : _mm256_srli_epi16(low, 2*K), _mm256_set1_epi8(3));
    if constexpr (BITS == 2) {
        return l;
    }
    const __m256i h = K == 0 ? _mm256_slli_epi16(high, 2) : K == 1 ? high : _mm256_srli_epi16(high, 2*K - 2);
    return _mm256_or_si256(l, _mm256_and_si256(h, _mm256_set1_epi8(4)));
}

// Calls emit(codes, at, at of the upper half) for the coordinates of one block, thirty-two at a time.
template <int BITS, int N, typename F> static inline void for_codes(const uint8_t * block, F emit) {
    if constexpr (BITS == 4) {
        for (int b : { 0, N/2 - 32 }) {
            const __m256i p = _mm256_loadu_si256((const __m256i *) (block + b));
            emit(_mm256_and_si256(p, _mm256_set1_epi8(15)), b, b + 16);
            emit(_mm256_and_si256(_mm256_srli_epi16(p, 4), _mm256_set1_epi8(15)), N/2 + b, N/2 + b + 16);
            if (N == 64) {
                break;
            }
        }
    } else if constexpr (N == 64) {
        const __m128i l = plane_low(block, 0);
        const __m256i low = _mm256_set_m128i(_mm_srli_epi16(l, 2), l);
        __m256i high = low;
        if constexpr (BITS == 3) {
            const __m128i h = plane_high<N>(block, 0);
            high = _mm256_set_m128i(_mm_srli_epi16(h, 2), h);
        }
        emit(plane_codes<BITS, 0>(low, high),  0, 16);
        emit(plane_codes<BITS, 2>(low, high), 32, 48);
    } else {
        constexpr int Q = N/4, T = Q - 16;
        const __m256i low = _mm256_set_m128i(plane_low(block, T), plane_low(block, 0));
        __m256i high = low;
        if constexpr (BITS == 3) {
            high = _mm256_set_m128i(plane_high<N>(block, T), plane_high<N>(block, 0));
        }
        emit(plane_codes<BITS, 0>(low, high),   0,   T);
        emit(plane_codes<BITS, 1>(low, high),   Q,   Q + T);
        emit(plane_codes<BITS, 2>(low, high), 2*Q, 2*Q + T);
        emit(plane_codes<BITS, 3>(low, high), 3*Q, 3*Q + T);
    }
}

static inline void store_halves(int8_t * out, __m256i x, int at, int upper) {
    if (upper == at + 16) {
        _mm256_storeu_si256((__m256i *) (out + at), x);
    } else {
        _mm_storeu_si128((__m128i *) (out + at),    _mm256_castsi256_si128(x));
        _mm_storeu_si128((__m128i *) (out + upper), _mm256_extracti128_si256(x, 1));
    }
}

// Levels and their magnitudes: the unsigned operand of the dot products.
template <int BITS, int N> static inline void unpack(const uint8_t * block, int8_t * level, int8_t * magnitude) {
    const __m256i table = level_table<BITS>(false), absolute = level_table<BITS>(true);
    for_codes<BITS, N>(block, [&](__m256i code, int at, int upper) {
        store_halves(level,     _mm256_shuffle_epi8(table,    code), at, upper);
        store_halves(magnitude, _mm256_shuffle_epi8(absolute, code), at, upper);
    });
}

// Levels of two blocks, interleaved: out[2*i] of the first, out[2*i + 1] of the second.
template <int BITS, int N> static inline void unpack_pair(const uint8_t * first, const uint8_t * second, int8_t * out) {
    const __m256i table = level_table<BITS>(false);
    const auto zip = [](__m128i a, __m128i b) { return _mm256_set_m128i(_mm_unpackhi_epi8(a, b), _mm_unpacklo_epi8(a, b)); };
    const auto emit = [&](__m256i code, int at) {
        _mm256_storeu_si256((__m256i *) (out + 2*at), _mm256_shuffle_epi8(table, code));
    };
    constexpr int W = BITS == 4 ? N/2 : N/4;   // bytes of the plane
    for (int i = 0; i < W; i += 16) {
        const int b = i + 16 <= W ? i : W - 16;
        const __m256i low = zip(plane_low(first, b), plane_low(second, b));
        if constexpr (BITS == 4) {
            emit(_mm256_and_si256(low, _mm256_set1_epi8(15)), b);
            emit(_mm256_and_si256(_mm256_srli_epi16(low, 4), _mm256_set1_epi8(15)), N/2 + b);
        } else {
            __m256i high = low;
            if constexpr (BITS == 3) {
                high = zip(plane_high<N>(first, b), plane_high<N>(second, b));
            }
            emit(plane_codes<BITS, 0>(low, high),         b);
            emit(plane_codes<BITS, 1>(low, high),   W   + b);
            emit(plane_codes<BITS, 2>(low, high), 2*W   + b);
            emit(plane_codes<BITS, 3>(low, high), 3*W   + b);
        }
    }
}

// acc + products of 32 levels and query values, in groups of four. A level is at most 104 and a query value 127, so a
// sum of two products fits in sixteen bits.
static inline __m256i dot32(__m256i acc, __m256i query, __m256i level, __m256i magnitude) {
    const __m256i q = _mm256_sign_epi8(query, level);
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    return _mm256_dpbusd_epi32(acc, magnitude, q);
#elif defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(acc, magnitude, q);
#else
    return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(magnitude, q), _mm256_set1_epi16(1)));
#endif
}

template <int N> static inline __m256i dot_partial(const int8_t * level, const int8_t * magnitude, const int8_t * query) {
    __m256i acc = _mm256_setzero_si256();
    for (int i = 0; i < tile_stride<N>; i += 32) {
        acc = dot32(acc, _mm256_loadu_si256((const __m256i *) (query + i)),
                         _mm256_loadu_si256((const __m256i *) (level + i)),
                         _mm256_loadu_si256((const __m256i *) (magnitude + i)));
    }
    return acc;
}

template <int N> static inline int32_t dot(const int8_t * level, const int8_t * magnitude, const int8_t * query) {
    const __m256i a = dot_partial<N>(level, magnitude, query);
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    s = _mm_add_epi32(s, _mm_unpackhi_epi64(s, s));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 1));
    return _mm_cvtsi128_si32(s);
}

// dot products of eight consecutive tile rows with one query
template <int N> static inline void dot8(const int8_t * level, const int8_t * magnitude, const int8_t * query, int32_t * out) {
    constexpr int S = tile_stride<N>;
    __m256i a[8];
    for (int t = 0; t < 8; t++) {
        a[t] = dot_partial<N>(level + t*S, magnitude + t*S, query);
    }
    const __m256i lo = _mm256_hadd_epi32(_mm256_hadd_epi32(a[0], a[1]), _mm256_hadd_epi32(a[2], a[3]));
    const __m256i hi = _mm256_hadd_epi32(_mm256_hadd_epi32(a[4], a[5]), _mm256_hadd_epi32(a[6], a[7]));
    _mm256_storeu_si256((__m256i *) out, _mm256_add_epi32(_mm256_permute2x128_si256(lo, hi, 0x20),
                                                          _mm256_permute2x128_si256(lo, hi, 0x31)));
}

#elif defined(KVQ_NEON)

template <int BITS> static inline int8x16_t level_table() {
    int8_t t[16];
    for (int i = 0; i < 16; i++) {
        t[i] = codec<BITS>::levels()[i & ((1 << BITS) - 1)];
    }
    return vld1q_s8(t);
}

template <int BITS, int N> static inline void lookup(const uint8_t * code, int8_t * level) {
    const int8x16_t table = level_table<BITS>();
    for (int i = 0; i < N; i += 16) {
        vst1q_s8(level + i, vqtbl1q_s8(table, vld1q_u8(code + i)));
    }
}

// sixteen bytes, bit 2k of byte i = high bit of coordinate k*N/4 + b + i; every load stays inside the block
template <int N> static inline uint8x16_t plane_high(const uint8_t * block, int b) {
    constexpr int Q = N/4, H = N/8;
    if constexpr (N == 64) {
        const uint8x8_t h = vld1_u8(block + Q);
        return vcombine_u8(h, vshr_n_u8(h, 1));
    } else if constexpr (N == 128) {
        const uint8x16_t h = vld1q_u8(block + Q);
        return b == 0 ? h : vshrq_n_u8(h, 1);
    } else {
        constexpr int from = Q + H + 2 - 16;   // the last sixteen bytes of the block
        const uint8_t count[16] = { 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 };
        const uint8x16_t lane = vaddq_u8(vld1q_u8(count), vdupq_n_u8((uint8_t) b));
        const uint8x16_t second = vcgeq_u8(lane, vdupq_n_u8(H));
        const uint8x16_t j = vsubq_u8(lane, vandq_u8(second, vdupq_n_u8(H)));
        const uint8x16_t h = vqtbl1q_u8(vld1q_u8(block + from), vaddq_u8(j, vdupq_n_u8(Q - from)));
        return vbslq_u8(second, vshrq_n_u8(h, 1), h);
    }
}

template <int BITS, int K> static inline uint8x16_t plane_codes(uint8x16_t low, uint8x16_t high) {
    uint8x16_t l = low, h = high;
    if constexpr (K > 0) { l = vshrq_n_u8(low, 2*K); h = vshrq_n_u8(high, 2*K); }
    l = vandq_u8(l, vdupq_n_u8(3));
    if constexpr (BITS == 2) {
        return l;
    }
    return vorrq_u8(l, vshlq_n_u8(vandq_u8(h, vdupq_n_u8(1)), 2));
}

template <int BITS, int N> static inline void unpack(const uint8_t * block, int8_t * level, int8_t *) {
    const int8x16_t table = level_table<BITS>();
    constexpr int W = BITS == 4 ? N/2 : N/4;   // bytes of the plane
    for (int i = 0; i < W; i += 16) {
        const int b = i + 16 <= W ? i : W - 16;
        const uint8x16_t low = vld1q_u8(block + b);
        if constexpr (BITS == 4) {
            vst1q_s8(level + b,       vqtbl1q_s8(table, vandq_u8(low, vdupq_n_u8(15))));
            vst1q_s8(level + N/2 + b, vqtbl1q_s8(table, vshrq_n_u8(low, 4)));
        } else {
            uint8x16_t high = low;
            if constexpr (BITS == 3) {
                high = plane_high<N>(block, b);
            }
            vst1q_s8(level +         b, vqtbl1q_s8(table, plane_codes<BITS, 0>(low, high)));
            vst1q_s8(level +   W   + b, vqtbl1q_s8(table, plane_codes<BITS, 1>(low, high)));
            vst1q_s8(level + 2*W   + b, vqtbl1q_s8(table, plane_codes<BITS, 2>(low, high)));
            vst1q_s8(level + 3*W   + b, vqtbl1q_s8(table, plane_codes<BITS, 3>(low, high)));
        }
    }
}

static inline int32x4_t dot16(int32x4_t acc, int8x16_t a, int8x16_t b) {
#if defined(__ARM_FEATURE_DOTPROD)
    return vdotq_s32(acc, a, b);
#else
    // a level is at most 104 and a query value 127, so two products fit in sixteen bits
    return vpadalq_s16(acc, vmlal_s8(vmull_s8(vget_low_s8(a), vget_low_s8(b)), vget_high_s8(a), vget_high_s8(b)));
#endif
}

template <int N> static inline int32x4_t dot_partial(const int8_t * level, const int8_t * query) {
    int32x4_t acc = vdupq_n_s32(0);
    for (int i = 0; i < N; i += 16) {
        acc = dot16(acc, vld1q_s8(level + i), vld1q_s8(query + i));
    }
    return acc;
}

template <int N> static inline int32_t dot(const int8_t * level, const int8_t *, const int8_t * query) {
    return vaddvq_s32(dot_partial<N>(level, query));
}

template <int N> static inline void dot8(const int8_t * level, const int8_t *, const int8_t * query, int32_t * out) {
    constexpr int S = tile_stride<N>;
    for (int t = 0; t < 8; t += 4) {
        const int32x4_t a = dot_partial<N>(level + (t + 0)*S, query), b = dot_partial<N>(level + (t + 1)*S, query);
        const int32x4_t c = dot_partial<N>(level + (t + 2)*S, query), d = dot_partial<N>(level + (t + 3)*S, query);
        vst1q_s32(out + t, vpaddq_s32(vpaddq_s32(a, b), vpaddq_s32(c, d)));
    }
}

#else

template <int BITS, int N> static inline void lookup(const uint8_t * code, int8_t * level) {
    for (int i = 0; i < N; i++) {
        level[i] = codec<BITS>::levels()[code[i]];
    }
}

template <int BITS, int N> static inline void unpack(const uint8_t * block, int8_t * level, int8_t *) {
    const int8_t * table = codec<BITS>::levels();
    if constexpr (BITS == 4) {
        for (int b = 0; b < N/2; b++) {
            level[b]       = table[block[b] & 15];
            level[N/2 + b] = table[block[b] >> 4];
        }
    } else {
        constexpr int Q = N/4, H = N/8;
        for (int k = 0; k < 4; k++) {
            for (int b = 0; b < Q; b++) {
                int code = (block[b] >> 2*k) & 3;
                if (BITS == 3) {
                    code |= ((block[Q + b % H] >> (2*k + b/H)) & 1) << 2;
                }
                level[k*Q + b] = table[code];
            }
        }
    }
}

template <int N> static inline int32_t dot(const int8_t * level, const int8_t *, const int8_t * query) {
    int32_t sum = 0;
    for (int i = 0; i < N; i++) {
        sum += level[i]*query[i];
    }
    return sum;
}

template <int N> static inline void dot8(const int8_t * level, const int8_t * magnitude, const int8_t * query, int32_t * out) {
    for (int t = 0; t < 8; t++) {
        out[t] = dot<N>(level + t*tile_stride<N>, magnitude, query);
    }
}

#endif

} // namespace kvq
