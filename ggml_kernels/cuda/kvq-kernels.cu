// Look-up of the compiled attention kernels; instances/ holds one file per entry.
#include "kvq-launch.cuh"

#define KVQ_FOR_EACH_PAIR(X) X(2, 2) X(2, 3) X(2, 4) X(3, 2) X(3, 3) X(3, 4) X(4, 2) X(4, 3) X(4, 4) X(5, 2) X(5, 3) X(5, 4)
#define KVQ_FOR_EACH_HEAD(X) X(64) X(80) X(96) X(112) X(128) X(192) X(256) X(512) X(576)

#define KVQ_DECLARE(K, V) kvq_decode_entry kvq_find_decode_##K##V(int dk, int dv, bool v_is_k);
KVQ_FOR_EACH_PAIR(KVQ_DECLARE)
#undef KVQ_DECLARE
#define KVQ_DECLARE(D) kvq_prefill_entry kvq_find_prefill_##D(int dv, bool v_is_k, int index); kvq_fattn_kernel kvq_find_combine_##D(int dv, bool v_is_k);
KVQ_FOR_EACH_HEAD(KVQ_DECLARE)
#undef KVQ_DECLARE

kvq_decode_entry kvq_find_decode(const int k_bits, const int v_bits, const int dk, const int dv, const bool v_is_k) {
#define KVQ_TRY(K, V) if (k_bits == K && v_bits == V) { return kvq_find_decode_##K##V(dk, dv, v_is_k); }
    KVQ_FOR_EACH_PAIR(KVQ_TRY)
#undef KVQ_TRY
    return {};
}

kvq_prefill_entry kvq_find_prefill(const int dk, const int dv, const bool v_is_k, const int index) {
#define KVQ_TRY(D) if (dk == D) { return kvq_find_prefill_##D(dv, v_is_k, index); }
    KVQ_FOR_EACH_HEAD(KVQ_TRY)
#undef KVQ_TRY
    return {};
}

kvq_fattn_kernel kvq_find_combine(const int dv, const bool v_is_k) {
#define KVQ_TRY(D) if (kvq_fattn_kernel k = kvq_find_combine_##D(dv, v_is_k)) { return k; }
    KVQ_FOR_EACH_HEAD(KVQ_TRY)
#undef KVQ_TRY
    return nullptr;
}

#ifdef KVQ_HOPPER
kvq_prefill_entry kvq_find_compiled_hopper(int d, int bias_pairs);
kvq_prefill_entry kvq_find_hopper(const int d, const int bias_pairs) { return kvq_find_compiled_hopper(d, bias_pairs); }
#else
kvq_prefill_entry kvq_find_hopper(const int, const int) { return {}; }
#endif
