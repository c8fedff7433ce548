// Calibrated transforms of a cache: a key k is stored as (k - mean) F~, its query becomes q B~^T with F~ B~ = I, so that
// products of queries and keys shift by one constant a query, which softmax does not see. Values lose their mean and
// the attention output gets it back.
#pragma once

#include "ggml-cpp.h"

#include <cstdint>
#include <string>
#include <vector>

// Tensors of one cached layer, f32, on the device of its cache. Null: not transformed.
struct kvq_layer {
    ggml_tensor * k_mean = nullptr;   // [d, n_head_kv]; null too where softmax would see the constant
    ggml_tensor * k_in   = nullptr;   // [d, d, n_head_kv], row j of a head: column j of F~
    ggml_tensor * q_in   = nullptr;   // [d, d, n_head_kv], row j of a head: column j of B~^T
    ggml_tensor * v_mean = nullptr;   // [d_v, n_head_kv]
    uint32_t k_hash = 0, v_hash = 0;  // of the data; 0: not transformed
};

struct kvq_transforms {
    std::vector<kvq_layer> layers;    // as the cache's own layers
    std::string source;               // where the data came from; empty: no data
    std::vector<std::pair<ggml_context_ptr, ggml_backend_buffer_ptr>> ctxs_bufs;
};

// inverse of a row-major [n, n] matrix, false when it is singular
bool kvq_invert(const std::vector<double> & matrix, int64_t n, std::vector<double> & inverse);
