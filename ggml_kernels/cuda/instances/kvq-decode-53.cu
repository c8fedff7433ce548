// decode kernels, K in oscar2 and V at 3 bits
#include "../kvq-decode-shapes.cuh"

kvq_decode_entry kvq_find_decode_53(int dk, int dv, bool v_is_k) {
    return kvq_decode_mixed<5, 3>(dk, dv, v_is_k);
}
