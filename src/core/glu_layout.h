// Where gate(j) and up(j) lie among the 2F positions that a GluLayout describes: `block` of the
// first half, `block` of the second, repeated. Host and device.
#pragma once

#include <moire.h>

#include <cstdint>

#include "core/host_device.h"

namespace moire {

constexpr bool is_gated(const moire_glu_layout& layout) { return layout.order != MOIRE_UNGATED; }
// Columns of z for one of act: a gate and an up, or a gate alone.
constexpr int64_t num_halves(const moire_glu_layout& layout) { return is_gated(layout) ? 2 : 1; }

// Whether `layout` describes 2F positions: a known order and a block that divides F (0 means F); or
// F of them, which have no blocks.
constexpr bool is_valid_glu_layout(moire_glu_layout layout, int64_t f) {
  if (layout.order < MOIRE_GATE_FIRST || layout.order > MOIRE_UNGATED) return false;
  if (f < 0 || layout.block < 0) return false;
  return layout.block == 0 || (is_gated(layout) && f % layout.block == 0);
}

// A valid layout for a known F, with the block resolved: F of one that is ungated, whose gates lie
// as the first half of a row would, and which has no second.
struct ResolvedGluLayout {
  int64_t f;        // columns of each half
  int64_t block;    // at least 1, divides f
  bool gate_first;  // of each pair of blocks
  bool is_gated = true;

  MOIRE_HOST_DEVICE constexpr int64_t columns() const { return is_gated ? 2 * f : f; }  // of z

  // The position of column j of the half that comes first (second) in each pair of blocks.
  MOIRE_HOST_DEVICE constexpr int64_t first(int64_t j) const {
    return 2 * (j - j % block) + j % block;
  }
  MOIRE_HOST_DEVICE constexpr int64_t second(int64_t j) const { return first(j) + block; }

  MOIRE_HOST_DEVICE constexpr int64_t gate(int64_t j) const {
    return gate_first ? first(j) : second(j);
  }
  MOIRE_HOST_DEVICE constexpr int64_t up(int64_t j) const {
    return gate_first ? second(j) : first(j);
  }
};

constexpr ResolvedGluLayout resolve_glu_layout(moire_glu_layout layout, int64_t f) {
  const int64_t block = layout.block == 0 ? f : layout.block;
  return {f, block > 0 ? block : 1, layout.order != MOIRE_UP_FIRST, is_gated(layout)};
}

}  // namespace moire
