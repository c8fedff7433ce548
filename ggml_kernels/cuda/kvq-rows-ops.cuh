// Row operations of the cache types, called by kvq-cuda.cu.
#pragma once

#include "common.cuh"
#include "kvq.h"
#include "kvq-fattn.cuh"
#include "kvq-rotary.h"

// rows of f32 or f16 into the cache rows that src[1] names
void kvq_cuda_set_rows(ggml_backend_cuda_context & ctx, ggml_tensor * dst);
// the same for up to KVQ_ROWS_TOGETHER tensors in one launch, which fit the first: K and V of a layer and their f16 windows; and up to KVQ_ROTARIES turns, of
// what is written and beside it
static constexpr int KVQ_ROWS_TOGETHER = 4;
bool kvq_cuda_rows_fit(const ggml_tensor * first, const ggml_tensor * dst);
void kvq_cuda_set_rows_together(ggml_backend_cuda_context & ctx, const ggml_tensor * const * dst, int n, const kvq_rotary_nodes * turns, int n_turns);
// cache rows that src[1] names, as f32 or f16
void kvq_cuda_get_rows(ggml_backend_cuda_context & ctx, ggml_tensor * dst);
// float to cache type, cache type to float, or between two tensors of one cache type
void kvq_cuda_copy(ggml_backend_cuda_context & ctx, const ggml_tensor * src, ggml_tensor * dst);
// Writes that stand in a row in a graph, the last of them node `last`.
struct kvq_writes {
    const ggml_tensor * node[KVQ_ROWS_TOGETHER];
    int n, last;
};
// The calibrated transforms of a layer for a small batch that node i begins, with n_turns turns in front of them and the writes behind them, in one launch: the last node
// that is done, -1 where that cannot be.
int kvq_cuda_transform(ggml_backend_cuda_context & ctx, const ggml_cgraph * graph, int i, const kvq_rotary_nodes * turns, int n_turns, const kvq_writes & writes);
