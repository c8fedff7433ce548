// the prefill kernels of compute capability 9.0; compiled for sm_90a alone
#include "../kvq-hopper.cuh"
#include "../kvq-launch.cuh"

template <int D> static kvq_prefill_entry kvq_hopper_of() {
    using S = kvq_hopper_shape<D, D, 3>;
    return { kvq_hopper<S>, S::ROWS, 16, S::TILE, 1, S::fixed_bytes };
}

kvq_prefill_entry kvq_find_compiled_hopper(const int d) {
    return d == 64 ? kvq_hopper_of<64>() : d == 128 ? kvq_hopper_of<128>() : kvq_prefill_entry {};
}
