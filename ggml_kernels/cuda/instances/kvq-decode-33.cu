// decode kernels, K at 3 bits and V at 3 bits
#include "../kvq-decode-shapes.cuh"

kvq_decode_entry kvq_find_decode_33(int dk, int dv, bool v_is_k) {
    return kvq_decode_all<3, 3>(dk, dv, v_is_k);
}
