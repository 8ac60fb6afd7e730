#include "ops/scatter_check.h"

namespace moire {
namespace {

template <class Index>
int64_t count_routed(const TensorView& scatter_idx) {
  int64_t routed = 0;
  for (int64_t t = 0; t < scatter_idx.shape[0]; ++t) {
    const Index* choices = static_cast<const Index*>(scatter_idx.data) + t * scatter_idx.stride();
    for (int64_t j = 0; j < scatter_idx.shape[1]; ++j) routed += choices[j] >= 0;
  }
  return routed;
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

}  // namespace moire
