// What a cache does to keys before it stores them. Calibrated transforms: a key k is stored as (k - mean) F~, its query
// becomes q B~^T with F~ B~ = I, so that products of queries and keys shift by one constant a query, which softmax does not
// see. Key bias: kvq-key-bias.h.
//
// Values stay as they are: taking their mean off and adding it to the output is exact too, but it makes the value of an
// attention sink, nearly zero and read by every query, as coarse as the others (measured: twice the divergence).
#pragma once

#include "kvq-key-bias.h"

#include "ggml-cpp.h"

#include <cstdint>
#include <string>
#include <vector>

// One cached layer; matrices are f16, the rest f32, on the device of its cache. Null: not done.
struct kvq_layer {
    ggml_tensor * mean = nullptr;   // [d, n_head_kv]; null too where softmax would see the constant
    ggml_tensor * k_in = nullptr;   // [d, d, n_head_kv], row j of a head: column j of F~
    ggml_tensor * q_in = nullptr;   // [d, d, n_head_kv], row j of a head: column j of B~^T
    ggml_tensor * bias = nullptr;   // [d, n_head_kv], left out of the keys; zero in pairs that are not in `pairs`
    ggml_tensor * kept = nullptr;   // [d * n_head_kv], the rest of attn_k.bias, which the graph adds; null: nothing
    kvq_pair_set pairs = {};        // of RoPE's frequencies that bias has
    bool subtract = false;          // the graph's keys have it: measured, no tensor of the model
    uint32_t hash = 0;              // of all this, for saved states; 0: keys are stored as they are
};

constexpr const char * KVQ_OFF = "--kvq off";   // a reason that needs no remedy

struct kvq_transforms {
    std::vector<kvq_layer> layers;    // as the cache's own layers
    std::string source;               // where calibrated data came from; empty: none
    std::string bias_stays;           // why the model's key bias is stored with the keys; empty: it is not, or there is none
    ggml_tensor * trig = nullptr;     // [n_rot, positions], see kvq_key_bias
    kvq_rope rope;                    // of trig
    std::vector<std::pair<ggml_context_ptr, ggml_backend_buffer_ptr>> ctxs_bufs;
};

// what the context that is being made asks of its caches; cparams is null before the first one
struct kvq_request {
    bool off = false;                // llama_context_params.kvq_off
    int32_t sink = -1, recent = -1;  // .kv_sink, .kv_recent
    const llama_cparams * cparams = nullptr;
};

const kvq_request & kvq_current();

// false for attention builders of their own, which call no hook of ours
bool kvq_has_hooks(const llama_model & model);

// inverse of a row-major [n, n] matrix, false when it is singular
bool kvq_invert(const std::vector<double> & matrix, int64_t n, std::vector<double> & inverse);
