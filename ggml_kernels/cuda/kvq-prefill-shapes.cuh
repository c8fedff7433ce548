// The compiled shapes of the prefill kernel: the first that fits the device's shared memory is taken.
#pragma once

#include "kvq-prefill.cuh"
#include "kvq-combine.cuh"
#include "kvq-launch.cuh"

// NR: DK for the kernels with a key bias
template <int DK, int DV, int DVP, int NK, int NV, int WARPS, int MT, int TILE, int NR = 0> static kvq_prefill_entry kvq_prefill_make() {
    using S = kvq_prefill_shape<DK, DV, DVP, NK, NV, WARPS, MT, TILE, NR>;
    return { kvq_prefill<S>, S::ROWS, S::WARPS, TILE, DV/DVP, size_t(S::fixed_bytes) };
}
