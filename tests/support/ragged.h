// The standard ragged cases, and a batch of groups that owns its offsets.
#pragma once

#include <moire/groups.h>

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "tests/support/random.h"

namespace moire::test {

struct RaggedCase {
  std::string name;
  std::vector<int64_t> splits;
  int64_t tail = 0;  // allocated rows past the last group

  int64_t rows() const;
};

inline std::ostream& operator<<(std::ostream& out, const RaggedCase& c) { return out << c.name; }

// No rows, no groups, one group, empty first, middle and last group, all rows in one group, sizes
// around the tiles, a Zipf draw, 512 groups, tails of 0, 1 and 10,000 rows. At most a few hundred
// rows each.
std::vector<RaggedCase> ragged_table();
// The few of them that between them have every feature, for tests with many other dimensions.
std::vector<RaggedCase> short_ragged_table();

// Names for INSTANTIATE_TEST_SUITE_P.
inline std::string case_name(const testing::TestParamInfo<RaggedCase>& info) {
  return info.param.name;
}

inline std::string dtype_case_name(const testing::TestParamInfo<DType>& info) {
  return dtype_name(info.param);
}

// Groups and the memory of their offsets.
class Batch {
 public:
  explicit Batch(const RaggedCase& c) : Batch(c.splits, c.tail) {}
  explicit Batch(const std::vector<int64_t>& splits, int64_t tail = 0);
  Batch(const Batch& other);  // deep
  Batch& operator=(const Batch&) = delete;

  const Groups& groups() const { return groups_; }
  int64_t num_groups() const { return groups_.num_groups; }
  int64_t rows() const { return offsets_.back(); }
  int64_t capacity() const { return groups_.capacity; }
  // Writable, for tests of bad offsets.
  std::vector<int64_t>& offsets() { return offsets_; }

 private:
  std::vector<int64_t> offsets_;
  Groups groups_;
};

}  // namespace moire::test
