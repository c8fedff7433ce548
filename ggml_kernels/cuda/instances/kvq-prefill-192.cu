// prefill kernels, head size 192 of K
#include "../kvq-prefill-shapes.cuh"

kvq_prefill_entry kvq_find_prefill_192(int dv, bool v_is_k, int index) {
    if (dv == 128 && !v_is_k) {
        switch (index) {
            case 0: return kvq_prefill_make<192, 128, 128, 64, 128, 8, 1, 32>();
            case 1: return kvq_prefill_make<192, 128, 128, 64, 128, 4, 1, 16>();
            case KVQ_PREFILL_BIAS: return kvq_prefill_make<192, 128, 128, 64, 128, 4, 1, 16, 192>();
        }
    }
    if (dv == 192 && !v_is_k) {
        switch (index) {
            case 0: return kvq_prefill_make<192, 192, 192, 64, 64, 8, 1, 32>();
            case 1: return kvq_prefill_make<192, 192, 192, 64, 64, 4, 1, 16>();
            case KVQ_PREFILL_BIAS: return kvq_prefill_make<192, 192, 192, 64, 64, 4, 1, 16, 192>();
        }
    }
    return {};
}

kvq_fattn_kernel kvq_find_combine_192(int dv, bool v_is_k) {
    return dv == 192 && !v_is_k ? kvq_combine<192, 64> : nullptr;
}
