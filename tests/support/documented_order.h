// Sums in the order that docs/numerics.md gives them, one element at a time.
#pragma once

#include <algorithm>
#include <cmath>

#include "tests/support/tensors.h"

namespace moire::test {

// Along a row: 16 chains of fused multiply-adds per 64 columns, folded in halves; then the segments
// in order. Of row i of a and row j of b, in FP32.
inline float documented_dot(TestTensor& a, int64_t i, TestTensor& b, int64_t j) {
  const int64_t columns = a.view().columns();
  float total = 0;
  for (int64_t first = 0; first < columns; first += 64) {
    float lanes[16] = {};
    for (int64_t c = first; c < std::min(columns, first + 64); ++c) {
      float& lane = lanes[(c - first) % 16];
      lane = std::fma(static_cast<float>(a.get(i, c)), static_cast<float>(b.get(j, c)), lane);
    }
    for (int half = 8; half != 0; half /= 2) {
      for (int l = 0; l < half; ++l) lanes[l] += lanes[l + half];
    }
    total += lanes[0];
  }
  return total;
}

}  // namespace moire::test
