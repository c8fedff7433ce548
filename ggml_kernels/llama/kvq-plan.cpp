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

kvq_plan kvq_plan_for(ggml_type type, int64_t d, const float * lambda) {
    kvq_plan plan;
    plan.order = dealt(d, kvq_block_for_head(type, d));

    // equal bits for all: the quartic root minimises the sum of the logit errors
    const double floor = std::max(1e-8*lambda[0], 1e-30);   // a coordinate that no query asks for still needs an inverse
    double sum = 0;
    for (int64_t i = 0; i < d; i++) {
        plan.weight.push_back(std::pow(std::max((double) lambda[i], floor), 0.25));
        sum += plan.weight[i]*plan.weight[i];
    }
    for (double & w : plan.weight) {
        w /= std::sqrt(sum/d);
    }
    return plan;
}
