// Operands of GGML_OP_FLASH_ATTN_EXT as both implementations read them.
#pragma once

#include "ggml-cpu-impl.h"
#include "kvq.h"
#include "kvq-key-bias.h"

#include <cmath>
#include <cstdint>
#include <cstring>

namespace kvq {

// Keys and values that one softmax covers together with others: the cache, and the f16 window beside it (sources 9 to 11).
struct attn_part {
    const ggml_tensor * k, * v, * mask;
    int64_t first;   // of its rows among the positions of a key bias

    int64_t n_rows() const { return k ? k->ne[1] : 0; }

    const uint16_t * mask_row(int64_t token, int64_t head, int64_t i3) const {
        return mask ? (const uint16_t *) ((const char *) mask->data + token*mask->nb[1] + head % mask->ne[2]*mask->nb[2]
                                          + i3 % mask->ne[3]*mask->nb[3])
                    : nullptr;
    }
};

struct attn_args {
    const ggml_tensor * dst, * q, * k, * v, * sinks;
    float scale, max_bias, softcap;
    key_bias bias;
    attn_part parts[2];

    explicit attn_args(const ggml_tensor * t)
        : dst(t), q(t->src[0]), k(t->src[1]), v(t->src[2]), sinks(t->src[4]), bias(t),
          parts{ { k, v, t->src[3], 0 }, { t->src[9], t->src[10], t->src[11], k->ne[1] } } {
        const float * f = (const float *) t->op_params;
        scale = f[0]; max_bias = f[1]; softcap = f[2];
    }

    void check() const {
        GGML_ASSERT(q->type == GGML_TYPE_F32 && q->nb[0] == sizeof(float));
        GGML_ASSERT(k->nb[0] == ggml_type_size(k->type) && v->nb[0] == ggml_type_size(v->type));
        GGML_ASSERT(k->ne[0] == q->ne[0] && k->ne[1] == v->ne[1]);
        GGML_ASSERT(k->ne[0] % ggml_blck_size(k->type) == 0 && v->ne[0] % ggml_blck_size(v->type) == 0);
        GGML_ASSERT(dst->ne[0] == v->ne[0] && dst->ne[1] == q->ne[2] && dst->ne[2] == q->ne[1]);
        GGML_ASSERT(ggml_is_contiguous(dst));
        if (const ggml_tensor * k16 = parts[1].k) {
            const ggml_tensor * v16 = parts[1].v;
            GGML_ASSERT(k16->type == kvq_window_type(k->type) && v16->type == kvq_window_type(v->type));
            GGML_ASSERT(k16->ne[0] == k->ne[0] && k16->ne[2] == k->ne[2] && k16->ne[3] == k->ne[3] && k16->ne[1] == v16->ne[1]);
            GGML_ASSERT(v16->ne[0] == v->ne[0] && v16->ne[2] == v->ne[2] && v16->ne[3] == v->ne[3]);
        }
    }

    // before the soft cap, which multiplies again
    float logit_scale() const { return softcap != 0.0f ? scale/softcap : scale; }

    // ALiBi
    float slope(int64_t head) const {
        if (max_bias <= 0.0f) {
            return 1.0f;
        }
        const int n_log2 = 1 << (int) floor(log2((double) q->ne[2]));
        return head < n_log2 ? powf(powf(2.0f, -max_bias/n_log2),      (float) (head + 1))
                             : powf(powf(2.0f, -max_bias/2.0f/n_log2), (float) (2*(head - n_log2) + 1));
    }

    const float * query(int64_t token, int64_t head, int64_t i3) const {
        return (const float *) ((const char *) q->data + token*q->nb[1] + head*q->nb[2] + i3*q->nb[3]);
    }
    // the rows of x, keys or values of a part, that a query head reads
    const char * rows_of(const ggml_tensor * x, int64_t head, int64_t i3) const {
        return (const char *) x->data + head/(q->ne[2]/x->ne[2])*x->nb[2] + i3/(q->ne[3]/x->ne[3])*x->nb[3];
    }
    float * output(int64_t token, int64_t head, int64_t i3) const {
        return (float *) ((char *) dst->data + head*dst->nb[1] + token*dst->nb[2] + i3*dst->nb[3]);
    }

    // Factor of the weighted sum of a row whose largest logit is `top` and whose weights sum to `total`: the sink
    // joins the sum, and a row that sees nothing gives zero.
    float finish(int64_t head, float top, float total) const {
        float factor = 1.0f;
        if (sinks) {
            const float s = ((const float *) sinks->data)[head];
            if (s > top) {
                factor = expf(top - s);
                total  = total*factor + 1.0f;
            } else {
                total += expf(s - top);
            }
        }
        return total == 0.0f ? 0.0f : factor/total;
    }
};

// Plain float arithmetic on dequantised rows, one query row at a time: what the packed kernels are tested against.
size_t reference_work_size(const ggml_tensor * dst, int n_threads);
void   reference_flash_attn(const ggml_compute_params * params, ggml_tensor * dst);

} // namespace kvq
