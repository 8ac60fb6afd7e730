// What moire_quantized says of shapes: how many elements share a scale, and what the scales of a
// matrix look like.
#pragma once

#include <moire/tensor.h>

#include <cstdint>
#include <string>
#include <string_view>

#include "core/divide.h"
#include "core/format.h"
#include "core/host_device.h"
#include "core/sizes.h"

namespace moire {

// Elements along one side of what shares a scale.
MOIRE_HOST_DEVICE constexpr int64_t scale_block(DType scales) {
  return scales == DType::kE8M0 ? 32 : 128;
}
MOIRE_HOST_DEVICE constexpr DType scale_dtype(int32_t scaling) {
  return scaling == MOIRE_SCALING_MXFP8 ? DType::kE8M0 : DType::kFP32;
}
MOIRE_HOST_DEVICE constexpr int64_t scale_block(int32_t scaling) {
  return scale_block(scale_dtype(scaling));
}
// The value of fractional_scales with which FP32 scales of ragged copies are those of MXFP8 that is
// folded (docs/numerics.md).
inline constexpr int32_t kFoldedScales = 2;
// What scales of this type stand for beside ragged operands, and beside a product's weights.
MOIRE_HOST_DEVICE constexpr int32_t ragged_scaling(DType scales) {
  return scales == DType::kE8M0 ? MOIRE_SCALING_MXFP8 : MOIRE_SCALING_FP8_BLOCK;
}
MOIRE_HOST_DEVICE constexpr int32_t weight_scaling(DType scales) {
  return scales == DType::kE8M0 ? MOIRE_SCALING_MXFP8 : MOIRE_SCALING_FP8_TILE;
}

inline bool is_values(const moire_quantized& q) {  // of MXFP8, in BF16 and without scales
  return q.data.rank != 0 && TensorView(q.data).type() == DType::kBF16;
}

// On a GPU a columnwise copy of FP8_BLOCK may lie transposed, as FP8 tensor cores read it:
// [k, transposed_rows] instead of [capacity, k]. The rows of group g are columns from
// 128 (offsets[g] div 128 + g) on, zeros up to the next multiple of 128; what belongs to no group
// is not defined. The scales stay as they are.
MOIRE_HOST_DEVICE constexpr int64_t transposed_rows(int64_t capacity, int64_t num_groups) {
  return product(sum(capacity / 128, num_groups), 128);
}
// The scales of a rowwise one, in expert order, may be turned over to [ceil(k / 128),
// transposed_rows], row i's in column i. With groups, no shape is ever the other's: there are more
// transposed rows than rows.
inline bool has_turned_scales(const TensorView& data, const TensorView& scales,
                              const moire_groups& groups) {
  if (data.rank != 2 || scales.rank != 2 || scales.type() != DType::kFP32) return false;
  return groups.num_groups > 0 && data.shape[0] == groups.capacity &&
         scales.shape[0] == ceil_div(data.shape[1], 128) &&
         scales.shape[1] == transposed_rows(groups.capacity, groups.num_groups);
}
inline bool is_transposed(const TensorView& data, const TensorView& scales,
                          const moire_groups& groups) {
  if (data.rank != 2 || scales.rank != 2 || scales.type() != DType::kFP32) return false;
  return groups.num_groups > 0 && data.shape[0] == scales.columns() &&
         data.shape[1] == transposed_rows(groups.capacity, groups.num_groups);
}

// A ragged operand as the rows that it was, if it lies transposed, to be asked for its shape.
inline TensorView as_rows(const TensorView& data, const TensorView& scales,
                          const moire_groups& groups) {
  if (!is_transposed(data, scales, groups)) return data;
  return TensorView(data.data, data.type(), {groups.capacity, data.shape[0]});
}

inline int32_t scaling_of(const moire_quantized& q) {  // of a ragged copy
  return is_values(q) ? MOIRE_SCALING_MXFP8 : ragged_scaling(TensorView(q.scales).type());
}

// "MXFP8", and "MXFP8 (1)"; a value that is no moire_scaling by its number alone.
constexpr std::string_view scaling_word(int32_t scaling) {
  constexpr std::string_view kWords[] = {"NONE", "MXFP8", "FP8_BLOCK", "FP8_TILE"};
  return scaling < 0 || scaling > MOIRE_SCALING_FP8_TILE ? "" : kWords[scaling];
}
inline std::string scaling_name(int32_t scaling) {
  const std::string_view word = scaling_word(scaling);
  return word.empty() ? concat(scaling) : concat(word, " (", scaling, ")");
}

struct ScaleShape {
  int64_t rows, columns;
};
// Of one matrix [n, k].
MOIRE_HOST_DEVICE constexpr ScaleShape matrix_scales(int32_t scaling, int32_t direction, int64_t n,
                                                     int64_t k) {
  const int64_t b = scale_block(scaling);
  const bool is_tile = scaling == MOIRE_SCALING_FP8_TILE;
  return {is_tile || direction == MOIRE_COLUMNWISE ? ceil_div(n, b) : n,
          is_tile || direction == MOIRE_ROWWISE ? ceil_div(k, b) : k};
}
// Of a ragged [capacity, k].
MOIRE_HOST_DEVICE constexpr ScaleShape ragged_scales(int32_t scaling, int32_t direction,
                                                     int64_t capacity, int64_t num_groups,
                                                     int64_t k) {
  const int64_t b = scale_block(scaling);
  if (direction == MOIRE_ROWWISE) return {capacity, ceil_div(k, b)};
  return {sum(capacity / b, num_groups), k};
}

}  // namespace moire
