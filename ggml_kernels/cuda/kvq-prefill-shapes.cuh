// The compiled shapes of the prefill kernel: the first that fits the device's shared memory is taken.
#pragma once

#include "kvq-prefill.cuh"
#include "kvq-combine.cuh"
#include "kvq-launch.cuh"

template <int DK, int DV, int DVP, int NK, int NV, int ROWS, int TILE> static kvq_prefill_entry kvq_prefill_make() {
    using S = kvq_prefill_shape<DK, DV, DVP, NK, NV, ROWS, TILE>;
    return { kvq_prefill<S>, ROWS, TILE, DV/DVP, size_t(S::fixed_bytes) };
}
