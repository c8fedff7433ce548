// Calibrated data of a model: the kvq.* metadata of its GGUF or of the sidecar beside it. Keys and shapes: docs/gguf-metadata.md.
#pragma once

#include "kvq-bias-pairs.h"

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

struct llama_model;

// What one layer carries, decoded and checked for shape and finiteness. Empty: the layer has none of it.
struct kvq_layer_data {
    std::vector<float> k_mean;     // [n_head_kv, d]
    std::vector<float> k_basis;    // [n_head_kv, d, d], row i of a head: coordinate i
    std::vector<float> k_lambda;   // [n_head_kv, d], descending
    std::vector<float> k_bias;     // [n_head_kv, d], of a measured key bias
    bool has_pairs = false;
    kvq_pair_set pairs = {};       // of the key bias that the keys were without
    uint32_t hash = 0;             // of the bytes above
};

class kvq_metadata {
public:
    // Finds the data: of the sidecar if there is one, else of the model. Throws std::runtime_error, in one line with the
    // remedy, for a version, codebook or model that does not match, and for a sidecar that cannot be read.
    explicit kvq_metadata(const llama_model & model);

    bool empty() const { return values == nullptr; }
    const std::string & source() const { return from; }

    // bias that the keys were without when they were measured: "none", "attn_k.bias" or "measured"
    std::string key_bias() const;

    // Throws std::runtime_error naming key and layer when something is missing, misshapen or not finite.
    kvq_layer_data layer(uint32_t il, int64_t n_head_kv, int64_t d) const;

    // `what` about a key, with the command that mends it
    std::string complaint(const std::string & key, const std::string & what) const;

private:
    using map = std::unordered_map<std::string, std::string>;

    const llama_model & model;
    map         sidecar;
    const map * values = nullptr;
    std::string from;

    const std::string * find(const std::string & key) const;
    void require_checksum() const;
    void require(const std::string & key, const std::string & wanted, const char * otherwise) const;
    std::vector<uint8_t> bytes(const std::string & key, size_t n) const;
};

// "fnv1a64:..." of the architecture and the norm weights, which are F32 in every quantisation of a model
std::string kvq_fingerprint(const llama_model & model);

// the command that writes the data of a model anew
std::string kvq_embed_command(const llama_model & model, bool force);
