// prefill kernels, head size 128 of K
#include "../kvq-prefill-shapes.cuh"

kvq_prefill_entry kvq_find_prefill_128(int dv, bool v_is_k, int index) {
    if (dv == 128 && !v_is_k) {
        switch (index) {
            case 0: return kvq_prefill_make<128, 128, 128, 128, 128, 8, 2, 64>();
            case 1: return kvq_prefill_make<128, 128, 128, 128, 128, 8, 1, 32>();
            case 2: return kvq_prefill_make<128, 128, 128, 128, 128,  4, 1, 32>();
            case KVQ_PREFILL_BIAS:     return kvq_prefill_make<128, 128, 128, 128, 128, 8, 1, 32, 128>();
            case KVQ_PREFILL_BIAS + 1: return kvq_prefill_make<128, 128, 128, 128, 128, 4, 1, 32, 128>();
        }
    }
    return {};
}

kvq_fattn_kernel kvq_find_combine_128(int dv, bool v_is_k) {
    return dv == 128 && !v_is_k ? kvq_combine<128, 128> : nullptr;
}
