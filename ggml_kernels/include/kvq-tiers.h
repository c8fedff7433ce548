// Which tier a coordinate of a tiered block belongs to, and where its code lies; see docs/formats.md.
#pragma once

#include "kvq-tables.h"

typedef struct {
    int byte, shift;
} kvq_place;

// three planes, of n/8, n/16 and n/16 bytes, for n/4 values of 4 bits, n/4 of 2 and n/2 of 1
static inline kvq_place kvq_place_of(int i, int n) {
    kvq_place p;
    if (i < n/4) {
        p.byte = i % (n/8);                     p.shift = 4*(i/(n/8));
    } else if (i < n/2) {
        i -= n/4;
        p.byte = n/8 + i % (n/16);              p.shift = 2*(i/(n/16));
    } else {
        i -= n/2;
        p.byte = n/8 + n/16 + i % (n/16);       p.shift = i/(n/16);
    }
    return p;
}

// The last sixteen bits of a block: an fp16 scale of five mantissa bits, the spread of the tier of two bits, that of the
// tier of one.
#define KVQ_TIER_SCALE_MASK 0xFFE0u
#define KVQ_TIER_SPREAD_2(bits) (((bits) >> 3) & 3)
#define KVQ_TIER_SPREAD_1(bits) ((bits) & 7)

// scale, as fp16 bits, rounded to five mantissa bits; the largest finite one if it overflows
static inline uint16_t kvq_tier_scale_bits(uint16_t fp16) {
    const uint32_t h = (fp16 + 16u) & KVQ_TIER_SCALE_MASK;
    return (uint16_t) (h >= 0x7C00u ? 0x7BE0u : h);
}
