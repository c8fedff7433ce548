// What the project's CUDA host code takes from upstream's common.cuh, on the host machine.
#pragma once

#include "cuda_fp16.h"
#include "ggml-impl.h"

#include <algorithm>
#include <limits.h>

typedef int cudaStream_t;
typedef int cudaError_t;
enum { cudaSuccess, cudaMemcpyDeviceToDevice, cudaFuncAttributeMaxDynamicSharedMemorySize };
#define CUDA_CHECK(x) GGML_ASSERT((x) == cudaSuccess)

static inline cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaFuncSetAttribute(const void * kernel, int attribute, int value);
cudaError_t cudaMemcpyAsync(void * to, const void * from, size_t bytes, int kind, cudaStream_t stream);

#define GGML_CUDA_CC_AMPERE 800
#define GGML_CUDA_CC_HOPPER 900
#define GGML_CUDA_CC_IS_NVIDIA(cc) ((cc) < 1000)
static inline int ggml_cuda_highest_compiled_arch(const int) { return __CUDA_ARCH__; }
static inline int ggml_cuda_get_device() { return 0; }

struct ggml_cuda_device_info {
    struct { int cc, nsm; size_t smpbo; } devices[1];
};
const ggml_cuda_device_info & ggml_cuda_info();

struct ggml_cuda_pool {};
template <typename T> struct ggml_cuda_pool_alloc {
    T * data;
    ggml_cuda_pool_alloc(ggml_cuda_pool &, const size_t n) : data((T *) cuda_host::device_allocate(n*sizeof(T))) {
        GGML_ASSERT(data);
        memset((void *) data, 0xFF, n*sizeof(T));
        cuda_host::allow(data, n*sizeof(T), "a buffer of the pool");
    }
    ~ggml_cuda_pool_alloc() { cuda_host::device_free((char *) data); }
    T * get() { return data; }
};

struct ggml_backend_cuda_context {
    ggml_cuda_pool memory;
    ggml_cuda_pool & pool() { return memory; }
    cudaStream_t stream() { return 0; }
};

struct ggml_cuda_kernel_launch_params {
    dim3 block_nums, block_dims;
    size_t shmem;
    cudaStream_t stream;
    ggml_cuda_kernel_launch_params(const dim3 & nums, const dim3 & dims, const size_t shmem, const cudaStream_t stream) : block_nums(nums), block_dims(dims), shmem(shmem), stream(stream) {}
};

std::string kvq_host_kernel_name(const void * kernel);

template <typename... P, typename... A>
static void ggml_cuda_kernel_launch(void (* kernel)(P...), const ggml_cuda_kernel_launch_params & p, A... arguments) {
    cuda_host::run({ kvq_host_kernel_name((const void *) kernel), [=] { kernel(arguments...); },
        { p.block_nums.x, p.block_nums.y, p.block_nums.z }, { p.block_dims.x, p.block_dims.y, p.block_dims.z }, p.shmem });
}
