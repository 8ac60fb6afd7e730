// What a task of convert_glu moves, the same type for every SIMD target.
//
// Along the converted dimension lie 2F positions; each is a piece of contiguous bytes, or several
// rows of them. Positions of one half keep their order, so a run of `gcd(from.block, to.block)`
// positions moves as one. Short runs are units, which blocks and columns then count.
#pragma once

#include <cstdint>

#include "core/glu_layout.h"

namespace moire::cpu {

// Columns first ... end - 1 of F, both halves.
struct GluColumns {
  const char* source;
  char* target;
  ResolvedGluLayout from, to;
  int64_t first, end;
  int64_t rows, row_bytes;           // of a position, or 1 and a unit's
  int64_t source_row, target_row;    // bytes from one row to the next
  int64_t source_step, target_step;  // bytes from one position to the next
  bool is_packed;                    // positions have one row, and no gaps between them
  bool are_units;
  bool bypasses_cache;  // the target is too large to find it in the cache again
};

}  // namespace moire::cpu
