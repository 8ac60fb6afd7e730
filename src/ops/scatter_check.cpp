#include "ops/scatter_check.h"

#include <algorithm>

namespace moire {
namespace {

template <class Index>
int64_t count_routed(const TensorView& scatter_idx) {
  if (scatter_idx.num_elements() == 0) return 0;  // whatever the number of tokens
  int64_t routed = 0;
  for (int64_t t = 0; t < scatter_idx.shape[0]; ++t) {
    const Index* choices = static_cast<const Index*>(scatter_idx.data) + t * scatter_idx.stride();
    for (int64_t j = 0; j < scatter_idx.shape[1]; ++j) routed += choices[j] >= 0;
  }
  return routed;
}

// The first row that its token does not name; `used` if there is none.
template <class Gather, class Scatter>
int64_t first_stray_row(const TensorView& gather_idx, const TensorView& scatter_idx, int64_t used) {
  const auto* const tokens = static_cast<const Gather*>(gather_idx.data);
  const auto* const rows = static_cast<const Scatter*>(scatter_idx.data);
  for (int64_t row = 0; row < used; ++row) {
    const Scatter* const of_token = rows + tokens[row] * scatter_idx.stride();
    const Scatter* const end = of_token + scatter_idx.shape[1];
    if (std::find(of_token, end, static_cast<Scatter>(row)) == end) return row;
  }
  return used;
}

template <class Gather>
int64_t first_stray_row(const TensorView& gather_idx, const TensorView& scatter_idx, int64_t used) {
  return scatter_idx.type() == DType::kInt32
             ? first_stray_row<Gather, int32_t>(gather_idx, scatter_idx, used)
             : first_stray_row<Gather, int64_t>(gather_idx, scatter_idx, used);
}

}  // namespace

bool check_scatter(ArgumentCheck& check, const TensorView& scatter_idx, const Groups& groups) {
  if (!check.ok() || !check.reads_values()) return check.ok();
  const int64_t used = rows_in_use(groups);
  if (!check.indices("scatter_idx", scatter_idx, scatter_idx.num_elements(), -1, used)) {
    return false;
  }
  const int64_t routed = scatter_idx.type() == DType::kInt32 ? count_routed<int32_t>(scatter_idx)
                                                             : count_routed<int64_t>(scatter_idx);
  return check.require(routed == used, "scatter_idx names ", routed, " rows but the groups have ",
                       used, ", must be those of the same plan");
}

bool check_inverse(ArgumentCheck& check, const TensorView& gather_idx,
                   const TensorView& scatter_idx, const Groups& groups) {
  if (!check.ok() || !check.reads_values()) return check.ok();
  const int64_t used = rows_in_use(groups);
  const bool is_int32 = gather_idx.type() == DType::kInt32;
  const int64_t row = is_int32 ? first_stray_row<int32_t>(gather_idx, scatter_idx, used)
                               : first_stray_row<int64_t>(gather_idx, scatter_idx, used);
  if (row == used) return true;
  const int64_t token = is_int32 ? static_cast<const int32_t*>(gather_idx.data)[row]
                                 : static_cast<const int64_t*>(gather_idx.data)[row];
  return check.require(false, "row ", row, " is gathered from token ", token, " but scatter_idx[",
                       token, "] does not name it; scatter_idx must be the ",
                       "inverse of gather_idx");
}

}  // namespace moire
