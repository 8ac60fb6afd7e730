// Partial sums of a bias' gradient, made where a tile of BF16 lies in shared memory: down 32 rows
// in order (docs/numerics.md), two columns a thread.
#pragma once

#include "backend/cuda/device/fp8.cuh"
#include "backend/cuda/device/row_blocks.cuh"

namespace moire::cuda::ops {

// The partial sums `part` of a tile with so many rows, if it has any of that part's; `word_at(row)`
// has both columns' values, and `target` is where those of its first part belong.
template <class WordAt>
__device__ inline void sum_part(float* target, int64_t columns, uint32_t part, uint32_t rows,
                                WordAt&& word_at) {
  constexpr uint32_t kRows = kBlockRows;
  const uint32_t first = part * kRows, end = min(rows, first + kRows);
  if (first >= end) return;
  float2 sum{};
#pragma unroll 8
  for (uint32_t row = first; row < end; ++row) {
    const float2 values = __bfloat1622float2(bits_as<__nv_bfloat162>(word_at(row)));
    sum.x += values.x;
    sum.y += values.y;
  }
  *reinterpret_cast<float2*>(target + part * columns) = sum;
}

}  // namespace moire::cuda::ops
