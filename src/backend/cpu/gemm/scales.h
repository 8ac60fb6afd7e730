// Where the scales of an FP8 operand lie. moire.h has the shapes; all of them are one formula here:
// element [row, column] has the scale [base + (row - first_row) / rows, column / columns].
#pragma once

#include <moire/groups.h>
#include <moire/tensor.h>

#include <bit>
#include <cstdint>

#include "core/scale_shapes.h"

namespace moire::cpu::gemm {

class Scales {
 public:
  Scales() = default;  // of an operand that is not quantised

  // Blocks along each row of a ragged operand, gathered or not.
  static Scales rowwise(const TensorView& scales) {
    return scales.is_present() ? Scales(scales, 1, false) : Scales();
  }
  // Blocks down the columns of one group's rows.
  static Scales columnwise(const TensorView& scales, const Groups& groups, int64_t group) {
    if (!scales.is_present()) return {};
    const int64_t block = scale_block(scales.type());
    Scales s(scales, block, true);
    s.first_row_ = groups.offsets[group];
    s.base_ = s.first_row_ / block + group;
    return s;
  }
  // Of one group's weight matrix; MXFP8 blocks lie along k, along the rows or down the columns.
  static Scales weight(const TensorView& scales, bool k_is_last, int64_t group) {
    if (!scales.is_present()) return {};
    const bool tiles = scales.type() == DType::kFP32;
    const int64_t block = scale_block(scales.type());
    Scales s(scales, tiles || !k_is_last ? block : 1, !tiles && !k_is_last);
    s.base_ = group * scales.shape[1];
    return s;
  }

  bool is_present() const { return data_ != nullptr; }
  DType dtype() const { return dtype_; }
  // Each column has a scale of its own; else a block of columns shares one.
  bool is_per_column() const { return per_column_; }
  // The scales of a row.
  const void* row(int64_t row) const {
    return data_ + (base_ + ((row - first_row_) >> row_shift_)) * pitch_bytes_;
  }

 private:
  Scales(const TensorView& scales, int64_t rows, bool per_column)
      : data_(static_cast<const char*>(scales.data)),
        dtype_(scales.type()),
        pitch_bytes_(scales.stride() * dtype_size(scales.type())),
        row_shift_(std::countr_zero(static_cast<uint64_t>(rows))),
        per_column_(per_column) {}

  const char* data_ = nullptr;
  DType dtype_ = DType::kNone;
  int64_t pitch_bytes_ = 0;
  int row_shift_ = 0;  // rows that share scales: a power of two
  bool per_column_ = false;
  int64_t first_row_ = 0, base_ = 0;
};

}  // namespace moire::cpu::gemm
