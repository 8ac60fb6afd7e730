// Blocks of s rows of each group, counted from the group's first row: what sums over a group's rows
// are cut into (s = 32), and what shares a columnwise scale (s = 32 or 128). Block b of group g has
// the index offsets[g] / s + g + b; indices of different groups never meet, and some belong to no
// block. Hence the number of indices follows from the capacity alone, and a grid can have one block
// per index.
#pragma once

#include "backend/cuda/device/groups.cuh"
#include "backend/cuda/device/warp.cuh"
#include "core/divide.h"
#include "core/row_sums.h"

namespace moire::cuda {

struct RowBlock {
  int64_t group;
  int64_t first, end;  // rows; empty if the index belongs to no block
};

template <int64_t kSize = kBlockRows>
__host__ __device__ inline int64_t row_blocks_bound(const moire_groups& groups) {
  return groups.num_groups == 0 ? 0 : groups.capacity / kSize + groups.num_groups;
}
// The index of a group's first block.
template <int64_t kSize = kBlockRows>
__device__ inline int64_t first_row_block(const RowRange& rows, int64_t group) {
  return rows.begin / kSize + group;
}

// The index, among blocks of kBlockRows, of the one whose first row is also the first of a block of
// kSize with this index: index - first_row / kSize is their group.
template <int64_t kSize>
__device__ inline int64_t partial_index(int64_t index, int64_t first_row) {
  static_assert(kSize % kBlockRows == 0);
  return index - first_row / kSize + first_row / kBlockRows;
}

// A warp calls it together: it looks at the rows of 32 groups at once, so that 32 are searched in
// the time of one load, 1024 in that of two. There are 2^30 at most.
template <int64_t kSize = kBlockRows>
__device__ inline RowBlock row_block_at(const moire_groups& groups, int64_t index) {
  if (groups.num_groups == 0) return {0, 0, 0};
  // The last group whose first index is not past this one.
  int low = 0, high = static_cast<int>(groups.num_groups), step = 0;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  RowRange rows{};
  int owner = 0;  // the lane that looks at `low`
  do {
    step = (high - low + kWarp - 1) / kWarp;
    const int group = low + lane * step;
    rows = rows_of(groups, min(group, high - 1));
    const bool fits = group < high && first_row_block<kSize>(rows, group) <= index;
    owner = max(0, kWarp - 1 - __clz(static_cast<int>(__ballot_sync(kAllLanes, fits))));
    low += owner * step;
    high = min(high, low + step);
  } while (step > 1);
  rows = {__shfl_sync(kAllLanes, rows.begin, owner), __shfl_sync(kAllLanes, rows.end, owner)};
  const int64_t block = index - first_row_block<kSize>(rows, low);
  const int64_t first = clamp_row(rows.begin + block * kSize, rows.begin, rows.end);
  return {low, first, clamp_row(first + kSize, first, rows.end)};
}

}  // namespace moire::cuda
