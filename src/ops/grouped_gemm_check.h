// What the grouped GEMMs share in validation and in what explain says of them.
#pragma once

#include <moire/grouped_gemm.h>

#include <string>
#include <string_view>

#include "core/argument_check.h"
#include "core/scales_check.h"
#include "ops/dispatch.h"

namespace moire {

// The ragged operand [capacity, k] or gathered [T, k], beside a weight that has this k.
inline bool check_operand(ArgumentCheck& check, const ScaledTensor& operand,
                          const TensorView& row_idx, const Groups& groups,
                          std::string_view weight_name, int64_t k) {
  const TensorView& t = operand.data.tensor;
  check.require(t.rank != 2 || t.columns() == k, operand.data.name, " is ", t, " but ", weight_name,
                " has k = ", k);
  check.ragged(operand.data.name, t, "row_idx", row_idx, groups, {"k", k}, kOperandTypes);
  return check_rowwise_scales(check, operand, groups, {"k", k});
}

// How products are summed. The model of a tensor core is one of FP8 operands.
inline bool check_accumulation(ArgumentCheck& check, int32_t accumulation, const NamedTensor& a,
                               const NamedTensor& b) {
  if (!check.enumerator("accumulation", accumulation, 3)) return false;
  if (accumulation != MOIRE_ACCUMULATE_EMULATED) return true;
  for (const NamedTensor& operand : {a, b}) {
    check.require(is_fp8(operand.tensor), "accumulation is 2 (emulated) but ", operand.name, " is ",
                  operand.tensor, ", needs e4m3 or e5m2 operands");
  }
  return check.ok();
}

// "128 groups, capacity 512, [512, 2048] x [128, 1536, 2048] bf16", "... e4m3 x bf16" where the
// dtypes differ.
inline std::string problem_text(const Groups& groups, const TensorView& a, const TensorView& b) {
  const auto sizes = [](const TensorView& t) {
    std::string text = "[";
    for (int32_t i = 0; i < t.rank; ++i) text += concat(i == 0 ? "" : ", ", t.shape[i]);
    return text + "]";
  };
  return concat(groups.num_groups, " groups, capacity ", groups.capacity, ", ", sizes(a), " x ",
                sizes(b), " ", a.dtype == b.dtype ? "" : concat(dtype_name(a.type()), " x "),
                dtype_name(b.type()));
}

}  // namespace moire
