// Attention in plain float arithmetic, for params->use_ref.
#include "kvq-flash-attn.h"

namespace kvq {

static const float * row_as_float(ggml_type type, const void * x, float * buffer, int64_t n) {
    if (type == GGML_TYPE_F32) {
        return (const float *) x;
    }
    ggml_get_type_traits(type)->to_float(x, buffer, n);
    return buffer;
}

size_t reference_work_size(const ggml_tensor * dst, int n_threads) {
    return n_threads*sizeof(float)*(dst->src[1]->ne[0] + 2*dst->src[2]->ne[0] + 2*key_bias(dst).width() + 16);
}

void reference_flash_attn(const ggml_compute_params * params, ggml_tensor * dst) {
    const attn_args a(dst);
    a.check();
    const int64_t dk = a.k->ne[0], dv = a.v->ne[0];
    float * key   = (float *) params->wdata + params->ith*(dk + 2*dv + 2*a.bias.width() + 16);
    float * value = key + dk;
    float * acc   = value + dv;
    float * z     = acc + dv, * turned = z + a.bias.width();

    const int64_t n_token = a.q->ne[1], n_head = a.q->ne[2];
    for (int64_t row = params->ith; row < n_token*n_head*a.q->ne[3]; row += params->nth) {
        const int64_t token = row % n_token, head = row/n_token % n_head, i3 = row/(n_token*n_head);
        const float    * q    = a.query(token, head, i3);
        const float slope = a.slope(head);
        float top = -INFINITY, total = 0.0f;
        memset(acc, 0, dv*sizeof(float));
        if (a.bias) {
            a.bias.query(token, head, i3, 1.0f, z);
        }

        for (const attn_part & part : a.parts) for (int64_t t = 0; t < part.n_rows(); t++) {
            const uint16_t * mask = part.mask_row(token, head, i3);
            const float bias = mask ? slope*ggml_fp16_to_fp32(mask[t]) : 0.0f;
            if (bias == -INFINITY) {
                continue;
            }
            const float * k = row_as_float(part.k->type, a.rows_of(part.k, head, i3) + t*part.k->nb[1], key, dk);
            const float * v = row_as_float(part.v->type, a.rows_of(part.v, head, i3) + t*part.v->nb[1], value, dv);
            float logit = 0.0f;
            for (int64_t i = 0; i < dk; i++) {
                logit += q[i]*k[i];
            }
            if (a.bias) {
                a.bias.turn(a.bias.positions(i3)[part.first + t], turned);
                for (int i = 0; i < a.bias.width(); i++) {
                    logit += z[i]*turned[i];
                }
            }
            logit *= a.logit_scale();
            if (a.softcap != 0.0f) {
                logit = a.softcap*tanhf(logit);
            }
            logit += bias;

            float alpha = 1.0f, beta = 1.0f;
            if (logit > top) {
                alpha = expf(top - logit);
                top   = logit;
            } else {
                beta = expf(logit - top);
            }
            for (int64_t i = 0; i < dv; i++) {
                acc[i] = acc[i]*alpha + v[i]*beta;
            }
            total = total*alpha + beta;
        }

        const float factor = a.finish(head, top, total);
        float * out = a.output(token, head, i3);
        for (int64_t i = 0; i < dv; i++) {
            out[i] = acc[i]*factor;
        }
    }
}

} // namespace kvq
