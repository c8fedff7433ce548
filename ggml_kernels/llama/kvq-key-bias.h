// A key bias b (attn_k.bias) stands in the key of position j as R(j) b, R being RoPE: hundreds of times larger than what the
// key says, and turning, so that no few bits and no fixed mean can hold it. The cache stores keys without it, and the attention
// operation adds q . R(j) b to the logit, which is exact.
#pragma once

#include "ggml.h"

#include <cstdint>
#include <string>
#include <vector>

struct llama_cparams;
struct llama_model;

// the model's own bias of a layer's keys, null when there is none
const ggml_tensor * kvq_model_key_bias(const llama_model & model, int32_t il);

// Why the bias has to stay in the keys of this layer, for a cache of these types; empty: it need not.
std::string kvq_bias_obstacle(const llama_model & model, const llama_cparams & cparams, int32_t il, ggml_type type_k, ggml_type type_v);

// Cosines and sines of kvq_key_bias::trig, computed by ggml's own RoPE with the model's parameters.
std::vector<float> kvq_rope_table(const llama_model & model, const llama_cparams & cparams, int32_t il);

constexpr int64_t KVQ_ROPE_STEP = 256, KVQ_ROPE_STEPS = 4096;   // up to position 2^20
