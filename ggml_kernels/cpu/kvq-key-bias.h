// A key bias that the stored keys lack: the logit of query q and the token at position j gains q . R(j) b, which is a product of
// z, made of q and b once a row, with the cosines and sines of the position, over the pairs of frequencies that carry b. Sources
// 5..8 of GGML_OP_FLASH_ATTN_EXT, see kvq_key_bias in kvq-llama.h.
#pragma once

#include "ggml.h"
#include "kvq-bias-pairs.h"

#include <cstdint>

namespace kvq {

struct key_bias {
    const ggml_tensor * q, * b, * trig, * pos;
    bool interleaved;
    int pairs;                           // that carry the bias
    uint8_t pair[KVQ_BIAS_PAIRS_MAX];    // of all

    explicit key_bias(const ggml_tensor * t)
        : q(t->src[5]), b(t->src[6]), trig(t->src[7]), pos(t->src[8]), interleaved(t->op_params[8] != 0), pairs(kvq_bias_pairs(t, pair)) {}

    explicit operator bool() const { return q != nullptr; }

    // floats of a row of cosines and sines
    int width() const { return 2*pairs; }

    // of a row of the table
    int all() const { return (int) trig->ne[0]/2; }

    // z [width] of one query row, times scale
    void query(int64_t token, int64_t head, int64_t i3, float scale, float * z) const {
        const float * x = (const float *) ((const char *) q->data + token*q->nb[1] + head*q->nb[2] + i3*q->nb[3]);
        const float * y = (const float *) ((const char *) b->data + head/(q->ne[2]/b->ne[1])*b->nb[1]);
        for (int i = 0; i < pairs; i++) {
            const int first = interleaved ? 2*pair[i] : pair[i], second = interleaved ? first + 1 : first + all();
            z[i]         = scale*(x[first]*y[first]  + x[second]*y[second]);
            z[pairs + i] = scale*(x[second]*y[first] - x[first]*y[second]);
        }
    }

    // of every cell
    const int32_t * positions(int64_t i3) const {
        return (const int32_t *) ((const char *) pos->data + i3/(q->ne[3]/pos->ne[1])*pos->nb[1]);
    }

    // cosines, then sines, of a position: the turn by its multiple of 256, then by the rest
    void turn(int32_t position, float * out) const {
        const int64_t rest = position & 255, steps = 256 + (position >> 8);
        const float * a = (const float *) ((const char *) trig->data + (steps < trig->ne[1] ? steps : trig->ne[1] - 1)*trig->nb[1]);
        const float * c = (const float *) ((const char *) trig->data + rest*trig->nb[1]);
        for (int i = 0; i < pairs; i++) {
            const int x = pair[i], y = x + all();
            out[i]         = a[x]*c[x] - a[y]*c[y];
            out[pairs + i] = a[y]*c[x] + a[x]*c[y];
        }
    }
};

} // namespace kvq
