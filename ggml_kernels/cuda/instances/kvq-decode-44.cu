// decode kernels, K at 4 bits and V at 4 bits
#include "../kvq-decode-shapes.cuh"

kvq_decode_entry kvq_find_decode_44(int dk, int dv, bool v_is_k) {
    return kvq_decode_all<4, 4>(dk, dv, v_is_k);
}
