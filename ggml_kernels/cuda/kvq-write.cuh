// Where a launch that writes the cache finds float rows and puts blocks.
#pragma once

#include "kvq-rows.cuh"
#include "kvq-rows-ops.cuh"

// stand for the bits per code of rows of an f16 window: rotated, and as they are
static constexpr int KVQ_ROWS_TURBO_F16 = 16, KVQ_ROWS_F16 = 17;

template <int BITS, int N> static constexpr int kvq_row_bytes = BITS >= KVQ_ROWS_TURBO_F16 ? 2*N : kvq_block<BITS, N>::bytes;

// Both sides of a copy, or of a row gather or scatter, in the terms of the kernels below. Extents in blocks of N values
// along dimension 0, so that 32-bit numbers hold every index.
struct kvq_rows_args {
    const char * src;
    char       * dst;
    const char * index;            // rows of the table side; null for plain copies
    bool         index64;
    int          bits;             // of the type written, for the kernel that writes K and V at once
    uint32_t n_blocks;
    uint32_t blocks_row;           // blocks per row of the walked side
    uint32_t ne[2];                // its extents 1 and 2
    uint32_t ne_dst[3];            // plain copies: blocks per row and extents 1 and 2 of the other side
    uint32_t ne_index[2];          // extents 1 and 2 of index
    int64_t nb_src[4], nb_dst[4], nb_index[3];
};

// where block number i lies in the order of the walked side: block of the row, then indices 1 to 3
static __device__ __forceinline__ void kvq_split_index(const kvq_rows_args & a, const uint32_t i, uint32_t (&at)[4]) {
    uint32_t row = i/a.blocks_row;
    at[0] = i - row*a.blocks_row;
    const uint32_t r1 = row/a.ne[0];
    at[1] = row - r1*a.ne[0];
    at[3] = r1/a.ne[1];
    at[2] = r1 - at[3]*a.ne[1];
}
// the same for the other side of a plain copy
static __device__ __forceinline__ void kvq_split_other(const kvq_rows_args & a, const uint32_t i, uint32_t (&at)[4]) {
    const uint32_t row = i/a.ne_dst[0];
    at[0] = i - row*a.ne_dst[0];
    const uint32_t r1 = row/a.ne_dst[1];
    at[1] = row - r1*a.ne_dst[1];
    at[3] = r1/a.ne_dst[2];
    at[2] = r1 - at[3]*a.ne_dst[2];
}

static __device__ __forceinline__ int64_t kvq_row_index(const kvq_rows_args & a, const uint32_t (&at)[4]) {
    const char * p = a.index + at[1]*a.nb_index[0] + (a.ne_index[0] == 1 ? 0 : at[2] % a.ne_index[0])*a.nb_index[1] +
        (a.ne_index[1] == 1 ? 0 : at[3] % a.ne_index[1])*a.nb_index[2];
    return a.index64 ? *(const int64_t *) p : int64_t(*(const int32_t *) p);
}

static __device__ __forceinline__ float kvq_load(const char * p, const float *)  { return *(const float *) p; }
static __device__ __forceinline__ float kvq_load(const char * p, const __half *) { return __half2float(*(const __half *) p); }
static __device__ __forceinline__ void kvq_store_value(char * p, const float x, const float *)  { *(float *) p = x; }
static __device__ __forceinline__ void kvq_store_value(char * p, const float x, const __half *) { *(__half *) p = __float2half_rn(x); }

// float rows -> blocks: scattered to the rows in index, or copied in element order; one block
template <int N, typename T>
static __device__ __forceinline__ void kvq_load_block(const kvq_rows_args & a, const uint32_t (&at)[4], float * x, const int lane) {
    const char * src = a.src + int64_t(at[0])*N*a.nb_src[0] + at[1]*a.nb_src[1] + at[2]*a.nb_src[2] + at[3]*a.nb_src[3];
#pragma unroll
    for (int r = 0; r < kvq_hadamard<N>::regs; ++r) {
        x[r] = r*32 + lane < N ? kvq_load(src + (r*32 + lane)*a.nb_src[0], (const T *) nullptr) : 0.0f;
    }
}

template <int BITS, int N>
static __device__ __forceinline__ void kvq_write_block(const kvq_rows_args & a, const uint32_t i, uint32_t (&at)[4], float * x, float * buf, uint8_t * codes, const int lane) {
    constexpr int BYTES = kvq_row_bytes<BITS, N>;
    char * dst;
    if (a.index) {
        dst = a.dst + kvq_row_index(a, at)*a.nb_dst[1] + at[2]*a.nb_dst[2] + at[3]*a.nb_dst[3] + at[0]*BYTES;
    } else {
        kvq_split_other(a, i, at);
        dst = a.dst + at[0]*BYTES + at[1]*a.nb_dst[1] + at[2]*a.nb_dst[2] + at[3]*a.nb_dst[3];
    }
    if constexpr (BITS >= KVQ_ROWS_TURBO_F16) {
        kvq_write_window_warp<BITS == KVQ_ROWS_TURBO_F16, N>(x, (__half *) dst, buf, lane);
    } else if constexpr (BITS == KVQ_TIERS) {
        kvq_quantise_tiers<N>(x, (uint8_t *) dst, buf, codes, lane);
    } else {
        kvq_quantise_warp<BITS, N>(x, (uint8_t *) dst, buf, codes, lane);
    }
}

// the same by the type written
template <int N>
static __device__ __forceinline__ void kvq_write_part(const kvq_rows_args & a, const uint32_t i, uint32_t (&at)[4], float * x, float * buf, uint8_t * codes, const int lane) {
    switch (a.bits) {
        case 2:                  kvq_write_block<2,                  N>(a, i, at, x, buf, codes, lane); break;
        case 3:                  kvq_write_block<3,                  N>(a, i, at, x, buf, codes, lane); break;
        case 4:                  kvq_write_block<4,                  N>(a, i, at, x, buf, codes, lane); break;
        case KVQ_TIERS:          kvq_write_block<KVQ_TIERS,          N>(a, i, at, x, buf, codes, lane); break;
        case KVQ_ROWS_TURBO_F16: kvq_write_block<KVQ_ROWS_TURBO_F16, N>(a, i, at, x, buf, codes, lane); break;
        default:                 kvq_write_block<KVQ_ROWS_F16,       N>(a, i, at, x, buf, codes, lane); break;
    }
}

// ---- arguments ----

static kvq_rows_args kvq_rows_of(const ggml_tensor * src, const ggml_tensor * dst, const ggml_tensor * walked, const int64_t n_per_block) {
    kvq_rows_args a = {};
    GGML_ASSERT(ggml_nelements(walked)/n_per_block < INT_MAX);
    a.src = (const char *) src->data;
    a.dst = (char *) dst->data;
    a.n_blocks   = uint32_t(ggml_nelements(walked)/n_per_block);
    a.blocks_row = uint32_t(walked->ne[0]/n_per_block);
    a.ne[0] = uint32_t(walked->ne[1]);
    a.ne[1] = uint32_t(walked->ne[2]);
    a.ne_dst[0] = uint32_t(dst->ne[0]/n_per_block);
    a.ne_dst[1] = uint32_t(dst->ne[1]);
    a.ne_dst[2] = uint32_t(dst->ne[2]);
    for (int i = 0; i < 4; ++i) {
        a.nb_src[i] = src->nb[i];
        a.nb_dst[i] = dst->nb[i];
    }
    return a;
}

static void kvq_set_index(kvq_rows_args & a, const ggml_tensor * index) {
    a.index   = (const char *) index->data;
    a.index64 = index->type == GGML_TYPE_I64;
    for (int i = 0; i < 3; ++i) {
        a.nb_index[i] = index->nb[i];
    }
    a.ne_index[0] = uint32_t(index->ne[1]);
    a.ne_index[1] = uint32_t(index->ne[2]);
}

// n_per_block: of the type written; the parts of one launch share it, also where that type is plain f16
static kvq_rows_args kvq_set_rows_args(const ggml_tensor * dst, const int64_t n_per_block) {
    kvq_rows_args a = kvq_rows_of(dst->src[0], dst, dst->src[0], n_per_block);
    kvq_set_index(a, dst->src[1]);
    a.bits = kvq_code(dst->type) == KVQ_TIERED ? KVQ_TIERS : kvq_bits(dst->type) ? kvq_bits(dst->type) :
        kvq_is_window_type(dst->type) ? KVQ_ROWS_TURBO_F16 : KVQ_ROWS_F16;
    return a;
}
