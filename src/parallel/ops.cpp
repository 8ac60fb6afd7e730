// dispatch_plan, dispatch and combine: validation, and the way to who runs them.
#include <moire/expert_parallel.h>

#include <algorithm>

#include "core/scales_check.h"
#include "core/sizes.h"
#include "ops/dispatch.h"
#include "parallel/exchange.h"

namespace moire {
namespace {

constexpr DType kInt32Only[] = {DType::kInt32};

bool check_experts(ArgumentCheck& check, int64_t num_experts, int64_t num_ranks) {
  check.require(num_experts >= 0 && num_experts < kMaxInt32, "num_experts is ", num_experts,
                ", must be 0 to ", kMaxInt32 - 1);
  return check.require(num_experts % num_ranks == 0, "num_experts is ", num_experts,
                       ", must be a multiple of the ", num_ranks, " ranks");
}

bool check_num_ranks(ArgumentCheck& check, const TensorView& places) {
  return check.require(places.shape[1] >= 1 && places.shape[1] <= kMostRanks, "places is ", places,
                       ", its ranks must be 1 to ", kMostRanks);
}

void validate(ArgumentCheck& check, const DispatchPlanArgs& args) {
  const TensorView topk_idx = args.topk_idx, places = args.places;
  if (!check.ranked("topk_idx", topk_idx, kIndexTypes, 2)) return;
  if (!check.ranked("places", places, kInt32Only, 2) || !check_num_ranks(check, places)) return;
  check.require(places.shape[0] == topk_idx.shape[0], "places is ", places, " but topk_idx is ",
                topk_idx, ": both must have the same number of tokens");
  check.tensor("counts", args.counts, kInt64Only, {{"R", places.shape[1]}});
  check_experts(check, args.num_experts, places.shape[1]);
  check.require(args.capacity >= 0 && args.capacity <= kMaxInt32, "capacity is ", args.capacity,
                ", must be 0 to ", kMaxInt32);
  check.indices("topk_idx", topk_idx, topk_idx.num_elements(), -1, args.num_experts + 1);
}

std::string problem_of(const DispatchPlanArgs& args) {
  return concat(args.topk_idx.shape[0], " tokens, top ", args.topk_idx.shape[1], ", ",
                args.num_experts, " experts over ", args.places.shape[1], " ranks, capacity ",
                args.capacity);
}

// The places that a plan makes: at each rank rows 0, 1, ... in the order of tokens. So each row is
// one token's, and in the window. `counts`, where they are read, say how many did not fit there.
void check_order(ArgumentCheck& check, const TensorView& places, int64_t capacity,
                 const int64_t* counts = nullptr) {
  if (!check.indices("places", places, places.num_elements(), -1, capacity)) return;
  if (!check.reads_values()) return;
  int32_t next[kMostRanks] = {};
  for (int64_t t = 0; t < places.shape[0]; ++t) {
    const int32_t* row = static_cast<const int32_t*>(places.data) + t * places.stride();
    for (int64_t d = 0; d < places.shape[1]; ++d) {
      if (row[d] < 0) continue;
      check.require(row[d] == next[d], "places[", t, ", ", d, "] is ", row[d], " but ", next[d],
                    " tokens before it go to rank ", d, ", must be as dispatch_plan made it");
      if (!check.ok()) return;
      ++next[d];
    }
  }
  for (int64_t d = 0; counts != nullptr && d < places.shape[1]; ++d) {
    check.require(next[d] == std::min(counts[d], capacity), "counts[", d, "] is ", counts[d],
                  " but places has ", next[d], " tokens for rank ", d, ", which has room for ",
                  capacity, ", must be as dispatch_plan made them for that room");
  }
}

// places [T, R] for the ranks that there are; an explaining context without others may ask for any
// number. `received` has R * C rows.
bool check_places(ArgumentCheck& check, const TensorView& places, std::string_view received_name,
                  const TensorView& received) {
  if (!check.ranked("places", places, kInt32Only, 2) || !check_num_ranks(check, places))
    return false;
  const Peers* peers = peers_of(check.context());
  const int64_t ranks = places.shape[1], rows = received.dim(0);
  const int64_t there = peers != nullptr                  ? peers->size()
                        : check.context().is_explaining() ? ranks
                                                          : 1;
  check.require(ranks == there, "places is ", places, " but the context's communicator has ", there,
                there == 1 ? " rank" : " ranks", ", needs a column for each");
  check.require(rows % ranks == 0, received_name, " is ", received,
                ", its rows must be a multiple of the ", ranks, " ranks");
  return check.ok();
}

// The choices of the tokens, and their weights at a receiver.
struct Choices {
  TensorView topk_idx, topk_weights, topk_weights_recv;
  int64_t num_experts;

  bool any() const {
    return topk_idx.is_present() || topk_weights.is_present() || topk_weights_recv.is_present();
  }
};

void check_choices(ArgumentCheck& check, const Choices& c, const TensorView& places,
                   int64_t num_rows) {
  if (!check.ranked("topk_idx", c.topk_idx, kIndexTypes, 2)) return;
  const NamedSize tokens{"T", places.shape[0]}, k{"k", c.topk_idx.shape[1]};
  check.tensor("topk_idx", c.topk_idx, kIndexTypes, {tokens, k});
  check.tensor("topk_weights", c.topk_weights, kFP32Only, {tokens, k});
  check.tensor("topk_weights_recv", c.topk_weights_recv, kFP32Only, {{"R * C", num_rows}, k});
  check_window(check, "topk_weights_recv", c.topk_weights_recv);
  if (!check_experts(check, c.num_experts, places.shape[1])) return;
  check.indices("topk_idx", c.topk_idx, c.topk_idx.num_elements(), -1, c.num_experts + 1);
}

void check_rows(ArgumentCheck& check, const DispatchArgs& args, int64_t num_rows) {
  const TensorView x = args.x, x_recv = args.x_recv, x_scales_recv = args.x_scales_recv;
  if (!check.ranked("x", x, kOperandTypes, 2)) return;
  const NamedSize h{"H", x.shape[1]};
  check.tensor("x", x, kOperandTypes, {{"T", args.places.shape[0]}, h});
  check.tensor("x_recv", x_recv, kOperandTypes, {{"R * C", num_rows}, h});
  check.same_dtype("x", x, "x_recv", x_recv);
  check_window(check, "x_recv", x_recv);
  const Groups rows(nullptr, 0, num_rows);
  check_operand_scales(check, {{"x", x}, {"x_scales", args.x_scales}}, MOIRE_ROWWISE, rows, h);
  check_operand_scales(check, {{"x_recv", x_recv}, {"x_scales_recv", x_scales_recv}}, MOIRE_ROWWISE,
                       rows, h);
  check.same_dtype("x_scales", args.x_scales, "x_scales_recv", x_scales_recv);
  check_window(check, "x_scales_recv", x_scales_recv);
}

void validate(ArgumentCheck& check, const DispatchArgs& args) {
  const TensorView places = args.places, topk_idx_recv = args.topk_idx_recv;
  const Choices choices{args.topk_idx, args.topk_weights, args.topk_weights_recv, args.num_experts};
  const bool moves_rows = is_present(args.x) || is_present(args.x_recv) ||
                          is_present(args.x_scales) || is_present(args.x_scales_recv);
  const bool moves_choices = choices.any() || topk_idx_recv.is_present();
  check.require(moves_rows || moves_choices,
                "there is nothing to do: x and x_recv, or topk_idx to topk_weights_recv, must be "
                "present");
  const TensorView received = moves_rows ? args.x_recv : args.topk_idx_recv;
  const std::string_view name = moves_rows ? "x_recv" : "topk_idx_recv";
  check.require(received.rank == 2, name, " is ", received, ", needs rank 2");
  if (!check.ok() || !check_places(check, places, name, received)) return;
  const int64_t num_rows = received.shape[0];
  if (moves_rows) check_rows(check, args, num_rows);
  if (moves_choices) {
    check_choices(check, choices, places, num_rows);
    check.tensor("topk_idx_recv", topk_idx_recv, kInt32Only,
                 {{"R * C", num_rows}, {"k", TensorView(args.topk_idx).columns()}});
    check_window(check, "topk_idx_recv", topk_idx_recv);
  }
  const bool refuses = args.overflow == MOIRE_OVERFLOW_REFUSE;
  if (refuses) check.tensor("counts", args.counts, kInt64Only, {{"R", places.shape[1]}});
  check_order(check, places, num_rows / places.shape[1],
              refuses ? static_cast<const int64_t*>(args.counts.data) : nullptr);
}

void validate(ArgumentCheck& check, const CombineArgs& args) {
  const TensorView rows = args.rows, places = args.places, y = args.y;
  const Choices choices{args.topk_idx, args.topk_weights, args.topk_weights_recv, args.num_experts};
  const bool sums = rows.is_present() || y.is_present();
  check.require(sums || choices.any(),
                "there is nothing to do: rows and y, or topk_weights_recv to topk_weights, must be "
                "present");
  const TensorView received = sums ? rows : choices.topk_weights_recv;
  const std::string_view name = sums ? "rows" : "topk_weights_recv";
  check.require(received.rank == 2, name, " is ", received, ", needs rank 2");
  if (!check.ok() || !check_places(check, places, name, received)) return;
  const int64_t num_rows = received.shape[0];
  if (sums && check.ranked("rows", rows, kFloatTypes, 2)) {
    check.tensor("y", y, kFloatTypes, {{"T", places.shape[0]}, {"H", rows.shape[1]}});
    check.require(y.type() == rows.type() || y.type() == DType::kFP32, "y is ", y, " but rows is ",
                  rows, ": y must have the dtype of rows, or fp32");
    check_window(check, "rows", rows);
  }
  if (choices.any()) check_choices(check, choices, places, num_rows);
  check_order(check, places, num_rows / places.shape[1]);
}

std::string problem_of(const TensorView& places, const TensorView& received) {
  const int64_t ranks = places.shape[1];
  return concat(places.shape[0], " tokens, ", ranks, " ranks, capacity ", received.dim(0) / ranks,
                ", ", received, " in the window");
}

std::string problem_of(const DispatchArgs& args) {
  return problem_of(args.places, is_present(args.x_recv) ? args.x_recv : args.topk_idx_recv);
}

std::string problem_of(const CombineArgs& args) {
  return problem_of(args.places, is_present(args.rows) ? args.rows : args.topk_weights_recv);
}

}  // namespace

MOIRE_DEFINE_OP_WITH_WORKSPACE(dispatch_plan)
MOIRE_DEFINE_OP(dispatch)
MOIRE_DEFINE_OP(combine)

}  // namespace moire
