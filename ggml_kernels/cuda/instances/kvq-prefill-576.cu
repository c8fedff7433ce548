// prefill kernels, head size 576 of K
#include "../kvq-prefill-shapes.cuh"

kvq_prefill_entry kvq_find_prefill_576(int dv, bool v_is_k, int index) {
    if (dv == 512 && v_is_k && index == 0) {
        return kvq_prefill_make<576, 512, 256, 64, 64, 4, 1, 16>();
    }
    return {};
}

kvq_fattn_kernel kvq_find_combine_576(int dv, bool v_is_k) {
    return dv == 512 && v_is_k ? kvq_combine<512, 64> : nullptr;
}
