// The compiled shapes of the prefill kernel: the first that fits the device's shared memory is taken.
#pragma once

#include "kvq-prefill.cuh"
#include "kvq-combine.cuh"
#include "kvq-launch.cuh"

template <int DK, int DV, int DVP, int NK, int NV, int WARPS, int MT, int TILE> static kvq_prefill_entry kvq_prefill_make() {
    using S = kvq_prefill_shape<DK, DV, DVP, NK, NV, WARPS, MT, TILE>;
    return { kvq_prefill<S>, S::ROWS, S::WARPS, TILE, DV/DVP, size_t(S::fixed_bytes) };
}
