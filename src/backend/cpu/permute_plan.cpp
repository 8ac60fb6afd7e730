// permute_plan on the CPU: a counting sort of the top-k entries by expert. The tokens are cut into
// blocks that depend on the shapes only. Each block counts its entries per expert; a scan over the
// blocks turns the counts into each block's first row of each expert; each block then deals out its
// rows in order. Hence it is stable, and the same for any number of threads.
//
// Workspace: next [num_blocks, G], then totals [G]; int64.
#include <algorithm>
#include <cstring>

#include "backend/cpu/implementations.h"
#include "backend/cpu/rows.h"
#include "core/format.h"

namespace moire::cpu {
namespace {

// A block has at least this many entries, so that a decoding step is one block and wakes no thread;
// and no fewer than it has counters to clear.
constexpr int64_t kMinEntries = 4096;
constexpr int64_t kMaxBlocks = 64;
// Entries of gather_idx's tail that one task fills.
constexpr int64_t kTailPerTask = 64 * 1024;

struct Plan {
  explicit Plan(const PermutePlanArgs& args)
      : topk_idx(args.topk_idx),
        gather_idx(args.gather_idx),
        scatter_idx(args.scatter_idx),
        num_tokens(topk_idx.shape[1] == 0 ? 0 : topk_idx.shape[0]),
        topk(topk_idx.shape[1]),
        num_groups(args.num_groups) {
    const int64_t entries = num_tokens * topk;
    const int64_t per_block = std::max(kMinEntries, 4 * num_groups);
    const int64_t blocks = std::clamp<int64_t>(entries / per_block, 1, kMaxBlocks);
    tokens_per_block = std::max<int64_t>(1, (num_tokens + blocks - 1) / blocks);
    num_blocks = (num_tokens + tokens_per_block - 1) / tokens_per_block;
    next = static_cast<int64_t*>(args.workspace.data);
    totals = next == nullptr ? nullptr : next + num_blocks * num_groups;
  }

  size_t workspace_bytes() const {
    return static_cast<size_t>((num_blocks + 1) * num_groups) * sizeof(int64_t);
  }
  int64_t first_token(int64_t block) const {
    return std::min(num_tokens, block * tokens_per_block);
  }
  bool is_routed(int64_t expert) const { return expert >= 0 && expert < num_groups; }

  TensorView topk_idx, gather_idx, scatter_idx;
  int64_t num_tokens, topk, num_groups;
  int64_t tokens_per_block, num_blocks;
  int64_t* next;    // [num_blocks, G]: counts, then the row that the block's next entry gets
  int64_t* totals;  // [G]
};

template <class Index>
void count_block(const Plan& plan, int64_t block) {
  int64_t* counts = plan.next + block * plan.num_groups;
  std::fill_n(counts, plan.num_groups, 0);
  for (int64_t t = plan.first_token(block); t < plan.first_token(block + 1); ++t) {
    const Index* experts = row_of<const Index>(plan.topk_idx, t);
    for (int64_t j = 0; j < plan.topk; ++j) {
      if (plan.is_routed(experts[j])) ++counts[experts[j]];
    }
  }
}

// Counts to rows before this block within the expert; returns the rows routed in all.
int64_t scan_blocks(const Plan& plan) {
  std::fill_n(plan.totals, plan.num_groups, 0);
  for (int64_t block = 0; block < plan.num_blocks; ++block) {
    int64_t* counts = plan.next + block * plan.num_groups;
    for (int64_t g = 0; g < plan.num_groups; ++g) {
      const int64_t count = counts[g];
      counts[g] = plan.totals[g];
      plan.totals[g] += count;
    }
  }
  int64_t routed = 0;
  for (int64_t g = 0; g < plan.num_groups; ++g) routed += plan.totals[g];
  return routed;
}

void write_offsets(const Plan& plan, int64_t* offsets) {
  offsets[0] = 0;
  for (int64_t g = 0; g < plan.num_groups; ++g) offsets[g + 1] = offsets[g] + plan.totals[g];
}

template <class Index, class Row>
void deal_block(const Plan& plan, const int64_t* offsets, int64_t block) {
  int64_t* next = plan.next + block * plan.num_groups;
  for (int64_t g = 0; g < plan.num_groups; ++g) next[g] += offsets[g];
  Row* gather_idx = row_of<Row>(plan.gather_idx, 0);
  for (int64_t t = plan.first_token(block); t < plan.first_token(block + 1); ++t) {
    const Index* experts = row_of<const Index>(plan.topk_idx, t);
    Row* scatter_idx = row_of<Row>(plan.scatter_idx, t);
    for (int64_t j = 0; j < plan.topk; ++j) {
      const int64_t row = plan.is_routed(experts[j]) ? next[experts[j]]++ : -1;
      scatter_idx[j] = static_cast<Row>(row);
      if (row >= 0) gather_idx[row] = static_cast<Row>(t);
    }
  }
}

template <class Index, class Row>
Status run_plan(const Context& context, const PermutePlanArgs& args) {
  const Plan plan(args);
  ThreadPool& pool = *context.state().pool;
  pool.parallel_for(plan.num_blocks, [&](int64_t block, int) { count_block<Index>(plan, block); });
  const int64_t routed = scan_blocks(plan), capacity = plan.gather_idx.shape[0];
  if (routed > capacity) {
    return {Code::kInvalidArgument, concat("permute_plan: gather_idx has a capacity of ", capacity,
                                           " rows but ", routed, " are routed")};
  }
  auto* offsets = static_cast<int64_t*>(args.offsets.data);
  write_offsets(plan, offsets);
  const int64_t tail_tasks = (capacity - routed + kTailPerTask - 1) / kTailPerTask;
  pool.parallel_for(plan.num_blocks + tail_tasks, [&](int64_t task, int) {
    if (task < plan.num_blocks) {
      deal_block<Index, Row>(plan, offsets, task);
      return;
    }
    const int64_t begin = routed + (task - plan.num_blocks) * kTailPerTask;
    std::fill_n(row_of<Row>(plan.gather_idx, 0) + begin, std::min(kTailPerTask, capacity - begin),
                Row{-1});
  });
  return {};
}

size_t workspace(const DeviceState&, const PermutePlanArgs& args) {
  return Plan(args).workspace_bytes();
}

std::string policy(const DeviceState& state, const PermutePlanArgs& args) {
  const Plan plan(args);
  return concat("counting sort, ", plan.num_blocks, " blocks of ", plan.tokens_per_block,
                " tokens, ", state.num_threads, " threads");
}

Status run(const Context& context, const PermutePlanArgs& args) {
  return with_index_type(TensorView(args.topk_idx).type(), [&]<class Index>() {
    return with_index_type(TensorView(args.gather_idx).type(),
                           [&]<class Row>() { return run_plan<Index, Row>(context, args); });
  });
}

}  // namespace

const Implementation<PermutePlanArgs> kPermutePlan = {
    "cpu", Device::kCpu, supports_everything<PermutePlanArgs>, workspace, policy, run};

}  // namespace moire::cpu
