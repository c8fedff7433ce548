// Which types are ours, and which member of a family serves a head size.
#include "kvq.h"

#include <string.h>

int kvq_bits(enum ggml_type type) {
    switch ((int) type) {
#define CASE(E, F, NAME, FAMILY, BITS, N, BYTES) case GGML_TYPE_##E: return BITS;
        KVQ_FOR_EACH_CACHE_TYPE(CASE)
#undef CASE
        default: return 0;
    }
}

bool kvq_is_cache_type(enum ggml_type type) {
    return kvq_bits(type) != 0;
}

static enum ggml_type member(int bits, int n) {
#define CASE(E, F, NAME, FAMILY, BITS, N, BYTES) if (bits == BITS && n == N) return GGML_TYPE_##E;
    KVQ_FOR_EACH_CACHE_TYPE(CASE)
#undef CASE
    return GGML_TYPE_COUNT;
}

enum ggml_type kvq_type_for_head(enum ggml_type type, int64_t head_dim) {
    const int bits = kvq_bits(type);
    if (bits == 0) {
        return type;
    }
#define TRY(N) if (head_dim > 0 && head_dim % N == 0) return member(bits, N);
    KVQ_FOR_EACH_BLOCK(TRY)
#undef TRY
    return GGML_TYPE_COUNT;
}

int kvq_block_for_head(enum ggml_type type, int64_t head_dim) {
    const enum ggml_type member_type = kvq_type_for_head(type, head_dim);
    return member_type != GGML_TYPE_COUNT ? (int) ggml_blck_size(member_type) : 64;
}

enum ggml_type kvq_type_from_name(const char * name) {
#define CASE(E, NAME, BITS) if (strcmp(name, NAME) == 0) return GGML_TYPE_##E;
    KVQ_FOR_EACH_FAMILY(CASE)
#undef CASE
    return GGML_TYPE_COUNT;
}

const char * kvq_family_name(enum ggml_type type) {
    switch (kvq_bits(type)) {
#define CASE(E, NAME, BITS) case BITS: return NAME;
        KVQ_FOR_EACH_FAMILY(CASE)
#undef CASE
        default: return ggml_type_name(type);
    }
}
