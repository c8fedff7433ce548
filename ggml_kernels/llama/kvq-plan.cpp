#include "kvq-plan.h"
#include "kvq.h"

#include <algorithm>
#include <cmath>

// Ranks are dealt to the blocks of a head in turn, so that the blocks, each with its own scale, get equal shares.
static std::vector<int> dealt(int64_t d, int64_t block) {
    const int64_t n_blocks = d/block;
    std::vector<int> order(d);
    for (int64_t i = 0; i < d; i++) {
        order[i % n_blocks*block + i/n_blocks] = (int) i;
    }
    return order;
}

// scales the weights of some ranks to a mean square of one
static void normalise(std::vector<double> & weight, const std::vector<int> & ranks) {
    double sum = 0;
    for (int r : ranks) {
        sum += weight[r]*weight[r];
    }
    for (int r : ranks) {
        weight[r] /= std::sqrt(sum/ranks.size());
    }
}

// Tiers of n/4, n/4 and n/2 positions of each block, mixed by a signed Hadamard each, so that one table fits all
// coordinates of a tier.
static void mix_tiers(kvq_plan & plan, int64_t d, int64_t block) {
    plan.mix.assign(d*d, 0.0);
    for (int64_t start = 0; start < d; ) {
        const int64_t n = start % block == block/2 ? block/2 : block/4;
        normalise(plan.weight, { plan.order.begin() + start, plan.order.begin() + start + n });
        for (int64_t i = 0; i < n; i++) {
            std::vector<float> unit(n), mixed(n);
            unit[i] = 1.0f;
            kvq_rotate_ref(unit.data(), mixed.data(), (int) n);
            for (int64_t j = 0; j < n; j++) {
                plan.mix[(start + i)*d + start + j] = mixed[j]/std::sqrt((double) n);
            }
        }
        start += n;
    }
}

kvq_plan kvq_plan_for(ggml_type type, int64_t d, const float * lambda) {
    kvq_plan plan;
    const int64_t block = kvq_block_for_head(type, d);
    plan.order = dealt(d, block);

    // for coordinates of equal bits, the quartic root minimises the sum of the logit errors
    const double floor = std::max(1e-8*lambda[0], 1e-30);   // a coordinate that no query asks for still needs an inverse
    for (int64_t i = 0; i < d; i++) {
        plan.weight.push_back(std::pow(std::max((double) lambda[i], floor), 0.25));
    }
    if (kvq_code(type) == KVQ_TIERED) {
        mix_tiers(plan, d, block);
    } else {
        normalise(plan.weight, plan.order);
    }
    return plan;
}
