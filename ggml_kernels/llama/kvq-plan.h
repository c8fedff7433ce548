// How a cache type wants the calibrated coordinates of a key: in which order, in which units, mixed how. The one place
// where types differ; everything else about calibrated keys is the same linear algebra.
#pragma once

#include "ggml.h"

#include <vector>

struct kvq_plan {
    std::vector<int>    order;    // [d] rank (0: most important) of the coordinate stored at each position
    std::vector<double> weight;   // [d] scale of the coordinate of each rank in the stored vector, positive
    std::vector<double> mix;      // [d, d] orthogonal, over positions, stored = positions * mix; empty: identity
};

// lambda [d], descending: the squared-logit cost of each coordinate at unit variance
kvq_plan kvq_plan_for(ggml_type type, int64_t d, const float * lambda);
