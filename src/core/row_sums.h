// The one order in which rows of a group are summed, each column by itself (docs/numerics.md §4),
// by whatever makes a bias' gradient, on any device. Runs are short so that threads which hold a
// few rows each sum them where they are, in registers.
//
//   run     p = fma(scale, y, p) from 0, down kRunRows rows of a block, or what is left of them
//   block   p = p + run from 0, down its runs
//   group   s = s + block from 0, down its blocks; then grad_bias (+)= s, rounded once
#pragma once

#include <cstdint>

namespace moire {

inline constexpr int64_t kBlockRows = 32;  // of a block, from the group's first row
inline constexpr int64_t kRunRows = 4;

}  // namespace moire
