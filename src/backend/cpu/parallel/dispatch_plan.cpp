// dispatch_plan on the CPU: one walk over the tokens, whose places at each rank are counted up.
#include <algorithm>

#include "backend/cpu/implementations.h"
#include "backend/cpu/rows.h"
#include "core/format.h"

namespace moire::cpu {
namespace {

template <class Index>
void plan(const DispatchPlanArgs& args) {
  const TensorView topk_idx = args.topk_idx, places = args.places;
  const int64_t ranks = places.shape[1], k = topk_idx.shape[1];
  const int64_t local = args.num_experts / ranks;
  int64_t* const counts = row_of<int64_t>(args.counts, 0);
  std::fill_n(counts, ranks, 0);
  for (int64_t t = 0; t < places.shape[0]; ++t) {
    int32_t* const at = row_of<int32_t>(places, t);
    const Index* const expert = row_of<const Index>(topk_idx, t);
    std::fill_n(at, ranks, -1);
    for (int64_t j = 0; j < k; ++j) {
      if (expert[j] < 0 || expert[j] >= args.num_experts) continue;
      const int64_t d = expert[j] / local;
      if (at[d] == -1) at[d] = -2;  // a choice there, which has no place yet
    }
    for (int64_t d = 0; d < ranks; ++d) {
      if (at[d] == -1) continue;
      at[d] = counts[d] < args.capacity ? static_cast<int32_t>(counts[d]) : -1;
      ++counts[d];
    }
  }
}

std::string policy(const DeviceState&, const DispatchPlanArgs&) { return "by token, 1 thread"; }

Status run(const Context&, const DispatchPlanArgs& args) {
  with_index_type(TensorView(args.topk_idx).type(), [&]<class Index>() { plan<Index>(args); });
  return {};
}

}  // namespace

const Implementation<DispatchPlanArgs> kDispatchPlan = {
    "cpu",  Device::kCpu, supports_everything<DispatchPlanArgs>, no_workspace<DispatchPlanArgs>,
    policy, run};

}  // namespace moire::cpu
