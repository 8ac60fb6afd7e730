// combine on the CPU: each token's row is summed from the windows of the ranks that it went to,
// rank 0 first, by the task that owns the token.
#include "backend/cpu/implementations.h"
#include "backend/cpu/rows.h"
#include "backend/cpu/simd_targets.h"
#include "core/format.h"
#include "core/status_macros.h"
#include "parallel/exchange.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/parallel/combine.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "backend/cpu/sum_entries-inl.h"

#ifndef MOIRE_COMBINE_RANKS
#define MOIRE_COMBINE_RANKS
namespace moire::cpu {
namespace {

// The rows of one token at the ranks: what sum_entries-inl.h sums.
struct RankEntries {
  RankEntries(const Exchange& exchange_, const CombineArgs& args, int64_t token)
      : exchange(exchange_),
        rows(args.rows),
        places(row_of<const int32_t>(args.places, token)),
        count(exchange.size()),
        first(rows.shape[0] / count * exchange.rank()) {}

  int64_t next(int64_t j) const {
    while (j < count && places[j] < 0) ++j;
    return j;
  }
  static float weight(int64_t) { return 1.0F; }
  template <class Element>
  const Element* row(int64_t j) const {
    return static_cast<const Element*>(exchange.at(static_cast<int>(j), rows)) +
           (first + places[j]) * rows.stride();
  }

  const Exchange& exchange;
  const TensorView rows;
  const int32_t* places;
  int64_t count, first;
};

}  // namespace
}  // namespace moire::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace moire::cpu::HWY_NAMESPACE {
namespace {

void SumRanks(const Exchange& exchange, const CombineArgs& args, int64_t begin, int64_t end) {
  with_format(TensorView(args.rows).type(), [&](auto from) HWY_ATTR {
    for (int64_t t = begin; t < end; ++t) {
      SumEntries<decltype(from)>(RankEntries(exchange, args, t), args.y, t);
    }
  });
}

}  // namespace
}  // namespace moire::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace moire::cpu {
namespace {

HWY_EXPORT(SumRanks);

// Of each choice the weight at the one rank that has its expert.
template <class Index>
void fetch_weights(const Exchange& exchange, const CombineArgs& args, int64_t begin, int64_t end) {
  const TensorView topk_idx = args.topk_idx, received = args.topk_weights_recv;
  const int64_t local = args.num_experts / exchange.size();
  const int64_t first = received.shape[0] / exchange.size() * exchange.rank();
  for (int64_t t = begin; t < end; ++t) {
    const int32_t* places = row_of<const int32_t>(args.places, t);
    const Index* expert = row_of<const Index>(topk_idx, t);
    float* to = row_of<float>(args.topk_weights, t);
    for (int64_t j = 0; j < topk_idx.shape[1]; ++j) {
      to[j] = 0.0F;
      if (expert[j] < 0 || expert[j] >= args.num_experts) continue;
      const auto owner = static_cast<int>(expert[j] / local);
      if (places[owner] < 0) continue;
      const auto* rows = static_cast<const float*>(exchange.at(owner, received));
      to[j] = rows[(first + places[owner]) * received.stride() + j];
    }
  }
}

int64_t tokens_per_task(const CombineArgs& args) {
  return items_per_task((args.places.shape[1] + 1) * bytes_per_row(args.y));
}

std::string policy(const DeviceState& state, const CombineArgs& args) {
  return concat("sum by token, ", tokens_per_task(args), " tokens per task, ", state.num_threads,
                " threads, ", state.simd);
}

Status run(const Context& context, const CombineArgs& args) {
  Exchange exchange(context, args);
  MOIRE_RETURN_IF_ERROR(exchange.begin());
  for_ranges(*context.state().pool, args.places.shape[0], tokens_per_task(args),
             [&](int64_t begin, int64_t end) {
               if (is_present(args.y)) {
                 HWY_DYNAMIC_DISPATCH(SumRanks)(exchange, args, begin, end);
               }
               if (!is_present(args.topk_weights)) return;
               with_index_type(TensorView(args.topk_idx).type(), [&]<class Index>() {
                 fetch_weights<Index>(exchange, args, begin, end);
               });
             });
  return exchange.end();
}

}  // namespace

// It runs without an element to write as well: others wait for this rank.
const Implementation<CombineArgs> kCombine = {
    "cpu",   Device::kCpu, supports_everything<CombineArgs>, no_workspace<CombineArgs>, policy, run,
    nullptr, true};

}  // namespace moire::cpu
#endif
