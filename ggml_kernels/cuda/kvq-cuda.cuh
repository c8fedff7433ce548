// Entry points that the call sites in patches/ use.
#pragma once

#include "common.cuh"

// True when the operation reads or writes one of our cache types and must not reach upstream's code.
bool kvq_cuda_owns(const ggml_tensor * op);

// Whether this device runs an operation that kvq_cuda_owns; false sends it to the CPU, and says once per tensor why.
bool kvq_cuda_supports(int device, const ggml_tensor * op);

// Runs an operation that kvq_cuda_owns: FLASH_ATTN_EXT, SET_ROWS, CPY, DUP, CONT or GET_ROWS.
void kvq_cuda_compute(ggml_backend_cuda_context & ctx, ggml_tensor * dst);

// Runs node i and later ones together when that saves a launch; the number of nodes after i that are done, 0 for none.
int kvq_cuda_try_fuse(ggml_backend_cuda_context & ctx, const ggml_cgraph * graph, int i);
