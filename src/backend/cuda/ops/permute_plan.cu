// permute_plan on CUDA: a stable counting sort of the choices by expert, in three launches; where
// choices are few, by one block, in one.
//   count  a warp takes a part of the choices, 32 at a time, and counts them per expert
//   scan   a block takes 32 experts and turns the parts' counts into the rows before each part; the
//          last block to finish then adds up the experts and writes the offsets
//   deal   each warp gives its choices their rows, in order; what is left of gather_idx gets -1
// The parts depend on the shapes only.
#include <algorithm>

#include "backend/cuda/device/indices.cuh"
#include "backend/cuda/device/scan.cuh"
#include "backend/cuda/device/shared.cuh"
#include "backend/cuda/device/values.cuh"
#include "backend/cuda/device/warp.cuh"
#include "backend/cuda/implementations.h"
#include "backend/cuda/runtime/launch.h"

namespace moire::cuda::ops {
namespace {

constexpr int kWarps = 8;  // of a counting or dealing block
constexpr int kScanThreads = 1024;
// A part has at least so many choices, and no fewer than a quarter of the counters it clears.
constexpr int64_t kMinPart = 256;
constexpr int kMaxParts = 512;
// Up to so many experts, a warp's counters lie in shared memory.
constexpr int64_t kMaxSharedCounters = 1024;
// One block takes so many choices, with so many counters, and so many rows.
constexpr int64_t kFewChoices = 4096, kFewCounters = 12288, kFewRows = 4 * kFewChoices;

struct Plan {
  Indices topk_idx;
  int64_t num_choices, k;
  int64_t num_groups, capacity;
  int64_t part, num_parts;
  bool is_few, counts_in_shared;
  // The workspace, where choices are not few.
  uint32_t* next;    // [parts, G]: counts, then the rows of the expert before the part
  uint32_t* totals;  // [G]: rows of the expert, then of all before it
  uint32_t* num_finished;
  int64_t* offsets;
};

// A warp's counters: its own in shared memory, or its part's in the workspace.
__device__ uint32_t* counters_of(const Plan& plan, int64_t part) {
  return plan.counts_in_shared ? dynamic_shared<uint32_t>() + threadIdx.x / kWarp * plan.num_groups
                               : plan.next + part * plan.num_groups;
}

// The expert of choice i, -1 where it is dropped.
__device__ int64_t expert_of(const Plan& plan, int64_t i) {
  if (i >= plan.num_choices) return -1;
  const auto choice = static_cast<uint32_t>(i), k = static_cast<uint32_t>(plan.k);
  const int64_t expert = plan.topk_idx.at(choice / k, choice % k);
  return expert >= 0 && expert < plan.num_groups ? expert : -1;
}

// By one warp: a part's choices of each expert.
__device__ void count_part(const Plan& plan, int64_t part, uint32_t* counters,
                           const Reporter& reporter) {
  const int lane = threadIdx.x % kWarp;
  for (int64_t g = lane; g < plan.num_groups; g += kWarp) counters[g] = 0;
  __syncwarp();
  const int64_t end = min(plan.num_choices, (part + 1) * plan.part);
  for (int64_t i = part * plan.part + lane; i < end; i += kWarp) {
    const auto choice = static_cast<uint32_t>(i), k = static_cast<uint32_t>(plan.k);
    const int64_t expert = plan.topk_idx.at(choice / k, choice % k);
    if (expert >= 0 && expert < plan.num_groups) {
      atomicAdd(counters + expert, 1U);
    } else if (expert != plan.num_groups) {
      checked_index(plan.topk_idx, i, expert, plan.num_groups + 1, Dropping::kAllowed, reporter);
    }
  }
}

__global__ void __launch_bounds__(kWarps* kWarp) count_kernel(Plan plan, Reporter reporter) {
  const int lane = threadIdx.x % kWarp;
  if (blockIdx.x == 0 && threadIdx.x == 0) *plan.num_finished = 0;
  const int64_t part = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
  if (part >= plan.num_parts) return;
  uint32_t* const counters = counters_of(plan, part);
  count_part(plan, part, counters, reporter);
  if (!plan.counts_in_shared) return;
  __syncwarp();
  uint32_t* const next = plan.next + part * plan.num_groups;
  for (int64_t g = lane; g < plan.num_groups; g += kWarp) next[g] = counters[g];
}

// The offsets, by one block: rows_of(g) are an expert's, and starts(g, row) is told its first.
template <class Rows, class Starts>
__device__ void write_offsets(const Plan& plan, const Reporter& reporter, Rows rows_of,
                              Starts starts) {
  uint64_t carry = 0;
  for (int64_t base = 0; base < plan.num_groups; base += kScanThreads) {
    const int64_t g = base + threadIdx.x;
    const uint64_t rows = g < plan.num_groups ? rows_of(g) : 0;
    uint64_t total;
    const uint64_t start = carry + exclusive_sum<kScanThreads>(rows, total);
    carry += total;
    if (g >= plan.num_groups) continue;
    starts(g, static_cast<uint32_t>(start));
    plan.offsets[g + 1] = min(static_cast<int64_t>(start + rows), plan.capacity);
  }
  if (threadIdx.x != 0) return;
  plan.offsets[0] = 0;
  const auto routed = static_cast<int64_t>(carry);
  if (routed > plan.capacity) {
    report(reporter, Finding::kTooFewRows, 0, routed, plan.capacity);
  }
}

__global__ void __launch_bounds__(kScanThreads) scan_kernel(Plan plan, Reporter reporter) {
  constexpr int kRanges = kScanThreads / kWarp, kPerRange = kMaxParts / kRanges;
  __shared__ uint32_t sums[kRanges][kWarp];
  __shared__ bool is_last;
  const int lane = threadIdx.x % kWarp, range = threadIdx.x / kWarp;
  const int64_t g = int64_t{blockIdx.x} * kWarp + lane;
  uint32_t* const next = plan.next + int64_t{range} * kPerRange * plan.num_groups + g;
  const int64_t parts = g < plan.num_groups ? plan.num_parts - range * kPerRange : 0;
  uint32_t counts[kPerRange], sum = 0;
#pragma unroll
  for (int p = 0; p < kPerRange; ++p) counts[p] = p < parts ? next[p * plan.num_groups] : 0;
#pragma unroll
  for (int p = 0; p < kPerRange; ++p) sum += counts[p];
  sums[range][lane] = sum;
  __syncthreads();
  uint32_t before = 0;
  for (int r = 0; r < range; ++r) before += sums[r][lane];
#pragma unroll
  for (int p = 0; p < kPerRange; ++p) {
    if (p < parts) next[p * plan.num_groups] = before;
    before += counts[p];
  }
  if (range == kRanges - 1 && g < plan.num_groups) plan.totals[g] = before;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) is_last = atomicAdd(plan.num_finished, 1U) == gridDim.x - 1;
  __syncthreads();
  if (!is_last) return;
  write_offsets(
      plan, reporter, [&](int64_t expert) { return __ldcg(plan.totals + expert); },
      [&](int64_t expert, uint32_t row) { plan.totals[expert] = row; });
}

// gather_idx and scatter_idx, of type Row.
template <class Row>
struct Dealt {
  Row *gather_idx, *scatter_idx;
  int64_t scatter_stride;
};

// Rows of no choice, by one of so many threads.
template <class Row>
__device__ void fill_tail(const Plan& plan, const Dealt<Row>& to, int64_t thread, int64_t threads) {
  for (int64_t i = plan.offsets[plan.num_groups] + thread; i < plan.capacity; i += threads) {
    to.gather_idx[i] = Row{-1};
  }
}

// By one warp: the rows of a part's choices, of which next[expert] is the first.
template <class Row>
__device__ void deal_part(const Plan& plan, int64_t part, uint32_t* next, const Dealt<Row>& to) {
  const int lane = threadIdx.x % kWarp;
  const uint32_t lanes_before = (1U << lane) - 1U;
  const int64_t end = min(plan.num_choices, (part + 1) * plan.part);
  for (int64_t base = part * plan.part; base < end; base += kWarp) {
    const int64_t i = base + lane;
    const int64_t expert = i < end ? expert_of(plan, i) : -1;
    const uint32_t same = __match_any_sync(0xFFFFFFFFU, static_cast<int>(expert));
    const int leader = __ffs(static_cast<int>(same)) - 1;
    uint32_t first = 0;
    if (expert >= 0 && lane == leader) {
      first = next[expert];
      next[expert] = first + __popc(same);
    }
    first = __shfl_sync(0xFFFFFFFFU, first, leader);
    __syncwarp();  // what the leaders wrote is there for those of the next 32
    if (i >= end) continue;
    int64_t row = int64_t{first} + __popc(same & lanes_before);
    if (expert < 0 || row >= plan.capacity) row = -1;
    const auto choice = static_cast<uint32_t>(i), k = static_cast<uint32_t>(plan.k);
    to.scatter_idx[choice / k * to.scatter_stride + choice % k] = static_cast<Row>(row);
    if (row >= 0) to.gather_idx[row] = static_cast<Row>(choice / k);
  }
}

template <class Row>
__global__ void __launch_bounds__(kWarps* kWarp) deal_kernel(Plan plan, Dealt<Row> to) {
  const int lane = threadIdx.x % kWarp;
  constexpr int kThreads = kWarps * kWarp;
  fill_tail(plan, to, int64_t{blockIdx.x} * kThreads + threadIdx.x, int64_t{gridDim.x} * kThreads);
  const int64_t part = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
  if (part >= plan.num_parts) return;
  uint32_t* const next = counters_of(plan, part);
  for (int64_t g = lane; g < plan.num_groups; g += kWarp) {
    next[g] = plan.next[part * plan.num_groups + g] + plan.totals[g];
  }
  __syncwarp();
  deal_part(plan, part, next, to);
}

// All of it, a part a warp.
template <class Row>
__global__ void __launch_bounds__(kScanThreads)
    few_kernel(Plan plan, Dealt<Row> to, Reporter reporter) {
  uint32_t* const counters = dynamic_shared<uint32_t>();  // [parts, G]
  const int64_t part = threadIdx.x / kWarp, groups = plan.num_groups;
  if (part < plan.num_parts) count_part(plan, part, counters + part * groups, reporter);
  __syncthreads();
  write_offsets(
      plan, reporter,
      [&](int64_t expert) {
        uint32_t before = 0;
        for (int64_t p = 0; p < plan.num_parts; ++p) {
          const uint32_t count = counters[p * groups + expert];
          counters[p * groups + expert] = before;
          before += count;
        }
        return before;
      },
      [&](int64_t expert, uint32_t row) {
        for (int64_t p = 0; p < plan.num_parts; ++p) counters[p * groups + expert] += row;
      });
  __syncthreads();
  fill_tail(plan, to, threadIdx.x, kScanThreads);
  if (part < plan.num_parts) deal_part(plan, part, counters + part * groups, to);
}

Plan plan_of(const PermutePlanArgs& args) {
  const TensorView topk_idx(args.topk_idx);
  Plan plan{};
  plan.topk_idx = indices_of(topk_idx, "topk_idx");
  plan.k = topk_idx.shape[1];
  plan.num_choices = topk_idx.shape[0] * plan.k;
  plan.num_groups = args.num_groups;
  plan.capacity = args.gather_idx.shape[0];
  // A warp of one block each.
  plan.part =
      std::max<int64_t>(kWarp, round_up(ceil_div(plan.num_choices, kScanThreads / kWarp), kWarp));
  plan.num_parts = ceil_div(plan.num_choices, plan.part);
  plan.is_few = plan.num_choices <= kFewChoices && plan.capacity <= kFewRows &&
                plan.num_parts * plan.num_groups <= kFewCounters;
  plan.offsets = static_cast<int64_t*>(args.offsets.data);
  if (plan.is_few) return plan;
  const int64_t least = std::max(kMinPart, args.num_groups / 4);
  const int64_t parts = std::clamp<int64_t>(plan.num_choices / least, 1, kMaxParts);
  plan.part = std::max<int64_t>(kWarp, round_up(ceil_div(plan.num_choices, parts), kWarp));
  plan.num_parts = ceil_div(plan.num_choices, plan.part);
  plan.counts_in_shared = args.num_groups <= kMaxSharedCounters;
  plan.next = static_cast<uint32_t*>(args.workspace.data);
  plan.totals = plan.next + plan.num_parts * plan.num_groups;
  plan.num_finished = plan.totals + plan.num_groups;
  return plan;
}

size_t workspace(const DeviceState&, const PermutePlanArgs& args) {
  const Plan plan = plan_of(args);
  if (plan.is_few) return 0;
  return static_cast<size_t>((plan.num_parts + 1) * plan.num_groups + 1) * sizeof(uint32_t);
}

template <class Row>
void launch(Launcher& launcher, const Plan& plan, const Dealt<Row>& to) {
  if (plan.is_few) {
    const auto bytes = static_cast<size_t>(plan.num_parts * plan.num_groups) * sizeof(uint32_t);
    launcher.launch(few_kernel<Row>, {1, kScanThreads, bytes}, plan, to, launcher.reporter());
    return;
  }
  const uint32_t blocks = std::max(1U, blocks_for(plan.num_parts, kWarps));
  const uint32_t scan_blocks = std::max(1U, blocks_for(plan.num_groups, kWarp));
  const size_t shared_bytes =
      plan.counts_in_shared ? static_cast<size_t>(kWarps * plan.num_groups) * sizeof(uint32_t) : 0;
  launcher.launch(count_kernel, {blocks, kWarps * kWarp, shared_bytes}, plan, launcher.reporter());
  launcher.launch(scan_kernel, {scan_blocks, kScanThreads}, plan, launcher.reporter());
  launcher.launch(deal_kernel<Row>, {blocks, kWarps * kWarp, shared_bytes}, plan, to);
}

Status run(const Context& context, const PermutePlanArgs& args) {
  Launcher launcher(context, "permute_plan");
  const TensorView scatter_idx(args.scatter_idx);
  with_index_type(scatter_idx.type(), [&]<class Row>() {
    launch<Row>(launcher, plan_of(args),
                {static_cast<Row*>(args.gather_idx.data), static_cast<Row*>(scatter_idx.data),
                 scatter_idx.stride()});
  });
  return launcher.status();
}

Reason supports(const DeviceState&, const PermutePlanArgs& args) {
  const int64_t choices = TensorView(args.topk_idx).num_elements();
  if (choices < int64_t{1} << 31) return std::nullopt;
  return concat("topk_idx has ", choices, " choices, less than 2^31 are taken");
}

std::string policy(const DeviceState&, const PermutePlanArgs& args) {
  const Plan plan = plan_of(args);
  if (plan.is_few) {
    return concat("counting sort by one block, ", plan.num_parts, " parts of ", plan.part,
                  " choices");
  }
  return concat("counting sort in 3 launches, ", plan.num_parts, " parts of ", plan.part,
                " choices, counters in ",
                plan.counts_in_shared ? "shared memory" : "the workspace");
}

int64_t launches(const DeviceState&, const PermutePlanArgs& args) {
  return plan_of(args).is_few ? 1 : 3;
}

}  // namespace

const Implementation<PermutePlanArgs> kPermutePlan = {
    "cuda", Device::kCuda, supports, workspace, policy, run, launches,
};

}  // namespace moire::cuda::ops
