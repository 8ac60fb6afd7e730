// Quantised blocks as core/fp8.h defines them, and copies of a matrix to compare with them.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "backend/cpu/quantize.h"
#include "core/fp8.h"

namespace moire::cpu {

// What the scalar definition makes of one block.
struct Block {
  std::vector<uint8_t> codes;
  uint8_t e8m0 = 0;
  float fp32 = 0;
};

template <class Format>
Block quantize(const QuantizeFormat& how, const std::vector<float>& values) {
  float amax = 0;
  for (const float v : values) amax = std::fabs(v) > amax ? std::fabs(v) : amax;
  Block out;
  const BlockScale scale = block_scale<Format>(amax, how.fractional);
  out.e8m0 = mx_scale<Format>(amax);
  out.fp32 = scale.scale;
  const float multiplier =
      how.scaling == MOIRE_SCALING_MXFP8 ? e8m0_reciprocal(out.e8m0) : scale.multiplier;
  for (const float v : values) out.codes.push_back(float_to_fp8<Format>(v * multiplier));
  return out;
}

// A copy with its guards: 0xA5 in every byte that is not an element.
struct Copy {
  Copy(const QuantizeFormat& how, int64_t rows, int64_t columns, int64_t scale_rows,
       int64_t scale_columns)
      : stride(columns + 5),
        scale_stride(scale_columns + 3),
        codes(static_cast<size_t>(rows * stride), 0xA5),
        e8m0(static_cast<size_t>(scale_rows * scale_stride), 0xA5),
        fp32(e8m0.size(), -77.0F),
        is_mx(how.scaling == MOIRE_SCALING_MXFP8) {}
  QuantizedPiece piece() {
    return {codes.data(), stride, is_mx ? static_cast<void*>(e8m0.data()) : fp32.data(),
            scale_stride};
  }
  void set_scale(int64_t row, int64_t column, const Block& block) {
    const auto at = static_cast<size_t>(row * scale_stride + column);
    (is_mx ? static_cast<void>(e8m0[at] = block.e8m0) : static_cast<void>(fp32[at] = block.fp32));
  }
  bool operator==(const Copy& other) const {
    return codes == other.codes && e8m0 == other.e8m0 && fp32 == other.fp32;
  }

  int64_t stride, scale_stride;
  std::vector<uint8_t> codes, e8m0;
  std::vector<float> fp32;
  bool is_mx;
};

// Both copies of [rows, columns] values, which run(rowwise, columnwise) makes, have the bytes of
// the scalar definition, and no other byte was written.
template <class Format, class Run>
void expect_quantized(const QuantizeFormat& how, const std::vector<float>& values, int64_t rows,
                      int64_t columns, Run&& run) {
  const int64_t block = how.block(), row_blocks = (columns + block - 1) / block;
  const auto at = [&](int64_t r, int64_t c) {
    return values[static_cast<size_t>(r * columns + c)];
  };
  Copy got_rows(how, rows, columns, rows, row_blocks), got_columns(how, rows, columns, 1, columns);
  Copy want_rows = got_rows, want_columns = got_columns;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t b = 0; b < row_blocks; ++b) {
      const auto begin = values.begin() + r * columns + b * block;
      const int64_t n = std::min(block, columns - b * block);
      const Block want = quantize<Format>(how, {begin, begin + n});
      std::copy(want.codes.begin(), want.codes.end(),
                want_rows.codes.begin() + r * want_rows.stride + b * block);
      want_rows.set_scale(r, b, want);
    }
  }
  for (int64_t c = 0; c < columns; ++c) {
    std::vector<float> column;
    for (int64_t r = 0; r < rows; ++r) column.push_back(at(r, c));
    const Block want = quantize<Format>(how, column);
    for (int64_t r = 0; r < rows; ++r) {
      want_columns.codes[static_cast<size_t>(r * want_columns.stride + c)] =
          want.codes[static_cast<size_t>(r)];
    }
    want_columns.set_scale(0, c, want);
  }
  run(got_rows.piece(), got_columns.piece());
  ASSERT_TRUE(got_rows == want_rows) << "rowwise " << rows << " x " << columns;
  ASSERT_TRUE(got_columns == want_columns) << "columnwise " << rows << " x " << columns;
}

}  // namespace moire::cpu
