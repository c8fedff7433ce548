// the prefill kernels of compute capability 9.0; compiled for sm_90a alone
#include "../kvq-hopper.cuh"
#include "../kvq-launch.cuh"

template <int D, int BIAS = 0> static kvq_prefill_entry kvq_hopper_of() {
    using S = kvq_hopper_shape<D, D, 3, BIAS>;
    return { kvq_hopper<S>, S::ROWS, 16, S::TILE, 1, S::fixed_bytes };
}

kvq_prefill_entry kvq_find_compiled_hopper(const int d, const int bias_pairs) {
    if (d == 64 && bias_pairs <= 32) {
        return bias_pairs == 0 ? kvq_hopper_of<64>() : bias_pairs <= 16 ? kvq_hopper_of<64, 16>() : kvq_hopper_of<64, 32>();
    }
    if (d == 128 && bias_pairs <= 64) {
        return bias_pairs == 0 ? kvq_hopper_of<128>() : bias_pairs <= 16 ? kvq_hopper_of<128, 16>() : bias_pairs <= 32 ? kvq_hopper_of<128, 32>() : kvq_hopper_of<128, 64>();
    }
    return {};
}
