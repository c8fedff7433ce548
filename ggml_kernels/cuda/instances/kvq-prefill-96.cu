// prefill kernels, head size 96 of K
#include "../kvq-prefill-shapes.cuh"

kvq_prefill_entry kvq_find_prefill_96(int dv, bool v_is_k, int index) {
    if (dv == 96 && !v_is_k) {
        switch (index) {
            case 0: return kvq_prefill_make<96, 96, 96, 96, 96, 8, 2, 64>();
            case 1: return kvq_prefill_make<96, 96, 96, 96, 96, 8, 1, 32>();
            case 2: return kvq_prefill_make<96, 96, 96, 96, 96,  4, 1, 32>();
            case KVQ_PREFILL_BIAS:     return kvq_prefill_make<96, 96, 96, 96, 96, 8, 1, 32, 96>();
            case KVQ_PREFILL_BIAS + 1: return kvq_prefill_make<96, 96, 96, 96, 96, 4, 1, 32, 96>();
        }
    }
    return {};
}

kvq_fattn_kernel kvq_find_combine_96(int dv, bool v_is_k) {
    return dv == 96 && !v_is_k ? kvq_combine<96, 96> : nullptr;
}
