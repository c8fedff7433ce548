// What the cache of libllama needs of us: the type of a layer, whether its device can run it, and what was allocated.
#include "kvq-llama.h"
#include "kvq-key-bias.h"
#include "kvq-metadata.h"
#include "kvq-transforms.h"
#include "kvq-window.h"
#include "kvq.h"

#include "ggml-cpp.h"
#include "llama-context.h"
#include "llama-hparams.h"
#include "llama-impl.h"
#include "llama-kv-cache.h"
#include "llama-kv-cache-dsa.h"
#include "llama-kv-cache-dsa-iswa.h"
#include "llama-kv-cache-iswa.h"
#include "llama-kv-cache-msa.h"
#include "llama-memory-hybrid-idx.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"
#include "llama-model.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <numeric>
#include <stdexcept>

// the device must be able to write rows of the type: a cache that it cannot write would abort at the first token
static void require_cache_write(ggml_backend_buffer_type_t buft, ggml_type type, int64_t head_dim, uint32_t il) {
    ggml_backend_dev_t dev = ggml_backend_buft_get_device(buft);
    if (!dev) {
        return;
    }
    ggml_context_ptr ctx(ggml_init({ 4*ggml_tensor_overhead(), nullptr, true }));
    ggml_tensor * cache = ggml_new_tensor_2d(ctx.get(), type, head_dim, 1);
    ggml_tensor * rows  = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, head_dim, 1);
    ggml_tensor * index = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I64, 1);
    ggml_tensor * write = ggml_set_rows(ctx.get(), cache, rows, index);
    if (!ggml_backend_dev_supports_op(dev, write)) {
        throw std::runtime_error(format("layer %u: device %s has no kernel for cache type %s; use f16 or q8_0 there, or keep the cache on the CPU with --no-kv-offload",
            il, ggml_backend_dev_name(dev), kvq_family_name(type)));
    }
}

static thread_local std::vector<int32_t> g_layer_types;   // of llama_kvq_set_layer_types

void llama_kvq_set_layer_types(const int32_t * types, int32_t n_layer) {
    g_layer_types.assign(types, types + 2*(size_t) n_layer);
}

// what the caller asked for in this layer
static ggml_type asked_type(ggml_type type, bool value, uint32_t il) {
    const size_t i = 2*(size_t) il + value;
    if (i < g_layer_types.size() && g_layer_types[i] >= 0) {
        type = (ggml_type) g_layer_types[i];
        if (type != GGML_TYPE_F16 && !kvq_is_cache_type(type)) {
            throw std::runtime_error(format("layer %u: single layers take f16, turbo and oscar2 types, not %d", il, (int) type));
        }
    }
    return value ? kvq_value_type(type) : type;
}

ggml_type kvq_cache_layer_type(ggml_type type, bool value, int64_t head_dim, int64_t view_dim, uint32_t il, ggml_backend_buffer_type_t buft) {
    type = asked_type(type, value, il);
    if (!kvq_is_cache_type(type) || head_dim == 0) {
        return type;
    }
    const ggml_type member = kvq_type_for_head(type, std::gcd(head_dim, view_dim));
    if (member == GGML_TYPE_COUNT) {
        const std::string view = view_dim ? format(" and its first %d values, which are the value", (int) view_dim) : "";
        throw std::runtime_error(format("layer %u: no block of cache type %s divides head size %d%s; use f16 or q8_0",
            il, kvq_family_name(type), (int) head_dim, view.c_str()));
    }
    require_cache_write(buft, member, head_dim, il);
    return member;
}

ggml_tensor * kvq_split_unrotated(ggml_context * ctx, ggml_tensor ** keys, ggml_type type, int64_t n_rot) {
    ggml_tensor * k = *keys;
    const int64_t n_still = k->ne[0] - n_rot;
    if (!kvq_is_cache_type(type) || n_still == 0) {
        return nullptr;
    }
    *keys = ggml_view_3d(ctx, k, n_rot, k->ne[1], k->ne[2], k->nb[1], k->nb[2], n_still*sizeof(float));
    return ggml_view_3d(ctx, k, n_still, k->ne[1], k->ne[2], k->nb[1], k->nb[2], 0);
}

void llama_kv_cache::kvq_layers(std::vector<llama_kvq_layer_info> & out) const {
    for (size_t i = 0; i < layers.size(); i++) {
        const auto & layer = layers[i];
        llama_kvq_layer_info info = {};
        info.il         = layer.il;
        info.type_k     = layer.k->type;
        info.type_v     = layer.v ? layer.v->type : layer.k->type;
        info.n_head_kv  = hparams.n_head_kv(layer.il);
        info.head_dim_k = hparams.n_embd_head_k(layer.il);
        info.head_dim_v = layer.v ? hparams.n_embd_head_v(layer.il) : 0;
        info.is_swa     = hparams.is_swa(layer.il);
        info.n_cells    = layer.k->ne[1];
        info.bytes_k    = ggml_nbytes(layer.k);
        info.bytes_v    = layer.v ? ggml_nbytes(layer.v) : 0;
        info.bytes_f16  = (ggml_nelements(layer.k) + (layer.v ? ggml_nelements(layer.v) : 0))*sizeof(ggml_fp16_t);
        if (layer.k->buffer) {
            snprintf(info.device, sizeof(info.device), "%s", ggml_backend_buffer_name(layer.k->buffer));
        }
        info.transform  = layer.kvq->hash;
        info.calibrated = layer.kvq->k_in != nullptr;
        info.key_bias   = layer.kvq->bias ? 2 : !hparams.is_mla() && (kvq_model_key_bias(model, layer.il) || model.layers[layer.il].wqkv_b);
        uint8_t pairs[KVQ_BIAS_PAIRS_MAX];
        info.bias_pairs = kvq_list_pairs(layer.kvq->pairs, pairs);
        info.n_window     = window ? window->n_rows : 0;
        info.bytes_window = window ? window->bytes(i) : 0;
        info.n_sink       = window ? window->sink : 0;
        info.n_recent     = window ? window->recent : 0;
        out.push_back(info);
    }
}

// what to say about keys of our types, empty when there are none
std::string llama_kv_cache::kvq_calibration() const {
    std::vector<llama_kvq_layer_info> infos;
    kvq_layers(infos);
    int n_keys = 0, n_calibrated = 0, n_omitted = 0, n_bare = 0, fewest = KVQ_BIAS_PAIRS_MAX, most = 0;
    for (const auto & l : infos) {
        const bool keys = kvq_is_cache_type((ggml_type) l.type_k);
        n_keys       += keys;
        n_calibrated += l.calibrated;
        n_omitted    += l.key_bias == 2;
        n_bare       += keys && l.key_bias == 1 && !l.calibrated && !kvq->bias_stays.empty();
        if (l.key_bias == 2) {
            fewest = std::min(fewest, l.bias_pairs);
            most   = std::max(most, l.bias_pairs);
        }
    }
    if (n_bare) {
        const bool chosen = kvq->bias_stays == KVQ_OFF;
        LLAMA_LOG_WARN("kvq: the keys of this model have a bias, which few bits cannot hold, and it stays in them (%s): expect wrong answers%s%s\n",
            kvq->bias_stays.c_str(), chosen ? "" : "; run: ", chosen ? "" : (kvq_embed_command(model, true) + " --key-bias none").c_str());
    }
    std::string text = !n_omitted ? "" : format("; key bias left out of the keys: %s%d of %d pairs in %d of %d layers",
        fewest < most ? format("%d to ", fewest).c_str() : "", most, kvq->rope.n_rot/2, n_omitted, (int) infos.size());
    if (n_calibrated) {
        text += format("; calibrated: %d of %d layers (%s)", n_calibrated, (int) infos.size(), kvq->source.c_str());
    } else if (n_keys) {
        text += "; not calibrated";
    }
    return text;
}

void kvq_log_cache(const llama_kv_cache & cache) {
    std::vector<llama_kvq_layer_info> layers;
    cache.kvq_layers(layers);

    std::map<std::string, int> counts;
    double bytes = 0, bytes_f16 = 0, bytes_window = 0;
    bool ours = false;
    for (const auto & l : layers) {
        ours = ours || kvq_is_cache_type((ggml_type) l.type_k) || kvq_is_cache_type((ggml_type) l.type_v);
        counts[format("K %s V %s", ggml_type_name((ggml_type) l.type_k), ggml_type_name((ggml_type) l.type_v))]++;
        bytes     += l.bytes_k + l.bytes_v;
        bytes_f16 += l.bytes_f16;
        bytes_window += l.bytes_window;
    }
    std::string types;
    for (const auto & [name, n] : counts) {
        types += format("%s%d x %s", types.empty() ? "" : ", ", n, name.c_str());
    }
    std::string window;
    if (cache.window) {
        window = format("; %u sinks and %u recent tokens also in f16, %.2f MiB%s", cache.window->sink, cache.window->recent, bytes_window/1024/1024,
            bytes + bytes_window < bytes_f16 ? "" : ": no smaller than an f16 cache, use a longer context or smaller --kv-sink and --kv-recent");
    }
    // the tools hide this library's info level by default, and who chose such a type must see what runs
    const auto level = ours ? GGML_LOG_LEVEL_WARN : GGML_LOG_LEVEL_INFO;
    llama_log_internal(level, "kvq: effective cache types: %s; %.2f MiB, f16 would be %.2f MiB (%.2fx)%s%s\n",
        types.c_str(), bytes/1024/1024, bytes_f16/1024/1024, bytes > 0 ? bytes_f16/(bytes + bytes_window) : 1.0, window.c_str(), cache.kvq_calibration().c_str());
}

// every attention cache inside a memory module, in the order of its parts
static void collect(const llama_memory_i * memory, std::vector<llama_kvq_layer_info> & out) {
    if (auto * kv = dynamic_cast<const llama_kv_cache *>(memory)) {
        kv->kvq_layers(out);
    } else if (auto * iswa = dynamic_cast<const llama_kv_cache_iswa *>(memory)) {
        iswa->get_base()->kvq_layers(out);
        iswa->get_swa()->kvq_layers(out);
    } else if (auto * hybrid = dynamic_cast<const llama_memory_hybrid *>(memory)) {
        hybrid->get_mem_attn()->kvq_layers(out);
    } else if (auto * hybrid = dynamic_cast<const llama_memory_hybrid_iswa *>(memory)) {
        collect(hybrid->get_mem_attn(), out);
    } else if (auto * hybrid = dynamic_cast<const llama_memory_hybrid_idx *>(memory)) {
        hybrid->get_mem_attn()->kvq_layers(out);
    } else if (auto * msa = dynamic_cast<const llama_kv_cache_msa *>(memory)) {
        msa->get_base()->kvq_layers(out);
    } else if (auto * dsa = dynamic_cast<const llama_kv_cache_dsa *>(memory)) {
        dsa->get_mla()->kvq_layers(out);
    }
}

int32_t llama_kvq_cache_info(const llama_context * ctx, llama_kvq_layer_info * out, int32_t capacity) {
    std::vector<llama_kvq_layer_info> layers;
    collect(ctx->get_memory(), layers);
    std::stable_sort(layers.begin(), layers.end(), [](const auto & a, const auto & b) { return a.il < b.il; });
    std::copy_n(layers.begin(), std::min<size_t>(std::max(capacity, 0), layers.size()), out);
    return (int32_t) layers.size();
}
