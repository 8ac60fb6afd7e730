// The rows before the tail, from offsets that have been checked and lie on the host. Groups that
// may be absent, in ops where that means one group of all rows; and those of other ops, where the
// same zeros mean that there are no groups.
#pragma once

#include <moire/tensor.h>

#include <cstdint>

namespace moire {

// 0 where there are no groups.
inline int64_t rows_in_use(const moire_groups& groups) {
  return groups.num_groups == 0 ? 0 : groups.offsets[groups.num_groups];
}

// Groups of a call that has to have them, for a step that may do without: no groups stay none.
inline moire_groups present_groups(const moire_groups& given) {
  static constexpr int64_t kNoRows = 0;
  return is_absent(given) ? moire_groups{&kNoRows, 0, 0} : given;
}

// Holds the offsets of that one group, on the host; not to be copied or moved.
class ResolvedGroups {
 public:
  ResolvedGroups(const moire_groups& given, int64_t rows)
      : one_{0, rows}, groups_(is_absent(given) ? moire_groups{one_, 1, rows} : given) {}
  ResolvedGroups(const ResolvedGroups&) = delete;
  ResolvedGroups& operator=(const ResolvedGroups&) = delete;

  const moire_groups& get() const { return groups_; }

 private:
  int64_t one_[2];
  moire_groups groups_;
};

}  // namespace moire
