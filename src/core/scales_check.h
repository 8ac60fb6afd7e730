// Checks of the scales beside FP8 tensors: present exactly where the data is FP8, of the shape that
// moire.h gives for their format and direction.
#pragma once

#include <moire/quantize.h>

#include <string_view>

#include "core/argument_check.h"

namespace moire {

inline constexpr DType kFp8Types[] = {DType::kE4M3, DType::kE5M2};
// What a grouped GEMM multiplies.
inline constexpr DType kOperandTypes[] = {DType::kFP32, DType::kBF16, DType::kFP16, DType::kE4M3,
                                          DType::kE5M2};

inline bool is_fp8(const TensorView& t) {
  return t.type() == DType::kE4M3 || t.type() == DType::kE5M2;
}

// A copy of which only one half is there is wrong, not absent.
inline bool is_given(const moire_quantized& q) { return is_present(q) || is_present(q.scales); }

// Data and its scales, as messages call them.
struct ScaledTensor {
  NamedTensor data, scales;
};

// The shape of what has scales: a ragged [rows, columns], or weights [num_groups, rows, columns].
struct ScaledShape {
  ScaledShape(const Groups& groups, NamedSize columns_)
      : rows{"capacity", groups.capacity}, columns(columns_), num_groups(groups.num_groups) {}
  explicit ScaledShape(const Weight& w)
      : rows{w.layout == MOIRE_OUT_IN ? "out" : "in", w.tensor.shape[1]},
        columns{w.layout == MOIRE_OUT_IN ? "in" : "out", w.tensor.shape[2]},
        num_groups(w.tensor.shape[0]),
        is_weight(true) {}

  // Of a ragged one, as far as the host knows them.
  moire_groups groups() const { return {nullptr, num_groups, rows.size}; }

  NamedSize rows, columns;
  int64_t num_groups;
  bool is_weight = false;
};

// Of a ragged operand of a product, whose blocks lie along its columns or down its groups' rows.
bool check_operand_scales(ArgumentCheck& check, const ScaledTensor& t, int32_t direction,
                          const Groups& groups, NamedSize columns);
// The checks of a columnwise copy that lies transposed (core/scale_shapes.h).
bool check_transposed(ArgumentCheck& check, const ScaledTensor& t, const ScaledShape& shape);
// Of packed weights whose blocks lie along their last dimension or the one before it, or of tiles.
bool check_weight_scales(ArgumentCheck& check, const Weight& w, const ScaledTensor& t,
                         int32_t direction);

// Data and scales in the format of `scaling`; check_copy's may be absent, and if ragged be values.
bool check_quantized(ArgumentCheck& check, std::string_view name, const moire_quantized& q,
                     int32_t scaling, int32_t direction, const ScaledShape& shape);
bool check_copy(ArgumentCheck& check, std::string_view name, const moire_quantized& q,
                int32_t scaling, int32_t direction, const ScaledShape& shape);
// The scales alone.
bool check_scales(ArgumentCheck& check, const NamedTensor& scales, int32_t scaling,
                  int32_t direction, const ScaledShape& shape);
// A format that quantised copies have: of weights, which may lie in tiles, or of any matrix. `but`
// says why those may not.
bool check_scaling(ArgumentCheck& check, int32_t scaling, bool takes_tiles,
                   std::string_view but = {});
// 1 only where scales are not powers of two by definition; kFoldedScales on a GPU, where it may be.
bool check_fractional(ArgumentCheck& check, int32_t scaling, int32_t fractional_scales,
                      bool may_fold = false);

// The quantised copies of one output [capacity, columns], NAME_rowwise and NAME_columnwise, each of
// which may be absent.
bool check_quantized_copies(ArgumentCheck& check, std::string_view name,
                            const moire_quantized& rowwise, const moire_quantized& columnwise,
                            int32_t fractional_scales, const Groups& groups, NamedSize columns);

}  // namespace moire
