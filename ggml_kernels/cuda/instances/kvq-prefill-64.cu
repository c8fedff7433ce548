// prefill kernels, head size 64 of K
#include "../kvq-prefill-shapes.cuh"

kvq_prefill_entry kvq_find_prefill_64(int dv, bool v_is_k, int index) {
    if (dv == 64 && !v_is_k) {
        switch (index) {
            case 0: return kvq_prefill_make<64, 64, 64, 64, 64, 8, 2, 64>();
            case 1: return kvq_prefill_make<64, 64, 64, 64, 64, 8, 1, 32>();
            case 2: return kvq_prefill_make<64, 64, 64, 64, 64,  4, 1, 32>();
            case KVQ_PREFILL_BIAS:     return kvq_prefill_make<64, 64, 64, 64, 64, 8, 1, 32, 64>();
            case KVQ_PREFILL_BIAS + 1: return kvq_prefill_make<64, 64, 64, 64, 64, 4, 1, 32, 64>();
        }
    }
    return {};
}

kvq_fattn_kernel kvq_find_combine_64(int dv, bool v_is_k) {
    return dv == 64 && !v_is_k ? kvq_combine<64, 64> : nullptr;
}
