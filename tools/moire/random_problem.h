// Random problems for `moire check --random`: small, ragged and hostile, over every op and option;
// one in 16 is wide.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "problem.h"

namespace moire::tool {

// Values to draw from, by field, in the place of the field's own.
using Samples = std::map<std::string_view, std::vector<std::string>>;

// Problem `i` of a seed; the same everywhere. What makes no sense beside the other fields is drawn
// again.
Problem random_problem(uint64_t seed, int64_t i, const Samples& given = {});

}  // namespace moire::tool
