// Sums and products of sizes that callers choose: what does not fit stays at kTooLarge, which no
// memory has and every check of a size refuses. Of numbers that are not negative. Host and device.
//
// Sizes of a tensor that has been checked need none of this: ArgumentCheck lets no tensor, and no
// count of rows or groups, past kMostBytes, so that sums of a few of them fit. What no tensor of
// the call has (rows of one and columns of another: scratch) is put together here.
#pragma once

#include <cstdint>
#include <limits>

#include "core/host_device.h"

namespace moire {

inline constexpr int64_t kTooLarge = std::numeric_limits<int64_t>::max();
inline constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();
// More than any address space has.
inline constexpr int64_t kMostBytes = int64_t{1} << 56;
// Of a call: kernels count them in 32 bits.
inline constexpr int64_t kMostGroups = int64_t{1} << 30;

MOIRE_HOST_DEVICE constexpr int64_t sum(int64_t a, int64_t b) {
  return a > kTooLarge - b ? kTooLarge : a + b;
}
MOIRE_HOST_DEVICE constexpr int64_t product(int64_t a, int64_t b) {
  return b != 0 && a > kTooLarge / b ? kTooLarge : a * b;
}
MOIRE_HOST_DEVICE constexpr int64_t product(int64_t a, int64_t b, int64_t c) {
  return product(product(a, b), c);
}

}  // namespace moire
