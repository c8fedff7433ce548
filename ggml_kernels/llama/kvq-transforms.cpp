#include "kvq-transforms.h"
#include "kvq-key-bias.h"
#include "kvq-llama.h"
#include "kvq-metadata.h"
#include "kvq-plan.h"
#include "kvq.h"

#include "llama-hparams.h"
#include "llama-impl.h"
#include "llama-kv-cache.h"
#include "llama-model.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <map>
#include <stdexcept>
#include <thread>

static thread_local kvq_request g_request;

void kvq_begin(const llama_context_params & params, const llama_cparams & cparams) {
    if (params.kv_sink < -1 || params.kv_recent < -1) {
        throw std::runtime_error(format("kv_sink and kv_recent are numbers of tokens, or -1 for the default, not %d and %d", params.kv_sink, params.kv_recent));
    }
    g_request = { params.kvq_off, params.kv_sink, params.kv_recent, &cparams };
}

const kvq_request & kvq_current() {
    return g_request;
}

bool kvq_invert(const std::vector<double> & matrix, int64_t n, std::vector<double> & inverse) {
    std::vector<double> a = matrix;
    inverse.assign(n*n, 0.0);
    for (int64_t i = 0; i < n; i++) {
        inverse[i*n + i] = 1.0;
    }
    for (int64_t col = 0; col < n; col++) {
        int64_t pivot = col;
        for (int64_t row = col + 1; row < n; row++) {
            if (std::fabs(a[row*n + col]) > std::fabs(a[pivot*n + col])) {
                pivot = row;
            }
        }
        if (a[pivot*n + col] == 0.0) {
            return false;
        }
        if (pivot != col) {
            std::swap_ranges(&a[pivot*n], &a[pivot*n] + n, &a[col*n]);
            std::swap_ranges(&inverse[pivot*n], &inverse[pivot*n] + n, &inverse[col*n]);
        }
        const double scale = 1.0/a[col*n + col];
        for (int64_t j = 0; j < n; j++) {
            a[col*n + j]       *= scale;
            inverse[col*n + j] *= scale;
        }
        for (int64_t row = 0; row < n; row++) {
            const double factor = a[row*n + col];
            if (row == col || factor == 0.0) {
                continue;
            }
            double * x = &a[row*n], * y = &inverse[row*n];
            const double * px = &a[col*n], * py = &inverse[col*n];
            for (int64_t j = col; j < n; j++) {
                x[j] -= factor*px[j];
            }
            for (int64_t j = 0; j < n; j++) {
                y[j] -= factor*py[j];
            }
        }
    }
    return true;
}

// out [d, d] = transpose of (rows [d, d] * mix), or of rows when nothing is mixed
static void mixed_transpose(const std::vector<double> & rows, const std::vector<double> & mix, int64_t d, float * out) {
    std::vector<double> y(d);
    for (int64_t i = 0; i < d; i++) {
        const double * x = &rows[i*d];
        if (!mix.empty()) {
            std::fill(y.begin(), y.end(), 0.0);
            for (int64_t p = 0; p < d; p++) {
                for (int64_t j = 0; j < d; j++) {
                    y[j] += x[p]*mix[p*d + j];
                }
            }
            x = y.data();
        }
        for (int64_t j = 0; j < d; j++) {
            out[j*d + i] = (float) x[j];
        }
    }
}

// Matrices of one KV head from its basis; false when the basis has no inverse to 1e-3.
static bool head_matrices(const float * basis, const kvq_plan & plan, int64_t d, float * k_in, float * q_in) {
    const std::vector<double> b(basis, basis + d*d);
    std::vector<double> f;
    if (!kvq_invert(b, d, f)) {
        return false;
    }
    // as stored: f32
    for (int64_t i = 0; i < d; i++) {
        std::vector<double> row(d, 0.0);
        for (int64_t m = 0; m < d; m++) {
            for (int64_t j = 0; j < d; j++) {
                row[j] += (double) (float) f[i*d + m]*b[m*d + j];
            }
        }
        for (int64_t j = 0; j < d; j++) {
            if (!(std::fabs(row[j] - (i == j)) < 1e-3)) {
                return false;
            }
        }
    }
    std::vector<double> keys(d*d), queries(d*d);   // [d, positions]
    for (int64_t p = 0; p < d; p++) {
        const int rank = plan.order[p];
        for (int64_t i = 0; i < d; i++) {
            keys[i*d + p]    = f[i*d + rank]*plan.weight[rank];
            queries[i*d + p] = b[rank*d + i]/plan.weight[rank];
        }
    }
    mixed_transpose(keys,    plan.mix, d, k_in);
    mixed_transpose(queries, plan.mix, d, q_in);
    return true;
}

// work(i) for i < n on all cores
static void parallel(int64_t n, const std::function<void(int64_t)> & work) {
    std::atomic<int64_t> next{0};
    const auto run = [&] {
        for (int64_t i; (i = next++) < n; ) {
            work(i);
        }
    };
    std::vector<std::thread> threads;
    for (int64_t t = 1; t < std::min<int64_t>(n, std::thread::hardware_concurrency()); t++) {
        threads.emplace_back(run);
    }
    run();
    for (auto & t : threads) {
        t.join();
    }
}

bool kvq_has_hooks(const llama_model & model) {
    switch (model.arch) {
        case LLM_ARCH_DEEPSEEK32: case LLM_ARCH_DEEPSEEK4: case LLM_ARCH_GLM_DSA: case LLM_ARCH_GLM5_NEXT: case LLM_ARCH_DOTS3NOTE:
        case LLM_ARCH_HY_V4: case LLM_ARCH_MINIMAX_M3: case LLM_ARCH_QWEN4EXP: case LLM_ARCH_DFLASH:
            return false;
        default:
            return true;
    }
}

// A constant shift of a query's logits is invisible to softmax, but not to a cap or beside a sink.
static bool shift_is_seen(const llama_model & model, uint32_t il) {
    return model.hparams.attn_soft_cap || model.arch == LLM_ARCH_GROK || model.layers[il].attn_sinks;
}

// Test only: caches of f16 and q8_0 are transformed too, as the type that KVQ_TRANSFORM_FLOAT names.
static ggml_type transformed_as(ggml_type type) {
    const char * name = getenv("KVQ_TRANSFORM_FLOAT");
    return name && (type == GGML_TYPE_F16 || type == GGML_TYPE_Q8_0) ? kvq_type_from_name(name) : type;
}

static std::vector<float> to_host(const ggml_tensor * t) {
    std::vector<float> x(ggml_nelements(t));
    ggml_backend_tensor_get(t, x.data(), 0, ggml_nbytes(t));
    return x;
}

// k_in and q_in of a layer, all heads at once
static void upload_matrices(const kvq_layer & t, const kvq_layer_data & data, ggml_type type, uint32_t il, const kvq_metadata & metadata) {
    const int64_t d = t.k_in->ne[0], n_head = t.k_in->ne[2];
    std::vector<float> k_in(d*d*n_head), q_in(d*d*n_head);
    std::atomic<int64_t> bad{-1};
    parallel(n_head, [&](int64_t h) {
        const kvq_plan plan = kvq_plan_for(type, d, &data.k_lambda[h*d]);
        if (!head_matrices(&data.k_basis[h*d*d], plan, d, &k_in[h*d*d], &q_in[h*d*d])) {
            bad = h;
        }
    });
    if (bad >= 0) {
        throw std::runtime_error(metadata.complaint(format("kvq.blk.%u.k.basis", il), format("the matrix of KV head %d has no inverse", (int) bad)));
    }
    std::vector<ggml_fp16_t> half(k_in.size());
    for (const auto & [tensor, values] : { std::pair(t.k_in, &k_in), std::pair(t.q_in, &q_in) }) {
        ggml_fp32_to_fp16_row(values->data(), half.data(), half.size());
        ggml_backend_tensor_set(tensor, half.data(), 0, ggml_nbytes(tensor));
    }
}

// A key bias in two: what is left out of the keys and returned, and what the graph adds to them still.
struct key_bias_parts {
    kvq_pair_set pairs = {};
    std::vector<float> returned, kept;   // kept is empty where that is nothing
};

// data: of the layer, null where there are none. A measured bias has only a returned part.
static key_bias_parts key_bias_of(const llama_model & model, int32_t il, bool measured, const kvq_layer_data * data, const kvq_rope & rope) {
    key_bias_parts out;
    const ggml_tensor * own = kvq_model_key_bias(model, il);
    if (measured ? data->k_bias.empty() : !own) {
        return out;
    }
    const int64_t d = model.hparams.n_embd_head_k(il);
    std::vector<float> b;
    if (measured) {
        b = data->k_bias;
    } else if (model.hparams.no_alloc) {
        b.assign(ggml_nelements(own), 1.0f);
    } else {
        b = to_host(own);
    }
    if (data && !data->k_basis.empty()) {   // as the keys were measured
        out.pairs = data->has_pairs ? data->pairs : kvq_first_pairs(rope.n_rot/2);
    } else {
        out.pairs = kvq_carrying_pairs(b, d, rope);
    }
    out.returned.assign(b.size(), 0.0f);
    std::vector<float> kept(b.size(), 0.0f);
    for (size_t j = 0; j < b.size(); j++) {
        const int pair = rope.pair_of(j % d);
        (pair >= 0 && kvq_has_pair(out.pairs, pair) ? out.returned : kept)[j] = b[j];
    }
    if (!measured && std::any_of(kept.begin(), kept.end(), [](float x) { return x != 0.0f; })) {
        out.kept = kept;
    }
    return out;
}

void llama_kv_cache::kvq_load() {
    const auto transforms = std::make_shared<kvq_transforms>();
    transforms->layers.resize(layers.size());
    kvq = transforms;

    std::vector<size_t> ours;   // the others keep what they have: a layer of another cache brings its own
    for (size_t i = 0; i < layers.size(); i++) {
        if (!layers[i].kvq) {
            layers[i].kvq = &transforms->layers[i];
            if (kvq_is_cache_type(transformed_as(layers[i].k->type))) {
                ours.push_back(i);
            }
        }
    }
    const bool tiered = std::any_of(ours.begin(), ours.end(), [&](size_t i) { return kvq_code(layers[i].k->type) == KVQ_TIERED; });
    if (tiered && (hparams.is_mla() || !kvq_has_hooks(model))) {
        throw std::runtime_error(format("cache type oscar2 needs calibrated keys, which the attention of %s cannot have; use turbo3 or turbo4",
            llm_arch_name(model.arch)));
    }
    if (tiered && g_request.off) {
        throw std::runtime_error("cache type oscar2 needs calibrated keys, and kvq is off; leave it at auto, or use turbo2");
    }
    if (ours.empty() || hparams.is_mla()) {
        return;
    }

    // the bias leaves the keys of all layers or of none, because calibrated data know one of both
    bool has_bias = false;
    for (const size_t i : ours) {
        const int32_t il = layers[i].il;
        if (kvq_model_key_bias(model, il)) {
            has_bias = true;
            if (transforms->bias_stays.empty()) {
                transforms->bias_stays = g_request.off ? KVQ_OFF : kvq_bias_obstacle(model, *g_request.cparams, il, false, layers[i].k->type, layers[i].v->type);
            }
        } else if (model.layers[il].wqkv_b) {
            transforms->bias_stays = "it is fused with that of queries and values";
        }
    }
    if (g_request.off || !kvq_has_hooks(model)) {
        return;
    }
    const kvq_metadata metadata(model);
    std::string left_out = has_bias && transforms->bias_stays.empty() ? "attn_k.bias" : "none";
    std::string obstacle = transforms->bias_stays;
    const std::string wanted = metadata.empty() ? left_out : metadata.key_bias();
    const bool measured = wanted == "measured";
    if (measured) {
        obstacle = "";
        for (const size_t i : ours) {
            if (obstacle.empty()) {
                obstacle = kvq_bias_obstacle(model, *g_request.cparams, layers[i].il, true, layers[i].k->type, layers[i].v->type);
            }
        }
        if (obstacle.empty()) {
            left_out = wanted;
            transforms->bias_stays = "";
        }
    }
    const bool calibrated = !metadata.empty() && wanted == left_out;
    if (!metadata.empty() && !calibrated) {
        // measured: leaving the bias out gains more than data that were measured with it
        const std::string why = format("measured on keys %s their bias, which %s here%s%s%s", wanted == "none" ? "with" : "without",
            wanted == "none" ? "is left out" : "stays", obstacle.empty() ? "" : " (", obstacle.c_str(), obstacle.empty() ? "" : ")");
        const std::string remedy = kvq_embed_command(model, true) + " --key-bias " + left_out;
        if (tiered) {
            throw std::runtime_error(format("kvq.key_bias of %s: %s; run: %s", metadata.source().c_str(), why.c_str(), remedy.c_str()));
        }
        LLAMA_LOG_WARN("kvq: calibrated data of %s not used: %s; run: %s\n", metadata.source().c_str(), why.c_str(), remedy.c_str());
    }
    if (tiered && !calibrated) {
        throw std::runtime_error(format("cache type oscar2 needs calibrated keys, which this model does not carry; run: %s",
            kvq_embed_command(model, false).c_str()));
    }
    transforms->source = calibrated ? metadata.source() : "";

    // tensors, one context a buffer type
    std::map<size_t, kvq_layer_data> data;
    std::map<size_t, key_bias_parts> biases;
    std::map<ggml_backend_buffer_type_t, ggml_context_ptr> contexts;
    for (const size_t i : ours) {
        const uint32_t il = layers[i].il;
        kvq_layer & t = transforms->layers[i];
        const int64_t n_head = hparams.n_head_kv(il), d = hparams.n_embd_head_k(il);

        auto & ctx = contexts[ggml_backend_buffer_get_type(layers[i].k->buffer)];
        if (!ctx) {
            ctx.reset(ggml_init({ (5*layers.size() + 1)*ggml_tensor_overhead(), nullptr, true }));
        }
        if (calibrated) {
            data[i] = metadata.layer(il, n_head, d);
        }
        if (calibrated && !data[i].k_basis.empty()) {
            const bool seen = shift_is_seen(model, il);
            t.k_in = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F16, d, d, n_head);
            t.q_in = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F16, d, d, n_head);
            t.mean = seen ? nullptr : ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, d, n_head);
            t.hash = data[i].hash;
        } else if (tiered) {
            throw std::runtime_error(metadata.complaint(format("kvq.blk.%u.k.basis", il), "missing, and cache type oscar2 needs it"));
        }
        t.subtract = left_out == "measured";
        if (t.subtract || left_out == "attn_k.bias") {
            const kvq_rope rope(model, *g_request.cparams, il);
            biases[i] = key_bias_of(model, il, t.subtract, calibrated ? &data[i] : nullptr, rope);
            t.pairs   = biases[i].pairs;
            if (t.pairs != kvq_pair_set{}) {
                t.bias = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, d, n_head);
                t.kept = biases[i].kept.empty() ? nullptr : ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, d*n_head);
                for (const uint32_t word : t.pairs) {
                    t.hash = (t.hash ^ word)*0x9E3779B1u;
                }
                if (!transforms->trig) {
                    transforms->rope = rope;
                    transforms->trig = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, hparams.n_rot(il), KVQ_ROPE_STEP + KVQ_ROPE_STEPS);
                }
            }
        }
    }
    for (auto & [buft, ctx] : contexts) {
        if (!ggml_get_first_tensor(ctx.get())) {
            continue;
        }
        ggml_backend_buffer_t buffer = hparams.no_alloc ? ggml_backend_buft_alloc_buffer(buft, 0)
                                                        : ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), buft);
        if (!buffer) {
            throw std::runtime_error("failed to allocate buffer for calibrated transforms");
        }
        for (ggml_tensor * t = ggml_get_first_tensor(ctx.get()); hparams.no_alloc && t; t = ggml_get_next_tensor(ctx.get(), t)) {
            t->buffer = buffer;
        }
        ggml_backend_buffer_set_usage(buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        transforms->ctxs_bufs.emplace_back(std::move(ctx), buffer);
    }
    if (hparams.no_alloc) {
        return;
    }

    for (const size_t i : ours) {
        const kvq_layer & t = transforms->layers[i];
        if (t.k_in) {
            upload_matrices(t, data[i], transformed_as(layers[i].k->type), layers[i].il, metadata);
        }
        if (t.mean) {
            ggml_backend_tensor_set(t.mean, data[i].k_mean.data(), 0, ggml_nbytes(t.mean));
        }
        if (t.bias) {
            ggml_backend_tensor_set(t.bias, biases[i].returned.data(), 0, ggml_nbytes(t.bias));
        }
        if (t.kept) {
            ggml_backend_tensor_set(t.kept, biases[i].kept.data(), 0, ggml_nbytes(t.kept));
        }
    }
    if (transforms->trig) {
        ggml_backend_tensor_set(transforms->trig, transforms->rope.table().data(), 0, ggml_nbytes(transforms->trig));
    }
}

// ---- graph ----

static ggml_tensor * product(ggml_context * ctx, ggml_tensor * matrices, ggml_tensor * x, int mark) {
    ggml_tensor * y = ggml_mul_mat(ctx, matrices, x);
    ggml_prec_set_acc(y, GGML_PREC_F32);
    y->op_params[KVQ_PRODUCT_PARAM] = mark;
    return y;
}

// x [d, n_head, n] by the matrix of its KV head, as [d, n, n_head]
static ggml_tensor * per_head(ggml_context * ctx, ggml_tensor * matrices, ggml_tensor * x, int mark = 0) {
    return product(ctx, matrices, ggml_permute(ctx, x, 0, 2, 1, 3), mark);
}

// [d, n, n_head] to contiguous [d, n_head, n]
static ggml_tensor * token_major(ggml_context * ctx, ggml_tensor * x) {
    if (x->ne[1] == 1 || x->ne[2] == 1) {
        return ggml_reshape_3d(ctx, x, x->ne[0], x->ne[2], x->ne[1]);
    }
    return ggml_cont(ctx, ggml_permute(ctx, x, 0, 2, 1, 3));
}

// what norm and RoPE, or RoPE alone, were made from
static ggml_tensor * before_rope(ggml_tensor * x) {
    if (x->op != GGML_OP_ROPE) {
        return x;
    }
    x = x->src[0];
    return x->op == GGML_OP_MUL && x->src[0]->op == GGML_OP_RMS_NORM ? x->src[0]->src[0] : x;
}

// The products of a layer stand side by side in the graph, and nothing that they read is overwritten before the last of them, nor what they read with norm and
// RoPE of a few tokens on the way: further sources, which a product does not look at, say so.
static void after(ggml_tensor * x, ggml_tensor * q, ggml_tensor * k, ggml_tensor * transformed_k) {
    x->src[2] = transformed_k;
    x->src[3] = k;
    if (q->ne[2] <= KVQ_ROTARY_TOKENS) {
        x->src[4] = before_rope(q);
        x->src[5] = before_rope(k);
        x->src[6] = k->op == GGML_OP_ROPE ? k->src[1] : nullptr;     // positions
    }
}

// x [d, n_head, n] to the same shape; of one token, the query heads of a KV head are columns of one product. k: the keys, null
// where the layer has none of its own.
static ggml_tensor * transformed_queries(ggml_context * ctx, const kvq_layer & t, ggml_tensor * q, ggml_tensor * k, ggml_tensor * transformed_k) {
    const int64_t d = q->ne[0], n_head = q->ne[1], n_head_kv = t.q_in->ne[2];
    const bool columns = q->ne[2] == 1 && ggml_is_contiguous(q);
    ggml_tensor * x = columns ? product(ctx, t.q_in, ggml_reshape_3d(ctx, q, d, n_head/n_head_kv, n_head_kv), KVQ_PRODUCT_QUERIES)
                              : per_head(ctx, t.q_in, q, KVQ_PRODUCT_QUERIES);
    if (k) {
        after(x, q, k, transformed_k);
    }
    return columns ? ggml_reshape_3d(ctx, x, d, n_head, 1) : ggml_permute(ctx, x, 0, 2, 1, 3);
}

static ggml_tensor * transformed_keys(ggml_context * ctx, const kvq_layer & t, ggml_tensor * k) {
    return token_major(ctx, per_head(ctx, t.k_in, t.mean ? ggml_sub(ctx, k, t.mean) : k, KVQ_PRODUCT_KEYS));
}

kvq_key_bias llama_kv_cache::kvq_enter(ggml_context * ctx, ggml_tensor *& q, ggml_tensor *& k, ggml_tensor * pos, int32_t il) const {
    const kvq_layer & t = *layers[map_layer_ids.at(il)].kvq;
    kvq_key_bias bias;
    if (t.bias) {
        const int64_t n_kv = pos->ne[0], n_stream = pos->ne[1]/2;
        bias = { q, t.bias, kvq->trig, ggml_view_2d(ctx, pos, n_kv, n_stream, pos->nb[1], 0), kvq->rope.interleaved(), t.pairs };
        if (k && t.subtract) {
            ggml_tensor * of_token = ggml_view_1d(ctx, pos, k->ne[2], n_stream*pos->nb[1]);
            k = ggml_sub(ctx, k, kvq->rope.turn(ctx, ggml_repeat_4d(ctx, t.bias, k->ne[0], k->ne[1], k->ne[2], 1), of_token));
        }
    }
    if (t.k_in) {
        ggml_tensor * plain = k;
        if (k) {
            k = transformed_keys(ctx, t, k);
            ggml_format_name(k, "kvq_k-%d", il);
        }
        q = transformed_queries(ctx, t, q, plain, k);
        ggml_format_name(q, "kvq_q-%d", il);
    }
    return bias;
}

ggml_tensor * llama_kv_cache::kvq_restore_keys(ggml_context * ctx, ggml_tensor * k, int32_t il) const {
    const kvq_layer & t = *layers[map_layer_ids.at(il)].kvq;
    if (!t.k_in) {
        return k;
    }
    // k~ = (k - mean) F~, and F~ B~ = I
    k = token_major(ctx, per_head(ctx, ggml_cont(ctx, ggml_transpose(ctx, t.q_in)), k));
    return t.mean ? ggml_add(ctx, k, t.mean) : k;
}

ggml_tensor * llama_kv_cache::kvq_transform_keys(ggml_context * ctx, ggml_tensor * k, int32_t il) const {
    const kvq_layer & t = *layers[map_layer_ids.at(il)].kvq;
    return t.k_in ? transformed_keys(ctx, t, k) : k;
}

// The products of a layer come first, so that norm, RoPE, transforms and writes stand side by side: a backend can join them (kvq-rotary.h).
void llama_kv_cache::kvq_order(ggml_cgraph * gf, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v, int32_t il) const {
    if (k && kvq_is_cache_type(layers[map_layer_ids.at(il)].k->type)) {
        for (ggml_tensor * x : { before_rope(q), before_rope(k), v }) {
            if (x) {
                ggml_build_forward_expand(gf, x);
            }
        }
    }
}

void llama_kv_cache_context::kvq_order(ggml_cgraph * gf, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v, int32_t il) const {
    kv->kvq_order(gf, q, k, v, il);
}

kvq_key_bias llama_kv_cache_context::kvq_enter(ggml_context * ctx, ggml_tensor *& q, ggml_tensor *& k, ggml_tensor * pos, int32_t il) const {
    return kv->kvq_enter(ctx, q, k, pos, il);
}
