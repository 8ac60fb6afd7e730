// What all ranks call together, which are threads: their tokens, windows and calls.
#include "staging/ranks.h"

#include <algorithm>
#include <numeric>

#include "cases.h"
#include "commands.h"
#include "reference/expert_parallel.h"
#include "staging/entry.h"
#include "staging/random.h"
#include "text.h"

namespace moire::tool {
namespace {

using staging::Random;

// k different experts for each token, some of which are nobody's.
std::vector<int64_t> choose(const Problem& p, int64_t tokens, Random& random) {
  const int64_t num_experts = p.groups * p.ranks;
  std::vector<int64_t> experts(static_cast<size_t>(num_experts)), out;
  std::iota(experts.begin(), experts.end(), 0);
  for (int64_t i = 0; i < tokens * p.topk; ++i) {
    const int64_t j = i % p.topk;
    const bool is_dropped = j >= num_experts || random.below(p.rows + p.dropped) >= p.rows;
    if (!is_dropped) {
      auto& chosen = experts[static_cast<size_t>(j)];
      std::swap(chosen, experts[static_cast<size_t>(j + random.below(num_experts - j))]);
    }
    const int64_t nobody = i % 2 == 0 ? -1 : num_experts;
    out.push_back(is_dropped ? nobody : experts[static_cast<size_t>(j)]);
  }
  return out;
}

// All ranks of a problem; the calls of its op share them.
class World : public std::enable_shared_from_this<World> {
 public:
  explicit World(Operands& operands)
      : operands_(operands),
        p_(operands.problem()),
        room_(p_.room > 0 ? p_.room : p_.tokens()),
        ranks_(static_cast<int>(p_.ranks)) {
    const int64_t rows = p_.ranks * room_;
    x_recv_ = ranks_.take(p_.is_quantized() ? p_.element : p_.dtype, rows, p_.hidden);
    if (p_.is_quantized())
      scales_recv_ = ranks_.take(p_.is_mx() ? DType::kE8M0 : DType::kFP32, rows, blocks());
    idx_recv_ = ranks_.take(DType::kInt32, rows, p_.topk);
    weights_recv_ = ranks_.take(DType::kFP32, rows, p_.topk);
    rows_ = ranks_.take(p_.dtype, rows, p_.hidden);
    if (operands.has_content()) require(ranks_.open());
    Random random(p_.seed);
    for (int64_t rank = 0; rank < p_.ranks; ++rank) {
      const bool is_full = rank == 0 || p_.splits.kind == Splits::Kind::kUniform;
      add(static_cast<size_t>(rank), is_full ? p_.tokens() : random.below(p_.tokens() + 1), random);
    }
    if (operands.has_content()) fill_rows();
  }

  Call call(const OpCall& what) {
    if (what.entry == "dispatch_plan") return make(what, plans_, reference::expect_plans);
    if (what.entry == "combine") return make(what, combines_, reference::expect_combines);
    return make(what, dispatches_, [this](const std::vector<moire_dispatch_args>& calls) {
      return reference::expect_dispatch(calls, ranks_.windows(), is_refused());
    });
  }

 private:
  int64_t blocks() const { return (p_.hidden + (p_.is_mx() ? 31 : 127)) / (p_.is_mx() ? 32 : 128); }
  bool is_refused() const {
    return !p_.drops && reference::has_excess({plans_.begin(), plans_.end()});
  }

  template <class A>
  Call make(const OpCall& what, const std::vector<A>& args, auto expect) {
    Call out;
    out.entry = what.entry;
    out.args = args[0];
    if (what.entry != "dispatch_plan") {
      out.window_bytes = ranks_.window_bytes();
      out.moved_bytes = 2 * moved_rows_ * static_cast<double>(p_.hidden * dtype_size(p_.dtype));
    }
    out.expect = [self = shared_from_this(), expect, &args](Device) {
      return expect({args.begin(), args.end()});
    };
    constexpr bool kHasWorkspace = staging::Entry<A>::kHasWorkspace;
    if constexpr (kHasWorkspace) {  // equal parts: rank 0 has most tokens
      out.workspace = [&args](const Context& context, size_t* bytes) {
        Status status = staging::Entry<A>::kWorkspace(context, args[0], bytes);
        *bytes *= args.size();
        return status;
      };
    }
    out.run = [self = shared_from_this(), &args](const Context& context, Workspace workspace) {
      std::vector<A> calls = args;
      if constexpr (kHasWorkspace) {
        const size_t part = workspace.bytes / calls.size();
        auto* of_rank = static_cast<std::byte*>(workspace.data);
        for (size_t i = 0; i < calls.size(); ++i) calls[i].workspace = {of_rank + i * part, part};
      }
      if (context.is_explaining()) return staging::Entry<A>::kRun(context, calls[0]);
      const Status found = self->ranks_.run(context, calls);
      // That all refuse what there is no room for is right.
      const bool is_right = found.message().find("has room for") != std::string::npos;
      return is_right && self->operands_.is_judged() && self->is_refused() ? Status() : found;
    };
    return out;
  }

  void add(size_t rank, int64_t tokens, Random& random) {
    const auto take = [&](const char* name, DType dtype, int64_t columns) {
      return operands_.output(text(name, " of rank ", rank), dtype, {tokens, columns});
    };
    const auto in_window = [&](size_t tensor) {
      const TensorView t = ranks_.in(rank, tensor);
      return ranks_.is_open() ? t : operands_.take("window", t.type(), {t.shape[0], t.shape[1]});
    };
    DispatchPlanArgs& plan = plans_.emplace_back();
    plan.topk_idx = take("topk_idx", p_.seed % 2 == 0 ? DType::kInt32 : DType::kInt64, p_.topk);
    plan.num_experts = p_.groups * p_.ranks;
    plan.capacity = room_;
    plan.places = take("places", DType::kInt32, p_.ranks);
    plan.counts = operands_.output(text("counts of rank ", rank), DType::kInt64, {p_.ranks});
    if (operands_.has_content()) {
      operands_.fill_indices(plan.topk_idx, choose(p_, tokens, random));
      const reference::DispatchPlanResults made = reference::dispatch_plan(plan);
      const bool is_given = p_.op->entry() != "dispatch_plan";
      if (is_given) operands_.fill_indices(plan.places, made.places);
      if (is_given) operands_.fill_indices(plan.counts, made.counts);
    }
    DispatchArgs& dispatch = dispatches_.emplace_back();
    dispatch.x_recv = in_window(x_recv_);
    dispatch.x = take("x", TensorView(dispatch.x_recv).type(), p_.hidden);
    if (p_.is_quantized()) {
      dispatch.x_scales_recv = in_window(scales_recv_);
      dispatch.x_scales = take("x_scales", TensorView(dispatch.x_scales_recv).type(), blocks());
      operands_.fill_codes(dispatch.x, text("x", rank), Operands::Values::kNormal);
      operands_.fill_scales(dispatch.x_scales, text("x", rank), Operands::Values::kNormal, 1, 0);
    } else {
      operands_.fill_normal(dispatch.x, text("x", rank), 1);
    }
    dispatch.topk_weights = take("topk_weights", DType::kFP32, p_.topk);
    operands_.fill_uniform(dispatch.topk_weights, text("topk_weights", rank));
    dispatch.counts = plan.counts;
    dispatch.overflow = p_.drops ? MOIRE_OVERFLOW_DROP : MOIRE_OVERFLOW_REFUSE;
    dispatch.topk_idx_recv = in_window(idx_recv_);
    dispatch.topk_weights_recv = in_window(weights_recv_);
    CombineArgs& combine = combines_.emplace_back();
    combine.rows = in_window(rows_);
    combine.y = take("y", p_.out == DType::kNone ? p_.dtype : p_.out, p_.hidden);
    combine.topk_weights_recv = dispatch.topk_weights_recv;
    combine.topk_weights = take("grad_topk_weights", DType::kFP32, p_.topk);
    dispatch.places = combine.places = plan.places;
    dispatch.topk_idx = combine.topk_idx = plan.topk_idx;
    dispatch.num_experts = combine.num_experts = plan.num_experts;
  }

  // What experts left for combine: NaN in rows that are nobody's.
  void fill_rows() {
    for (size_t s = 0; s < plans_.size(); ++s) {
      const std::vector<int64_t> counts = reference::dispatch_plan(plans_[s]).counts;
      for (size_t d = 0; d < plans_.size(); ++d) {
        const int64_t used = std::min(counts[d], room_);
        moved_rows_ += static_cast<double>(used);
        for (const size_t tensor : {rows_, weights_recv_}) {
          const TensorView all = ranks_.in(d, tensor);
          const TensorView sent = all.slice(static_cast<int64_t>(s) * room_, used);
          operands_.fill_normal(sent, text("rows", s, d), 1);
        }
      }
    }
  }

  Operands& operands_;
  const Problem& p_;
  int64_t room_;
  double moved_rows_ = 0;  // over all ranks
  staging::Ranks ranks_;
  size_t x_recv_, scales_recv_ = 0, idx_recv_, weights_recv_, rows_;  // in the windows
  std::vector<DispatchPlanArgs> plans_;
  std::vector<DispatchArgs> dispatches_;
  std::vector<CombineArgs> combines_;
};

}  // namespace

std::vector<Call> make_rank_calls(Operands& operands) {
  const auto world = std::make_shared<World>(operands);
  std::vector<Call> out;
  for (const OpCall& what : operands.problem().op->calls) out.push_back(world->call(what));
  return out;
}

}  // namespace moire::tool
