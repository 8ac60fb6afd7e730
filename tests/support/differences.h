// Central differences in double, for gradients.
#pragma once

#include "tests/support/tensors.h"

namespace moire::test {

// A step whose truncation error (h^2) and rounding error (2^-53 / h) are both about 1e-10 for
// functions of size 1; comparisons allow kDifferenceError relative to the size of the loss.
inline constexpr double kDifferenceStep = 1e-5;
inline constexpr double kDifferenceError = 1e-8;

// d loss / d t[row, column]; `t` is FP64 and is left as it was.
template <class Loss>
double central_difference(TestTensor& t, int64_t row, int64_t column, const Loss& loss) {
  const double before = t.get(row, column);
  t.set(row, column, before + kDifferenceStep);
  const double above = loss();
  t.set(row, column, before - kDifferenceStep);
  const double below = loss();
  t.set(row, column, before);
  return (above - below) / (2 * kDifferenceStep);
}

// The same for element [out, in] of one group of a weight.
template <class Loss>
double central_difference(TestWeight& w, int64_t group, int64_t out, int64_t in, const Loss& loss) {
  const double before = w.get(group, out, in);
  w.set(group, out, in, before + kDifferenceStep);
  const double above = loss();
  w.set(group, out, in, before - kDifferenceStep);
  const double below = loss();
  w.set(group, out, in, before);
  return (above - below) / (2 * kDifferenceStep);
}

}  // namespace moire::test
