#include "kvq-metadata.h"
#include "kvq-types.h"

#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "gguf.h"
#include "llama-impl.h"
#include "llama-model.h"

#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string_view>

struct fnv1a64 {
    uint64_t value = 0xcbf29ce484222325ull;

    void add(const void * data, size_t n) {
        for (size_t i = 0; i < n; i++) {
            value = (value ^ ((const uint8_t *) data)[i])*0x100000001b3ull;
        }
    }
};

// CRC-32 as zlib has it: a burst of up to 32 bits never goes unseen, and Python brings it along.
static uint32_t crc32(uint32_t crc, std::string_view text) {
    static const auto table = [] {
        std::array<uint32_t, 256> t;
        for (uint32_t i = 0; i < 256; i++) {
            t[i] = i;
            for (int bit = 0; bit < 8; bit++) {
                t[i] = t[i] >> 1 ^ (t[i] & 1 ? 0xEDB88320u : 0);
            }
        }
        return t;
    }();
    crc = ~crc;
    for (const char c : text) {
        crc = table[(crc ^ (uint8_t) c) & 0xff] ^ crc >> 8;
    }
    return ~crc;
}

std::string kvq_fingerprint(const llama_model & model) {
    fnv1a64 hash;
    const std::string arch = model.arch_name();
    hash.add(arch.data(), arch.size());

    const auto add = [&](const std::string & name) {
        const ggml_tensor * t = model.get_tensor(name.c_str());
        if (t && t->type == GGML_TYPE_F32) {
            std::vector<uint8_t> data(ggml_nbytes(t));
            ggml_backend_tensor_get(t, data.data(), 0, data.size());
            hash.add(data.data(), data.size());
        }
    };
    for (uint32_t il = 0; il < model.hparams.n_layer(); il++) {
        add(format("blk.%u.attn_norm.weight", il));
    }
    add("output_norm.weight");
    return format("fnv1a64:%016llx", (unsigned long long) hash.value);
}

static std::string sidecar_path(const std::string & model_path) {
    const std::string ending = ".gguf";
    const bool has = model_path.size() > ending.size() && model_path.compare(model_path.size() - ending.size(), ending.size(), ending) == 0;
    return (has ? model_path.substr(0, model_path.size() - ending.size()) : model_path) + ".kvq.gguf";
}

static bool exists(const std::string & path) {
    FILE * f = ggml_fopen(path.c_str(), "rb");
    if (f) {
        fclose(f);
    }
    return f != nullptr;
}

std::string kvq_embed_command(const llama_model & model, bool force) {
    return format("pykvq embed-rotations %s%s", model.kvq_path.empty() ? "MODEL" : model.kvq_path.c_str(), force ? " --force" : "");
}

kvq_metadata::kvq_metadata(const llama_model & model) : model(model) {
    const std::string path = model.kvq_path.empty() ? "" : sidecar_path(model.kvq_path);
    if (!path.empty() && exists(path)) {
        from = path.substr(path.find_last_of("/\\") + 1);
        gguf_context_ptr file(gguf_init_from_file(path.c_str(), { /*.no_alloc =*/ true, /*.ctx =*/ nullptr }));
        if (!file) {
            throw std::runtime_error(format("%s is damaged or no GGUF file; run: %s, or use --kvq off", path.c_str(),
                kvq_embed_command(model, true).c_str()));
        }
        for (int64_t i = 0; i < gguf_get_n_kv(file.get()); i++) {
            if (gguf_get_kv_type(file.get(), i) != GGUF_TYPE_ARRAY) {
                sidecar.emplace(gguf_get_key(file.get(), i), gguf_kv_to_str(file.get(), i));
            }
        }
        values = &sidecar;
    } else if (model.gguf_kv.count("kvq.version")) {
        from   = "model metadata";
        values = &model.gguf_kv;
    } else {
        return;
    }
    require("kvq.version", "1", "another version of pykvq wrote it");
    require_checksum();
    require("kvq.codebook", KVQ_CODEBOOK, "made for other tables of levels");
    if (!model.hparams.no_alloc) {
        require("kvq.fingerprint", kvq_fingerprint(model), "made for another model");
    }
    if (key_bias() != "none" && key_bias() != "measured") {
        require("kvq.key_bias", "attn_k.bias", "this program cannot remove that key bias");
    }
}

std::string kvq_metadata::key_bias() const {
    const std::string * value = find("kvq.key_bias");
    return value ? *value : "";
}

const std::string * kvq_metadata::find(const std::string & key) const {
    const auto it = values->find(key);
    return it == values->end() ? nullptr : &it->second;
}

std::string kvq_metadata::complaint(const std::string & key, const std::string & what) const {
    return format("%s of %s: %s; run: %s, or use --kvq off", key.c_str(), from.c_str(), what.c_str(), kvq_embed_command(model, true).c_str());
}

// Data written before there was a checksum have none, and are taken as they are.
void kvq_metadata::require_checksum() const {
    const std::string wanted = "kvq.checksum", prefix = "kvq.";
    if (!find(wanted)) {
        return;
    }
    std::map<std::string, const std::string *> sorted;
    for (const auto & [key, value] : *values) {
        if (key.compare(0, prefix.size(), prefix) == 0 && key != wanted) {
            sorted[key] = &value;
        }
    }
    uint32_t crc = 0;
    for (const auto & [key, value] : sorted) {
        for (const std::string_view part : { std::string_view(key), std::string_view("="), std::string_view(*value), std::string_view("\n") }) {
            crc = crc32(crc, part);
        }
    }
    require(wanted, format("crc32:%08x", crc), "the kvq data are damaged");
}

void kvq_metadata::require(const std::string & key, const std::string & wanted, const char * otherwise) const {
    const std::string * value = find(key);
    if (!value) {
        throw std::runtime_error(complaint(key, "missing"));
    }
    if (*value != wanted) {
        throw std::runtime_error(complaint(key, format("%s (%s, not %s)", otherwise, value->c_str(), wanted.c_str())));
    }
}

// RFC 4648 with padding; false for anything else
static bool decode_base64(const std::string & text, std::vector<uint8_t> & out) {
    static const auto digits = [] {
        std::array<int8_t, 256> t;
        t.fill(-1);
        const char * alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        for (int i = 0; i < 64; i++) {
            t[(uint8_t) alphabet[i]] = (int8_t) i;
        }
        return t;
    }();
    if (text.size() % 4 != 0) {
        return false;
    }
    const size_t padding = text.empty() ? 0 : (text[text.size() - 1] == '=') + (text[text.size() - 2] == '=');
    out.clear();
    out.reserve(text.size()/4*3);
    for (size_t i = 0; i < text.size(); i += 4) {
        uint32_t bits = 0;
        for (size_t j = i; j < i + 4; j++) {
            const int digit = j >= text.size() - padding ? 0 : digits[(uint8_t) text[j]];
            if (digit < 0) {
                return false;
            }
            bits = bits << 6 | (uint32_t) digit;
        }
        for (int shift = 16; shift >= 0; shift -= 8) {
            out.push_back((uint8_t) (bits >> shift));
        }
    }
    out.resize(out.size() - padding);
    return true;
}

// n bytes of a base64 string; none if there is no such key
std::vector<uint8_t> kvq_metadata::bytes(const std::string & key, size_t n) const {
    std::vector<uint8_t> out;
    const std::string * text = find(key);
    if (!text) {
        return out;
    }
    if (!decode_base64(*text, out)) {
        throw std::runtime_error(complaint(key, "cut off or no base64"));
    }
    if (out.size() != n) {
        throw std::runtime_error(complaint(key, format("%zu bytes, %zu expected for this model", out.size(), n)));
    }
    return out;
}

kvq_layer_data kvq_metadata::layer(uint32_t il, int64_t n_head_kv, int64_t d) const {
    kvq_layer_data out;
    fnv1a64 hash;
    bool any = false;

    const auto key = [&](const char * name) { return format("kvq.blk.%u.%s", il, name); };
    const auto read = [&](const char * name, int64_t n, bool half) {
        const std::vector<uint8_t> raw = bytes(key(name), n*(half ? sizeof(ggml_fp16_t) : sizeof(float)));
        std::vector<float> x(raw.empty() ? 0 : n);
        if (raw.empty()) {
            return x;
        }
        any = true;
        hash.add(raw.data(), raw.size());
        if (half) {
            ggml_fp16_to_fp32_row((const ggml_fp16_t *) raw.data(), x.data(), n);
        } else {
            memcpy(x.data(), raw.data(), raw.size());
        }
        for (float v : x) {
            if (!std::isfinite(v)) {
                throw std::runtime_error(complaint(key(name), "holds a value that is not finite"));
            }
        }
        return x;
    };
    out.k_mean   = read("k.mean",   n_head_kv*d,   true);
    out.k_basis  = read("k.basis",  n_head_kv*d*d, true);
    out.k_lambda = read("k.lambda", n_head_kv*d,   false);
    const bool measured = key_bias() == "measured";
    if (measured) {
        out.k_bias = read("k.bias", n_head_kv*d, true);
    }
    const std::vector<uint8_t> pairs = bytes(key("k.pairs"), sizeof(out.pairs));
    if (!pairs.empty()) {
        out.has_pairs = true;
        memcpy(out.pairs.data(), pairs.data(), pairs.size());
        hash.add(pairs.data(), pairs.size());
        for (int i = (int) model.hparams.n_rot(il)/2; i < KVQ_BIAS_PAIRS_MAX; i++) {
            if (kvq_has_pair(out.pairs, i)) {
                throw std::runtime_error(complaint(key("k.pairs"), "names a pair that the heads do not have"));
            }
        }
    }

    const std::pair<const char *, const std::vector<float> &> parts[] = {
        { "k.mean", out.k_mean }, { "k.basis", out.k_basis }, { "k.lambda", out.k_lambda }, { "k.bias", out.k_bias } };
    for (const auto & [name, x] : parts) {
        if (any && x.empty() && (measured || &x != &out.k_bias)) {
            throw std::runtime_error(complaint(key(name), "missing, though the layer has other key data"));
        }
    }
    for (size_t i = 0; i < out.k_lambda.size(); i++) {
        if (out.k_lambda[i] < 0.0f || (i % d != 0 && out.k_lambda[i] > out.k_lambda[i - 1])) {
            throw std::runtime_error(complaint(key("k.lambda"), "negative or not descending"));
        }
    }
    out.hash = any ? (uint32_t) (hash.value ^ hash.value >> 32) : 0;
    return out;
}
