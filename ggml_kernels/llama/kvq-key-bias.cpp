#include "kvq-key-bias.h"
#include "kvq-llama.h"
#include "kvq-transforms.h"
#include "kvq-window.h"
#include "kvq.h"

#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "llama-arch.h"
#include "llama-cparams.h"
#include "llama-impl.h"
#include "llama-kv-cache.h"
#include "llama-model.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>

const ggml_tensor * kvq_model_key_bias(const llama_model & model, int32_t il) {
    const ggml_tensor * b = model.layers[il].wk_b;
    return b && ggml_n_dims(b) == 1 ? b : nullptr;   // with MLA the name means a matrix
}

kvq_key_bias kvq_bias_to_ask(ggml_context * ctx, const llama_hparams & hparams, int32_t il, ggml_tensor * q, int64_t n) {
    const int64_t n_rot = hparams.n_rot(il);
    return { q, ggml_new_tensor_2d(ctx, GGML_TYPE_F32, q->ne[0], hparams.n_head_kv(il)),
        ggml_new_tensor_2d(ctx, GGML_TYPE_F32, n_rot, KVQ_ROPE_STEP + KVQ_ROPE_STEPS), ggml_new_tensor_2d(ctx, GGML_TYPE_I32, n, 1), false,
        kvq_first_pairs((int) n_rot/2) };
}

// asks the device of the layer about an attention operation with the further sources
static bool device_supports(const llama_model & model, int32_t il, ggml_type type_k, ggml_type type_v) {
    const auto & h = model.hparams;
    const int64_t d = h.n_embd_head_k(il), n_head = h.n_head(il), n_head_kv = h.n_head_kv(il);
    ggml_context_ptr ctx(ggml_init({ 16*ggml_tensor_overhead(), nullptr, true }));
    ggml_tensor * q    = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, d, n_head, 1);
    ggml_tensor * k    = ggml_new_tensor_3d(ctx.get(), type_k, d, 256, n_head_kv);
    ggml_tensor * v    = ggml_new_tensor_3d(ctx.get(), type_v, h.n_embd_head_v(il), 256, n_head_kv);
    ggml_tensor * mask = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F16, 256, 1);
    ggml_tensor * attention = ggml_flash_attn_ext(ctx.get(), ggml_permute(ctx.get(), q, 0, 2, 1, 3), k, v, mask, 1.0f, 0.0f, 0.0f);
    kvq_sources sources;
    sources.bias = kvq_bias_to_ask(ctx.get(), h, il, q, 256);
    kvq_add_sources(ctx.get(), attention, &sources);
    return ggml_backend_dev_supports_op(model.dev_layer(il), attention);
}

std::string kvq_bias_obstacle(const llama_model & model, const llama_cparams & cparams, int32_t il, bool measured, ggml_type type_k,
        ggml_type type_v) {
    // Measured: exact whatever the builder does, but one RoPE must turn all layers, and only the plain cache gets positions.
    // Else: builders whose keys are W x + b, then RoPE, then the cache.
    const bool plain = measured
        ? model.hparams.swa_type == LLAMA_SWA_TYPE_NONE && !llm_arch_is_hybrid(model.arch)
        : (model.arch == LLM_ARCH_QWEN2 || model.arch == LLM_ARCH_QWEN2MOE) && !model.layers[il].wqkv
            && kvq_model_key_bias(model, il)->type == GGML_TYPE_F32;
    const bool rope  = model.hparams.rope_type == LLAMA_ROPE_TYPE_NEOX || model.hparams.rope_type == LLAMA_ROPE_TYPE_NORM;
    if (!plain || !rope) {
        return format("the architecture %s is not known for it", model.arch_name().c_str());
    }
    if (model.hparams.n_rot(il)/2 > KVQ_BIAS_PAIRS_MAX) {
        return "its heads are too large";
    }
    if (!cparams.flash_attn) {
        return "it needs flash attention";
    }
    if (!kvq_is_cache_type(type_k) && !kvq_is_cache_type(type_v)) {
        return "the attention of other types cannot return it";
    }
    if (!device_supports(model, il, type_k, type_v)) {
        return format("device %s has no kernel for it", ggml_backend_dev_name(model.dev_layer(il)));
    }
    return "";
}

kvq_rope::kvq_rope(const llama_model & model, const llama_cparams & cparams, int32_t il)
    : factors(model.get_rope_factors(cparams, il)), n_rot((int) model.hparams.n_rot(il)), mode(model.hparams.rope_type),
      n_ctx_orig((int) cparams.n_ctx_orig_yarn), freq_base(model.get_rope_freq_base(cparams, il)),
      freq_scale(model.get_rope_freq_scale(cparams, il)), ext_factor(cparams.yarn_ext_factor), attn_factor(cparams.yarn_attn_factor),
      beta_fast(cparams.yarn_beta_fast), beta_slow(cparams.yarn_beta_slow) {}

bool kvq_rope::interleaved() const {
    return mode == LLAMA_ROPE_TYPE_NORM;
}

int kvq_rope::pair_of(int64_t coordinate) const {
    return coordinate >= n_rot ? -1 : (int) (interleaved() ? coordinate/2 : coordinate % (n_rot/2));
}

// What of a bias may stay in a key, root mean square of a value; what else is in keys is of the order of 1. Pairs leave by sixteens, which CUDA takes at once.
// Measured on Qwen2.5-Coder: docs/calibration.md.
constexpr double BIAS_KEPT = 0.5;
constexpr int    BIAS_STEP = 16;

kvq_pair_set kvq_carrying_pairs(const std::vector<float> & b, int64_t d, const kvq_rope & rope) {
    std::vector<double> energy(rope.n_rot/2, 0.0);
    for (size_t j = 0; j < b.size(); j++) {
        if (const int pair = rope.pair_of(j % d); pair >= 0) {
            energy[pair] += (double) b[j]*b[j];
        }
    }
    std::vector<int> order(energy.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int x, int y) { return energy[x] > energy[y]; });

    kvq_pair_set set = {};
    double kept = std::accumulate(energy.begin(), energy.end(), 0.0);
    for (size_t i = 0; i < order.size() && (i % BIAS_STEP || kept > BIAS_KEPT*BIAS_KEPT*b.size()); i++) {
        set[order[i]/32] |= 1u << order[i] % 32;
        kept -= energy[order[i]];
    }
    return set;
}

ggml_tensor * kvq_rope::turn(ggml_context * ctx, ggml_tensor * x, ggml_tensor * pos) const {
    return ggml_rope_ext(ctx, x, pos, factors, n_rot, mode, n_ctx_orig, freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow);
}

std::vector<float> kvq_rope::table() const {
    const int64_t n = KVQ_ROPE_STEP + KVQ_ROPE_STEPS;
    const auto first  = [&](int64_t i) { return interleaved() ? 2*i : i; };
    const auto second = [&](int64_t i) { return interleaved() ? 2*i + 1 : i + n_rot/2; };

    ggml_context_ptr ctx(ggml_init({ (size_t) (4*n*n_rot*sizeof(float) + (1 << 20)), nullptr, false }));
    ggml_tensor * x   = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, n_rot, 1, n);
    ggml_tensor * pos = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I32, n);
    for (int64_t j = 0; j < n; j++) {
        ((int32_t *) pos->data)[j] = (int32_t) (j < KVQ_ROPE_STEP ? j : (j - KVQ_ROPE_STEP)*KVQ_ROPE_STEP);
        for (int64_t i = 0; i < n_rot/2; i++) {
            ((float *) x->data)[j*n_rot + first(i)]  = 1.0f;   // turned by a: (cos a, sin a)
            ((float *) x->data)[j*n_rot + second(i)] = 0.0f;
        }
    }
    ggml_tensor * y = turn(ctx.get(), x, pos);
    ggml_cgraph * graph = ggml_new_graph(ctx.get());
    ggml_build_forward_expand(graph, y);
    ggml_backend_ptr backend(ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr));
    if (!backend || ggml_backend_graph_compute(backend.get(), graph) != GGML_STATUS_SUCCESS) {
        throw std::runtime_error("failed to compute the table of positions");
    }

    // YaRN lengthens vectors; one of the two factors of a position carries that
    const float * turned = (const float *) y->data;
    const float length = turned[first(0)];
    std::vector<float> table(n*n_rot);
    for (int64_t j = 0; j < n; j++) {
        for (int64_t i = 0; i < n_rot/2; i++) {
            const float scale = j < KVQ_ROPE_STEP ? 1.0f/length : 1.0f;
            table[j*n_rot + i]           = scale*turned[j*n_rot + first(i)];
            table[j*n_rot + n_rot/2 + i] = scale*turned[j*n_rot + second(i)];
        }
    }
    return table;
}

// ---- graph ----

ggml_tensor * kvq_kept_key_bias(const llama_memory_context_i * mctx, ggml_tensor * wk_b, int32_t il) {
    const auto * cache = wk_b ? dynamic_cast<const llama_kv_cache_context *>(mctx) : nullptr;
    return cache ? cache->kvq_kept_key_bias(wk_b, il) : wk_b;
}

void kvq_add_sources(ggml_context * ctx, ggml_tensor * attention, const kvq_sources * sources) {
    if (!sources) {
        return;
    }
    attention->src[9]  = sources->k16;
    attention->src[10] = sources->v16;
    attention->src[11] = sources->mask16;

    const kvq_key_bias * bias = &sources->bias;
    if (!bias->q) {
        return;
    }
    GGML_ASSERT(bias->pairs != kvq_pair_set());   // a backend may only be asked about what it could be given
    // as build_attn_mha splits its own query
    ggml_tensor * q = bias->q;
    const int64_t n_stream = attention->src[1]->ne[3], n_tokens = q->ne[2]/n_stream;
    q = ggml_view_4d(ctx, q, q->ne[0], q->ne[1], n_tokens, n_stream, q->nb[1], q->nb[2], q->nb[2]*n_tokens, 0);
    attention->src[5] = ggml_permute(ctx, q, 0, 2, 1, 3);
    attention->src[6] = bias->b;
    attention->src[7] = bias->trig;
    attention->src[8] = bias->pos;
    ((int32_t *) attention->op_params)[8] = bias->interleaved;
    kvq_set_bias_pairs(attention, bias->pairs);
}

ggml_tensor * llama_kv_cache::kvq_kept_key_bias(ggml_tensor * wk_b, int32_t il) const {
    const auto it = map_layer_ids.find(il);
    const kvq_layer * t = it != map_layer_ids.end() ? layers[it->second].kvq : nullptr;
    return t && t->bias && !t->subtract ? t->kept : wk_b;
}

ggml_tensor * llama_kv_cache::kvq_build_input_pos(ggml_context * ctx, uint32_t n_kv, const slot_info & sinfo) const {
    if (!kvq->trig) {
        return nullptr;
    }
    // of the cells and window rows of every stream, then as many rows for those of the batch's tokens, which are fewer
    ggml_tensor * pos = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, n_kv, 2*(sinfo.s1 - sinfo.s0 + 1));
    ggml_set_input(pos);
    ggml_set_name(pos, "kvq_inp_pos");
    return pos;
}

void llama_kv_cache::kvq_set_input_pos(ggml_tensor * pos, const slot_info & sinfo) const {
    GGML_ASSERT(ggml_backend_buffer_is_host(pos->buffer));
    const int64_t n_stream = pos->ne[1]/2;
    const int64_t n_kv = pos->ne[0] - (window ? window->n_ring(sinfo) + window->n_own_max : 0);
    int32_t * of_token = (int32_t *) pos->data + n_stream*pos->ne[0];
    for (int64_t s = 0; s < n_stream; s++) {
        const auto & cells = v_cells[sinfo.s0 + s];
        int32_t * row = (int32_t *) pos->data + s*pos->ne[0];
        for (int64_t i = 0; i < n_kv; i++) {
            row[i] = cells.is_empty(i) ? 0 : cells.pos_get(i);
        }
        if (window) {
            window->positions(sinfo, s, row + n_kv);
        }
        for (const uint32_t i : sinfo.idxs[s]) {
            *of_token++ = cells.pos_get(i);
        }
    }
}

ggml_tensor * llama_kv_cache_context::kvq_kept_key_bias(ggml_tensor * wk_b, int32_t il) const {
    return kv->kvq_kept_key_bias(wk_b, il);
}

ggml_tensor * llama_kv_cache_context::kvq_build_input_pos(ggml_context * ctx) const {
    return kv->kvq_build_input_pos(ctx, n_kv + (kv->window ? n_ring + kv->window->n_own_max : 0), sinfos[i_cur]);
}

void llama_kv_cache_context::kvq_set_input_pos(ggml_tensor * pos) const {
    kv->kvq_set_input_pos(pos, sinfos[i_cur]);
}
