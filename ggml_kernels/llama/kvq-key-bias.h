// A key bias b stands in the key of position j as R(j) b, R being RoPE, which turns, so that no few bits and no fixed mean can
// hold it. The cache stores keys without it, and the attention operation adds q . R(j) b to the logit, which is exact. b is
// attn_k.bias, which the graph then does not add and which can be hundreds of times larger than what a key says, or the mean
// of the keys before RoPE, measured, which is subtracted as R(j) b before the key is stored.
#pragma once

#include "ggml.h"
#include "kvq-bias-pairs.h"

#include <cstdint>
#include <string>
#include <vector>

struct kvq_key_bias;
struct llama_cparams;
struct llama_hparams;
struct llama_model;

// the model's own bias of a layer's keys, null when there is none
const ggml_tensor * kvq_model_key_bias(const llama_model & model, int32_t il);

// Why the bias, the model's own or a measured one, has to stay in the keys of this layer, for a cache of these types; empty: it
// need not.
std::string kvq_bias_obstacle(const llama_model & model, const llama_cparams & cparams, int32_t il, bool measured, ggml_type type_k,
    ggml_type type_v);

// A bias of a layer's shape over n rows of keys, in all pairs, for asking a device about an attention operation of query q.
kvq_key_bias kvq_bias_to_ask(ggml_context * ctx, const llama_hparams & hparams, int32_t il, ggml_tensor * q, int64_t n);

// The RoPE of a layer.
struct kvq_rope {
    ggml_tensor * factors = nullptr;
    int n_rot = 0, mode = 0, n_ctx_orig = 0;
    float freq_base = 0, freq_scale = 0, ext_factor = 0, attn_factor = 0, beta_fast = 0, beta_slow = 0;

    kvq_rope() = default;
    kvq_rope(const llama_model & model, const llama_cparams & cparams, int32_t il);

    bool interleaved() const;

    // the pair of frequencies of a coordinate of a head, -1 where it does not turn
    int pair_of(int64_t coordinate) const;

    // x [d, heads, n] turned to the positions [n]
    ggml_tensor * turn(ggml_context * ctx, ggml_tensor * x, ggml_tensor * pos) const;

    // cosines and sines of kvq_key_bias::trig, computed by ggml
    std::vector<float> table() const;
};

// pairs of a bias b [n_head_kv, d] that no few bits hold, as far as b alone says it
kvq_pair_set kvq_carrying_pairs(const std::vector<float> & b, int64_t d, const kvq_rope & rope);

constexpr int64_t KVQ_ROPE_STEP = 256, KVQ_ROPE_STEPS = 4096;   // up to position 2^20
