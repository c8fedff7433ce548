// decode kernels, K in oscar2 and V at 4 bits
#include "../kvq-decode-shapes.cuh"

kvq_decode_entry kvq_find_decode_54(int dk, int dv, bool v_is_k) {
    return kvq_decode_mixed<5, 4>(dk, dv, v_is_k);
}
