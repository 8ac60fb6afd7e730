// Which columns a product computes, and in which order: all of them as they lie, or gate and up
// columns brought together so that an epilogue finds each gate beside its up partner.
//
// Columns are cut into chunks, the unit that an epilogue gets. Of a paired product a chunk of w
// output columns has 2w columns: w gates, then their w ups.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/divide.h"
#include "core/glu_layout.h"

namespace moire::cpu::gemm {

// Columns of a paired product's chunk, and of the partial sums over columns: part of the numerics
// contract.
inline constexpr int64_t kGluChunk = 64;
// A multiple of every micro-tile's rows (6 and 8), so that no chunk but the last ends in a short
// one.
inline constexpr int64_t kPlainChunk = 96;

struct Columns {
  int64_t outputs = 0;  // n, or F of a paired product
  int64_t chunk = kPlainChunk;
  bool paired = false;
  ResolvedGluLayout layout = {};

  static Columns plain(int64_t n) { return {n, kPlainChunk, false, {}}; }
  static Columns in_glu_chunks(int64_t f) { return {f, kGluChunk, false, {}}; }
  static Columns glu_pairs(const ResolvedGluLayout& layout) {
    return {layout.f, kGluChunk, layout.is_gated, layout};
  }

  int64_t per_output() const { return paired ? 2 : 1; }
  int64_t num_chunks() const { return ceil_div(outputs, chunk); }
  // Output columns of the chunk that starts at `output`.
  int64_t width(int64_t output) const { return std::min(chunk, outputs - output); }

  // The weight's column that is column i of the product.
  int64_t source(int64_t i) const {
    if (!paired) return i;
    const int64_t first = i / (2 * chunk) * chunk;
    const int64_t at = i - 2 * first, w = width(first);
    return at < w ? layout.gate(first + at) : layout.up(first + at - w);
  }
};

}  // namespace moire::cpu::gemm
