// Calibrated transforms of keys and queries, those of one layer as one operation.
#include "kvq-transform.h"
#include "kvq-simd.h"

using namespace kvq;

constexpr int ROWS = 16;       // of a matrix, a thread's share at a time: one cache line of the result
constexpr int GROUP = 4;       // rows that meet a column together

int kvq_cpu_transform(const ggml_compute_params * params, const ggml_cgraph * graph, int i) {
    kvq_transform_args a;
    const int n_done = kvq_find_transform(graph, i, INT64_MAX, a);
    if (!n_done) {
        return 0;
    }
    const int d = a.d, blocks = d/ROWS, shares = 2*a.n_head_kv*blocks;
    const f32x16 zero = set1(0.0f);
    for (int share = params->ith; share < shares; share += params->nth) {
        const kvq_transform_part & p = a.part[share/(a.n_head_kv*blocks)];
        const int head = share/blocks % a.n_head_kv;
        const float * mean = p.mean ? p.mean + head*d : nullptr;
        for (int row = share % blocks*ROWS, end = row + ROWS; row < end; row += GROUP) {
            const ggml_fp16_t * m = p.matrix + (int64_t(head)*d + row)*d;
            for (int c = 0; c < p.n1*p.n2; c++) {
                const int i1 = c % p.n1, i2 = head*p.n2 + c/p.n1;
                const float * x = (const float *) (p.x + i1*p.nbx1 + i2*p.nbx2);
                f32x16 s[GROUP] = { zero, zero, zero, zero };
                for (int at = 0; at < d; at += 16) {
                    const f32x16 v = mean ? sub(load(x + at), load(mean + at)) : load(x + at);
                    for (int r = 0; r < GROUP; r++) {
                        s[r] = fma(load_f16(m + r*d + at), v, s[r]);
                    }
                }
                float * y = p.y + i1*p.sy1 + i2*p.sy2 + row;
                for (int r = 0; r < GROUP; r++) {
                    y[r] = sum(s[r]);
                }
            }
        }
    }
    return n_done;
}
