// router against the definition in double: the choice, its order, its weights.
#include <gtest/gtest.h>
#include <moire/routing.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <string>

#include "reference/routing.h"
#include "tests/ops/routing_support.h"
#include "tests/support/outputs.h"

namespace moire::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

struct RouterCase {
  RouterCase(int64_t num_tokens, int64_t num_experts, int64_t k, DType dtype = DType::kFP32,
             DType index_type = DType::kInt32, int64_t padding = 0)
      : logits(dtype, {num_tokens, num_experts}, padding),
        expert_bias(DType::kFP32, {num_experts}),
        topk_idx(index_type, {num_tokens, k}, padding),
        topk_weights(DType::kFP32, {num_tokens, k}, padding) {
    logits.randomize(random, 2);
    expert_bias.randomize(random, 0.1);
  }
  // One token with these logits, and a zero bias.
  RouterCase(const std::vector<float>& values, int64_t k)
      : RouterCase(1, static_cast<int64_t>(values.size()), k) {
    std::copy(values.begin(), values.end(), logits.as<float>());
    expert_bias.fill(0);
  }

  RouterArgs args() {
    RouterArgs a;
    a.logits = logits;
    if (with_bias) a.expert_bias = expert_bias;
    a.kind = kind;
    a.normalize = normalize;
    a.scale = scale;
    a.topk_idx = topk_idx;
    a.topk_weights = topk_weights;
    return a;
  }
  std::vector<int64_t> choice() const {
    std::vector<int64_t> out;
    const TensorView idx = topk_idx;
    for (int64_t i = 0; i < idx.num_elements(); ++i) {
      out.push_back(reference::read_index(idx, i / idx.columns(), i % idx.columns()));
    }
    return out;
  }
  void check(const Tested& context) {
    expect_right(context, args());
    EXPECT_TRUE(topk_idx.is_undamaged() && topk_weights.is_undamaged());
  }

  Random random;
  TestTensor logits, expert_bias, topk_idx, topk_weights;
  int32_t kind = MOIRE_ROUTER_SOFTMAX, normalize = 0;
  float scale = 0;
  bool with_bias = false;
};

TEST(Router, EqualsTheDefinitionForAnyShapeAndKind) {
  const Tested context = tested();
  for (const DType dtype : {DType::kFP32, DType::kBF16, DType::kFP16}) {
    for (const int64_t num_experts : {1, 2, 17, 64, 128, 512}) {
      for (const int64_t k : std::set<int64_t>{1, std::min<int64_t>(2, num_experts),
                                               std::min<int64_t>(8, num_experts), num_experts}) {
        for (const int mode : {0, 1, 2, 3, 4, 5, 6, 7}) {
          RouterCase c(3, num_experts, k, dtype, mode < 4 ? DType::kInt32 : DType::kInt64, 1);
          c.kind = mode % 2 == 0 ? MOIRE_ROUTER_SOFTMAX : MOIRE_ROUTER_SIGMOID;
          c.normalize = mode / 2 % 2;
          c.with_bias = mode / 4 % 2 != 0;
          c.scale = mode < 4 ? 0.0F : 2.5F;
          SCOPED_TRACE(testing::Message() << dtype_name(dtype) << ", " << k << " of " << num_experts
                                          << ", mode " << mode);
          c.check(context);
        }
      }
    }
  }
}

TEST(Router, TakesNoTokens) {
  RouterCase c(0, 8, 2);
  EXPECT_TRUE(succeeds(router(tested(), c.args())));
}

TEST(Router, BreaksTiesByTheLowestIndex) {
  for (const int32_t kind : {MOIRE_ROUTER_SOFTMAX, MOIRE_ROUTER_SIGMOID}) {
    RouterCase c({1, 3, 3, 0, 3, 1}, 5);
    c.kind = kind;
    ASSERT_TRUE(succeeds(router(tested(), c.args())));
    EXPECT_EQ(c.choice(), (std::vector<int64_t>{1, 2, 4, 0, 5}));
  }
}

TEST(Router, BiasDecidesChoiceAndOrderButNotTheWeights) {
  RouterCase c({0, 0, 0, 0}, 2);
  c.with_bias = true;
  c.kind = MOIRE_ROUTER_SIGMOID;
  c.expert_bias.set(0, 3, 2);
  c.expert_bias.set(0, 1, 1);
  ASSERT_TRUE(succeeds(router(tested(), c.args())));
  EXPECT_EQ(c.choice(), (std::vector<int64_t>{3, 1}));
  EXPECT_EQ(c.topk_weights.get(0, 0), 0.5);
  EXPECT_EQ(c.topk_weights.get(0, 1), 0.5);
}

TEST(Router, NaNLosesAgainstEverything) {
  RouterCase c({kNaN, -kInf, 1, kNaN}, 3);
  c.kind = MOIRE_ROUTER_SIGMOID;
  ASSERT_TRUE(succeeds(router(tested(), c.args())));
  EXPECT_EQ(c.choice(), (std::vector<int64_t>{2, 1, 0}));
  EXPECT_EQ(c.topk_weights.get(0, 1), 0);
  EXPECT_TRUE(std::isnan(c.topk_weights.get(0, 2)));
}

TEST(Router, GivesMinusInfinityAScoreOfZero) {
  RouterCase c({-kInf, 5, -kInf, 5}, 3);
  ASSERT_TRUE(succeeds(router(tested(), c.args())));
  EXPECT_EQ(c.choice(), (std::vector<int64_t>{1, 3, 0}));
  EXPECT_EQ(c.topk_weights.get(0, 0), 0.5);
  EXPECT_EQ(c.topk_weights.get(0, 2), 0);
}

// What torch.softmax says of such rows too.
TEST(Router, HasNoSoftmaxWithoutAFiniteMaximum) {
  for (const auto& row : {std::vector<float>{-kInf, -kInf, -kInf}, std::vector<float>{1, kInf, 0},
                          std::vector<float>{1, 2, kNaN}}) {
    RouterCase c(row, 2);
    ASSERT_TRUE(succeeds(router(tested(), c.args())));
    EXPECT_EQ(c.choice(), (std::vector<int64_t>{0, 1}));
    EXPECT_TRUE(std::isnan(c.topk_weights.get(0, 0)) && std::isnan(c.topk_weights.get(0, 1)));
  }
}

TEST(Router, ABadTokenLeavesTheOthersAlone) {
  RouterCase c(3, 40, 4);
  for (int64_t e = 0; e < 40; ++e) c.logits.set(1, e, static_cast<double>(kNaN));
  ASSERT_TRUE(succeeds(router(tested(), c.args())));
  const reference::RouterResults want = reference::router(c.args());
  for (const int64_t t : {0, 2}) {
    for (int64_t j = 0; j < 4; ++j) {
      EXPECT_TRUE(
          reference::accepts(DType::kFP32, want.topk_weights.at(t, j), c.topk_weights.get(t, j)));
    }
  }
}

TEST(Router, NormalizesASumOfZeroToZero) {
  RouterCase c({-kInf, 1, -kInf}, 2);
  c.kind = MOIRE_ROUTER_SOFTMAX;
  c.normalize = 1;
  c.with_bias = true;  // moves the choice to the experts with a score of zero
  c.expert_bias.set(0, 0, 3);
  c.expert_bias.set(0, 2, 2);
  c.check(tested());
  EXPECT_EQ(c.choice(), (std::vector<int64_t>{0, 2}));
  EXPECT_EQ(c.topk_weights.get(0, 0), 0);
  EXPECT_EQ(c.topk_weights.get(0, 1), 0);
}

TEST(Router, SurvivesHugeLogits) {
  RouterCase c({3e38F, -3e38F, 3e38F, 0}, 2);
  for (const int32_t kind : {MOIRE_ROUTER_SOFTMAX, MOIRE_ROUTER_SIGMOID}) {
    c.kind = kind;
    ASSERT_TRUE(succeeds(router(tested(), c.args())));
    EXPECT_EQ(c.choice(), (std::vector<int64_t>{0, 2}));
    EXPECT_EQ(c.topk_weights.get(0, 1), kind == MOIRE_ROUTER_SOFTMAX ? 0.5 : 1.0);
  }
}

TEST(Router, IsTheSameForAnyNumberOfThreads) {
  RouterCase c(700, 128, 8, DType::kBF16);
  c.normalize = 1;
  c.with_bias = true;
  c.check(cpu(1));
  expect_same_on_any_threads(c.args());
}

TEST(Router, RefusesBadArgumentsAndSaysWhy) {
  RouterCase c(4, 8, 2);
  c.with_bias = true;
  const auto expect = [&](auto&& change, const std::string& message,
                          Code code = Code::kInvalidArgument) {
    RouterArgs args = c.args();
    change(args);
    EXPECT_TRUE(fails(router(cpu(), args), code, "router: " + message));
    EXPECT_TRUE(tail_is_untouched(c.topk_idx, {})) << "an output was written";
    EXPECT_TRUE(tail_is_untouched(c.topk_weights, {})) << "an output was written";
  };
  using A = RouterArgs;
  expect([](A& a) { a.logits = {}; }, "logits is absent, needs fp32, bf16 or fp16 of rank 2");
  expect([](A& a) { a.logits.dtype = MOIRE_INT32; }, "logits is int32 [4, 8], needs fp32");
  expect([](A& a) { a.logits.row_stride = 7; }, "logits is fp32 [4, 8] with row stride 7: rows of");
  expect([](A& a) { a.topk_idx = {}; }, "topk_idx is absent, needs int32 or int64 of rank 2");
  expect([](A& a) { a.topk_idx.shape[0] = 3; },
         "topk_idx is int32 [3, 2] but logits is fp32 [4, 8]: both must have the same number");
  expect([](A& a) { a.topk_idx.shape[1] = 0; },
         "topk_idx is int32 [4, 0], its k must be 1 to the 8 experts of logits");
  expect([](A& a) { a.topk_idx.shape[1] = 9; },
         "topk_idx is int32 [4, 9], its k must be 1 to the 8 experts of logits");
  expect([](A& a) { a.kind = 2; }, "kind is 2, must be 0 to 1");
  expect([](A& a) { a.normalize = -1; }, "normalize is -1, must be 0 to 1");
  expect([](A& a) { a.scale = kNaN; }, "scale is nan, must be finite");
  expect([](A& a) { a.expert_bias.shape[0] = 7; }, "expert_bias is fp32 [7], needs [E] = [8]");
  expect([](A& a) { a.expert_bias.dtype = MOIRE_FP16; }, "expert_bias is fp16 [8], needs fp32");
  expect([](A& a) { a.topk_weights = {}; }, "topk_weights is absent, needs fp32 [T, k] = [4, 2]");
  expect([](A& a) { a.topk_weights.dtype = MOIRE_BF16; },
         "topk_weights is bf16 [4, 2], needs fp32");
  expect([](A& a) { a.topk_idx.data = a.logits.data; }, "topk_idx and logits overlap");
  expect([](A& a) { a.topk_idx.data = a.expert_bias.data; }, "topk_idx and expert_bias overlap");
  expect([](A& a) { a.topk_weights.data = a.logits.data; }, "topk_weights and logits overlap");
  expect([](A& a) { a.topk_weights.data = a.expert_bias.data; },
         "topk_weights and expert_bias overlap");
  expect([](A& a) { a.topk_weights.data = a.topk_idx.data; }, "topk_weights and topk_idx overlap");
  const TestTensor many(DType::kFP32, {4, 4097});
  expect([&](A& a) { a.logits = many, a.expert_bias = {}; },
         "no implementation on cpu takes this call; cpu: logits has 4097 experts, at most 4096",
         Code::kUnsupported);
}

TEST(Router, ExplainsItself) {
  RouterCase c(4, 8, 2, DType::kBF16);
  const Context explaining = cpu(2).explaining();
  ASSERT_TRUE(succeeds(router(explaining, c.args())));
  const Step step = explaining.explanation().at(0);
  EXPECT_EQ(step.problem, "2 of 8 experts, bf16 [4, 8]");
  EXPECT_EQ(step.policy.find("by token, 512 tokens per task, 2 threads, "), 0U);
  EXPECT_EQ(step.bytes_read, 4 * 8 * 2);
  EXPECT_EQ(step.bytes_written, 4 * 2 * (4 + 4));
}

}  // namespace
}  // namespace moire::test
