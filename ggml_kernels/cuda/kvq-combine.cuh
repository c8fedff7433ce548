// Joins the partial results along the context, adds the sinks, undoes the rotation of V and writes the output.
#pragma once

#include "kvq-fattn.cuh"

// One block per query row: DV/4 threads a partial result, blockDim.y partial results at once.
template <int DV, int NV>
static __global__ void __launch_bounds__(1024) kvq_combine(const __grid_constant__ kvq_fattn_args a) {
    const int64_t row = blockIdx.x;                       // (seq*n_tok + tok)*n_head + head
    const int head = int(row % a.n_head);
    const int t = threadIdx.x, y = threadIdx.y, tid = y*blockDim.x + t, n_threads = blockDim.x*blockDim.y;
    const int n_warps = (n_threads + 31)/32;

    extern __shared__ __align__(16) char smem[];
    float * weight = (float *) smem;                      // [n_part]
    float * sums   = weight + ((a.n_part + 3) & ~3);      // [blockDim.y][DV]
    __shared__ float red[2][32];

    kvq_pdl_wait();
    kvq_pdl_launch();
    const float2 * meta = a.meta + row*a.n_part;
    const float sink = a.sinks ? a.sinks[head]*KVQ_LOG2E : KVQ_NO_MAX;

    // the first partial results and this thread's maximum are on their way before the weights are known
    const float * part = a.part + row*a.n_part*DV + 4*t;
    constexpr int EARLY = 4;
    float4 early[EARLY];
#pragma unroll
    for (int j = 0; j < EARLY; ++j) {
        const int i = y + j*int(blockDim.y);
        early[j] = i < a.n_part ? *(const float4 *) (part + int64_t(i)*DV) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    const float2 mine = tid < a.n_part ? meta[tid] : make_float2(KVQ_NO_MAX, 0.0f);
    float top = fmaxf(sink, mine.x);
    for (int i = tid + n_threads; i < a.n_part; i += n_threads) {
        top = fmaxf(top, meta[i].x);
    }
#pragma unroll
    for (int h = 16; h > 0; h /= 2) {
        top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, h));
    }
    if ((tid & 31) == 0) {
        red[0][tid/32] = top;
    }
    __syncthreads();
    top = (tid & 31) < n_warps ? red[0][tid & 31] : KVQ_NO_MAX;
#pragma unroll
    for (int h = 16; h > 0; h /= 2) {
        top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, h));
    }
    float sum = 0.0f;
    for (int i = tid; i < a.n_part; i += n_threads) {
        const float2 ml = i == tid ? mine : meta[i];
        const float w = exp2f(ml.x - top);
        weight[i] = w;
        sum = fmaf(w, ml.y, sum);
    }
#pragma unroll
    for (int h = 16; h > 0; h /= 2) {
        sum += __shfl_xor_sync(0xFFFFFFFFu, sum, h);
    }
    if ((tid & 31) == 0) {
        red[1][tid/32] = sum;
    }
    __syncthreads();
    sum = (tid & 31) < n_warps ? red[1][tid & 31] : 0.0f;
#pragma unroll
    for (int h = 16; h > 0; h /= 2) {
        sum += __shfl_xor_sync(0xFFFFFFFFu, sum, h);
    }
    sum += a.sinks ? exp2f(sink - top) : 0.0f;
    const float total = sum > 0.0f ? 1.0f/sum : 0.0f;     // a row that sees nothing is zero

    float4 acc = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    auto add = [&](const float4 p, const float w) {
        acc.x = fmaf(w, p.x, acc.x);
        acc.y = fmaf(w, p.y, acc.y);
        acc.z = fmaf(w, p.z, acc.z);
        acc.w = fmaf(w, p.w, acc.w);
    };
#pragma unroll
    for (int j = 0; j < EARLY; ++j) {
        const int i = y + j*int(blockDim.y);
        if (i < a.n_part) {
            add(early[j], weight[i]);
        }
    }
#pragma unroll 4
    for (int i = y + EARLY*int(blockDim.y); i < a.n_part; i += blockDim.y) {
        add(*(const float4 *) (part + int64_t(i)*DV), weight[i]);
    }
    acc.x *= total;
    acc.y *= total;
    acc.z *= total;
    acc.w *= total;
    *(float4 *) (sums + y*DV + 4*t) = acc;
    // halve the rows of sums until one is left
    for (int rows = blockDim.y; rows > 1; ) {
        const int half = (rows + 1)/2;
        __syncthreads();
        for (int i = tid; i < (rows - half)*DV; i += n_threads) {
            sums[i] += sums[half*DV + i];
        }
        rows = half;
    }
    __syncthreads();

    const int lane = tid & 31;
    float * out = a.dst + row*DV;
    constexpr int R = kvq_hadamard<NV>::regs;
    const kvq_operand & vo = a.v_is_k ? a.k : a.v;
    if (vo.store <= KVQ_STORE_TURBO4) {
        for (int b = tid/32; b < DV/NV; b += n_warps) {
            float x[R];
#pragma unroll
            for (int j = 0; j < R; ++j) {
                x[j] = j*32 + lane < NV ? sums[b*NV + j*32 + lane] : 0.0f;
            }
            kvq_hadamard_warp<NV, true>(x, sums + b*NV, lane);
            kvq_apply_signs<NV>(x, lane);
#pragma unroll
            for (int j = 0; j < R; ++j) {
                if (j*32 + lane < NV) {
                    out[b*NV + j*32 + lane] = x[j]*rsqrtf(float(NV));
                }
            }
        }
    } else {
        for (int i = tid; i < DV; i += n_threads) {
            out[i] = sums[i];
        }
    }
}
