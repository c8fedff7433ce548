// Cache write (SET_ROWS), copies and GET_ROWS of the cache types, one warp per quantisation block.
#include "kvq-write.cuh"
#include "kvq-rotary.cuh"

#define KVQ_ROWS_WARPS 4

template <int BITS, int N, typename T>
static __global__ void __launch_bounds__(32*KVQ_ROWS_WARPS) kvq_write_rows(const __grid_constant__ kvq_rows_args a) {
    __shared__ float   buf[KVQ_ROWS_WARPS][N];
    __shared__ uint8_t codes[KVQ_ROWS_WARPS][N];
    const uint32_t i = blockIdx.x*KVQ_ROWS_WARPS + threadIdx.y;
    kvq_pdl_wait();
    kvq_pdl_launch();
    if (i < a.n_blocks) {
        uint32_t at[4];
        kvq_split_index(a, i, at);
        float x[kvq_hadamard<N>::regs];
        kvq_load_block<N, T>(a, at, x, threadIdx.x);
        kvq_write_block<BITS, N>(a, i, at, x, buf[threadIdx.y], codes[threadIdx.y], threadIdx.x);
    }
}

// K and V of one layer, and their rows of an f16 window, in one launch: f32 scatters in blocks of one size. With ROTARY, rows of a part come from the turn of
// that number, and turns with an output of their own have a warp for each of its rows.
struct kvq_rows_set {
    kvq_rows_args part[KVQ_ROWS_TOGETHER];
    int           turn_of[KVQ_ROWS_TOGETHER];      // -1: rows are as they are
    kvq_rotary    turn[KVQ_ROTARIES];
    uint32_t      turn_rows[KVQ_ROTARIES];
};

template <int N, bool ROTARY>
static __global__ void __launch_bounds__(32*KVQ_ROWS_WARPS) kvq_write_together(const __grid_constant__ kvq_rows_set set) {
    __shared__ float   all_buf[KVQ_ROWS_WARPS][N];
    __shared__ uint8_t all_codes[KVQ_ROWS_WARPS][N];
    float   * buf   = all_buf[threadIdx.y];
    uint8_t * codes = all_codes[threadIdx.y];
    const int lane = threadIdx.x;
    uint32_t i = blockIdx.x*KVQ_ROWS_WARPS + threadIdx.y;
    int which = 0;
    while (which < KVQ_ROWS_TOGETHER && i >= set.part[which].n_blocks) {
        i -= set.part[which++].n_blocks;
    }
    if (which == KVQ_ROWS_TOGETHER) {
        if (ROTARY) {
#pragma unroll
            for (int t = 0; t < KVQ_ROTARIES; ++t) {
                if (i < set.turn_rows[t]) {
                    kvq_rotary_row(set.turn[t], int(i), lane);
                    return;
                }
                i -= set.turn_rows[t];
            }
        }
        kvq_pdl_wait();
        kvq_pdl_launch();
        return;
    }
    const kvq_rows_args & a = set.part[which];
    uint32_t at[4];
    kvq_split_index(a, i, at);
    float x[kvq_hadamard<N>::regs];
    if (ROTARY && set.turn_of[which] >= 0) {
        const kvq_rotary & t = set.turn[set.turn_of[which]];
        const int blocks = t.d/N, head = at[0]/blocks, begin = (at[0] - head*blocks)*N;
        kvq_rotary_block<N> turned;
        turned.prepare(t, head, at[1], begin, lane);
        kvq_pdl_wait();
        kvq_pdl_launch();
        turned.load(t, begin, x, lane);
    } else {
        kvq_pdl_wait();
        kvq_pdl_launch();
        kvq_load_block<N, float>(a, at, x, lane);
    }
    kvq_write_part<N>(a, i, at, x, buf, codes, lane);
}

// blocks -> float rows: gathered from the rows in index, or copied in element order
template <int BITS, int N, typename T>
static __global__ void __launch_bounds__(32*KVQ_ROWS_WARPS) kvq_read_rows(const __grid_constant__ kvq_rows_args a) {
    __shared__ float buf[KVQ_ROWS_WARPS][N];
    const int lane = threadIdx.x, warp = threadIdx.y;
    const uint32_t i = blockIdx.x*KVQ_ROWS_WARPS + warp;
    kvq_pdl_wait();
    kvq_pdl_launch();
    if (i >= a.n_blocks) {
        return;
    }
    uint32_t at[4];
    kvq_split_index(a, i, at);
    constexpr int BYTES = kvq_row_bytes<BITS, N>;
    const int64_t row = a.index ? kvq_row_index(a, at) : at[1];
    const char * src = a.src + row*a.nb_src[1] + at[2]*a.nb_src[2] + at[3]*a.nb_src[3] + at[0]*BYTES;
    if (!a.index) {
        kvq_split_other(a, i, at);
    }
    char * dst = a.dst + int64_t(at[0])*N*a.nb_dst[0] + at[1]*a.nb_dst[1] + at[2]*a.nb_dst[2] + at[3]*a.nb_dst[3];
    float x[kvq_hadamard<N>::regs];
    if constexpr (BITS == KVQ_ROWS_TURBO_F16) {
        kvq_read_window_warp<N>((const __half *) src, x, buf[warp], lane);
    } else if constexpr (BITS == KVQ_TIERS) {
        kvq_dequantise_tiers_warp<N>((const uint8_t *) src, x, lane);
    } else {
        kvq_dequantise_warp<BITS, N>((const uint8_t *) src, x, buf[warp], lane);
    }
#pragma unroll
    for (int r = 0; r < kvq_hadamard<N>::regs; ++r) {
        if (r*32 + lane < N) {
            kvq_store_value(dst + (r*32 + lane)*a.nb_dst[0], x[r], (const T *) nullptr);
        }
    }
}

// blocks of one type between two strided tensors of the same shape, 16 bits a thread
static __global__ void kvq_copy_blocks(const __grid_constant__ kvq_rows_args a, const int halves_row, const int64_t n) {
    kvq_pdl_wait();
    kvq_pdl_launch();
    for (int64_t i = int64_t(blockIdx.x)*blockDim.x + threadIdx.x; i < n; i += int64_t(gridDim.x)*blockDim.x) {
        uint32_t row = uint32_t(i/halves_row);
        const int64_t h = 2*(i - int64_t(row)*halves_row);
        const uint32_t i1 = row % a.ne[0]; row /= a.ne[0];
        const uint32_t i2 = row % a.ne[1], i3 = row/a.ne[1];
        *(uint16_t *) (a.dst + i1*a.nb_dst[1] + i2*a.nb_dst[2] + i3*a.nb_dst[3] + h) =
            *(const uint16_t *) (a.src + i1*a.nb_src[1] + i2*a.nb_src[2] + i3*a.nb_src[3] + h);
    }
}

typedef void (* kvq_rows_kernel)(const kvq_rows_args);

static kvq_rows_kernel kvq_find_write(const ggml_type type, const ggml_type from) {
    switch ((int) type) {
#define KVQ_CASE_WRITE(E, F, NAME, FAMILY, BITS, N, BYTES) case GGML_TYPE_##E: return from == GGML_TYPE_F16 ? kvq_write_rows<BITS, N, __half> : kvq_write_rows<BITS, N, float>;
        KVQ_FOR_EACH_TURBO_TYPE(KVQ_CASE_WRITE)
#define KVQ_CASE_WRITE_TIERS(E, F, NAME, FAMILY, CODE, N, BYTES) KVQ_CASE_WRITE(E, F, NAME, FAMILY, KVQ_TIERS, N, BYTES)
        KVQ_FOR_EACH_TIERED_TYPE(KVQ_CASE_WRITE_TIERS)
#define KVQ_CASE_WRITE_WINDOW(E, F, NAME, N, BYTES) KVQ_CASE_WRITE(E, F, NAME, , KVQ_ROWS_TURBO_F16, N, BYTES)
        KVQ_FOR_EACH_WINDOW_TYPE(KVQ_CASE_WRITE_WINDOW)
        default: GGML_ABORT("not a cache type");
    }
}

static kvq_rows_kernel kvq_find_read(const ggml_type type, const ggml_type to) {
    switch ((int) type) {
#define KVQ_CASE_READ(E, F, NAME, FAMILY, BITS, N, BYTES) case GGML_TYPE_##E: return to == GGML_TYPE_F16 ? kvq_read_rows<BITS, N, __half> : kvq_read_rows<BITS, N, float>;
        KVQ_FOR_EACH_TURBO_TYPE(KVQ_CASE_READ)
#define KVQ_CASE_READ_TIERS(E, F, NAME, FAMILY, CODE, N, BYTES) KVQ_CASE_READ(E, F, NAME, FAMILY, KVQ_TIERS, N, BYTES)
        KVQ_FOR_EACH_TIERED_TYPE(KVQ_CASE_READ_TIERS)
#define KVQ_CASE_READ_WINDOW(E, F, NAME, N, BYTES) KVQ_CASE_READ(E, F, NAME, , KVQ_ROWS_TURBO_F16, N, BYTES)
        KVQ_FOR_EACH_WINDOW_TYPE(KVQ_CASE_READ_WINDOW)
        default: GGML_ABORT("not a cache type");
    }
}

static dim3 kvq_rows_grid(const uint32_t n_blocks) {
    return dim3((n_blocks + KVQ_ROWS_WARPS - 1)/KVQ_ROWS_WARPS, 1, 1);
}

static void kvq_launch_rows(ggml_backend_cuda_context & ctx, const kvq_rows_kernel kernel, const kvq_rows_args & a) {
    if (a.n_blocks > 0) {
        ggml_cuda_kernel_launch(kernel, ggml_cuda_kernel_launch_params(kvq_rows_grid(a.n_blocks), dim3(32, KVQ_ROWS_WARPS, 1), size_t(0), ctx.stream()), a);
    }
}

void kvq_cuda_set_rows(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    kvq_launch_rows(ctx, kvq_find_write(dst->type, dst->src[0]->type), kvq_set_rows_args(dst, ggml_blck_size(dst->type)));
}

bool kvq_cuda_rows_fit(const ggml_tensor * first, const ggml_tensor * dst) {
    const int64_t n = ggml_blck_size(first->type);
    return dst->src[0]->type == GGML_TYPE_F32 && (dst->src[1]->type == GGML_TYPE_I64 || dst->src[1]->type == GGML_TYPE_I32) &&
        (dst->type == GGML_TYPE_F16 ? dst->nb[0] == sizeof(ggml_fp16_t) && dst->ne[0] % n == 0 : ggml_blck_size(dst->type) == n);
}

void kvq_cuda_set_rows_together(ggml_backend_cuda_context & ctx, const ggml_tensor * const * dst, const int n, const kvq_rotary_nodes * turns, const int n_turns) {
    GGML_ASSERT(n <= KVQ_ROWS_TOGETHER && n_turns <= KVQ_ROTARIES);
    kvq_rows_set set = {};
    uint32_t n_warps = 0;
    for (int i = 0; i < n; ++i) {
        set.part[i] = kvq_set_rows_args(dst[i], ggml_blck_size(dst[0]->type));
        set.turn_of[i] = -1;
        for (int t = 0; t < n_turns; ++t) {
            if (kvq_is_all_of(dst[i]->src[0], turns[t].rope)) {
                set.turn_of[i] = t;
            }
        }
        n_warps += set.part[i].n_blocks;
    }
    for (int t = 0; t < n_turns; ++t) {
        set.turn[t] = turns[t].turn;
        set.turn_rows[t] = set.turn[t].y ? uint32_t(set.turn[t].n_head*set.turn[t].n_tokens) : 0;
        n_warps += set.turn_rows[t];
    }
    if (n_warps == 0) {
        return;
    }
    void (* kernel)(const kvq_rows_set) = nullptr;
    switch (ggml_blck_size(dst[0]->type)) {
#define KVQ_CASE_TOGETHER(N) case N: kernel = n_turns ? kvq_write_together<N, true> : kvq_write_together<N, false>; break;
        KVQ_FOR_EACH_BLOCK(KVQ_CASE_TOGETHER)
        default: GGML_ABORT("not a block of the cache types");
    }
    ggml_cuda_kernel_launch(kernel, ggml_cuda_kernel_launch_params(kvq_rows_grid(n_warps), dim3(32, KVQ_ROWS_WARPS, 1), size_t(0), ctx.stream()), set);
}

void kvq_cuda_get_rows(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    // dst [ne0, ne10, ne11, ne12]: row i10 of plane (i11, i12) comes from row index[i10, i11, i12] of the same plane
    kvq_rows_args a = kvq_rows_of(dst->src[0], dst, dst, ggml_blck_size(dst->src[0]->type));
    kvq_set_index(a, dst->src[1]);
    kvq_launch_rows(ctx, kvq_find_read(dst->src[0]->type, dst->type), a);
}

void kvq_cuda_copy(ggml_backend_cuda_context & ctx, const ggml_tensor * src, ggml_tensor * dst) {
    if (src->type == dst->type) {
        if (ggml_is_contiguous(src) && ggml_is_contiguous(dst)) {
            CUDA_CHECK(cudaMemcpyAsync(dst->data, src->data, ggml_nbytes(src), cudaMemcpyDeviceToDevice, ctx.stream()));
            return;
        }
        const kvq_rows_args a = kvq_rows_of(src, dst, src, ggml_blck_size(src->type));
        const int halves = int(ggml_row_size(src->type, src->ne[0])/2);
        const int64_t n = halves*ggml_nrows(src);
        const int64_t blocks = std::min<int64_t>((n + 255)/256, 1 << 20);
        if (blocks > 0) {
            ggml_cuda_kernel_launch(kvq_copy_blocks, ggml_cuda_kernel_launch_params(dim3(blocks, 1, 1), dim3(256, 1, 1), size_t(0), ctx.stream()), a, halves, n);
        }
    } else if (kvq_is_cache_type(dst->type) || kvq_is_window_type(dst->type)) {
        kvq_launch_rows(ctx, kvq_find_write(dst->type, src->type), kvq_rows_of(src, dst, src, ggml_blck_size(dst->type)));
    } else {
        kvq_launch_rows(ctx, kvq_find_read(src->type, dst->type), kvq_rows_of(src, dst, src, ggml_blck_size(src->type)));
    }
}
