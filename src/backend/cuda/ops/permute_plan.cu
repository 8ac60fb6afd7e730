// permute_plan on CUDA: a stable counting sort of the choices by expert, in three launches.
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

struct Plan {
  Indices topk_idx;
  int64_t num_choices, k;
  int64_t num_groups, capacity;
  int64_t part, num_parts;
  bool counts_in_shared;
  // The workspace.
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

__global__ void __launch_bounds__(kWarps* kWarp) count_kernel(Plan plan, Reporter reporter) {
  const int lane = threadIdx.x % kWarp;
  if (blockIdx.x == 0 && threadIdx.x == 0) *plan.num_finished = 0;
  const int64_t part = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
  if (part >= plan.num_parts) return;
  uint32_t* const counters = counters_of(plan, part);
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
  if (!plan.counts_in_shared) return;
  __syncwarp();
  uint32_t* const next = plan.next + part * plan.num_groups;
  for (int64_t g = lane; g < plan.num_groups; g += kWarp) next[g] = counters[g];
}

// The offsets, from the experts' rows; for one block, after all others.
__device__ void write_offsets(const Plan& plan, const Reporter& reporter) {
  uint64_t carry = 0;
  for (int64_t base = 0; base < plan.num_groups; base += kScanThreads) {
    const int64_t g = base + threadIdx.x;
    const uint64_t rows = g < plan.num_groups ? __ldcg(plan.totals + g) : 0;
    uint64_t total;
    const uint64_t start = carry + exclusive_sum<kScanThreads>(rows, total);
    carry += total;
    if (g >= plan.num_groups) continue;
    plan.totals[g] = static_cast<uint32_t>(start);
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
  if (is_last) write_offsets(plan, reporter);
}

// Row: the type of gather_idx and scatter_idx.
template <class Row>
__global__ void __launch_bounds__(kWarps* kWarp)
    deal_kernel(Plan plan, Row* gather_idx, Row* scatter_idx, int64_t scatter_stride) {
  const int lane = threadIdx.x % kWarp;
  const int64_t tail = plan.offsets[plan.num_groups];
  const int64_t threads = int64_t{gridDim.x} * kWarps * kWarp;
  for (int64_t i = tail + int64_t{blockIdx.x} * kWarps * kWarp + threadIdx.x; i < plan.capacity;
       i += threads) {
    gather_idx[i] = Row{-1};
  }
  const int64_t part = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
  if (part >= plan.num_parts) return;
  uint32_t* const next = counters_of(plan, part);
  for (int64_t g = lane; g < plan.num_groups; g += kWarp) {
    next[g] = plan.next[part * plan.num_groups + g] + plan.totals[g];
  }
  __syncwarp();
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
    scatter_idx[choice / k * scatter_stride + choice % k] = static_cast<Row>(row);
    if (row >= 0) gather_idx[row] = static_cast<Row>(choice / k);
  }
}

Plan plan_of(const PermutePlanArgs& args) {
  const TensorView topk_idx(args.topk_idx);
  Plan plan{};
  plan.topk_idx = indices_of(topk_idx, "topk_idx");
  plan.k = topk_idx.shape[1];
  plan.num_choices = topk_idx.shape[0] * plan.k;
  plan.num_groups = args.num_groups;
  plan.capacity = args.gather_idx.shape[0];
  const int64_t least = std::max(kMinPart, args.num_groups / 4);
  const int64_t parts = std::clamp<int64_t>(plan.num_choices / least, 1, kMaxParts);
  plan.part = std::max<int64_t>(kWarp, round_up(ceil_div(plan.num_choices, parts), kWarp));
  plan.num_parts = ceil_div(plan.num_choices, plan.part);
  plan.counts_in_shared = args.num_groups <= kMaxSharedCounters;
  plan.next = static_cast<uint32_t*>(args.workspace.data);
  plan.totals = plan.next + plan.num_parts * plan.num_groups;
  plan.num_finished = plan.totals + plan.num_groups;
  plan.offsets = static_cast<int64_t*>(args.offsets.data);
  return plan;
}

size_t workspace(const DeviceState&, const PermutePlanArgs& args) {
  const Plan plan = plan_of(args);
  return static_cast<size_t>((plan.num_parts + 1) * plan.num_groups + 1) * sizeof(uint32_t);
}

Status run(const Context& context, const PermutePlanArgs& args) {
  Launcher launcher(context, "permute_plan");
  const Plan plan = plan_of(args);
  const TensorView scatter_idx(args.scatter_idx);
  const uint32_t blocks = std::max(1U, blocks_for(plan.num_parts, kWarps));
  const uint32_t scan_blocks = std::max(1U, blocks_for(plan.num_groups, kWarp));
  const size_t shared_bytes =
      plan.counts_in_shared ? static_cast<size_t>(kWarps * plan.num_groups) * sizeof(uint32_t) : 0;
  launcher.launch(count_kernel, {blocks, kWarps * kWarp, shared_bytes}, plan, launcher.reporter());
  launcher.launch(scan_kernel, {scan_blocks, kScanThreads}, plan, launcher.reporter());
  with_index_type(scatter_idx.type(), [&]<class Row>() {
    launcher.launch(deal_kernel<Row>, {blocks, kWarps * kWarp, shared_bytes}, plan,
                    static_cast<Row*>(args.gather_idx.data), static_cast<Row*>(scatter_idx.data),
                    scatter_idx.stride());
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
  return concat("counting sort in 3 launches, ", plan.num_parts, " parts of ", plan.part,
                " choices, counters in ",
                plan.counts_in_shared ? "shared memory" : "the workspace");
}

int64_t launches(const DeviceState&, const PermutePlanArgs&) { return 3; }

}  // namespace

const Implementation<PermutePlanArgs> kPermutePlan = {
    "cuda", Device::kCuda, supports, workspace, policy, run, launches,
};

}  // namespace moire::cuda::ops
