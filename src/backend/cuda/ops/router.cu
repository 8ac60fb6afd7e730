// router on CUDA: a warp takes a token (a block one of more than 512 experts) and holds its scores
// in registers. Each choice is the largest of what is left: a maximum over the team, then the
// lowest index that has it.
#include "backend/cuda/implementations.h"
#include "backend/cuda/ops/router_scores.cuh"
#include "backend/cuda/runtime/launch.h"

namespace moire::cuda::ops {
namespace {

struct Operands {
  AnyFloats logits;
  const float* expert_bias;  // or null
  int32_t kind;
  bool normalizes;
  float scale;
  void* topk_idx;
  int64_t idx_stride;
  bool idx_is_int64;
  Matrix<float> topk_weights;
  int64_t num_tokens;
  int num_experts, k;
};

// Larger is better: the order of floats as integers, NaN below all, and what is not to be chosen
// below that.
constexpr uint32_t kTaken = 0, kNaN = 1;
__device__ uint32_t rank_of(float choice) {
  if (choice != choice) return kNaN;
  const uint32_t bits = __float_as_uint(choice);
  return (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;
}

template <class Team, int kPerThread>
__global__ void __launch_bounds__(kRouterThreads, 2) route_kernel(Operands args) {
  constexpr int kTeams = kRouterThreads / Team::kThreads;
  const int64_t token = int64_t{blockIdx.x} * kTeams + threadIdx.x / Team::kThreads;
  if (token >= args.num_tokens) return;  // whole teams
  using TeamScores = Scores<Team, kPerThread>;
  const TeamScores scores(args.logits, token, args.num_experts, args.kind);
  uint32_t ranks[kPerThread];
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int e = TeamScores::expert(i);
    const bool exists = e < args.num_experts;
    const float bias = exists && args.expert_bias != nullptr ? args.expert_bias[e] : 0.0F;
    const float choice = args.expert_bias != nullptr ? scores.values[i] + bias : scores.values[i];
    ranks[i] = exists ? rank_of(choice) : kTaken;
  }
  float sum = 0;
  float* const weights = args.topk_weights.row(token);
  for (int j = 0; j < args.k; ++j) {
    uint32_t best = kTaken;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) best = ranks[i] > best ? ranks[i] : best;
    best = Team::max(best);
    uint32_t first = UINT32_MAX;
#pragma unroll
    for (int i = kPerThread - 1; i >= 0; --i) {
      if (ranks[i] == best) first = static_cast<uint32_t>(TeamScores::expert(i));
    }
    const int e = static_cast<int>(Team::min(first));
    const float score = TeamScores::pick(scores.values, e);
    sum += score;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      if (TeamScores::expert(i) == e) ranks[i] = kTaken;
    }
    if (j % Team::kThreads == Team::index()) {
      const int64_t i = token * args.idx_stride + j;
      if (args.idx_is_int64) {
        static_cast<int64_t*>(args.topk_idx)[i] = e;
      } else {
        static_cast<int32_t*>(args.topk_idx)[i] = e;
      }
      weights[j] = score;
    }
  }
  for (int j = Team::index(); j < args.k; j += Team::kThreads) {
    weights[j] = (args.normalizes ? share(weights[j], sum) : weights[j]) * args.scale;
  }
}

Status run(const Context& context, const RouterArgs& args) {
  Launcher launcher(context, "router");
  const TensorView logits(args.logits), topk_idx(args.topk_idx);
  const Operands operands{.logits = any_floats(logits),
                          .expert_bias = vector_of<const float>(args.expert_bias),
                          .kind = args.kind,
                          .normalizes = args.normalize != 0,
                          .scale = scale_of(args.scale),
                          .topk_idx = topk_idx.data,
                          .idx_stride = topk_idx.stride(),
                          .idx_is_int64 = topk_idx.type() == DType::kInt64,
                          .topk_weights = matrix_of<float>(args.topk_weights),
                          .num_tokens = logits.num_rows(),
                          .num_experts = static_cast<int>(logits.columns()),
                          .k = static_cast<int>(topk_idx.columns())};
  with_team(logits.columns(), [&]<class Team, int kPerThread>() {
    const uint32_t blocks = blocks_for(operands.num_tokens, kRouterThreads / Team::kThreads);
    launcher.launch(route_kernel<Team, kPerThread>, {blocks, kRouterThreads}, operands);
  });
  return launcher.status();
}

}  // namespace

const Implementation<RouterArgs> kRouter = on_cuda(supports_experts, team_policy, run);

}  // namespace moire::cuda::ops
