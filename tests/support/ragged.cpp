#include "tests/support/ragged.h"

#include <numeric>

namespace moire::test {
namespace {

// Group sizes proportional to 1 / (1 + rank), ranks shuffled by a fixed rule: a few large groups,
// many small or empty ones.
std::vector<int64_t> zipf(int64_t num_groups, int64_t rows) {
  double sum = 0;
  for (int64_t r = 0; r < num_groups; ++r) sum += 1.0 / static_cast<double>(1 + r);
  std::vector<int64_t> splits(static_cast<size_t>(num_groups));
  for (int64_t g = 0; g < num_groups; ++g) {
    const int64_t rank = g * 7 % num_groups;
    splits[static_cast<size_t>(g)] =
        static_cast<int64_t>(static_cast<double>(rows) / static_cast<double>(1 + rank) / sum);
  }
  return splits;
}

// 512 groups of 0, 1 or 2 rows.
std::vector<int64_t> many_small_groups() {
  std::vector<int64_t> splits(512);
  for (size_t g = 0; g < splits.size(); ++g) splits[g] = static_cast<int64_t>(g * g % 3);
  return splits;
}

}  // namespace

int64_t RaggedCase::rows() const {
  return std::accumulate(splits.begin(), splits.end(), int64_t{0});
}

std::vector<RaggedCase> ragged_table() {
  return {
      {"NoGroups", {}},
      {"NoGroupsButATail", {}, 1},
      {"NoRows", {0, 0, 0}},
      {"NoRowsButATail", {0, 0, 0}, 1},
      {"OneGroup", {37}},
      {"OneRow", {1}},
      {"EmptyFirst", {0, 5, 3}},
      {"EmptyMiddle", {4, 0, 0, 6}, 1},
      {"EmptyLast", {2, 7, 0}},
      {"AllInOneGroup", {0, 0, 70, 0}},
      {"AroundTheTiles", {1, 31, 32, 33, 127, 129}},
      {"Zipf", zipf(16, 160), 1},
      {"ManyGroups", many_small_groups()},
      {"LongTail", {3, 0, 33}, 10000},
  };
}

std::vector<RaggedCase> short_ragged_table() {
  return {
      {"NoGroups", {}},
      {"NoRowsButATail", {0, 0, 0}, 1},
      {"EmptyFirstAndLast", {0, 5, 33, 0}, 1},
      {"EmptyMiddle", {17, 0, 1, 31}},
  };
}

Batch::Batch(const std::vector<int64_t>& splits, int64_t tail) {
  offsets_.push_back(0);
  for (const int64_t rows : splits) offsets_.push_back(offsets_.back() + rows);
  groups_ = Groups(offsets_.data(), static_cast<int64_t>(splits.size()), rows() + tail);
}

Batch::Batch(const Batch& other) : offsets_(other.offsets_), groups_(other.groups_) {
  groups_.offsets = offsets_.data();
}

}  // namespace moire::test
