// router_backward against the formula in double and against central differences.
#include <gtest/gtest.h>
#include <moire/routing.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "reference/routing.h"
#include "tests/ops/routing_support.h"
#include "tests/support/differences.h"
#include "tests/support/outputs.h"

namespace moire::test {
namespace {

struct RouterBackwardCase {
  RouterBackwardCase(int64_t num_tokens, int64_t num_experts, int64_t k, DType dtype = DType::kFP32,
                     DType grad_type = DType::kFP32, DType index_type = DType::kInt32,
                     int64_t padding = 0)
      : logits(dtype, {num_tokens, num_experts}, padding),
        topk_idx(index_type, {num_tokens, k}, padding),
        grad_topk_weights(DType::kFP32, {num_tokens, k}, padding),
        grad_logits(grad_type, {num_tokens, num_experts}, padding) {
    logits.randomize(random, 2);
    grad_topk_weights.randomize(random);
    for (int64_t t = 0; t < num_tokens; ++t) {  // k different experts, in any order
      const int64_t first = random.integer(0, num_experts - 1);
      for (int64_t j = 0; j < k; ++j) set_index(topk_idx, t, j, (first + j) % num_experts);
    }
  }

  RouterBackwardArgs args() {
    RouterBackwardArgs a;
    a.logits = logits;
    a.topk_idx = topk_idx;
    a.grad_topk_weights = grad_topk_weights;
    a.kind = kind;
    a.normalize = normalize;
    a.scale = scale;
    a.grad_logits = grad_logits;
    return a;
  }
  void check(const Tested& context) {
    expect_right(context, args());
    EXPECT_TRUE(grad_logits.is_undamaged());
  }

  Random random;
  TestTensor logits, topk_idx, grad_topk_weights, grad_logits;
  int32_t kind = MOIRE_ROUTER_SOFTMAX, normalize = 0;
  float scale = 0;
};

TEST(RouterBackward, EqualsTheDefinitionForAnyShapeAndKind) {
  const Tested context = tested();
  for (const DType dtype : {DType::kFP32, DType::kBF16, DType::kFP16}) {
    for (const DType grad_type : {DType::kFP32, DType::kBF16, DType::kFP16}) {
      for (const int64_t num_experts : {1, 2, 17, 128, 512}) {
        for (const int mode : {0, 1, 2, 3, 4, 5, 6, 7}) {
          const int64_t k = mode < 4 ? std::min<int64_t>(8, num_experts) : num_experts;
          RouterBackwardCase c(3, num_experts, k, dtype, grad_type,
                               mode < 4 ? DType::kInt32 : DType::kInt64, 2);
          c.kind = mode % 2 == 0 ? MOIRE_ROUTER_SOFTMAX : MOIRE_ROUTER_SIGMOID;
          c.normalize = mode / 2 % 2;
          c.scale = mode < 4 ? 0.0F : 2.5F;
          SCOPED_TRACE(testing::Message()
                       << dtype_name(dtype) << ", " << dtype_name(grad_type) << ", " << k << " of "
                       << num_experts << ", mode " << mode);
          c.check(context);
        }
      }
    }
  }
}

// The weights of one token, from their definition.
std::vector<double> weights_of(TestTensor& logits, const RouterBackwardArgs& args) {
  const int64_t num_experts = logits.view().columns(), k = args.topk_idx.shape[1];
  double total = 0, sum = 0;
  for (int64_t e = 0; e < num_experts; ++e) total += std::exp(logits.get(0, e));
  std::vector<double> out;
  for (int64_t j = 0; j < k; ++j) {
    const double logit = logits.get(0, reference::read_index(args.topk_idx, 0, j));
    out.push_back(args.kind == MOIRE_ROUTER_SOFTMAX ? std::exp(logit) / total
                                                    : 1 / (1 + std::exp(-logit)));
    sum += out.back();
  }
  for (double& weight : out) {
    weight *= static_cast<double>(args.scale) / (args.normalize != 0 ? sum : 1);
  }
  return out;
}

TEST(RouterBackward, IsTheDerivativeOfTheWeights) {
  for (const int32_t kind : {MOIRE_ROUTER_SOFTMAX, MOIRE_ROUTER_SIGMOID}) {
    for (const int32_t normalize : {0, 1}) {
      RouterBackwardCase c(1, 9, 4);
      c.kind = kind;
      c.normalize = normalize;
      c.scale = 1.5F;
      ASSERT_TRUE(succeeds(router_backward(tested(), c.args())));
      TestTensor logits(DType::kFP64, {1, 9});
      for (int64_t e = 0; e < 9; ++e) logits.set(0, e, c.logits.get(0, e));
      const auto loss = [&] {
        const std::vector<double> weights = weights_of(logits, c.args());
        double sum = 0;
        for (int64_t j = 0; j < 4; ++j) {
          sum += weights[static_cast<size_t>(j)] * c.grad_topk_weights.get(0, j);
        }
        return sum;
      };
      const reference::Matrix bounds = reference::router_backward(c.args());
      for (int64_t e = 0; e < 9; ++e) {
        EXPECT_NEAR(c.grad_logits.get(0, e), central_difference(logits, 0, e, loss),
                    10 * kDifferenceError + bounds.at(0, e).bound)
            << "expert " << e << ", kind " << kind << ", normalize " << normalize;
      }
    }
  }
}

// With normalize, softmax weights depend on the chosen logits alone: no rounding noise elsewhere.
TEST(RouterBackward, NormalizedSoftmaxLeavesTheOthersExactlyZero) {
  RouterBackwardCase c(5, 64, 4);
  c.normalize = 1;
  ASSERT_TRUE(succeeds(router_backward(tested(), c.args())));
  for (int64_t t = 0; t < 5; ++t) {
    int64_t num_zero = 0;
    for (int64_t e = 0; e < 64; ++e) num_zero += c.grad_logits.get(t, e) == 0;
    EXPECT_EQ(num_zero, 60);
  }
}

// 1 - sigmoid(20) is 2e-9: computed as 1 - s it would be zero.
TEST(RouterBackward, KeepsTheSlopeOfASaturatedSigmoid) {
  RouterBackwardCase c(1, 2, 1);
  c.kind = MOIRE_ROUTER_SIGMOID;
  c.logits.fill(20);
  c.grad_topk_weights.fill(1);
  ASSERT_TRUE(succeeds(router_backward(tested(), c.args())));
  const int64_t chosen = reference::read_index(c.topk_idx.view(), 0, 0);
  const double exact = std::exp(-20.0) / std::pow(1 + std::exp(-20.0), 2);
  EXPECT_NEAR(c.grad_logits.get(0, chosen), exact, reference::dot_tolerance(8, exact));
}

TEST(RouterBackward, ASumOfZeroHasNoGradient) {
  for (const int32_t kind : {MOIRE_ROUTER_SOFTMAX, MOIRE_ROUTER_SIGMOID}) {
    RouterBackwardCase c(1, 4, 2);
    c.kind = kind;
    c.normalize = 1;
    c.logits.fill(1);
    for (int64_t j = 0; j < 2; ++j) {
      c.logits.set(0, reference::read_index(c.topk_idx.view(), 0, j),
                   -std::numeric_limits<double>::infinity());
    }
    c.check(tested());
    EXPECT_TRUE(tail_is_zero(c.grad_logits, {}));
  }
}

TEST(RouterBackward, ANaNTokenLeavesTheOthersAlone) {
  RouterBackwardCase c(3, 20, 4);
  c.logits.set(1, 7, std::numeric_limits<double>::quiet_NaN());
  ASSERT_TRUE(succeeds(router_backward(tested(), c.args())));
  const reference::Matrix want = reference::router_backward(c.args());
  for (int64_t e = 0; e < 20; ++e) {
    EXPECT_TRUE(std::isnan(c.grad_logits.get(1, e)));
    for (const int64_t t : {0, 2}) {
      EXPECT_TRUE(reference::accepts(DType::kFP32, want.at(t, e), c.grad_logits.get(t, e)));
    }
  }
}

TEST(RouterBackward, IsTheSameForAnyNumberOfThreads) {
  RouterBackwardCase c(700, 128, 8, DType::kBF16, DType::kBF16);
  c.check(cpu(1));
  expect_same_on_any_threads(c.args());
}

TEST(RouterBackward, RefusesBadArgumentsAndSaysWhy) {
  RouterBackwardCase c(4, 8, 2);
  const auto expect = [&](auto&& change, const std::string& message) {
    RouterBackwardArgs args = c.args();
    change(args);
    EXPECT_TRUE(
        fails(router_backward(cpu(), args), Code::kInvalidArgument, "router_backward: " + message));
    EXPECT_TRUE(tail_is_untouched(c.grad_logits, {})) << "an output was written";
  };
  using A = RouterBackwardArgs;
  expect([](A& a) { a.logits = {}; }, "logits is absent, needs fp32, bf16 or fp16 of rank 2");
  expect([](A& a) { a.topk_idx = {}; }, "topk_idx is absent, needs int32 or int64 of rank 2");
  expect([](A& a) { a.topk_idx.shape[1] = 9; }, "topk_idx is int32 [4, 9], its k must be 1 to");
  expect([](A& a) { a.grad_topk_weights = {}; },
         "grad_topk_weights is absent, needs fp32 [T, k] = [4, 2]");
  expect([](A& a) { a.grad_topk_weights.dtype = MOIRE_BF16; },
         "grad_topk_weights is bf16 [4, 2], needs fp32");
  expect([](A& a) { a.grad_logits = {}; },
         "grad_logits is absent, needs fp32, bf16 or fp16 [T, E] = [4, 8]");
  expect([](A& a) { a.grad_logits.shape[1] = 7; },
         "grad_logits is fp32 [4, 7], needs [T, E] = [4, 8]");
  expect([](A& a) { a.kind = 2; }, "kind is 2, must be 0 to 1");
  expect([](A& a) { a.normalize = 2; }, "normalize is 2, must be 0 to 1");
  expect([](A& a) { a.scale = -std::numeric_limits<float>::infinity(); },
         "scale is -inf, must be finite");
  expect([](A& a) { a.grad_logits.data = a.logits.data; }, "grad_logits and logits overlap");
  std::vector<int32_t> zeros(4 * 8);  // sound indices
  expect([&](A& a) { a.topk_idx.data = a.grad_logits.data = zeros.data(); },
         "grad_logits and topk_idx overlap");
  expect([](A& a) { a.grad_topk_weights.data = a.grad_logits.data; },
         "grad_logits and grad_topk_weights overlap");
  set_index(c.topk_idx, 2, 0, 8);
  expect([](A&) {}, "topk_idx[2, 0] is 8, must be 0 to 7");
  set_index(c.topk_idx, 1, 1, -1);
  expect([](A&) {}, "topk_idx[1, 1] is -1, must be 0 to 7");
}

}  // namespace
}  // namespace moire::test
