// The compiled shapes of the decode kernel. A stage holds a tile of every warp's K and V; the tile and the number of
// stages keep the aimed number of blocks resident on a multiprocessor with 227 KiB.
#pragma once

#include "kvq-decode.cuh"
#include "kvq-launch.cuh"

template <int KB, int VB, typename S, bool LINEAR, bool BIAS> static constexpr kvq_decode_variant kvq_decode_variant_of(const kvq_fattn_kernel kernel) {
    using F = kvq_bias_shape<S>;
    return { kernel, S::TILE, S::STAGES, S::template query_bytes<KB>, S::BLOCKS, kvq_query16_in_ring<KB, VB, S, LINEAR, BIAS>() ? 0 : S::query16_bytes, F::slot_bytes, F::fixed_bytes };
}
template <int KB, int VB, typename S, bool LINEAR, bool BIAS = false> static constexpr kvq_decode_variant kvq_decode_of() {
    return kvq_decode_variant_of<KB, VB, S, LINEAR, BIAS>(kvq_decode<KB, VB, S, LINEAR, BIAS>);
}
template <int KB, int VB, typename S, bool BIAS = false> static constexpr kvq_decode_variant kvq_decode_short_of() {
    return kvq_decode_variant_of<KB, VB, S, true, BIAS>(kvq_decode_short<KB, VB, S, BIAS>);
}

// one or two groups of 4 query rows a warp
template <int KB, int VB, int DK, int DV, int NK, int NV, int VP, int TILE, int STAGES, int BLOCKS>
static kvq_decode_entry kvq_decode_make() {
    kvq_decode_entry e = {};
    e.v_parts = VP;
    e.general[0] = kvq_decode_of<KB, VB, kvq_decode_shape<DK, DV, NK, NV, VP, TILE, STAGES, BLOCKS, 1>, false>();
    e.general[1] = kvq_decode_of<KB, VB, kvq_decode_shape<DK, DV, NK, NV, VP, TILE, STAGES, BLOCKS, 2>, false>();
    // with a key bias: the head sizes of most models that have one; others take the prefill kernel
    if constexpr (DK == DV && (DK == 64 || DK == 128)) {
        e.general_bias[0] = kvq_decode_of<KB, VB, kvq_decode_shape<DK, DV, NK, NV, VP, TILE, STAGES, BLOCKS, 1>, false, true>();
        e.general_bias[1] = kvq_decode_of<KB, VB, kvq_decode_shape<DK, DV, NK, NV, VP, TILE, STAGES, BLOCKS, 2>, false, true>();
    }
    return e;
}

template <int KB, int VB, int D> static kvq_decode_entry kvq_decode_small() {
    constexpr int sum = kvq_block<KB, D>::code_bits + VB, tile = sum > 4 ? 32 : 64, stages = sum > 4 && sum <= 6 ? 3 : 2;
    kvq_decode_entry e = kvq_decode_make<KB, VB, D, D, D, D, 1, tile, stages, 2>();
    if constexpr (D == 64 || D == 128) {
        // tiles of 64 tokens and two stages even where they leave room for one block: fewer instructions a token count for
        // more than more warps
        constexpr int bytes = 8*(kvq_block<KB, D>::bytes + kvq_block<VB, D>::bytes), blocks = 2*64*bytes <= 112000 ? 2 : 1;
        e.linear[0] = kvq_decode_of<KB, VB, kvq_decode_shape<D, D, D, D, 1, 64, 2, blocks, 1>, true>();
        e.linear[1] = kvq_decode_of<KB, VB, kvq_decode_shape<D, D, D, D, 1, 64, 2, KB + VB == 4 ? 2 : 1, 2>, true>();
        e.linear_bias[0] = kvq_decode_of<KB, VB, kvq_decode_shape<D, D, D, D, 1, 64, 2, blocks, 1>, true, true>();
        e.linear_bias[1] = kvq_decode_of<KB, VB, kvq_decode_shape<D, D, D, D, 1, 64, 2, KB + VB == 4 ? 2 : 1, 2>, true, true>();
        using one = kvq_decode_shape<D, D, D, D, 1, 32, 2, 1, 1>;
        using two = kvq_decode_shape<D, D, D, D, 1, KB == KVQ_TIERS && D == 64 ? 64 : 32, 2, 1, 2>;
        e.brief[0] = kvq_decode_short_of<KB, VB, one>();
        e.brief[1] = kvq_decode_short_of<KB, VB, two>();
        e.brief_bias[0] = kvq_decode_short_of<KB, VB, one, true>();
        e.brief_bias[1] = kvq_decode_short_of<KB, VB, two, true>();
    }
    return e;
}

// every head size, for one family in both K and V, and for oscar2, whose values are turbo2
template <int KB, int VB> static kvq_decode_entry kvq_decode_all(const int dk, const int dv, const bool v_is_k) {
    if constexpr (KB == VB) {
        if (dk == 576 && dv == 512 && v_is_k) { return kvq_decode_make<KB, VB, 576, 512, 64, 64, 2, 32, 2, 1>(); }
    }
    if (v_is_k)                           { return {}; }
    if (dk ==  64 && dv ==  64) { return kvq_decode_small<KB, VB,  64>(); }
    if (dk ==  80 && dv ==  80) { return kvq_decode_small<KB, VB,  80>(); }
    if (dk ==  96 && dv ==  96) { return kvq_decode_small<KB, VB,  96>(); }
    if (dk == 112 && dv == 112) { return kvq_decode_small<KB, VB, 112>(); }
    if (dk == 128 && dv == 128) { return kvq_decode_small<KB, VB, 128>(); }
    if (dk == 192 && dv == 128) { return kvq_decode_make<KB, VB, 192, 128,  64, 128, 1, 32, 3, 1>(); }
    if (dk == 192 && dv == 192) { return kvq_decode_make<KB, VB, 192, 192,  64,  64, 1, 32, 3, 1>(); }
    if (dk == 256 && dv == 256) { return kvq_decode_make<KB, VB, 256, 256, 128, 128, 1, 32, 3, 1>(); }
    if (dk == 512 && dv == 512) { return kvq_decode_make<KB, VB, 512, 512, 128, 128, 2, 32, 2, 1>(); }
    return {};
}

// the common head sizes, for two different families
template <int KB, int VB> static kvq_decode_entry kvq_decode_mixed(const int dk, const int dv, const bool v_is_k) {
    if (v_is_k)                 { return {}; }
    if (dk ==  64 && dv ==  64) { return kvq_decode_small<KB, VB,  64>(); }
    if (dk == 128 && dv == 128) { return kvq_decode_small<KB, VB, 128>(); }
    if (dk == 256 && dv == 256) { return kvq_decode_make<KB, VB, 256, 256, 128, 128, 1, 32, 3, 1>(); }
    return {};
}
