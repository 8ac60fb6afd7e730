// Partial sums of a bias' gradient, made where a tile lies in shared memory: down 32 rows in order
// (docs/numerics.md), two columns a thread.
#pragma once

#include "backend/cuda/device/row_blocks.cuh"
#include "backend/cuda/device/values.cuh"

namespace moire::cuda::ops {

// The partial sums `part` of a tile with so many rows, if it has any of that part's;
// `place_of(row)` is where both columns' values lie, and `target` where the sums of the first part
// belong.
template <class PlaceOf>
__device__ inline void sum_part(float* target, int64_t columns, uint32_t part, uint32_t rows,
                                PlaceOf&& place_of) {
  constexpr uint32_t kRows = kBlockRows;
  const uint32_t first = part * kRows, end = min(rows, first + kRows);
  if (first >= end) return;
  float2 sum{};
#pragma unroll 8
  for (uint32_t row = first; row < end; ++row) {
    const auto values = load<2>(place_of(row));
    sum.x += values[0];
    sum.y += values[1];
  }
  *reinterpret_cast<float2*>(target + part * columns) = sum;
}

}  // namespace moire::cuda::ops
