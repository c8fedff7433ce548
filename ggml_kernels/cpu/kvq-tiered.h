// oscar2 blocks to int8 levels: the counterpart of unpack() in kvq-codes.h for tiers of 4, 2 and 1 bits.
#pragma once

#include "kvq-codes.h"
#include "kvq-tiers.h"

namespace kvq {

template <> struct codec<KVQ_TIERED> {
    static constexpr float scale = KVQ_TIER_SCALE;
};

static_assert(sizeof(KVQ_TIER_LEVELS_4) == 16 && sizeof(KVQ_TIER_LEVELS_2) == 16 && sizeof(KVQ_TIER_LEVELS_1) == 16, "one shuffle a tier");

// scale and spreads of a block
template <int N> static inline uint16_t tier_choice(const uint8_t * block) {
    uint16_t bits;
    memcpy(&bits, block + N/4, sizeof(bits));
    return bits;
}

#if defined(KVQ_AVX2)

// levels of two tiers for the halves of a shuffle; all spreads of a tier are sixteen levels
static inline __m256i tier_table(const int8_t * low, const int8_t * high) {
    return _mm256_set_m128i(_mm_loadu_si128((const __m128i *) high), _mm_loadu_si128((const __m128i *) low));
}

// Calls emit(indices, which tables, at) for 32 coordinates at a time: 0 for the tier of four bits and that of two side by
// side, 1 for four bits, 2 for two, 3 for one. An index is the code with the spread above it.
template <int N, typename F> static inline void for_tier_codes(const uint8_t * block, F emit) {
    const uint16_t choice = tier_choice<N>(block);
    const __m256i two = _mm256_set1_epi8((char) (KVQ_TIER_SPREAD_2(choice) << 2)), one = _mm256_set1_epi8((char) (KVQ_TIER_SPREAD_1(choice) << 1));
    if constexpr (N == 64) {
        const __m128i x = _mm_loadu_si128((const __m128i *) block);   // 8 bytes of nibbles, 4 of pairs, 4 of bits
        const __m128i nibbles = _mm_and_si128(_mm_unpacklo_epi64(x, _mm_srli_epi16(x, 4)), _mm_set1_epi8(15));
        const __m128i pairs = _mm_and_si128(_mm_srlv_epi32(_mm_shuffle_epi32(x, 0xAA), _mm_setr_epi32(0, 2, 4, 6)), _mm_set1_epi8(3));
        emit(_mm256_set_m128i(_mm_or_si128(pairs, _mm256_castsi256_si128(two)), nibbles), 0, 0);
        const __m256i bits = _mm256_broadcastd_epi32(_mm_shuffle_epi32(x, 0xFF));
        emit(_mm256_or_si256(_mm256_and_si256(_mm256_srlv_epi32(bits, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)), _mm256_set1_epi8(1)), one), 3, 32);
    } else {
        const __m128i a = _mm_loadu_si128((const __m128i *) block);          // 16 bytes of nibbles
        const __m128i x = _mm_loadu_si128((const __m128i *) (block + 16));   // 8 of pairs, 8 of bits
        emit(_mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(a, 4), a), _mm256_set1_epi8(15)), 1, 0);
        const __m256i pairs = _mm256_broadcastq_epi64(x), bits = _mm256_broadcastq_epi64(_mm_unpackhi_epi64(x, x));
        emit(_mm256_or_si256(_mm256_and_si256(_mm256_srlv_epi64(pairs, _mm256_setr_epi64x(0, 2, 4, 6)), _mm256_set1_epi8(3)), two), 2, 32);
        emit(_mm256_or_si256(_mm256_and_si256(_mm256_srlv_epi64(bits, _mm256_setr_epi64x(0, 1, 2, 3)), _mm256_set1_epi8(1)), one), 3, 64);
        emit(_mm256_or_si256(_mm256_and_si256(_mm256_srlv_epi64(bits, _mm256_setr_epi64x(4, 5, 6, 7)), _mm256_set1_epi8(1)), one), 3, 96);
    }
}

template <int N> static inline void unpack_tiers(const uint8_t * block, int8_t * level, int8_t * magnitude) {
    const __m256i tables[4] = {
        tier_table(KVQ_TIER_LEVELS_4, KVQ_TIER_LEVELS_2), tier_table(KVQ_TIER_LEVELS_4, KVQ_TIER_LEVELS_4),
        tier_table(KVQ_TIER_LEVELS_2, KVQ_TIER_LEVELS_2), tier_table(KVQ_TIER_LEVELS_1, KVQ_TIER_LEVELS_1),
    };
    for_tier_codes<N>(block, [&](__m256i index, int table, int at) {
        const __m256i x = _mm256_shuffle_epi8(tables[table], index);
        _mm256_storeu_si256((__m256i *) (level     + at), x);
        _mm256_storeu_si256((__m256i *) (magnitude + at), _mm256_abs_epi8(x));
    });
}

#elif defined(KVQ_NEON)

// byte i of the result: byte i % W of the plane, shifted right by first + step*(i/W)
template <int W> static inline uint8x16_t plane_bits(const uint8_t * plane, int first, int step) {
    if constexpr (W == 8) {
        const int64_t s[2] = { -first, -first - step };
        uint64_t x;
        memcpy(&x, plane, sizeof(x));
        return vreinterpretq_u8_u64(vshlq_u64(vdupq_n_u64(x), vld1q_s64(s)));
    } else {
        const int32_t s[4] = { -first, -first - step, -first - 2*step, -first - 3*step };
        uint32_t x;
        memcpy(&x, plane, sizeof(x));
        return vreinterpretq_u8_u32(vshlq_u32(vdupq_n_u32(x), vld1q_s32(s)));
    }
}

template <int N> static inline void unpack_tiers(const uint8_t * block, int8_t * level, int8_t *) {
    const int8x16_t four = vld1q_s8(KVQ_TIER_LEVELS_4), two = vld1q_s8(KVQ_TIER_LEVELS_2), one = vld1q_s8(KVQ_TIER_LEVELS_1);
    const uint16_t choice = tier_choice<N>(block);
    const uint8x16_t spread_2 = vdupq_n_u8(KVQ_TIER_SPREAD_2(choice) << 2), spread_1 = vdupq_n_u8(KVQ_TIER_SPREAD_1(choice) << 1);
    constexpr int W = N/16;   // bytes of the planes of pairs and of bits
    if constexpr (N == 64) {
        const uint8x8_t a = vld1_u8(block);
        vst1q_s8(level, vqtbl1q_s8(four, vcombine_u8(vand_u8(a, vdup_n_u8(15)), vshr_n_u8(a, 4))));
    } else {
        const uint8x16_t a = vld1q_u8(block);
        vst1q_s8(level,      vqtbl1q_s8(four, vandq_u8(a, vdupq_n_u8(15))));
        vst1q_s8(level + 16, vqtbl1q_s8(four, vshrq_n_u8(a, 4)));
    }
    for (int i = 0; i < N/4; i += 16) {
        vst1q_s8(level + N/4 + i, vqtbl1q_s8(two, vorrq_u8(vandq_u8(plane_bits<W>(block + N/8, 2*(i/W), 2), vdupq_n_u8(3)), spread_2)));
    }
    for (int i = 0; i < N/2; i += 16) {
        vst1q_s8(level + N/2 + i, vqtbl1q_s8(one, vorrq_u8(vandq_u8(plane_bits<W>(block + N/8 + W, i/W, 1), vdupq_n_u8(1)), spread_1)));
    }
}

#endif

// Levels and their magnitudes of one block.
template <int N> static inline void unpack_tiered(const uint8_t * block, int8_t * level, int8_t * magnitude) {
#if defined(KVQ_AVX2) || defined(KVQ_NEON)
    if constexpr (N == 64 || N == 128) {
        unpack_tiers<N>(block, level, magnitude);
        return;
    }
#endif
    // one plane after the other; the tiers of other blocks are no multiples of a vector
    constexpr int A = N/8, W = N/16;
    const uint16_t choice = tier_choice<N>(block);
    const int8_t * two = KVQ_TIER_LEVELS_2 + 4*KVQ_TIER_SPREAD_2(choice), * one = KVQ_TIER_LEVELS_1 + 2*KVQ_TIER_SPREAD_1(choice);
    for (int b = 0; b < A; b++) {
        level[b]     = KVQ_TIER_LEVELS_4[block[b] & 15];
        level[A + b] = KVQ_TIER_LEVELS_4[block[b] >> 4];
    }
    for (int k = 0; k < 4; k++) {
        for (int b = 0; b < W; b++) {
            level[N/4 + k*W + b] = two[(block[A + b] >> 2*k) & 3];
        }
    }
    for (int k = 0; k < 8; k++) {
        for (int b = 0; b < W; b++) {
            level[N/2 + k*W + b] = one[(block[A + W + b] >> k) & 1];
        }
    }
    if (magnitude) {
        for (int i = 0; i < N; i++) {
            magnitude[i] = level[i] < 0 ? -level[i] : level[i];
        }
    }
}

// ---- of any code ----

template <int CODE, int N> static inline void unpack_block(const uint8_t * block, int8_t * level, int8_t * magnitude) {
    if constexpr (CODE == KVQ_TIERED) {
        unpack_tiered<N>(block, level, magnitude);
    } else {
        unpack<CODE, N>(block, level, magnitude);
    }
}

#if defined(KVQ_AVX2)
template <int CODE, int N> static inline void unpack_block_pair(const uint8_t * first, const uint8_t * second, int8_t * out) {
    if constexpr (CODE == KVQ_TIERED) {
        int8_t level[2][N], magnitude[N];
        unpack_tiered<N>(first,  level[0], magnitude);
        unpack_tiered<N>(second, level[1], magnitude);
        for (int i = 0; i < N; i++) {
            out[2*i]     = level[0][i];
            out[2*i + 1] = level[1][i];
        }
    } else {
        unpack_pair<CODE, N>(first, second, out);
    }
}
#endif

} // namespace kvq
