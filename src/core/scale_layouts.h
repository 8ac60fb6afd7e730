// Where the MXFP8 scales of a group lie in each moire_scale_layout. Of a group's scales, `outer`
// counts what has scales (rows of a rowwise copy, columns of a columnwise one) and `block` the
// blocks along it.
//
// Layouts other than the canonical one are containers of `width` bytes a row, in which a group owns
// consecutive rows. PADDED and SWIZZLED lay a group's matrix [outer, blocks], padded to multiples
// of 128 and 4, into the bytes of its rows; columnwise, where that matrix is as wide as the group
// has blocks, a container row has one byte per padded column.
#pragma once

#include <moire.h>

#include <cstdint>

#include "core/scale_shapes.h"

namespace moire {

inline constexpr int64_t kMxBlock = 32;
inline constexpr int64_t kPaddedOuter = 128, kPaddedBlocks = 4;

// A container's columns.
MOIRE_HOST_DEVICE constexpr int64_t scale_layout_width(int32_t direction, int32_t layout,
                                                       int64_t k) {
  const bool is_padded = layout >= MOIRE_SCALES_PADDED;
  if (direction == MOIRE_COLUMNWISE) return is_padded ? round_up(k, kPaddedOuter) : k;
  const int64_t blocks = ceil_div(k, kMxBlock);
  return is_padded ? round_up(blocks, kPaddedBlocks) : blocks;
}
// Container rows of a group of so many rows: what is cut into blocks is the other side.
MOIRE_HOST_DEVICE constexpr int64_t scale_layout_rows(int32_t direction, int32_t layout,
                                                      int64_t group_rows) {
  return scale_layout_width(1 - direction, layout, group_rows);
}
// Rows that suffice for any splits: groups of m rows in all have at most m / b + G blocks of b.
MOIRE_HOST_DEVICE constexpr ScaleShape scale_layout_bound(int32_t direction, int32_t layout,
                                                          int64_t capacity, int64_t num_groups,
                                                          int64_t k) {
  // As many as there are in the canonical layout.
  if (layout <= MOIRE_SCALES_DENSE) {
    return ragged_scales(MOIRE_SCALING_MXFP8, direction, capacity, num_groups, k);
  }
  const int64_t blocks_of_128 = capacity / kPaddedOuter + num_groups;
  return {blocks_of_128 * (direction == MOIRE_ROWWISE ? kPaddedOuter : kPaddedBlocks),
          scale_layout_width(direction, layout, k)};
}

// Byte offsets of one group's scales.
struct GroupScales {
  int32_t direction, layout;
  int64_t pitch;      // bytes from one row to the next
  int64_t first_row;  // of the group
  int64_t padded_blocks;

  MOIRE_HOST_DEVICE int64_t offset(int64_t outer, int64_t block) const {
    const int64_t base = first_row * pitch;
    if (layout == MOIRE_SCALES_SWIZZLED) {
      const int64_t tile =
          outer / kPaddedOuter * (padded_blocks / kPaddedBlocks) + block / kPaddedBlocks;
      const int64_t in_tile = 16 * (outer % 32) + 4 * (outer % kPaddedOuter / 32);
      return base + tile * kPaddedOuter * kPaddedBlocks + in_tile + block % kPaddedBlocks;
    }
    if (layout == MOIRE_SCALES_PADDED) return base + outer * padded_blocks + block;
    return base + (direction == MOIRE_ROWWISE ? outer * pitch + block : block * pitch + outer);
  }
};

}  // namespace moire
