// Where the first element is that is infinite or NaN, after quantising has met one. Not fast: no
// call on finite numbers asks.
#pragma once

#include <cmath>
#include <string>

#include "backend/cpu/quantize.h"
#include "core/fp8.h"

namespace moire::cpu {

// Rows count through all matrices.
struct Element {
  int64_t row = 0, column = 0;
};

// "[3, 5]", and "[1, 3, 5]" in weights.
inline std::string index_text(const TensorView& of, const Element& e) {
  if (of.rank < 3) return concat("[", e.row, ", ", e.column, "]");
  const int64_t n = of.shape[1];
  return concat("[", e.row / n, ", ", e.row % n, ", ", e.column, "]");
}

// Row i of the strip's; FP8 is decoded.
inline bool is_finite(const StripSource& source, int64_t i, int64_t column) {
  const void* const row = source.rows[i];
  if (source.dtype == DType::kFP32) return std::isfinite(static_cast<const float*>(row)[column]);
  if (dtype_size(source.dtype) == 2) {
    const uint16_t exponent = source.dtype == DType::kBF16 ? 0x7F80 : 0x7C00;
    return (static_cast<const uint16_t*>(row)[column] & exponent) != exponent;
  }
  const uint8_t code = static_cast<const uint8_t*>(row)[column];
  const bool is_e8m0 = source.scale_dtype == DType::kE8M0;
  const int64_t at =
      source.direction == MOIRE_COLUMNWISE ? column : column / scale_block(source.scale_dtype);
  const float scale = is_e8m0 ? e8m0_to_float(static_cast<const uint8_t*>(source.scales[i])[at])
                              : static_cast<const float*>(source.scales[i])[at];
  const float element =
      source.dtype == DType::kE4M3 ? fp8_to_float<E4M3>(code) : fp8_to_float<E5M2>(code);
  return std::isfinite(element * scale);
}

// The first in the order of the rows; `fill(index, block, source)` says where a block's rows lie.
template <class Fill>
Element first_non_finite(const ScaleBlocks& blocks, int64_t columns, Fill&& fill) {
  for (int64_t index = 0; index < blocks.count(); ++index) {
    const RowBlock block = blocks.at(index);
    if (block.first == block.end) continue;
    StripSource source{};
    fill(index, block, source);
    for (int64_t row = block.first; row < block.end; ++row) {
      for (int64_t c = 0; c < columns; ++c) {
        if (!is_finite(source, row - block.first, c)) return {row, c};
      }
    }
  }
  return {};
}

}  // namespace moire::cpu
