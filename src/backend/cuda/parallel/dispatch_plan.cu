// dispatch_plan on CUDA: up to 16 blocks share out the tokens, neighbours to neighbours, a token
// per thread at a time. A block counts for each rank the tokens that it has for it, tells that to
// those behind it, and once all before it have told theirs, places its own in order. It waits for
// those before it alone, which began earlier and wait for none behind them.
#include <algorithm>

#include "backend/cuda/device/indices.cuh"
#include "backend/cuda/device/matrix.cuh"
#include "backend/cuda/device/warp.cuh"
#include "backend/cuda/implementations.h"
#include "backend/cuda/parallel/peers.h"
#include "backend/cuda/runtime/launch.h"
#include "core/format.h"

namespace moire::cuda::ops {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / kWarp;
constexpr int kMostBlocks = 16;
constexpr int64_t kLeastTokens = 256;  // of a block, where there are several
constexpr int kChoicesAtOnce = 8;      // of a thread, under way

struct Plan {
  Indices topk_idx;
  Matrix<int32_t> places;
  int64_t* counts;
  int64_t num_tokens, k, num_experts, local_experts, capacity, tokens_of_block;
  int num_ranks;
  // Bits 0 to 15: which blocks have told their counts; above, how many have read those before
  // them. 0 before and after. Null: one block.
  uint32_t* told;
  int64_t* counts_of_blocks;  // [blocks, ranks]
};

// Some of the ranks, as many as a warp has lanes. Where a lane has a number, it is its rank's.
struct Some {
  int first, size;
};

// Bit d: the token has a choice at rank some.first + d.
__device__ uint32_t ranks_of(const Plan& plan, int64_t token, const Some& some) {
  uint32_t ranks = 0;
  for (int64_t first = 0; first < plan.k; first += kChoicesAtOnce) {
    int64_t experts[kChoicesAtOnce];
#pragma unroll
    for (int i = 0; i < kChoicesAtOnce; ++i) {
      experts[i] = first + i < plan.k ? plan.topk_idx.at(token, first + i) : -1;
    }
#pragma unroll
    for (const int64_t expert : experts) {
      if (expert < 0 || expert >= plan.num_experts) continue;
      const uint32_t rank =
          static_cast<uint32_t>(expert) / static_cast<uint32_t>(plan.local_experts);
      const uint32_t d = rank - static_cast<uint32_t>(some.first);
      if (d < kWarp) ranks |= 1U << d;
    }
  }
  return ranks;
}

// Says of choices that there are not.
__device__ void check_choices(const Plan& plan, int64_t token, const Reporter& reporter) {
  for (int64_t j = 0; j < plan.k; ++j) {
    checked_index(plan.topk_idx, token * plan.k + j, plan.topk_idx.at(token, j),
                  plan.num_experts + 1, Dropping::kAllowed, reporter);
  }
}

// By a lane: how many of its warp's tokens go to its rank.
__device__ uint32_t count_in_warp(uint32_t ranks, const Some& some) {
  uint32_t count = 0;
  for (int d = 0; d < some.size; ++d) {
    const uint32_t tokens = __ballot_sync(kAllLanes, ranks >> d & 1U);
    if (threadIdx.x % kWarp == d) count = static_cast<uint32_t>(__popc(tokens));
  }
  return count;
}

// The sum of each lane's `value` over the block's warps; `before` gets that over those before this
// one.
__device__ int64_t sum_over_warps(int64_t value, int64_t& before) {
  __shared__ int64_t values[kWarps][kWarp];
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  __syncthreads();  // the last call's have been read
  values[warp][lane] = value;
  __syncthreads();
  int64_t total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w == warp) before = total;
    total += values[w][lane];
  }
  return total;
}

__device__ void count(const Plan& plan, int64_t begin, int64_t end, const Some& some) {
  int64_t counted = 0, before;
  for (int64_t base = begin; base < end; base += kThreads) {
    const int64_t token = base + threadIdx.x;
    counted += count_in_warp(token < end ? ranks_of(plan, token, some) : 0, some);
  }
  const int64_t all = sum_over_warps(counted, before);
  if (static_cast<int>(threadIdx.x) >= some.size) return;
  plan.counts_of_blocks[blockIdx.x * plan.num_ranks + some.first + threadIdx.x] = all;
}

// Tells that this block's counts are there; those of all before it are when it returns.
__device__ void tell_and_wait(uint32_t* told) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    const uint32_t own = 1U << blockIdx.x, before = own - 1;
    uint32_t now = atomicOr(told, own);
    while ((now & before) != before) now = *static_cast<volatile uint32_t*>(told);
    __threadfence();
    if (atomicAdd(told, 1U << kMostBlocks) >> kMostBlocks == gridDim.x - 1) *told = 0;
  }
  __syncthreads();
}

__device__ void place(const Plan& plan, int64_t begin, int64_t end, const Some& some,
                      const Reporter& reporter) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  int64_t next = 0;  // the place of the lane's rank's next token
#pragma unroll
  for (uint32_t block = 0; block < kMostBlocks - 1; ++block) {  // all loads under way at once
    if (block >= blockIdx.x || lane >= some.size) continue;
    next += plan.counts_of_blocks[block * plan.num_ranks + some.first + lane];
  }
  for (int64_t base = begin; base < end; base += kThreads) {
    const int64_t token = base + threadIdx.x;
    const uint32_t ranks = token < end ? ranks_of(plan, token, some) : 0;
    int64_t before;
    const int64_t all = sum_over_warps(count_in_warp(ranks, some), before);
    for (int d = 0; d < some.size; ++d) {
      const uint32_t tokens = __ballot_sync(kAllLanes, ranks >> d & 1U);
      const int64_t place =
          __shfl_sync(kAllLanes, next + before, d) + __popc(tokens & ((1U << lane) - 1U));
      const bool has_place = (ranks >> d & 1U) != 0 && place < plan.capacity;
      if (token >= end) continue;
      plan.places.row(token)[some.first + d] = has_place ? static_cast<int32_t>(place) : -1;
    }
    if (token < end && some.first == 0) check_choices(plan, token, reporter);
    next += all;
  }
  const bool is_last = blockIdx.x == gridDim.x - 1;
  if (is_last && static_cast<int>(threadIdx.x) < some.size) plan.counts[some.first + lane] = next;
}

__global__ void __launch_bounds__(kThreads) plan_kernel(Plan plan, Reporter reporter) {
  const int64_t begin = min(blockIdx.x * plan.tokens_of_block, plan.num_tokens);
  const int64_t end = min(begin + plan.tokens_of_block, plan.num_tokens);
  const auto for_some = [&](auto&& f) {
    for (int first = 0; first < plan.num_ranks; first += kWarp) {
      f(Some{first, min(plan.num_ranks - first, kWarp)});
    }
  };
  if (gridDim.x > 1) {
    for_some([&](const Some& some) { count(plan, begin, end, some); });
    tell_and_wait(plan.told);
  }
  for_some([&](const Some& some) { place(plan, begin, end, some, reporter); });
}

uint32_t blocks_of(const DispatchPlanArgs& args) {
  const int64_t blocks = ceil_div(args.places.shape[0], kLeastTokens);
  return static_cast<uint32_t>(std::clamp<int64_t>(blocks, 1, kMostBlocks));
}

size_t workspace(const DeviceState&, const DispatchPlanArgs& args) {
  const uint32_t blocks = blocks_of(args);
  return blocks == 1 ? 0 : static_cast<size_t>(blocks * args.places.shape[1]) * sizeof(int64_t);
}

Status run(const Context& context, const DispatchPlanArgs& args) {
  Launcher launcher(context, "dispatch_plan");
  const TensorView topk_idx(args.topk_idx), places(args.places);
  const int64_t ranks = places.shape[1];
  uint32_t* const told = blocks_of(args) == 1 ? nullptr : launcher.tile_counter();
  const uint32_t blocks = told == nullptr ? 1 : blocks_of(args);
  const Plan plan{.topk_idx = indices_of(topk_idx, "topk_idx"),
                  .places = matrix_of<int32_t>(places),
                  .counts = vector_of<int64_t>(args.counts),
                  .num_tokens = places.shape[0],
                  .k = topk_idx.shape[1],
                  .num_experts = args.num_experts,
                  .local_experts = args.num_experts / ranks,
                  .capacity = args.capacity,
                  .tokens_of_block = ceil_div(places.shape[0], int64_t{blocks}),
                  .num_ranks = static_cast<int>(ranks),
                  .told = told,
                  .counts_of_blocks = static_cast<int64_t*>(args.workspace.data)};
  launcher.launch(plan_kernel, {blocks, kThreads}, plan, launcher.reporter());
  return launcher.status();
}

std::string policy(const DeviceState&, const DispatchPlanArgs& args) {
  return concat(blocks_of(args), " blocks of ", kThreads, " threads, a token each at a time");
}

}  // namespace

const Implementation<DispatchPlanArgs> kDispatchPlan = {
    "cuda", Device::kCuda, supports_everything, workspace, policy, run};

cudaError_t load_dispatch_plan() { return load(plan_kernel); }

}  // namespace moire::cuda::ops
