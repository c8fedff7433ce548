// What a model does to the queries or keys of a layer between their product and the cache - RMS norm with weights, then RoPE - found in a graph, so that a
// launch which reads them can do it on the way. As operations of ggml they are a launch, and at one token each costs more than its arithmetic.
// For C++ files that include ggml-impl.h.
#pragma once

#include "ggml-impl.h"
#include "kvq.h"

#include <math.h>

constexpr int KVQ_ROTARIES = 2;             // of one launch: queries and keys

struct kvq_rotary {
    const char * x;            // f32 [d, n_head, n_tokens] before both
    int64_t nbx1, nbx2;        // bytes from head to head and from token to token
    float * y;                 // the same after them, contiguous; null where nothing but the launch reads it
    const float   * weight;    // [d], null: no norm
    const float   * factors;   // [n_dims/2] of frequencies, or null
    const int32_t * pos;       // [n_tokens]
    int   d, n_head, n_tokens;
    int   n_dims;              // the first values of a row, which turn
    bool  neox;                // pairs are (0, n_dims/2), (1, n_dims/2 + 1), ...; else (0, 1), (2, 3), ...
    float eps, theta_scale, freq_scale, ext_factor, attn_factor, corr[2];
};

// A turn as nodes of a graph.
struct kvq_rotary_nodes {
    kvq_rotary turn;
    const ggml_tensor * source;
    const ggml_tensor * rope;
    int last;                  // of its nodes, the one of RoPE
};

static inline bool kvq_overlap(const ggml_tensor * x, const ggml_tensor * y) {
    const char * a = (const char *) x->data, * b = (const char *) y->data;
    return a < b + ggml_nbytes(y) && b < a + ggml_nbytes(x);
}

// the first node behind `at` that is no view
static inline int kvq_next_node(const ggml_cgraph * graph, int at) {
    do { at++; } while (at < graph->n_nodes && ggml_op_is_empty(graph->nodes[at]->op));
    return at;
}

// Whether nothing but the nodes behind `at` up to `last` reads node `at`, directly or through views.
static inline bool kvq_used_within(const ggml_cgraph * graph, const int at, const int last) {
    const ggml_tensor * t = graph->nodes[at];
    if (t->flags & GGML_TENSOR_FLAG_OUTPUT) {
        return false;
    }
    int uses = 0;
    for (int i = at + 1; i <= last; i++) {
        for (const ggml_tensor * src : graph->nodes[i]->src) {
            uses += src == t;
        }
        if (ggml_op_is_empty(graph->nodes[i]->op) && graph->nodes[i]->src[0] == t && !kvq_used_within(graph, i, last)) {
            return false;
        }
    }
    return uses == ggml_node_get_use_count(graph, at);
}

// Whether `x` is the tensor `of`, or a view of the whole of it.
static inline bool kvq_is_all_of(const ggml_tensor * x, const ggml_tensor * of) {
    return x == of || (x->view_src == of && x->view_offs == 0 && ggml_nelements(x) == ggml_nelements(of));
}

// Fills `out` when node i begins the norm and RoPE, or RoPE alone, of at most max_tokens tokens. What no launch has to wait for - positions, weights and factors -
// must be leaves.
static inline bool kvq_find_rotary(const ggml_cgraph * graph, const int i, const int64_t max_tokens, kvq_rotary_nodes & out) {
    const ggml_tensor * first = graph->nodes[i], * weight = nullptr;
    auto is_leaf = [](const ggml_tensor * t, const ggml_type type) { return t->op == GGML_OP_NONE && t->type == type && ggml_is_contiguous(t) && ggml_nrows(t) == 1; };
    int at = i;
    if (first->op == GGML_OP_RMS_NORM) {
        const ggml_tensor * mul = i + 2 < graph->n_nodes ? graph->nodes[i + 1] : nullptr;
        if (!mul || mul->op != GGML_OP_MUL || mul->src[0] != first || !ggml_node_has_n_uses(graph, i, 1) || !ggml_node_has_n_uses(graph, i + 1, 1)) {
            return false;
        }
        weight = mul->src[1];
        at = i + 2;
        if (!is_leaf(weight, GGML_TYPE_F32) || weight->ne[0] != first->ne[0] || graph->nodes[at]->src[0] != mul) {
            return false;
        }
    }
    const ggml_tensor * rope = graph->nodes[at], * x = first->src[0];
    if (rope->op != GGML_OP_ROPE || !(rope->flags & GGML_TENSOR_FLAG_COMPUTE)) {
        return false;
    }
    const ggml_tensor * pos = rope->src[1], * factors = rope->src[2];
    const int32_t * params = rope->op_params;
    const int n_dims = params[1], mode = params[2], n_ctx_orig = params[4], n_offs = params[15];
    const bool known = (mode == GGML_ROPE_TYPE_NORMAL || mode == GGML_ROPE_TYPE_NEOX) && n_offs == 0 && n_dims % 2 == 0 && n_dims <= rope->ne[0] &&
        rope->type == GGML_TYPE_F32 && !rope->view_src && ggml_is_contiguous(rope) && rope->ne[0] % 2 == 0 && rope->ne[2] <= max_tokens && rope->ne[3] == 1 &&
        x->type == GGML_TYPE_F32 && x->nb[0] == sizeof(float) && ggml_are_same_shape(x, rope) && is_leaf(pos, GGML_TYPE_I32) &&
        (!factors || (is_leaf(factors, GGML_TYPE_F32) && factors->ne[0] >= n_dims/2));
    if (!known) {
        return false;
    }
    float base, beta_fast, beta_slow;
    kvq_rotary & t = out.turn;
    memcpy(&base,          params +  5, sizeof(float));
    memcpy(&t.freq_scale,  params +  6, sizeof(float));
    memcpy(&t.ext_factor,  params +  7, sizeof(float));
    memcpy(&t.attn_factor, params +  8, sizeof(float));
    memcpy(&beta_fast,     params +  9, sizeof(float));
    memcpy(&beta_slow,     params + 10, sizeof(float));
    ggml_rope_yarn_corr_dims(n_dims, n_ctx_orig, base, beta_fast, beta_slow, t.corr);
    t.theta_scale = powf(base, -2.0f/n_dims);
    t.eps = 0.0f;
    if (weight) {
        memcpy(&t.eps, first->op_params, sizeof(float));
    }
    t.x        = (const char *) x->data;
    t.nbx1     = x->nb[1];
    t.nbx2     = x->nb[2];
    t.y        = (float *) rope->data;
    t.weight   = weight ? (const float *) weight->data : nullptr;
    t.factors  = factors ? (const float *) factors->data : nullptr;
    t.pos      = (const int32_t *) pos->data;
    t.d        = int(rope->ne[0]);
    t.n_head   = int(rope->ne[1]);
    t.n_tokens = int(rope->ne[2]);
    t.n_dims   = n_dims;
    t.neox     = mode == GGML_ROPE_TYPE_NEOX;
    out.source = x;
    out.rope   = rope;
    out.last   = at;
    return true;
}
