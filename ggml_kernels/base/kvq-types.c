// Which types are ours, and which member of a family serves a head size.
#include "kvq.h"

#include <string.h>

int kvq_code(enum ggml_type type) {
    switch ((int) type) {
#define CASE(E, F, NAME, FAMILY, CODE, N, BYTES) case GGML_TYPE_##E: return CODE;
        KVQ_FOR_EACH_CACHE_TYPE(CASE)
#undef CASE
        default: return 0;
    }
}

bool kvq_is_cache_type(enum ggml_type type) {
    return kvq_code(type) != 0;
}

int kvq_bits(enum ggml_type type) {
    return kvq_code(type) == KVQ_TIERED ? 0 : kvq_code(type);
}

bool kvq_is_window_type(enum ggml_type type) {
    switch ((int) type) {
#define CASE(E, F, NAME, N, BYTES) case GGML_TYPE_##E:
        KVQ_FOR_EACH_WINDOW_TYPE(CASE)
#undef CASE
            return true;
        default: return false;
    }
}

enum ggml_type kvq_window_type(enum ggml_type stored) {
#define CASE(E, F, NAME, N, BYTES) if (kvq_bits(stored) && ggml_blck_size(stored) == N) return GGML_TYPE_##E;
    KVQ_FOR_EACH_WINDOW_TYPE(CASE)
#undef CASE
    return GGML_TYPE_F16;
}

static enum ggml_type member(int code, int n) {
#define CASE(E, F, NAME, FAMILY, CODE, N, BYTES) if (code == CODE && n == N) return GGML_TYPE_##E;
    KVQ_FOR_EACH_CACHE_TYPE(CASE)
#undef CASE
    return GGML_TYPE_COUNT;
}

enum ggml_type kvq_type_for_head(enum ggml_type type, int64_t head_dim) {
    const int code = kvq_code(type);
    if (code == 0) {
        return type;
    }
#define TRY(N) if (head_dim > 0 && head_dim % N == 0) return member(code, N);
    KVQ_FOR_EACH_BLOCK(TRY)
#undef TRY
    return GGML_TYPE_COUNT;
}

int kvq_block_for_head(enum ggml_type type, int64_t head_dim) {
    const enum ggml_type member_type = kvq_type_for_head(type, head_dim);
    return member_type != GGML_TYPE_COUNT ? (int) ggml_blck_size(member_type) : 64;
}

enum ggml_type kvq_value_type(enum ggml_type type) {
    return kvq_code(type) == KVQ_TIERED ? member(2, (int) ggml_blck_size(type)) : type;
}

enum ggml_type kvq_type_from_name(const char * name) {
#define CASE(E, NAME, CODE) if (strcmp(name, NAME) == 0) return GGML_TYPE_##E;
    KVQ_FOR_EACH_FAMILY(CASE)
#undef CASE
    return GGML_TYPE_COUNT;
}

const char * kvq_family_name(enum ggml_type type) {
    switch (kvq_code(type)) {
#define CASE(E, NAME, CODE) case CODE: return NAME;
        KVQ_FOR_EACH_FAMILY(CASE)
#undef CASE
        default: return ggml_type_name(type);
    }
}
