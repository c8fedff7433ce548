// Calibrated transforms of the keys and queries of a few tokens, those of one layer in one launch.
#include "common.cuh"
#include "kvq-fattn.cuh"
#include "kvq-rows-ops.cuh"
#include "kvq-transform.h"

constexpr int KVQ_TRANSFORM_TOKENS = 8;    // larger batches are cuBLAS's
constexpr int KVQ_TRANSFORM_WARPS  = 8;
constexpr int KVQ_TRANSFORM_ROWS   = 2;    // matrix rows of a warp
constexpr int KVQ_TRANSFORM_COLS   = 4;    // columns that it asks for at once

// Sums of 8 values over the lanes of a warp; lane l gets the one of number l/4.
static __device__ __forceinline__ float kvq_warp_sums(float (&v)[8], const int lane) {
#pragma unroll
    for (int n = 4, offset = 16; n > 0; n /= 2, offset /= 2) {
#pragma unroll
        for (int i = 0; i < n; ++i) {
            const float other = __shfl_xor_sync(0xFFFFFFFF, lane & offset ? v[i] : v[i + n], offset);
            v[i] = (lane & offset ? v[i + n] : v[i]) + other;
        }
    }
    v[0] += __shfl_xor_sync(0xFFFFFFFF, v[0], 2);
    return v[0] + __shfl_xor_sync(0xFFFFFFFF, v[0], 1);
}

// NV: vectors of 4 values that a lane holds of a row. Blocks: KV head and rows of its matrix; keys, queries.
template <int NV>
static __global__ void __launch_bounds__(32*KVQ_TRANSFORM_WARPS) kvq_transform(const __grid_constant__ kvq_transform_args a) {
    const kvq_transform_part & p = a.part[blockIdx.y];
    const int groups = gridDim.x/a.n_head_kv, head = blockIdx.x/groups, lane = threadIdx.x;
    const int row = ((blockIdx.x - head*groups)*KVQ_TRANSFORM_WARPS + threadIdx.y)*KVQ_TRANSFORM_ROWS;
    const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float4 mean[NV];
    half2 m[KVQ_TRANSFORM_ROWS][NV][2];
    // matrices and means are constants: they are asked for while the kernels before this one still run
#pragma unroll
    for (int v = 0; v < NV; ++v) {
        const int at = 4*(v*32 + lane);
        mean[v] = p.mean && at < a.d ? *(const float4 *) (p.mean + head*a.d + at) : zero;
#pragma unroll
        for (int r = 0; r < KVQ_TRANSFORM_ROWS; ++r) {
            const uint2 bits = row + r < a.d && at < a.d ? *(const uint2 *) (p.matrix + (int64_t(head)*a.d + row + r)*a.d + at) : make_uint2(0, 0);
            m[r][v][0] = *(const half2 *) &bits.x;
            m[r][v][1] = *(const half2 *) &bits.y;
        }
    }
    kvq_pdl_wait();
    kvq_pdl_launch();
    // all columns of a step are asked for before any result is written: it could be where the next column is read, to the compiler
    for (int first = 0, i = 0, j = 0; j < p.n2; first += KVQ_TRANSFORM_COLS) {
        float4 x[KVQ_TRANSFORM_COLS][NV];
#pragma unroll
        for (int c = 0; c < KVQ_TRANSFORM_COLS; ++c) {
            const char * column = p.x + i*p.nbx1 + (head*p.n2 + j)*p.nbx2;
#pragma unroll
            for (int v = 0; v < NV; ++v) {
                const int at = 4*(v*32 + lane);
                x[c][v] = j < p.n2 && at < a.d ? *(const float4 *) (column + at*sizeof(float)) : zero;
            }
            if (++i == p.n1) {
                i = 0;
                ++j;
            }
        }
        float sum[KVQ_TRANSFORM_COLS*KVQ_TRANSFORM_ROWS] = {};
#pragma unroll
        for (int v = 0; v < NV; ++v) {
#pragma unroll
            for (int r = 0; r < KVQ_TRANSFORM_ROWS; ++r) {
                const float2 lo = __half22float2(m[r][v][0]), hi = __half22float2(m[r][v][1]);
#pragma unroll
                for (int c = 0; c < KVQ_TRANSFORM_COLS; ++c) {
                    sum[c*KVQ_TRANSFORM_ROWS + r] += (x[c][v].x - mean[v].x)*lo.x + (x[c][v].y - mean[v].y)*lo.y + (x[c][v].z - mean[v].z)*hi.x +
                        (x[c][v].w - mean[v].w)*hi.y;
                }
            }
        }
        const float total = kvq_warp_sums(sum, lane);
        const int c = first + lane/4/KVQ_TRANSFORM_ROWS, r = row + lane/4 % KVQ_TRANSFORM_ROWS, c2 = c/p.n1, c1 = c - c2*p.n1;
        if (lane % 4 == 0 && c2 < p.n2 && r < a.d) {
            p.y[r + c1*p.sy1 + (head*p.n2 + c2)*p.sy2] = total;
        }
    }
}

int kvq_cuda_transform(ggml_backend_cuda_context & ctx, const ggml_cgraph * graph, const int i) {
    kvq_transform_args a;
    const int n_done = kvq_find_transform(graph, i, KVQ_TRANSFORM_TOKENS, a);
    if (n_done) {
        constexpr int rows = KVQ_TRANSFORM_WARPS*KVQ_TRANSFORM_ROWS;
        const ggml_cuda_kernel_launch_params launch(dim3(unsigned(a.n_head_kv*((a.d + rows - 1)/rows)), 2, 1), dim3(32, KVQ_TRANSFORM_WARPS, 1), size_t(0), ctx.stream());
        switch ((a.d + 127)/128) {
            case 1:  ggml_cuda_kernel_launch(kvq_transform<1>, launch, a); break;
            case 2:  ggml_cuda_kernel_launch(kvq_transform<2>, launch, a); break;
            default: ggml_cuda_kernel_launch(kvq_transform<4>, launch, a); break;
        }
    }
    return n_done;
}
