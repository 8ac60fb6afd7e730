// unpermute: rows back to tokens, weighted or plain, and its gradient.
#include <gtest/gtest.h>
#include <moire/routing.h>

#include <string>

#include "reference/routing.h"
#include "tests/ops/routing_support.h"
#include "tests/support/outputs.h"

namespace moire::test {
namespace {

// The tensors of one call of unpermute.
struct UnpermuteCase {
  UnpermuteCase(int64_t num_tokens, int64_t k, int64_t num_groups, int64_t hidden, DType dtype,
                DType y_type, DType index_type = DType::kInt32, int64_t padding = 0)
      : plan(random, num_tokens, k, num_groups, 3, index_type),
        rows(dtype, {plan.groups.capacity, hidden}, padding),
        weights(DType::kFP32, {num_tokens, k}, padding),
        y(y_type, {num_tokens, hidden}, padding),
        probs(DType::kFP32, {plan.groups.capacity}),
        topk_weights(DType::kFP32, {num_tokens, k}, padding) {
    rows.randomize_rows(random, plan.routed());  // the tail stays NaN: nobody may read it
    probs.randomize(random);
    weights.randomize(random);
  }

  UnpermuteArgs args() {
    UnpermuteArgs a;
    a.rows = rows;
    a.scatter_idx = plan.scatter_idx;
    a.weights = weights;
    a.y = y;
    a.probs = probs;
    a.topk_weights = topk_weights;
    return a;
  }
  void check(const Tested& context, const UnpermuteArgs& a) {
    expect_right(context, a);
    EXPECT_TRUE(y.is_undamaged() && topk_weights.is_undamaged());
  }

  Random random;
  RandomPlan plan;
  TestTensor rows, weights, y, probs, topk_weights;
};

TEST(Unpermute, SumsWeightedAndPlainForAnyShapeAndType) {
  const Tested context = tested();
  for (const DType dtype : {DType::kFP32, DType::kBF16, DType::kFP16}) {
    for (const DType y_type : {DType::kFP32, dtype}) {
      for (const DType index_type : {DType::kInt32, DType::kInt64}) {
        for (const int64_t k : {1, 2, 8}) {
          for (const int64_t hidden : {0, 1, 31, 64, 150}) {
            SCOPED_TRACE(testing::Message() << dtype_name(dtype) << " to " << dtype_name(y_type)
                                            << ", k " << k << ", " << hidden << " columns");
            UnpermuteCase c(9, k, 4, hidden, dtype, y_type, index_type, 3);
            c.check(context, c.args());
            UnpermuteArgs plain = c.args();
            plain.weights = {};
            c.check(context, plain);
          }
        }
      }
    }
  }
}

// (1 + 2^-24) + 2^-24 loses both; the other way round they make one unit. Rounding once keeps the
// sum of two halves of a BF16 unit.
TEST(Unpermute, AddsInChoiceOrderInFP32AndRoundsOnce) {
  TestTensor rows(DType::kFP32, {3, 1}), y(DType::kFP32, {2, 1}), scatter(DType::kInt32, {2, 3});
  rows.set(0, 0, 1);
  rows.set(1, 0, 0x1p-24);
  rows.set(2, 0, 0x1p-24);
  const int64_t order[2][3] = {{0, 1, 2}, {1, 2, 0}};
  for (int64_t t = 0; t < 2; ++t) {
    for (int64_t j = 0; j < 3; ++j) set_index(scatter, t, j, order[t][j]);
  }
  UnpermuteArgs args;
  args.rows = rows;
  args.scatter_idx = scatter;
  args.y = y;
  ASSERT_TRUE(succeeds(unpermute(tested(), args)));
  EXPECT_EQ(y.get(0, 0), 1);
  EXPECT_EQ(y.get(1, 0), 1 + 0x1p-23);

  TestTensor half(DType::kBF16, {3, 1}), out(DType::kBF16, {1, 1});
  half.set(0, 0, 1);
  half.set(1, 0, 0x1p-8);
  half.set(2, 0, 0x1p-9);
  args.rows = half;
  args.scatter_idx.shape[0] = 1;
  args.y = out;
  ASSERT_TRUE(succeeds(unpermute(tested(), args)));
  EXPECT_EQ(out.get(0, 0), 1 + 0x1p-7);
}

TEST(Unpermute, ATokenWithoutChoicesGetsZeros) {
  Random random;
  TestTensor rows(DType::kBF16, {2, 80}), y(DType::kBF16, {3, 80}), scatter(DType::kInt64, {3, 2});
  rows.randomize(random);
  UnpermuteArgs args;
  args.rows = rows;
  args.scatter_idx = scatter;
  args.y = y;
  ASSERT_TRUE(succeeds(unpermute(tested(), args)));
  EXPECT_TRUE(tail_is_zero(y, {}));
}

// Permute, then unpermute: with k = 1 the identity to the bit; with k equal copies of power-of-two
// weights that sum to one as well.
TEST(Unpermute, UndoesPermuteToTheBit) {
  for (const int64_t k : {1, 2, 4}) {
    Random random;
    TestTensor x(DType::kFP32, {50, 70}), y(DType::kFP32, {50, 70}), topk(DType::kInt32, {50, k});
    x.randomize(random);
    x.set(7, 3, -0.0);
    TestTensor weights(DType::kFP32, {50, k});
    weights.fill(1.0 / static_cast<double>(k));
    TestTensor offsets(DType::kInt64, {9}), gather(DType::kInt32, {50 * k}),
        scatter(DType::kInt32, {50, k}), rows(DType::kFP32, {50 * k, 70});
    for (int64_t t = 0; t < 50; ++t) {
      for (int64_t j = 0; j < k; ++j) set_index(topk, t, j, random.integer(0, 7));
    }
    PermutePlanArgs plan;
    plan.topk_idx = topk;
    plan.num_groups = 8;
    plan.offsets = offsets;
    plan.gather_idx = gather;
    plan.scatter_idx = scatter;
    ASSERT_TRUE(succeeds(run(tested(), plan)));
    PermuteArgs there;
    there.x = x;
    there.gather_idx = gather;
    there.rows = rows;
    there.groups = Groups(offsets.as<int64_t>(), 8, 50 * k);
    ASSERT_TRUE(succeeds(permute(tested(), there)));
    UnpermuteArgs back;
    back.rows = rows;
    back.scatter_idx = scatter;
    back.weights = weights;
    back.y = y;
    ASSERT_TRUE(succeeds(unpermute(tested(), back)));
    EXPECT_TRUE(same_bits(y, x));
  }
}

TEST(Unpermute, EitherPairMayBeAbsent) {
  UnpermuteCase c(20, 3, 4, 16, DType::kBF16, DType::kBF16);
  ASSERT_TRUE(succeeds(unpermute(tested(), c.args())));
  const TestTensor y = c.y, topk_weights = c.topk_weights;
  c.y.poison();
  c.topk_weights.poison();
  UnpermuteArgs only_y = c.args();
  only_y.probs = only_y.topk_weights = {};
  ASSERT_TRUE(succeeds(unpermute(tested(), only_y)));
  EXPECT_TRUE(same_bits(c.y, y));
  UnpermuteArgs only_weights = c.args();
  only_weights.rows = only_weights.weights = only_weights.y = {};
  ASSERT_TRUE(succeeds(unpermute(tested(), only_weights)));
  EXPECT_TRUE(same_bits(c.topk_weights, topk_weights));
}

TEST(Unpermute, IsTheSameForAnyNumberOfThreads) {
  UnpermuteCase c(400, 4, 16, 300, DType::kBF16, DType::kFP32);
  c.check(cpu(1), c.args());
  expect_same_on_any_threads(c.args());
}

TEST(Unpermute, RefusesBadArgumentsAndSaysWhy) {
  UnpermuteCase c(4, 2, 3, 8, DType::kBF16, DType::kBF16);
  const int64_t capacity = c.plan.groups.capacity;
  const auto expect = [&](auto&& change, const std::string& message) {
    UnpermuteArgs args = c.args();
    change(args);
    EXPECT_TRUE(fails(unpermute(cpu(), args), Code::kInvalidArgument, "unpermute: " + message));
    EXPECT_TRUE(tail_is_untouched(c.y, {})) << "an output was written";
    EXPECT_TRUE(tail_is_untouched(c.topk_weights, {})) << "an output was written";
  };
  using A = UnpermuteArgs;
  expect([](A& a) { a = A(); }, "there is nothing to do: rows and y, or probs and topk_weights");
  expect([](A& a) { a.scatter_idx = {}; }, "scatter_idx is absent, needs int32 or int64 of rank 2");
  expect([](A& a) { a.scatter_idx.dtype = MOIRE_FP32; },
         "scatter_idx is fp32 [4, 2], needs int32 or int64");
  expect([](A& a) { a.rows = {}; }, "rows is absent, needs fp32, bf16 or fp16 of rank 2");
  expect([](A& a) { a.rows.data = nullptr; }, "rows is bf16 [");
  expect([](A& a) { a.weights.shape[1] = 1; }, "weights is fp32 [4, 1], needs [T, k] = [4, 2]");
  expect([](A& a) { a.weights.dtype = MOIRE_BF16; }, "weights is bf16 [4, 2], needs fp32");
  expect([](A& a) { a.y = {}; }, "y is absent, needs fp32, bf16 or fp16 [T, H] = [4, 8]");
  expect([](A& a) { a.y.shape[0] = 5; }, "y is bf16 [5, 8], needs [T, H] = [4, 8]");
  expect([](A& a) { a.y.dtype = MOIRE_FP16; }, "y is fp16 [4, 8] but rows is bf16 [");
  expect([](A& a) { a.y.data = a.rows.data; }, "y and rows overlap");
  expect([](A& a) { a.scatter_idx.data = a.y.data; }, "y and scatter_idx overlap");
  expect([](A& a) { a.weights.data = a.y.data; }, "y and weights overlap");
  expect([](A& a) { a.probs.data = a.y.data; }, "y and probs overlap");
  expect([](A& a) { a.probs = {}; }, "probs is absent, needs fp32 of rank 1");
  expect([](A& a) { a.probs.shape[0] -= 1; },
         "rows is bf16 [" + std::to_string(capacity) + ", 8] but probs is fp32 [" +
             std::to_string(capacity - 1) + "]: both must have the same capacity");
  expect([](A& a) { a.topk_weights = {}; }, "topk_weights is absent, needs fp32 [T, k] = [4, 2]");
  expect([](A& a) { a.topk_weights.data = a.probs.data; }, "topk_weights and probs overlap");
  expect([](A& a) { a.topk_weights.data = a.weights.data; }, "topk_weights and weights overlap");
  expect([](A& a) { a.topk_weights.data = a.rows.data; }, "topk_weights and rows overlap");
  expect([](A& a) { a.topk_weights.data = a.scatter_idx.data; },
         "topk_weights and scatter_idx overlap");
  expect([](A& a) { a.topk_weights.data = a.y.data; }, "topk_weights and y overlap");
  set_index(c.plan.scatter_idx, 3, 1, capacity);
  expect([](A&) {}, "scatter_idx[3, 1] is " + std::to_string(capacity) + ", must be -1 to " +
                        std::to_string(capacity - 1));
  expect([](A& a) { a.rows = a.weights = a.y = {}; }, "scatter_idx[3, 1] is");
}

TEST(Unpermute, ExplainsItself) {
  UnpermuteCase c(4, 2, 3, 8, DType::kBF16, DType::kFP32);
  const Context explaining = cpu(2).explaining();
  UnpermuteArgs args = c.args();
  args.probs = args.topk_weights = {};
  ASSERT_TRUE(succeeds(unpermute(explaining, args)));
  const Step step = explaining.explanation().at(0);
  EXPECT_EQ(step.problem.find("4 tokens, top 2, bf16 ["), 0U);
  EXPECT_EQ(step.policy.find("sum by token, 1365 tokens per task, 2 threads, "), 0U);
  EXPECT_EQ(step.bytes_read, 4 * 2 * (4 + 4) + 4 * 2 * 8 * 2);
  EXPECT_EQ(step.bytes_written, 4 * 8 * 4);
}

}  // namespace
}  // namespace moire::test
