// The rows before the tail, from offsets that have been checked and lie on the host.
#pragma once

#include <moire.h>

#include <cstdint>

namespace moire {

// 0 where there are no groups.
inline int64_t rows_in_use(const moire_groups& groups) {
  return groups.num_groups == 0 ? 0 : groups.offsets[groups.num_groups];
}

}  // namespace moire
