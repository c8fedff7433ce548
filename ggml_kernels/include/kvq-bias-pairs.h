// Which pairs of RoPE's frequencies carry the key bias of an attention operation: a bit a pair in op_params[9..12] of
// GGML_OP_FLASH_ATTN_EXT, lowest first, set while source 5 is there. Pairs that are not in it add nothing to a logit: their part
// of the bias stays in the stored keys, and source 6 holds zeros for it. The table of source 7 has all pairs.
#pragma once

#include "ggml.h"

#include <array>
#include <cstdint>

constexpr int KVQ_BIAS_PAIRS_PARAM = 9, KVQ_BIAS_PAIRS_MAX = 128;

typedef std::array<uint32_t, KVQ_BIAS_PAIRS_MAX/32> kvq_pair_set;

inline kvq_pair_set kvq_first_pairs(int n) {
    kvq_pair_set set = {};
    for (int i = 0; i < n; i++) {
        set[i/32] |= 1u << i % 32;
    }
    return set;
}

inline bool kvq_has_pair(const kvq_pair_set & set, int i) {
    return set[i/32] >> i % 32 & 1;
}

// the pairs of a set, ascending; returns how many
inline int kvq_list_pairs(const kvq_pair_set & set, uint8_t (&pairs)[KVQ_BIAS_PAIRS_MAX]) {
    int n = 0;
    for (int i = 0; i < KVQ_BIAS_PAIRS_MAX; i++) {
        if (kvq_has_pair(set, i)) {
            pairs[n++] = (uint8_t) i;
        }
    }
    return n;
}

inline void kvq_set_bias_pairs(ggml_tensor * attention, const kvq_pair_set & set) {
    for (size_t i = 0; i < set.size(); i++) {
        attention->op_params[KVQ_BIAS_PAIRS_PARAM + i] = (int32_t) set[i];
    }
}

// the pairs of an attention operation, ascending; returns how many, 0 without a key bias
inline int kvq_bias_pairs(const ggml_tensor * attention, uint8_t (&pairs)[KVQ_BIAS_PAIRS_MAX]) {
    kvq_pair_set set = {};
    for (size_t i = 0; attention->src[5] && i < set.size(); i++) {
        set[i] = (uint32_t) attention->op_params[KVQ_BIAS_PAIRS_PARAM + i];
    }
    const int n = kvq_list_pairs(set, pairs);
    GGML_ASSERT(!attention->src[5] || (n > 0 && pairs[n - 1] < attention->src[7]->ne[0]/2));
    return n;
}
