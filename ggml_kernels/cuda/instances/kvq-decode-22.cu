// decode kernels, K at 2 bits and V at 2 bits
#include "../kvq-decode-shapes.cuh"

kvq_decode_entry kvq_find_decode_22(int dk, int dv, bool v_is_k) {
    return kvq_decode_all<2, 2>(dk, dv, v_is_k);
}
