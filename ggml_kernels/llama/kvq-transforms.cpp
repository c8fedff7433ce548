#include "kvq-transforms.h"
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

// set by the context for the caches that it creates
static thread_local bool g_off = false;

void kvq_set_off(bool off) {
    g_off = off;
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

// attention builders of their own, which call no hook of ours
static bool has_hooks(llm_arch arch) {
    switch (arch) {
        case LLM_ARCH_DEEPSEEK32: case LLM_ARCH_DEEPSEEK4: case LLM_ARCH_GLM_DSA: case LLM_ARCH_GLM5_NEXT: case LLM_ARCH_DOTS3NOTE:
        case LLM_ARCH_HY_V4: case LLM_ARCH_MINIMAX_M3: case LLM_ARCH_QWEN4EXP: case LLM_ARCH_DFLASH:
            return false;
        default:
            return true;
    }
}

// Test only: caches of f16 and q8_0 are transformed too, as the type that KVQ_TRANSFORM_FLOAT names.
static ggml_type transformed_as(ggml_type type) {
    const char * name = getenv("KVQ_TRANSFORM_FLOAT");
    return name && (type == GGML_TYPE_F16 || type == GGML_TYPE_Q8_0) ? kvq_type_from_name(name) : type;
}

void llama_kv_cache::kvq_load() {
    const auto transforms = std::make_shared<kvq_transforms>();
    transforms->layers.resize(layers.size());
    const auto owned = [&](const kv_layer & layer) { return !layer.kvq; };   // a layer of another cache brings its own

    const auto ours = [](const ggml_tensor * t) { return t && kvq_is_cache_type(transformed_as(t->type)); };
    const bool wanted = std::any_of(layers.begin(), layers.end(), [&](const kv_layer & l) { return ours(l.k) || ours(l.v); });
    kvq = transforms;
    for (size_t i = 0; i < layers.size(); i++) {
        layers[i].kvq = owned(layers[i]) ? &transforms->layers[i] : layers[i].kvq;
    }
    const bool tiered = std::any_of(layers.begin(), layers.end(), [](const kv_layer & l) { return kvq_code(l.k->type) == KVQ_TIERED; });
    const bool able = !hparams.is_mla() && has_hooks(model.arch);
    if (tiered && !able) {
        throw std::runtime_error(format("cache type oscar2 needs calibrated keys, which the attention of %s cannot have; use turbo3 or turbo4",
            llm_arch_name(model.arch)));
    }
    if (tiered && g_off) {
        throw std::runtime_error("cache type oscar2 needs calibrated keys, and kvq is off; leave it at auto, or use turbo2");
    }
    if (g_off || !wanted || !able) {
        return;
    }
    const kvq_metadata metadata(model);
    if (tiered && metadata.empty()) {
        throw std::runtime_error(format("cache type oscar2 needs calibrated keys, which this model does not carry; run: %s",
            kvq_embed_command(model, false).c_str()));
    }
    if (metadata.empty()) {
        return;
    }
    transforms->source = metadata.source();

    // data and tensors, one context a buffer type
    std::vector<kvq_layer_data> data(layers.size());
    std::map<ggml_backend_buffer_type_t, ggml_context_ptr> contexts;
    for (size_t i = 0; i < layers.size(); i++) {
        const auto & layer = layers[i];
        kvq_layer & t = transforms->layers[i];
        if (layer.kvq != &t) {
            continue;
        }
        const int64_t n_head = hparams.n_head_kv(layer.il), d = hparams.n_embd_head_k(layer.il), d_v = hparams.n_embd_head_v(layer.il);
        data[i] = metadata.layer(layer.il, n_head, d, d_v);

        auto & ctx = contexts[ggml_backend_buffer_get_type(layer.k->buffer)];
        if (!ctx) {
            ctx.reset(ggml_init({ 4*layers.size()*ggml_tensor_overhead(), nullptr, true }));
        }
        // A constant shift of a query's logits is invisible to softmax, but not to a cap or beside a sink.
        const bool sinks  = model.layers[layer.il].attn_sinks;
        const bool capped = hparams.attn_soft_cap || model.arch == LLM_ARCH_GROK;
        if (ours(layer.k) && !data[i].k_basis.empty()) {
            t.k_in   = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, d, d, n_head);
            t.q_in   = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, d, d, n_head);
            t.k_mean = sinks || capped ? nullptr : ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, d, n_head);
            t.k_hash = data[i].hash;
        } else if (kvq_code(layer.k->type) == KVQ_TIERED) {
            throw std::runtime_error(metadata.complaint(format("kvq.blk.%u.k.basis", layer.il), "missing, and cache type oscar2 needs it"));
        }
        if (ours(layer.v) && !data[i].v_mean.empty() && !sinks) {
            t.v_mean = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, d_v, n_head);
            t.v_hash = data[i].hash;
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

    for (size_t i = 0; i < layers.size(); i++) {
        const auto & layer = layers[i];
        const kvq_layer & t = transforms->layers[i];
        if (t.k_in && layer.kvq == &t) {
            const int64_t d = t.k_in->ne[0], n_head = t.k_in->ne[2];
            std::vector<float> k_in(d*d*n_head), q_in(d*d*n_head);
            std::atomic<int64_t> bad{-1};
            parallel(n_head, [&](int64_t h) {
                const kvq_plan plan = kvq_plan_for(transformed_as(layer.k->type), d, &data[i].k_lambda[h*d]);
                if (!head_matrices(&data[i].k_basis[h*d*d], plan, d, &k_in[h*d*d], &q_in[h*d*d])) {
                    bad = h;
                }
            });
            if (bad >= 0) {
                throw std::runtime_error(metadata.complaint(format("kvq.blk.%u.k.basis", layer.il),
                    format("the matrix of KV head %d has no inverse", (int) bad)));
            }
            ggml_backend_tensor_set(t.k_in, k_in.data(), 0, ggml_nbytes(t.k_in));
            ggml_backend_tensor_set(t.q_in, q_in.data(), 0, ggml_nbytes(t.q_in));
            if (t.k_mean) {
                ggml_backend_tensor_set(t.k_mean, data[i].k_mean.data(), 0, ggml_nbytes(t.k_mean));
            }
        }
        if (t.v_mean && layer.kvq == &t) {
            ggml_backend_tensor_set(t.v_mean, data[i].v_mean.data(), 0, ggml_nbytes(t.v_mean));
        }
    }
}

// ---- graph ----

// x [d, n_head, n] by the matrix of its KV head, as [d, n, n_head]
static ggml_tensor * per_head(ggml_context * ctx, ggml_tensor * matrices, ggml_tensor * x) {
    return ggml_mul_mat(ctx, matrices, ggml_permute(ctx, x, 0, 2, 1, 3));
}

// [d, n, n_head] to contiguous [d, n_head, n]
static ggml_tensor * token_major(ggml_context * ctx, ggml_tensor * x) {
    if (x->ne[1] == 1 || x->ne[2] == 1) {
        return ggml_reshape_3d(ctx, x, x->ne[0], x->ne[2], x->ne[1]);
    }
    return ggml_cont(ctx, ggml_permute(ctx, x, 0, 2, 1, 3));
}

static ggml_tensor * transformed_keys(ggml_context * ctx, const kvq_layer & t, ggml_tensor * k) {
    return token_major(ctx, per_head(ctx, t.k_in, t.k_mean ? ggml_sub(ctx, k, t.k_mean) : k));
}

void llama_kv_cache::kvq_enter(ggml_context * ctx, ggml_tensor *& q, ggml_tensor *& k, ggml_tensor *& v, int32_t il) const {
    const kvq_layer & t = *layers[map_layer_ids.at(il)].kvq;
    if (t.k_in) {
        q = ggml_permute(ctx, per_head(ctx, t.q_in, q), 0, 2, 1, 3);
        ggml_format_name(q, "kvq_q-%d", il);
        if (k) {
            k = transformed_keys(ctx, t, k);
            ggml_format_name(k, "kvq_k-%d", il);
        }
    }
    if (t.v_mean && v) {
        v = ggml_sub(ctx, v, t.v_mean);
        ggml_format_name(v, "kvq_v-%d", il);
    }
}

ggml_tensor * llama_kv_cache::kvq_leave(ggml_context * ctx, ggml_tensor * out, int32_t il) const {
    const kvq_layer & t = *layers[map_layer_ids.at(il)].kvq;
    if (!t.v_mean) {
        return out;
    }
    const int64_t d = t.v_mean->ne[0], n_head_kv = t.v_mean->ne[1];
    ggml_tensor * x = ggml_reshape_4d(ctx, out, d, out->ne[0]/(d*n_head_kv), n_head_kv, out->ne[1]);
    x = ggml_add(ctx, x, ggml_reshape_3d(ctx, t.v_mean, d, 1, n_head_kv));
    return ggml_reshape_2d(ctx, x, out->ne[0], out->ne[1]);
}

ggml_tensor * llama_kv_cache::kvq_restore_keys(ggml_context * ctx, ggml_tensor * k, int32_t il) const {
    const kvq_layer & t = *layers[map_layer_ids.at(il)].kvq;
    if (!t.k_in) {
        return k;
    }
    // k~ = (k - mean) F~, and F~ B~ = I
    k = token_major(ctx, per_head(ctx, ggml_cont(ctx, ggml_transpose(ctx, t.q_in)), k));
    return t.k_mean ? ggml_add(ctx, k, t.k_mean) : k;
}

ggml_tensor * llama_kv_cache::kvq_transform_keys(ggml_context * ctx, ggml_tensor * k, int32_t il) const {
    const kvq_layer & t = *layers[map_layer_ids.at(il)].kvq;
    return t.k_in ? transformed_keys(ctx, t, k) : k;
}

// ---- the batch's view of the cache ----

void llama_kv_cache_context::kvq_enter(ggml_context * ctx, ggml_tensor *& q, ggml_tensor *& k, ggml_tensor *& v, int32_t il) const {
    kv->kvq_enter(ctx, q, k, v, il);
}

ggml_tensor * llama_kv_cache_context::kvq_leave(ggml_context * ctx, ggml_tensor * out, int32_t il) const {
    return kv->kvq_leave(ctx, out, il);
}
