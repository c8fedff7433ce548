// prefill kernels, head size 512 of K
#include "../kvq-prefill-shapes.cuh"

kvq_prefill_entry kvq_find_prefill_512(int dv, bool v_is_k, int index) {
    if (dv == 512 && !v_is_k) {
        switch (index) {
            case 0: return kvq_prefill_make<512, 512, 256, 128, 128, 4, 1, 16>();
            case KVQ_PREFILL_BIAS: return kvq_prefill_make<512, 512, 256, 128, 128, 2, 1, 16, 512>();
        }
    }
    return {};
}

kvq_fattn_kernel kvq_find_combine_512(int dv, bool v_is_k) {
    return dv == 512 && !v_is_k ? kvq_combine<512, 128> : nullptr;
}
