// Checks of the scales beside FP8 tensors: present exactly where the data is FP8, of the shape that
// moire.h gives for their format and direction.
#pragma once

#include <moire/grouped_gemm.h>

#include <string>
#include <string_view>

#include "core/argument_check.h"

namespace moire {

inline constexpr DType kFp8Types[] = {DType::kE4M3, DType::kE5M2};
inline constexpr DType kScaleTypes[] = {DType::kE8M0, DType::kFP32};
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

// Of a ragged operand [rows, columns] whose blocks lie along its columns; `rows` is the capacity
// or, of a gathered one, T.
bool check_rowwise_scales(ArgumentCheck& check, const ScaledTensor& t, const Groups& groups,
                          NamedSize columns);
// Of a ragged operand [capacity, columns] whose blocks lie down its groups' rows. It cannot be
// gathered: its scales are in the order of the groups.
bool check_columnwise_scales(ArgumentCheck& check, const ScaledTensor& t,
                             const NamedTensor& row_idx, const Groups& groups, NamedSize columns);
// Of packed weights whose blocks lie along their last dimension or the one before it, or of tiles.
bool check_weight_scales(ArgumentCheck& check, const Weight& w, const ScaledTensor& t,
                         int32_t direction);

// Data and scales [capacity, columns], or [G, ., .] as `w` has them, in the format that `scaling`
// asks for; `name` is the struct's.
bool check_quantized(ArgumentCheck& check, std::string_view name, const moire_quantized& q,
                     int32_t scaling, int32_t direction, const Groups& groups, NamedSize columns);
bool check_quantized(ArgumentCheck& check, std::string_view name, const moire_quantized& q,
                     int32_t scaling, int32_t direction, const Weight& w);
// The scales of a ragged [capacity, columns] alone.
bool check_scales(ArgumentCheck& check, const NamedTensor& scales, int32_t scaling,
                  int32_t direction, const Groups& groups, NamedSize columns);
// 0 or 1, and 1 only where scales are not powers of two by definition.
bool check_fractional(ArgumentCheck& check, int32_t scaling, int32_t fractional_scales);

// Two quantised copies of one output [capacity, columns], each of which may be absent.
struct QuantizedCopies {
  std::string_view rowwise_name;
  moire_quantized rowwise;
  std::string_view columnwise_name;
  moire_quantized columnwise;

  bool any() const { return is_present(rowwise) || is_present(columnwise); }
};
bool check_quantized_copies(ArgumentCheck& check, const QuantizedCopies& copies,
                            int32_t fractional_scales, const Groups& groups, NamedSize columns);

}  // namespace moire
