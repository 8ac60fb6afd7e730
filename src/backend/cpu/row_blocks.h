// Blocks of s rows of each group, counted from the group's first row: what sums over a group's
// rows are cut into (s = 32), so that threads can share a group and the sum keeps one order; and
// what shares a columnwise scale (s = 32 or 128).
//
// Block b of group g has the index offsets[g] / s + g + b. Indices of different groups never meet,
// because a group of m rows from row o has ceil(m / s) <= (o + m) / s - o / s + 1 blocks; some
// indices belong to no block. Hence the number of indices follows from the capacity alone.
#pragma once

#include <moire.h>

#include <algorithm>
#include <cstdint>

#include "core/divide.h"
#include "core/row_sums.h"

namespace moire::cpu {

struct RowBlock {
  int64_t group;
  int64_t first, end;  // rows; empty if the index belongs to no block
};

class RowBlocks {
 public:
  explicit RowBlocks(const moire_groups& groups, int64_t size = kBlockRows)
      : groups_(groups), size_(size) {}

  // Block indices of any splits: each partial sum needs a place for that many.
  static int64_t bound(int64_t num_groups, int64_t capacity, int64_t size = kBlockRows) {
    return num_groups == 0 ? 0 : capacity / size + num_groups;
  }
  int64_t bound() const { return bound(groups_.num_groups, groups_.capacity, size_); }
  int64_t first_of(int64_t group) const { return groups_.offsets[group] / size_ + group; }
  int64_t count_of(int64_t group) const {
    const int64_t rows = groups_.offsets[group + 1] - groups_.offsets[group];
    return ceil_div(rows, size_);
  }

  RowBlock at(int64_t index) const {
    // The last group whose first index is not past this one.
    int64_t low = 0, high = groups_.num_groups;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (first_of(middle) <= index ? low : high) = middle;
    }
    const int64_t end = groups_.offsets[low + 1];
    const int64_t first = std::min(end, groups_.offsets[low] + (index - first_of(low)) * size_);
    return {low, first, std::min(end, first + size_)};
  }

 private:
  moire_groups groups_;
  int64_t size_;
};

}  // namespace moire::cpu
