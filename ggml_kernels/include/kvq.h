// C interface of the KV-cache types, used by the call sites in patches/ and by the kernels.
#pragma once

#include "ggml.h"
#include "kvq-types.h"

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Product of a calibrated matrix with keys or queries: op_params[KVQ_PRODUCT_PARAM] of a MUL_MAT, so that a backend can run those
// of a layer together. Without a mark it is a product like any other.
enum { KVQ_PRODUCT_PARAM = 15, KVQ_PRODUCT_KEYS = 1, KVQ_PRODUCT_QUERIES = 2 };

// Tokens of a batch whose norm, RoPE and transforms a backend may join; more fill a GPU in launches of their own.
enum { KVQ_ROTARY_TOKENS = 8 };

// ---- formats (ggml-base) ----

// true for turbo2, turbo3, turbo4 and oscar2 of every block size
GGML_API bool kvq_is_cache_type(enum ggml_type type);

// how a cache type codes a value: bits per code of the turbo types, KVQ_TIERED for oscar2, 0 for other types
GGML_API int kvq_code(enum ggml_type type);

// bits per code of a turbo type, 0 for other types
GGML_API int kvq_bits(enum ggml_type type);

// The member of type's family whose block divides head_dim, in the order of formats.toml; type itself when it is not
// ours; GGML_TYPE_COUNT when no block divides.
GGML_API enum ggml_type kvq_type_for_head(enum ggml_type type, int64_t head_dim);

// Values per block of type at that head size; the smallest block of the family when none divides, so that
// head_dim % block tells.
GGML_API int kvq_block_for_head(enum ggml_type type, int64_t head_dim);

// true for turbo_f16 of every block size, the types of f16 windows beside a cache
GGML_API bool kvq_is_window_type(enum ggml_type type);

// The type of the window beside a cache tensor of this type: the same vectors in f16, for turbo types in their rotated domain
// (turbo_f16 of the same block), for others plain f16.
GGML_API enum ggml_type kvq_window_type(enum ggml_type stored);

// The type of the values in a cache whose type was named for both: turbo2 for oscar2, whose tiers suit keys alone (the
// spectrum of values is nearly flat).
GGML_API enum ggml_type kvq_value_type(enum ggml_type type);

// the family's type for "turbo3"; GGML_TYPE_COUNT for an unknown name
GGML_API enum ggml_type kvq_type_from_name(const char * name);

// "turbo3" for every member of the family; ggml_type_name(type) for other types
GGML_API const char * kvq_family_name(enum ggml_type type);

// Scalar reference of one row of k values (k a multiple of the block). Bit-exact with pykvq.codecs.turbo and .oscar2.
GGML_API void kvq_quantize_row_ref  (enum ggml_type type, const float * x, void  * y, int64_t k);
GGML_API void kvq_dequantize_row_ref(enum ggml_type type, const void  * x, float * y, int64_t k);

// y = H (signs * x) for one block of n values, unnormalised (divide by sqrt(n) for the orthonormal rotation), and its
// inverse up to the factor n: x = signs * (H^T y). n: a block of formats.toml, or a quarter or half of one.
GGML_API void kvq_rotate_ref  (const float * x, float * y, int n);
GGML_API void kvq_unrotate_ref(const float * y, float * x, int n);

// levels and scale of a turbo type, for kernels that unpack by themselves
GGML_API const int8_t * kvq_levels(enum ggml_type type);   // [1 << bits], ascending
GGML_API float          kvq_scale (enum ggml_type type);   // int8 units per sigma

#define KVQ_DECLARE_CACHE_TYPE(E, F, NAME, FAMILY, CODE, N, BYTES) \
    GGML_API void kvq_quantize_row_##F##_ref(const float * x, void * y, int64_t k); \
    GGML_API void kvq_dequantize_row_##F    (const void * x, float * y, int64_t k);
KVQ_FOR_EACH_CACHE_TYPE(KVQ_DECLARE_CACHE_TYPE)

// f16 window of a turbo type: y = H (signs * x)/sqrt(n) as n f16 values
#define KVQ_DECLARE_WINDOW_TYPE(E, F, NAME, N, BYTES) \
    GGML_API void kvq_quantize_row_##F##_ref(const float * x, void * y, int64_t k); \
    GGML_API void kvq_dequantize_row_##F    (const void * x, float * y, int64_t k);
KVQ_FOR_EACH_WINDOW_TYPE(KVQ_DECLARE_WINDOW_TYPE)

// rotated int8 query: {float d; int8_t qs[n]}, orthonormal rotation, absmax / 127
#define KVQ_DECLARE_ACTIVATION_TYPE(E, F, NAME, N, BYTES) \
    GGML_API void kvq_quantize_row_##F##_ref(const float * x, void * y, int64_t k); \
    GGML_API void kvq_dequantize_row_##F    (const void * x, float * y, int64_t k);
KVQ_FOR_EACH_ACTIVATION_TYPE(KVQ_DECLARE_ACTIVATION_TYPE)

// ---- CPU backend (ggml-cpu) ----

#define KVQ_DECLARE_CPU(E, F, NAME, FAMILY, CODE, N, BYTES) \
    void kvq_cpu_quantize_row_##F(const float * x, void * y, int64_t k); \
    void kvq_cpu_vec_dot_##F(int n, float * s, size_t bs, const void * x, size_t bx, const void * y, size_t by, int nrc);
KVQ_FOR_EACH_CACHE_TYPE(KVQ_DECLARE_CPU)

#define KVQ_DECLARE_CPU_INTERNAL(E, F, NAME, N, BYTES) \
    void kvq_cpu_quantize_row_##F(const float * x, void * y, int64_t k);
KVQ_FOR_EACH_ACTIVATION_TYPE(KVQ_DECLARE_CPU_INTERNAL)
KVQ_FOR_EACH_WINDOW_TYPE(KVQ_DECLARE_CPU_INTERNAL)

struct ggml_compute_params;

// true when the attention operation reads one of our types, so that kvq_cpu_flash_attn must run it
bool   kvq_cpu_owns_flash_attn(const struct ggml_tensor * dst);
size_t kvq_cpu_flash_attn_work_size(const struct ggml_tensor * dst, int n_threads);
void   kvq_cpu_flash_attn(const struct ggml_compute_params * params, struct ggml_tensor * dst);

// This thread's share of node i and later ones, when they are the calibrated transforms of a layer: the number of nodes after i
// that are done, 0 for none.
struct ggml_cgraph;
int    kvq_cpu_transform(const struct ggml_compute_params * params, const struct ggml_cgraph * graph, int i);

// ---- trait tables: designated initialisers for type_traits[] and type_traits_cpu[] ----

#define KVQ_TRAIT_CACHE(E, F, NAME, FAMILY, CODE, N, BYTES) \
    [GGML_TYPE_##E] = { .type_name = NAME, .blck_size = N, .type_size = BYTES, .is_quantized = true, \
        .to_float = kvq_dequantize_row_##F, .from_float_ref = kvq_quantize_row_##F##_ref },
#define KVQ_TRAIT_INTERNAL(E, F, NAME, N, BYTES) \
    [GGML_TYPE_##E] = { .type_name = NAME, .blck_size = N, .type_size = BYTES, .is_quantized = true, \
        .to_float = kvq_dequantize_row_##F, .from_float_ref = kvq_quantize_row_##F##_ref },
#define KVQ_TYPE_TRAITS KVQ_FOR_EACH_CACHE_TYPE(KVQ_TRAIT_CACHE) KVQ_FOR_EACH_WINDOW_TYPE(KVQ_TRAIT_INTERNAL) \
    KVQ_FOR_EACH_ACTIVATION_TYPE(KVQ_TRAIT_INTERNAL)

#define KVQ_TRAIT_CPU_TURBO(E, F, NAME, FAMILY, CODE, N, BYTES) \
    [GGML_TYPE_##E] = { .from_float = kvq_cpu_quantize_row_##F, .vec_dot = kvq_cpu_vec_dot_##F, \
        .vec_dot_type = GGML_TYPE_KVQ_Q8_##N, .nrows = 1 },
#define KVQ_TRAIT_CPU_TIERED(E, F, NAME, FAMILY, CODE, N, BYTES) \
    [GGML_TYPE_##E] = { .from_float = kvq_cpu_quantize_row_##F, .vec_dot = kvq_cpu_vec_dot_##F, \
        .vec_dot_type = GGML_TYPE_F32, .nrows = 1 },
#define KVQ_TRAIT_CPU_INTERNAL(E, F, NAME, N, BYTES) \
    [GGML_TYPE_##E] = { .from_float = kvq_cpu_quantize_row_##F },
#define KVQ_TYPE_TRAITS_CPU KVQ_FOR_EACH_TURBO_TYPE(KVQ_TRAIT_CPU_TURBO) KVQ_FOR_EACH_TIERED_TYPE(KVQ_TRAIT_CPU_TIERED) \
    KVQ_FOR_EACH_WINDOW_TYPE(KVQ_TRAIT_CPU_INTERNAL) KVQ_FOR_EACH_ACTIVATION_TYPE(KVQ_TRAIT_CPU_INTERNAL)

// case labels of every cache type, for switches over ggml_type
#define KVQ_CASE(E, F, NAME, FAMILY, CODE, N, BYTES) case GGML_TYPE_##E:
#define KVQ_CACHE_TYPE_CASES KVQ_FOR_EACH_CACHE_TYPE(KVQ_CASE)
#define KVQ_FAMILY_ENTRY(E, NAME, CODE) GGML_TYPE_##E,
#define KVQ_CACHE_TYPE_LIST KVQ_FOR_EACH_FAMILY(KVQ_FAMILY_ENTRY)

#ifdef __cplusplus
}
#endif
