// router_backward on CUDA: the scores again, as router.cu holds them, then the pull of each chosen
// weight's gradient on its expert, and the softmax's or sigmoid's own gradient.
#include "backend/cuda/implementations.h"
#include "backend/cuda/ops/router_scores.cuh"
#include "backend/cuda/runtime/launch.h"

namespace moire::cuda::ops {
namespace {

struct Operands {
  AnyFloats logits;
  Indices topk_idx;
  Matrix<const float> grad_topk_weights;
  int32_t kind;
  bool normalizes;
  float scale;
  AnyFloats grad_logits;
  int64_t num_tokens;
  int num_experts, k;
};

// The expert of choice j; -1, which stands for none, where the index is outside.
__device__ int expert_of(const Operands& args, int64_t token, int j, const Reporter& reporter) {
  return static_cast<int>(checked_index(args.topk_idx, token * args.k + j,
                                        args.topk_idx.at(token, j), args.num_experts,
                                        Dropping::kForbidden, reporter));
}

// pulls[e] = d(sum of grad * weight) / d(log of score e), before the scale; their sum is returned.
// With normalizes that sum is zero, and returned so.
template <class Team, int kPerThread>
__device__ float pull(const Operands& args, int64_t token, const Scores<Team, kPerThread>& scores,
                      float (&pulls)[kPerThread], const Reporter& reporter) {
  using TeamScores = Scores<Team, kPerThread>;
  const float* const grads = args.grad_topk_weights.row(token);
  float sum = 0, mean = 0, total = 0;
  for (int j = 0; args.normalizes && j < args.k; ++j) {
    const int e = expert_of(args, token, j, reporter);
    if (e >= 0) sum += TeamScores::pick(scores.values, e);
  }
  for (int j = 0; args.normalizes && j < args.k; ++j) {
    const int e = expert_of(args, token, j, reporter);
    if (e >= 0) mean += share(TeamScores::pick(scores.values, e), sum) * grads[j];
  }
  for (int j = 0; j < args.k; ++j) {
    const int e = expert_of(args, token, j, reporter);
    if (e < 0) continue;
    const float score = TeamScores::pick(scores.values, e);
    const float pull = args.normalizes ? share(score, sum) * (grads[j] - mean) : score * grads[j];
    if (!args.normalizes) total += pull;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      if (TeamScores::expert(i) == e) pulls[i] += pull;
    }
  }
  return total;
}

template <class Team, int kPerThread>
__global__ void __launch_bounds__(kRouterThreads)
    backward_kernel(Operands args, Reporter reporter) {
  constexpr int kTeams = kRouterThreads / Team::kThreads;
  const int64_t token = int64_t{blockIdx.x} * kTeams + threadIdx.x / Team::kThreads;
  if (token >= args.num_tokens) return;  // whole teams
  const Scores<Team, kPerThread> scores(args.logits, token, args.num_experts, args.kind);
  float pulls[kPerThread] = {};
  const float total = pull(args, token, scores, pulls, reporter);
  const bool is_sigmoid = args.kind == MOIRE_ROUTER_SIGMOID;
  // d log s_i / d logit_e: softmax (i == e) - s_e; sigmoid (i == e) * (1 - s_e).
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int e = Scores<Team, kPerThread>::expert(i);
    if (e >= args.num_experts) continue;
    float grad = pulls[i];
    if (is_sigmoid) {
      grad = grad == 0.0F ? 0.0F : grad * scores.complements[i];
    } else if (!args.normalizes) {
      grad -= scores.values[i] * total;
    }
    args.grad_logits.set(token, e, grad * args.scale);
  }
}

Status run(const Context& context, const RouterBackwardArgs& args) {
  Launcher launcher(context, "router_backward");
  const TensorView logits(args.logits), topk_idx(args.topk_idx);
  const Operands operands{.logits = any_floats(logits),
                          .topk_idx = indices_of(topk_idx, "topk_idx"),
                          .grad_topk_weights = matrix_of<const float>(args.grad_topk_weights),
                          .kind = args.kind,
                          .normalizes = args.normalize != 0,
                          .scale = scale_of(args.scale),
                          .grad_logits = any_floats(args.grad_logits),
                          .num_tokens = logits.num_rows(),
                          .num_experts = static_cast<int>(logits.columns()),
                          .k = static_cast<int>(topk_idx.columns())};
  with_team(logits.columns(), [&]<class Team, int kPerThread>() {
    const uint32_t blocks = blocks_for(operands.num_tokens, kRouterThreads / Team::kThreads);
    launcher.launch(backward_kernel<Team, kPerThread>, {blocks, kRouterThreads}, operands,
                    launcher.reporter());
  });
  return launcher.status();
}

}  // namespace

const Implementation<RouterBackwardArgs> kRouterBackward =
    on_cuda(supports_experts, team_policy, run);

}  // namespace moire::cuda::ops
