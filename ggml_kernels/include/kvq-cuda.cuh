// Entry points of the CUDA kernels, for the call sites in patches/.
#pragma once

struct ggml_tensor;
struct ggml_cgraph;
struct ggml_backend_cuda_context;

#if !defined(GGML_USE_HIP) && !defined(GGML_USE_MUSA)

// True when the operation reads or writes one of our cache types and must not reach upstream's code.
bool kvq_cuda_owns(const ggml_tensor * op);

// Whether this device runs an operation that kvq_cuda_owns; false sends it to the CPU, and says once per tensor why.
bool kvq_cuda_supports(int device, const ggml_tensor * op);

// Runs an operation that kvq_cuda_owns: FLASH_ATTN_EXT, SET_ROWS, CPY, DUP, CONT or GET_ROWS.
void kvq_cuda_compute(ggml_backend_cuda_context & ctx, ggml_tensor * dst);

// Runs node i and later ones together when that saves a launch; the number of nodes after i that are done, 0 for none.
int kvq_cuda_try_fuse(ggml_backend_cuda_context & ctx, const ggml_cgraph * graph, int i);

#else // HIP and MUSA compile the same call sites, and have no kernels for our types

static inline bool kvq_cuda_owns(const ggml_tensor *) { return false; }
static inline bool kvq_cuda_supports(int, const ggml_tensor *) { return false; }
static inline void kvq_cuda_compute(ggml_backend_cuda_context &, ggml_tensor *) {}
static inline int  kvq_cuda_try_fuse(ggml_backend_cuda_context &, const ggml_cgraph *, int) { return 0; }

#endif
