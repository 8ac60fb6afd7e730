// Random problems for `moire check --random`: small, ragged and hostile, over every op and option;
// one in 16 is wide.
#pragma once

#include <cstdint>
#include <vector>

#include "problem.h"

namespace moire::tool {

// Problem `i` of a seed; the same everywhere. `ops` and `dtypes` limit the draw; empty = all.
Problem random_problem(uint64_t seed, int64_t i, const std::vector<const Op*>& ops,
                       const std::vector<Problem>& dtypes);

}  // namespace moire::tool
