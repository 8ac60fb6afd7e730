// The rows of a group as kernels may use them: whatever the offsets hold, inside the buffers.
#pragma once

#include <moire.h>

#include "backend/cuda/device/report.cuh"
#include "core/resolved_groups.h"

namespace moire::cuda {

struct RowRange {
  int64_t begin, end;
  __device__ int64_t size() const { return end - begin; }
};

__device__ inline int64_t clamp_row(int64_t row, int64_t low, int64_t high) {
  return row < low ? low : row > high ? high : row;
}

// What kernels are given where groups may be absent: then one group of all rows, which has no
// offsets.
inline moire_groups groups_or_all(const moire_groups& given, int64_t rows) {
  return is_absent(given) ? moire_groups{nullptr, 1, rows} : given;
}

__device__ inline RowRange rows_of(const moire_groups& groups, int64_t group) {
  if (groups.offsets == nullptr) return {0, groups.capacity};
  const int64_t begin = clamp_row(groups.offsets[group], 0, groups.capacity);
  return {begin, clamp_row(groups.offsets[group + 1], begin, groups.capacity)};
}

// The rows before the tail.
__device__ inline int64_t rows_in_use(const moire_groups& groups) {
  if (groups.num_groups == 0) return 0;
  if (groups.offsets == nullptr) return groups.capacity;
  return clamp_row(groups.offsets[groups.num_groups], 0, groups.capacity);
}

// Reports a wrong offset, of several any one. For one block (or warp) of each kernel that reads
// groups: thread `index` of `count`.
__device__ inline void check_groups(const moire_groups& groups, const Reporter& reporter, int index,
                                    int count) {
  if (groups.offsets == nullptr) return;
  for (int64_t g = index; g < groups.num_groups; g += count) {
    const int64_t begin = groups.offsets[g], end = groups.offsets[g + 1];
    if (g == 0 && begin != 0) report(reporter, Finding::kFirstOffset, 0, begin, 0);
    if (end < begin) report(reporter, Finding::kDecreasing, g, end, begin);
    if (end > groups.capacity) report(reporter, Finding::kPastCapacity, g, end, groups.capacity);
  }
}

}  // namespace moire::cuda
