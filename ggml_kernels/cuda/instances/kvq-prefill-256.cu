// prefill kernels, head size 256 of K
#include "../kvq-prefill-shapes.cuh"

kvq_prefill_entry kvq_find_prefill_256(int dv, bool v_is_k, int index) {
    if (dv == 256 && !v_is_k) {
        switch (index) {
            case 0: return kvq_prefill_make<256, 256, 256, 128, 128, 8, 1, 32>();
            case 1: return kvq_prefill_make<256, 256, 256, 128, 128, 4, 1, 16>();
            case KVQ_PREFILL_BIAS: return kvq_prefill_make<256, 256, 256, 128, 128, 4, 1, 16, 256>();
        }
    }
    return {};
}

kvq_fattn_kernel kvq_find_combine_256(int dv, bool v_is_k) {
    return dv == 256 && !v_is_k ? kvq_combine<256, 128> : nullptr;
}
