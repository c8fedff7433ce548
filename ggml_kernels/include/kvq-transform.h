// The calibrated transforms of a layer, (k - mean) F~ and q B~^T, found in a graph, so that a backend can run them as one. As operations of ggml they are three or four, and at one token each costs more than its arithmetic.
// For C++ files that include ggml-impl.h.
#pragma once

#include "kvq-rotary.h"

// y = M (x - mean) for the columns x of every KV head: n1*n2 of them, the one of indices i, j at x + i*nbx1 + (head*n2 + j)*nbx2
struct kvq_transform_part {
    const ggml_fp16_t * matrix;            // [d, d, n_head_kv], rows of a head one after the other
    const float * mean;                    // [d, n_head_kv], or null
    const char  * x;
    float       * y;
    int n1, n2;
    int64_t nbx1, nbx2;                    // bytes
    int64_t sy1, sy2;                      // values
};

struct kvq_transform_args {
    kvq_transform_part part[2];            // keys, queries
    int d, n_head_kv;
};

// what the parts read and write, as nodes of a graph
struct kvq_transform_nodes {
    const ggml_tensor * in[2], * out[2];
};

// the mark of a product with a calibrated matrix, 0 for other nodes
static inline int kvq_product_of(const ggml_tensor * t) {
    return t->op == GGML_OP_MUL_MAT && t->src[0]->type == GGML_TYPE_F16 && t->type == GGML_TYPE_F32 ? t->op_params[KVQ_PRODUCT_PARAM] : 0;
}

// rows that can be read in vectors of 16 bytes
static inline bool kvq_vector_rows(const ggml_tensor * t, const ggml_type type = GGML_TYPE_F32) {
    return t->type == type && t->nb[0] == ggml_type_size(type) && t->nb[1] % 16 == 0 && t->nb[2] % 16 == 0 && t->ne[3] == 1 && uintptr_t(t->data) % 16 == 0;
}

// Fills `a` when node i begins the transforms of a layer for at most max_tokens tokens, as ggml_kernels/llama/kvq-transforms.cpp builds them: returns the number
// of nodes after i that belong to them, 0 when node i begins something else.
static inline int kvq_find_transform(const ggml_cgraph * graph, const int i, const int64_t max_tokens, kvq_transform_args & a, kvq_transform_nodes * nodes = nullptr) {
    auto node = [&](const int j) { return j < graph->n_nodes ? graph->nodes[j] : nullptr; };
    auto next = [&](const int j) { return kvq_next_node(graph, j); };
    int at = i;
    const ggml_tensor * sub = node(i)->op == GGML_OP_SUB ? node(i) : nullptr;
    if (sub) {
        at = next(at);
    }
    const ggml_tensor * kt = node(at);
    if (!kt || kvq_product_of(kt) != KVQ_PRODUCT_KEYS) {
        return 0;
    }
    at = next(at);
    const ggml_tensor * out = kt;                     // [d, n, n_head_kv], or [d, n_head_kv, n] when it is laid out anew
    if (node(at) && node(at)->op == GGML_OP_CONT && node(at)->src[0]->view_src == kt) {
        out = node(at);
        at = next(at);
    }
    const ggml_tensor * qt = node(at);
    if (!qt || kvq_product_of(qt) != KVQ_PRODUCT_QUERIES) {
        return 0;
    }
    const ggml_tensor * k = sub ? sub->src[0] : kt->src[1], * mean = sub ? sub->src[1] : nullptr, * q = qt->src[1];
    const ggml_tensor * k_in = kt->src[0], * q_in = qt->src[0];
    const int64_t d = kt->ne[0], n = kt->ne[1], heads = kt->ne[2];
    const bool known = n <= max_tokens && d % 16 == 0 && d <= 512 && q_in->ne[2] == heads && q->ne[2] % heads == 0 &&
        (!sub || (kt->src[1]->view_src == sub && kvq_vector_rows(mean) && ggml_is_contiguous(mean) && ggml_nelements(mean) == d*heads)) &&
        kvq_vector_rows(k) && kvq_vector_rows(q) && kvq_vector_rows(k_in, GGML_TYPE_F16) && kvq_vector_rows(q_in, GGML_TYPE_F16) &&
        ggml_is_contiguous(k_in) && ggml_is_contiguous(q_in) && ggml_is_contiguous(qt) && ggml_is_contiguous(out) &&
        !kvq_overlap(out, k) && !kvq_overlap(out, q) && !kvq_overlap(qt, k) && !kvq_overlap(qt, q);
    if (!known) {
        return 0;
    }
    for (const ggml_tensor * t : { kt, out, qt }) {
        if (!(t->flags & GGML_TENSOR_FLAG_COMPUTE) || (t == kt && t != out && t->flags & GGML_TENSOR_FLAG_OUTPUT)) {
            return 0;
        }
    }
    const bool anew = out != kt;
    // before a subtraction the keys are [d, heads, n], as the operand of the product [d, n, heads]
    a.part[0] = { (const ggml_fp16_t *) k_in->data, mean ? (const float *) mean->data : nullptr, (const char *) k->data, (float *) out->data, int(n), 1,
        int64_t(k->nb[sub ? 2 : 1]), int64_t(k->nb[sub ? 1 : 2]), anew ? d*heads : d, anew ? d : d*n };
    a.part[1] = { (const ggml_fp16_t *) q_in->data, nullptr, (const char *) q->data, (float *) qt->data, int(q->ne[1]), int(q->ne[2]/heads),
        int64_t(q->nb[1]), int64_t(q->nb[2]), d, d*q->ne[1] };
    a.d = int(d);
    a.n_head_kv = int(heads);
    if (nodes) {
        *nodes = { { k, q }, { out, qt } };
    }
    return at - i;
}
