// decode kernels, K in oscar2 and V at 2 bits
#include "../kvq-decode-shapes.cuh"

kvq_decode_entry kvq_find_decode_52(int dk, int dv, bool v_is_k) {
    return kvq_decode_all<5, 2>(dk, dv, v_is_k);
}
