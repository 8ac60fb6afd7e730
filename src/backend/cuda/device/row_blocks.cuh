// Blocks of 64 rows of each group, counted from the group's first row: what sums over a group's
// rows are cut into. Block b of group g has the index offsets[g] / 64 + g + b; indices of different
// groups never meet, and some belong to no block. Hence the number of indices follows from the
// capacity alone, and a grid can have one block per index.
#pragma once

#include <cstdint>

#include "backend/cuda/device/groups.cuh"

namespace moire::cuda {

inline constexpr int64_t kBlockRows = 64;

struct RowBlock {
  int64_t group;
  int64_t first, end;  // rows; empty if the index belongs to no block
};

__host__ __device__ inline int64_t row_blocks_bound(const moire_groups& groups) {
  return groups.num_groups == 0 ? 0 : groups.capacity / kBlockRows + groups.num_groups;
}
__device__ inline int64_t first_row_block(const moire_groups& groups, int64_t group) {
  return rows_of(groups, group).begin / kBlockRows + group;
}

__device__ inline RowBlock row_block_at(const moire_groups& groups, int64_t index) {
  if (groups.num_groups == 0) return {0, 0, 0};
  // The last group whose first index is not past this one.
  int64_t low = 0, high = groups.num_groups;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (first_row_block(groups, middle) <= index ? low : high) = middle;
  }
  const RowRange rows = rows_of(groups, low);
  const int64_t block = index - first_row_block(groups, low);
  const int64_t first = clamp_row(rows.begin + block * kBlockRows, rows.begin, rows.end);
  return {low, first, clamp_row(first + kBlockRows, first, rows.end)};
}

}  // namespace moire::cuda
