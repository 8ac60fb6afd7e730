// How convert_glu moves memory, the same types for every SIMD target.
//
// Along the converted dimension lie 2F positions; each is a piece of contiguous bytes, or several
// rows of them. Positions of one half keep their order, so a run of `gcd(from.block, to.block)`
// positions moves as one.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/glu_layout.h"

namespace moire::cpu {

// Positions that follow each other without a gap and are shorter than a cache line, along one row.
struct SmallUnits {
  const char* source;
  char* target;
  ResolvedGluLayout from, to;  // in units
  int64_t first, end;          // units of each half
  int64_t unit_bytes;
  bool bypass_cache;  // write past the cache: the target is too large to find it there again
};

// Contiguous bytes from one place to another.
struct CopyRun {
  const char* source;
  char* target;
  int64_t bytes;
  bool bypass_cache;
};

}  // namespace moire::cpu
