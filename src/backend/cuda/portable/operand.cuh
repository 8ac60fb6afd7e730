// An operand of a product as kernels read it: elements of any type, and the scales of FP8 ones.
#pragma once

#include <bit>

#include "backend/cuda/device/values.cuh"
#include "core/fp8.h"
#include "core/scale_shapes.h"

namespace moire::cuda::portable::gemm {

// Where the scales of an FP8 operand lie. moire.h has the shapes; all of them are one formula here:
// element [row, column] has the scale [base + (row - first_row) / rows, column / columns].
struct Scales {
  const void* data;  // null: the operand is not quantised
  int64_t stride;
  bool is_e8m0;
  int32_t row_shift, column_shift;  // of rows and columns that share a scale, powers of two
  int64_t first_row, base;

  __host__ __device__ bool is_present() const { return data != nullptr; }
  __device__ float at(int64_t row, int64_t column) const {
    const int64_t scale_row = base + ((row - first_row) >> row_shift);
    const int64_t i = scale_row * stride + (column >> column_shift);
    if (is_e8m0) return e8m0_to_float(static_cast<const uint8_t*>(data)[i]);
    return static_cast<const float*>(data)[i];
  }
};

struct Operand {
  AnyFloats elements;  // FP8 codes where there are scales
  Scales scales;

  bool is_fp8() const { return elements.dtype == DType::kE4M3 || elements.dtype == DType::kE5M2; }
  __device__ float decoded(uint8_t code) const {
    return elements.dtype == DType::kE4M3 ? fp8_to_float<E4M3>(code) : fp8_to_float<E5M2>(code);
  }
  __device__ float at(int64_t row, int64_t column) const {
    if (!scales.is_present()) return elements.at(row, column);
    const auto* const codes = static_cast<const uint8_t*>(elements.data);
    return decoded(codes[row * elements.stride + column]) * scales.at(row, column);
  }
};

inline Operand operand_of(const TensorView& t, const TensorView& scales, bool shares_rows,
                          bool shares_columns) {
  const auto block = static_cast<uint64_t>(scales.is_present() ? scale_block(scales.type()) : 1);
  const int32_t shift = std::countr_zero(block);
  return {any_floats(t),
          {scales.data, scales.stride(), scales.type() == DType::kE8M0, shares_rows ? shift : 0,
           shares_columns ? shift : 0, 0, 0}};
}
// Ragged rows, gathered or not, with blocks along each.
inline Operand rowwise(const TensorView& t, const TensorView& scales) {
  return operand_of(t, scales, false, true);
}
// Ragged rows with blocks down the columns of each group.
inline Operand columnwise(const TensorView& t, const TensorView& scales) {
  return operand_of(t, scales, true, false);
}
// All groups' weights as one matrix; MXFP8 blocks lie along k, the others are tiles.
inline Operand weights(const TensorView& w, const TensorView& scales, bool k_is_last) {
  const bool is_tiled = scales.type() == DType::kFP32;
  return operand_of(w, scales, is_tiled || !k_is_last, is_tiled || k_is_last);
}
// One group's of columnwise rows or of weights, whose rows and scales begin there.
__device__ inline Operand of_group(Operand all, int64_t first_row, int64_t first_scale_row) {
  all.scales.first_row = first_row;
  all.scales.base = first_scale_row;
  return all;
}

}  // namespace moire::cuda::portable::gemm
