// router and its gradient on the CPU, one token at a time: scores of all experts in FP32, the k
// best by insertion, their weights. Main paths: RouteToken and BackwardToken.
#include <algorithm>
#include <bit>
#include <limits>

#include "backend/cpu/implementations.h"
#include "backend/cpu/rows.h"
#include "backend/cpu/simd_targets.h"
#include "core/format.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/router.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// The inline headers come after foreach_target.h.
#include <hwy/contrib/math/math-inl.h>

#include "backend/cpu/convert-inl.h"
#include "backend/cpu/lane_sums-inl.h"

#ifndef MOIRE_CPU_ROUTER_COMMON
#define MOIRE_CPU_ROUTER_COMMON
namespace moire::cpu {
namespace {

// What one token needs lies on the stack: 64 KiB.
constexpr int64_t kMaxExperts = 4096;

// Larger is better: the order of floats as integers, NaN below all; then the lower index.
inline int64_t rank_of(float choice, int64_t expert) {
  const auto bits = std::bit_cast<int32_t>(choice);
  const int32_t ordered =
      choice != choice ? std::numeric_limits<int32_t>::min() : bits ^ ((bits >> 31) & 0x7FFFFFFF);
  return (static_cast<int64_t>(ordered) << 32) | static_cast<int64_t>(~expert & 0xFFFFFFFF);
}
inline int64_t expert_of(int64_t rank) { return ~rank & 0xFFFFFFFF; }

// The k best ranks of `choices`, best first.
inline void select(const float* choices, int64_t num_experts, int64_t k, int64_t* best) {
  int64_t size = 0;
  for (int64_t e = 0; e < num_experts; ++e) {
    const int64_t rank = rank_of(choices[e], e);
    if (size == k && rank < best[k - 1]) continue;
    int64_t at = size == k ? k - 1 : size++;
    for (; at > 0 && best[at - 1] < rank; --at) best[at] = best[at - 1];
    best[at] = rank;
  }
}

}  // namespace
}  // namespace moire::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace moire::cpu::HWY_NAMESPACE {
namespace {

using Vector = hn::VFromD<FloatTag>;

// One token's row of floats, filled up to whole sums of 16 lanes.
struct TokenBuffer {
  HWY_ALIGN float values[kMaxExperts];
};

// Highway's exp makes 0 of NaN.
HWY_INLINE Vector ExpOrNaN(FloatTag d, Vector x) {
  return hn::IfThenElse(hn::IsNaN(x), x, hn::Exp(d, x));
}

// In place. A row with NaN or +inf, or with nothing above -inf, has no softmax: all NaN.
void Softmax(float* x, size_t n) {
  const FloatTag d;
  const size_t lanes = hn::Lanes(d), end = PaddedColumns(n);
  std::fill(x + n, x + end, -std::numeric_limits<float>::infinity());
  Vector max = hn::Load(d, x);
  for (size_t c = lanes; c < end; c += lanes) max = hn::Max(max, hn::Load(d, x + c));
  max = hn::MaxOfLanes(d, max);
  HWY_ALIGN float sums[kSumLanes] = {};
  for (size_t c = 0; c < end; c += lanes) {
    const Vector e = ExpOrNaN(d, hn::Sub(hn::Load(d, x + c), max));
    float* sum = sums + c % kSumLanes;
    hn::Store(hn::Add(hn::Load(d, sum), e), d, sum);
    hn::Store(e, d, x + c);
  }
  const float total = FoldLanes(sums);
  if (!(total >= 1.0F)) {  // the largest logit alone gives exp(0)
    std::fill(x, x + n, std::numeric_limits<float>::quiet_NaN());
    return;
  }
  const Vector divisor = hn::Set(d, total);
  for (size_t c = 0; c < end; c += lanes) {
    hn::Store(hn::Div(hn::Load(d, x + c), divisor), d, x + c);
  }
}

// In place; `complements`, if not null, gets 1 - sigmoid without cancellation.
void Sigmoid(float* x, size_t n, float* complements) {
  const FloatTag d;
  const Vector one = hn::Set(d, 1.0F);
  std::fill(x + n, x + PaddedColumns(n), 0.0F);
  for (size_t c = 0; c < PaddedColumns(n); c += hn::Lanes(d)) {
    const Vector v = hn::Load(d, x + c);
    const Vector e = ExpOrNaN(d, hn::Neg(hn::Abs(v)));
    const Vector small = hn::Div(e, hn::Add(one, e)), large = hn::Div(one, hn::Add(one, e));
    const auto negative = hn::Lt(v, hn::Zero(d));
    hn::Store(hn::IfThenElse(negative, small, large), d, x + c);
    if (complements != nullptr) {
      hn::Store(hn::IfThenElse(negative, large, small), d, complements + c);
    }
  }
}

void Scores(const TensorView& logits, int64_t token, int32_t kind, float* scores,
            float* complements) {
  const auto num_experts = static_cast<size_t>(logits.shape[1]);
  DecodeRow(row_bytes_of(logits, token), logits.type(), num_experts, scores);
  if (kind == MOIRE_ROUTER_SIGMOID) return Sigmoid(scores, num_experts, complements);
  Softmax(scores, num_experts);
}

// 1 / sum as applied by division: a sum of zero gives weights of zero.
HWY_INLINE float Share(float score, float sum) { return sum == 0.0F ? 0.0F : score / sum; }

HWY_INLINE float ScaleOf(float scale) { return scale == 0.0F ? 1.0F : scale; }

template <class Index>
void RouteToken(const RouterArgs& args, int64_t token) {
  const TensorView logits = args.logits, topk_idx = args.topk_idx;
  const int64_t num_experts = logits.shape[1], k = topk_idx.shape[1];
  TokenBuffer scores, choices;
  Scores(logits, token, args.kind, scores.values, nullptr);
  const float* by = scores.values;
  if (is_present(args.expert_bias)) {
    const auto* bias = static_cast<const float*>(args.expert_bias.data);
    for (int64_t e = 0; e < num_experts; ++e) choices.values[e] = scores.values[e] + bias[e];
    by = choices.values;
  }
  int64_t best[kMaxExperts];
  select(by, num_experts, k, best);
  Index* idx = row_of<Index>(topk_idx, token);
  float* weights = row_of<float>(args.topk_weights, token);
  float sum = 0.0F;
  for (int64_t j = 0; j < k; ++j) {
    idx[j] = static_cast<Index>(expert_of(best[j]));
    weights[j] = scores.values[idx[j]];
    sum += weights[j];
  }
  const float scale = ScaleOf(args.scale);
  for (int64_t j = 0; j < k; ++j) {
    weights[j] = (args.normalize != 0 ? Share(weights[j], sum) : weights[j]) * scale;
  }
}

// pulls[e] = d(sum of grad * weight) / d(log of score e), before the scale; their sum is returned.
// With normalize that sum is zero, and returned so.
template <class Index>
float Pulls(const RouterBackwardArgs& args, int64_t token, const float* scores, float* pulls) {
  const int64_t k = args.topk_idx.shape[1];
  const Index* idx = row_of<const Index>(args.topk_idx, token);
  const float* grad = row_of<const float>(args.grad_topk_weights, token);
  if (args.normalize == 0) {
    float total = 0.0F;
    for (int64_t j = 0; j < k; ++j) {
      const float pull = scores[idx[j]] * grad[j];
      pulls[idx[j]] += pull;
      total += pull;
    }
    return total;
  }
  float sum = 0.0F, mean = 0.0F;
  for (int64_t j = 0; j < k; ++j) sum += scores[idx[j]];
  for (int64_t j = 0; j < k; ++j) mean += Share(scores[idx[j]], sum) * grad[j];
  for (int64_t j = 0; j < k; ++j) {
    pulls[idx[j]] += Share(scores[idx[j]], sum) * (grad[j] - mean);
  }
  return 0.0F;
}

template <class Index>
void BackwardToken(const RouterBackwardArgs& args, int64_t token) {
  const TensorView grad_logits = args.grad_logits;
  const int64_t num_experts = grad_logits.shape[1];
  TokenBuffer scores, complements, grads;
  std::fill_n(grads.values, num_experts, 0.0F);
  Scores(args.logits, token, args.kind, scores.values, complements.values);
  const float total = Pulls<Index>(args, token, scores.values, grads.values);
  const float scale = ScaleOf(args.scale);
  // d log s_i / d logit_e: softmax (i == e) - s_e; sigmoid (i == e) * (1 - s_e).
  const bool is_sigmoid = args.kind == MOIRE_ROUTER_SIGMOID, is_dense = args.normalize == 0;
  for (int64_t e = 0; e < num_experts; ++e) {
    float& grad = grads.values[e];
    if (is_sigmoid) {
      grad = grad == 0.0F ? 0.0F : grad * complements.values[e];
    } else if (is_dense) {
      grad -= scores.values[e] * total;
    }
    grad *= scale;
  }
  EncodeRow(grads.values, static_cast<size_t>(num_experts), grad_logits.type(),
            row_bytes_of(grad_logits, token));
}

void RouteTokens(const RouterArgs& args, int64_t begin, int64_t end) {
  with_index_type(TensorView(args.topk_idx).type(), [&]<class Index>() HWY_ATTR {
    for (int64_t t = begin; t < end; ++t) RouteToken<Index>(args, t);
  });
}

void BackwardTokens(const RouterBackwardArgs& args, int64_t begin, int64_t end) {
  with_index_type(TensorView(args.topk_idx).type(), [&]<class Index>() HWY_ATTR {
    for (int64_t t = begin; t < end; ++t) BackwardToken<Index>(args, t);
  });
}

}  // namespace
}  // namespace moire::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace moire::cpu {
namespace {

HWY_EXPORT(RouteTokens);
HWY_EXPORT(BackwardTokens);

template <class A>
Reason supports(const DeviceState&, const A& args) {
  const int64_t num_experts = args.logits.shape[1];
  if (num_experts <= kMaxExperts) return std::nullopt;
  return concat("logits has ", num_experts, " experts, at most ", kMaxExperts, " are taken");
}

// Tokens of one task: scoring an expert costs about as much as moving 32 bytes.
int64_t tokens_per_task(const TensorView& logits) { return items_per_task(32 * logits.shape[1]); }

template <class A>
std::string policy(const DeviceState& state, const A& args) {
  return concat("by token, ", tokens_per_task(args.logits), " tokens per task, ", state.num_threads,
                " threads, ", state.simd);
}

Status run(const Context& context, const RouterArgs& args) {
  for_ranges(*context.state().pool, args.logits.shape[0], tokens_per_task(args.logits),
             [&](int64_t begin, int64_t end) {
               HWY_DYNAMIC_DISPATCH(RouteTokens)(args, begin, end);
             });
  return {};
}

Status run_backward(const Context& context, const RouterBackwardArgs& args) {
  for_ranges(*context.state().pool, args.logits.shape[0], tokens_per_task(args.logits),
             [&](int64_t begin, int64_t end) {
               HWY_DYNAMIC_DISPATCH(BackwardTokens)(args, begin, end);
             });
  return {};
}

}  // namespace

const Implementation<RouterArgs> kRouter = {
    "cpu", Device::kCpu, supports<RouterArgs>, no_workspace<RouterArgs>, policy<RouterArgs>, run};
const Implementation<RouterBackwardArgs> kRouterBackward = {"cpu",
                                                            Device::kCpu,
                                                            supports<RouterBackwardArgs>,
                                                            no_workspace<RouterBackwardArgs>,
                                                            policy<RouterBackwardArgs>,
                                                            run_backward};

}  // namespace moire::cpu
#endif
