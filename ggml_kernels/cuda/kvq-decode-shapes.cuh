// The compiled shapes of the decode kernel. A stage holds a tile of every warp's K and V; the tile and the number of
// stages keep two blocks of 8 heads resident on a multiprocessor with 227 KiB.
#pragma once

#include "kvq-decode.cuh"
#include "kvq-launch.cuh"

template <int KB, int VB, int DK, int DV, int NK, int NV, int VP, int TILE, int STAGES, int BLOCKS>
static kvq_decode_entry kvq_decode_make() {
    using S = kvq_decode_shape<DK, DV, NK, NV, VP, TILE, STAGES, BLOCKS>;
    return { kvq_decode<KB, VB, S, false>, nullptr, TILE, STAGES, VP, S::q_bytes, BLOCKS };
}

template <int KB, int VB, int D> static kvq_decode_entry kvq_decode_small() {
    constexpr int tile = KB + VB > 4 ? 32 : 64, stages = KB + VB > 4 && KB + VB <= 6 ? 3 : 2;
    kvq_decode_entry e = kvq_decode_make<KB, VB, D, D, D, D, 1, tile, stages, 2>();
    if constexpr (D == 64 || D == 128) {
        e.linear = kvq_decode<KB, VB, kvq_decode_shape<D, D, D, D, 1, tile, stages, 2>, true>;
    }
    return e;
}

// every head size, for one family in both K and V
template <int B> static kvq_decode_entry kvq_decode_all(const int dk, const int dv, const bool v_is_k) {
    if (dk == 576 && dv == 512 && v_is_k) { return kvq_decode_make<B, B, 576, 512,  64,  64, 2, 32, 2, 1>(); }
    if (v_is_k)                           { return {}; }
    if (dk ==  64 && dv ==  64) { return kvq_decode_small<B, B,  64>(); }
    if (dk ==  80 && dv ==  80) { return kvq_decode_small<B, B,  80>(); }
    if (dk ==  96 && dv ==  96) { return kvq_decode_small<B, B,  96>(); }
    if (dk == 112 && dv == 112) { return kvq_decode_small<B, B, 112>(); }
    if (dk == 128 && dv == 128) { return kvq_decode_small<B, B, 128>(); }
    if (dk == 192 && dv == 128) { return kvq_decode_make<B, B, 192, 128,  64, 128, 1, 32, 3, 1>(); }
    if (dk == 192 && dv == 192) { return kvq_decode_make<B, B, 192, 192,  64,  64, 1, 32, 3, 1>(); }
    if (dk == 256 && dv == 256) { return kvq_decode_make<B, B, 256, 256, 128, 128, 1, 32, 3, 1>(); }
    if (dk == 512 && dv == 512) { return kvq_decode_make<B, B, 512, 512, 128, 128, 2, 32, 2, 1>(); }
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
