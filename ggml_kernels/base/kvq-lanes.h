// Sums in the order in which SIMD registers keep their partial ones: KVQ_LANES of them, then a halving tree.
#pragma once

#define KVQ_LANES 16

static inline float kvq_dot_lanes(const float * a, const float * b, int n) {
    float lane[KVQ_LANES] = {0};
    for (int i = 0; i < n; i++) {
        lane[i % KVQ_LANES] += a[i]*b[i];
    }
    for (int w = KVQ_LANES/2; w >= 1; w /= 2) {
        for (int l = 0; l < w; l++) {
            lane[l] += lane[l + w];
        }
    }
    return lane[0];
}
