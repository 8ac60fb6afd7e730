// dispatch_plan on CUDA: a block for each rank walks over all tokens, a few per thread at a time,
// and places those that have a choice there, in order.
#include "backend/cuda/device/indices.cuh"
#include "backend/cuda/device/matrix.cuh"
#include "backend/cuda/device/scan.cuh"
#include "backend/cuda/implementations.h"
#include "backend/cuda/parallel/peers.h"
#include "backend/cuda/runtime/launch.h"
#include "core/format.h"

namespace moire::cuda::ops {
namespace {

constexpr int kThreads = 512;
constexpr int kTokens = 4;  // of a thread, at a time

struct Plan {
  Indices topk_idx;
  Matrix<int32_t> places;
  int64_t* counts;
  int64_t num_tokens, k, num_experts, local_experts, capacity;
};

// Whether a token has a choice at the block's rank. Choices that there are not, one block reports.
__device__ bool goes_here(const Plan& plan, int64_t token, const Reporter& reporter) {
  const int64_t first = blockIdx.x * plan.local_experts;
  bool goes = false;
  for (int64_t j = 0; j < plan.k; ++j) {
    const int64_t expert = plan.topk_idx.at(token, j);
    goes |= expert >= first && expert < first + plan.local_experts;
    if (blockIdx.x != 0) continue;
    checked_index(plan.topk_idx, token * plan.k + j, expert, plan.num_experts + 1,
                  Dropping::kAllowed, reporter);
  }
  return goes;
}

__global__ void __launch_bounds__(kThreads) plan_kernel(Plan plan, Reporter reporter) {
  int64_t count = 0;
  for (int64_t base = 0; base < plan.num_tokens; base += kThreads * kTokens) {
    const int64_t first = base + threadIdx.x * kTokens;
    uint32_t goes = 0;  // a bit for each of the thread's tokens
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      if (first + i < plan.num_tokens) goes |= goes_here(plan, first + i, reporter) << i;
    }
    uint32_t total;
    const uint32_t before = exclusive_sum<kThreads>(static_cast<uint32_t>(__popc(goes)), total);
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      if (first + i >= plan.num_tokens) continue;
      const int64_t place = count + before + __popc(goes & ((1U << i) - 1U));
      const bool has_place = (goes >> i & 1U) != 0 && place < plan.capacity;
      plan.places.row(first + i)[blockIdx.x] = has_place ? static_cast<int32_t>(place) : -1;
    }
    count += total;
  }
  if (threadIdx.x == 0) plan.counts[blockIdx.x] = count;
}

Status run(const Context& context, const DispatchPlanArgs& args) {
  Launcher launcher(context, "dispatch_plan");
  const TensorView topk_idx(args.topk_idx), places(args.places);
  const int64_t ranks = places.shape[1];
  const Plan plan{.topk_idx = indices_of(topk_idx, "topk_idx"),
                  .places = matrix_of<int32_t>(places),
                  .counts = vector_of<int64_t>(args.counts),
                  .num_tokens = places.shape[0],
                  .k = topk_idx.shape[1],
                  .num_experts = args.num_experts,
                  .local_experts = args.num_experts / ranks,
                  .capacity = args.capacity};
  launcher.launch(plan_kernel, {static_cast<uint32_t>(ranks), kThreads}, plan, launcher.reporter());
  return launcher.status();
}

std::string policy(const DeviceState&, const DispatchPlanArgs&) {
  return concat("a block of ", kThreads, " threads per rank, ", kTokens, " tokens each at a time");
}

}  // namespace

const Implementation<DispatchPlanArgs> kDispatchPlan = {
    "cuda", Device::kCuda, supports_everything, no_workspace, policy, run};

cudaError_t load_dispatch_plan() { return load(plan_kernel); }

}  // namespace moire::cuda::ops
