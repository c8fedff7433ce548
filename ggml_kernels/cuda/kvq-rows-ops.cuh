// Row operations of the cache types, called by kvq-cuda.cu.
#pragma once

#include "common.cuh"
#include "kvq.h"
#include "kvq-fattn.cuh"

// rows of f32 or f16 into the cache rows that src[1] names
void kvq_cuda_set_rows(ggml_backend_cuda_context & ctx, ggml_tensor * dst);
// the same for K and V of a layer in one launch; false, and nothing done, when they do not fit together
bool kvq_cuda_set_rows_two(ggml_backend_cuda_context & ctx, const ggml_tensor * k, const ggml_tensor * v);
// cache rows that src[1] names, as f32 or f16
void kvq_cuda_get_rows(ggml_backend_cuda_context & ctx, ggml_tensor * dst);
// float to cache type, cache type to float, or between two tensors of one cache type
void kvq_cuda_copy(ggml_backend_cuda_context & ctx, const ggml_tensor * src, ggml_tensor * dst);
