// unpermute_backward, and that permute and unpermute are each other's transposes.
#include <gtest/gtest.h>
#include <moire/routing.h>

#include <cmath>
#include <limits>
#include <string>

#include "reference/routing.h"
#include "tests/ops/routing_support.h"
#include "tests/support/documented_order.h"
#include "tests/support/outputs.h"

namespace moire::test {
namespace {

struct UnpermuteBackwardCase {
  UnpermuteBackwardCase(int64_t num_tokens, int64_t k, int64_t num_groups, int64_t hidden,
                        DType grad_type, DType rows_type, DType index_type = DType::kInt32,
                        int64_t padding = 0, int64_t tail = 3, int64_t dropped_token = -1)
      : plan(random, num_tokens, k, num_groups, tail, index_type, dropped_token),
        grad_y(grad_type, {num_tokens, hidden}, padding),
        rows(rows_type, {plan.groups.capacity, hidden}, padding),
        weights(DType::kFP32, {num_tokens, k}, padding),
        grad_rows(grad_type, {plan.groups.capacity, hidden}, padding),
        grad_weights(DType::kFP32, {num_tokens, k}, padding) {
    grad_y.randomize(random);
    rows.randomize_rows(random, plan.routed());  // the tail stays NaN: nobody may read it
    weights.randomize(random);
  }

  UnpermuteBackwardArgs args(int32_t tail = MOIRE_TAIL_ZERO) {
    UnpermuteBackwardArgs a;
    a.grad_y = grad_y;
    a.rows = rows;
    a.scatter_idx = plan.scatter_idx;
    a.weights = weights;
    a.grad_rows = grad_rows;
    a.grad_weights = grad_weights;
    a.groups = plan.groups;
    a.tail = tail;
    return a;
  }
  void check(const Tested& context, const UnpermuteBackwardArgs& a) {
    expect_right(context, a);
    EXPECT_TRUE(grad_rows.is_undamaged() && grad_weights.is_undamaged());
  }

  Random random;
  RandomPlan plan;
  TestTensor grad_y, rows, weights, grad_rows, grad_weights;
};

TEST(UnpermuteBackward, EqualsTheDefinitionForAnyShapeAndType) {
  const Tested context = tested();
  for (const DType grad_type : {DType::kFP32, DType::kBF16, DType::kFP16}) {
    for (const DType rows_type : {DType::kFP32, DType::kBF16, DType::kFP16}) {
      for (const int64_t k : {1, 3, 8}) {
        for (const int64_t hidden : {0, 1, 63, 64, 65, 200}) {
          SCOPED_TRACE(testing::Message() << dtype_name(grad_type) << ", " << dtype_name(rows_type)
                                          << ", k " << k << ", " << hidden << " columns");
          UnpermuteBackwardCase c(9, k, 4, hidden, grad_type, rows_type,
                                  k == 3 ? DType::kInt64 : DType::kInt32, 5);
          c.check(context, c.args());
          UnpermuteBackwardArgs plain = c.args();
          plain.weights = {};
          c.check(context, plain);
        }
      }
    }
  }
}

TEST(UnpermuteBackward, LeavesTheTailUntouchedWhenAsked) {
  UnpermuteBackwardCase c(6, 2, 3, 40, DType::kBF16, DType::kBF16);
  c.check(tested(), c.args(MOIRE_TAIL_UNTOUCHED));
}

TEST(UnpermuteBackward, EitherOutputMayBeAbsent) {
  UnpermuteBackwardCase c(20, 3, 4, 70, DType::kBF16, DType::kFP32);
  ASSERT_TRUE(succeeds(unpermute_backward(tested(), c.args())));
  const TestTensor grad_rows = c.grad_rows, grad_weights = c.grad_weights;
  c.grad_rows.poison();
  c.grad_weights.poison();
  UnpermuteBackwardArgs only_rows = c.args();
  only_rows.rows = only_rows.grad_weights = {};
  ASSERT_TRUE(succeeds(unpermute_backward(tested(), only_rows)));
  EXPECT_TRUE(same_bits(c.grad_rows, grad_rows));
  UnpermuteBackwardArgs only_weights = c.args();
  only_weights.grad_rows = only_weights.weights = {};
  ASSERT_TRUE(succeeds(unpermute_backward(tested(), only_weights)));
  EXPECT_TRUE(same_bits(c.grad_weights, grad_weights));
}

void expect_documented_sums(UnpermuteBackwardCase& c) {
  for (int64_t t = 0; t < c.grad_weights.view().num_rows(); ++t) {
    for (int64_t j = 0; j < c.grad_weights.view().columns(); ++j) {
      const int64_t row = reference::read_index(c.plan.scatter_idx.view(), t, j);
      const float want = row < 0 ? 0.0F : documented_dot(c.rows, row, c.grad_y, t);
      EXPECT_EQ(static_cast<float>(c.grad_weights.get(t, j)), want) << t << ", " << j;
    }
  }
}

TEST(UnpermuteBackward, SumsWeightGradientsInTheDocumentedOrder) {
  for (const int64_t hidden : {64, 200, 384}) {
    UnpermuteBackwardCase c(8, 2, 3, hidden, DType::kBF16, DType::kFP16);
    ASSERT_TRUE(succeeds(unpermute_backward(tested(), c.args())));
    expect_documented_sums(c);
  }
}

// On a GPU a block takes 4096 columns at a time of 16-bit elements, 2048 of FP32, 512 of elements
// that do not lie in vectors, and 8 choices.
TEST(UnpermuteBackward, TakesRowsOfSeveralPartsAndManyChoices) {
  struct Shape {
    int64_t k, hidden, padding;
    DType grad, rows;
  };
  const DType kBF16 = DType::kBF16, kFP16 = DType::kFP16, kFP32 = DType::kFP32;
  for (const Shape& s : {Shape{9, 4104, 0, kBF16, kBF16}, Shape{2, 7168, 0, kBF16, kBF16},
                         Shape{17, 7168, 0, kFP16, kFP16}, Shape{9, 2056, 0, kFP32, kFP32},
                         Shape{17, 520, 3, kBF16, kBF16}, Shape{9, 1030, 3, kFP32, kFP32},
                         Shape{3, 1100, 0, kBF16, kFP32}, Shape{9, 64, 0, kBF16, kBF16},
                         Shape{17, 72, 0, kFP16, kFP16}, Shape{16, 33, 5, kFP32, kBF16}}) {
    SCOPED_TRACE(testing::Message()
                 << dtype_name(s.grad) << ", " << dtype_name(s.rows) << ", k " << s.k << ", "
                 << s.hidden << " columns, padding " << s.padding);
    UnpermuteBackwardCase c(10, s.k, 4, s.hidden, s.grad, s.rows, DType::kInt32, s.padding);
    c.check(tested(), c.args());
    expect_documented_sums(c);
    const TestTensor grad_rows = c.grad_rows, grad_weights = c.grad_weights;
    c.grad_rows.poison();
    c.grad_weights.poison();
    UnpermuteBackwardArgs only_rows = c.args(), only_weights = c.args();
    only_rows.rows = only_rows.grad_weights = {};
    only_weights.grad_rows = only_weights.weights = {};
    ASSERT_TRUE(succeeds(unpermute_backward(tested(), only_rows)));
    ASSERT_TRUE(succeeds(unpermute_backward(tested(), only_weights)));
    EXPECT_TRUE(same_bits(c.grad_rows, grad_rows));
    EXPECT_TRUE(same_bits(c.grad_weights, grad_weights));
  }
}

// Of a token that goes to no expert nothing is multiplied, not by zero either.
TEST(UnpermuteBackward, GivesDroppedChoicesAGradientOfZeroWhateverTheirToken) {
  constexpr int64_t kToken = 4;
  for (const int64_t k : {2, 8, 9, 17}) {
    for (const int64_t hidden : {40, 520, 4104}) {
      for (const int64_t padding : {0, 3}) {
        SCOPED_TRACE(testing::Message()
                     << "k " << k << ", " << hidden << " columns, padding " << padding);
        UnpermuteBackwardCase c(7, k, 3, hidden, DType::kBF16, DType::kBF16, DType::kInt64, padding,
                                3, kToken);
        for (int64_t h = 0; h < hidden; ++h) {
          c.grad_y.set(kToken, h,
                       h % 3 == 0 ? std::numeric_limits<double>::quiet_NaN()
                                  : std::numeric_limits<double>::infinity());
        }
        c.check(tested(), c.args());
        for (int64_t j = 0; j < k; ++j) EXPECT_EQ(c.grad_weights.get(kToken, j), 0) << j;
        for (int64_t i = 0; i < c.plan.routed(); ++i) {
          ASSERT_TRUE(std::isfinite(c.grad_rows.get(i, hidden - 1))) << "row " << i;
        }
      }
    }
  }
}

TEST(UnpermuteBackward, IsTheSameForAnyNumberOfThreads) {
  UnpermuteBackwardCase c(400, 4, 16, 300, DType::kBF16, DType::kBF16, DType::kInt32, 0, 500);
  c.check(cpu(1), c.args());
  expect_same_on_any_threads(c.args());
}

// <a, b> over `rows` rows, and the sum of |a b|.
reference::Number inner(const TestTensor& a, const TestTensor& b, int64_t rows) {
  reference::Dot dot;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < a.view().columns(); ++j) {
      const double x = a.get(i, j), y = b.get(i, j);
      const double rounding = reference::dot_tolerance(8, std::abs(x));  // of a sum of up to 8
      dot.add({x, rounding}, {y, reference::dot_tolerance(8, std::abs(y))});
    }
  }
  return dot.sum();
}

TEST(UnpermuteBackward, PermuteAndPlainUnpermuteAreTransposes) {
  Random random;
  const RandomPlan plan(random, 30, 3, 5, 4);
  TestTensor x(DType::kFP32, {30, 50}), y(DType::kFP32, {30, 50}),
      rows(DType::kFP32, {plan.groups.capacity, 50}), r(DType::kFP32, {plan.groups.capacity, 50});
  x.randomize(random);
  r.randomize(random);
  PermuteArgs there;
  there.x = x;
  there.gather_idx = plan.gather_idx;
  there.rows = rows;
  there.groups = plan.groups;
  ASSERT_TRUE(succeeds(permute(tested(), there)));
  UnpermuteArgs back;
  back.rows = r;
  back.scatter_idx = plan.scatter_idx;
  back.y = y;
  ASSERT_TRUE(succeeds(unpermute(tested(), back)));
  const reference::Number left = inner(rows, r, plan.routed()), right = inner(x, y, 30);
  EXPECT_NEAR(left.value, right.value, left.bound + right.bound);
}

TEST(UnpermuteBackward, IsTheTransposeOfAWeightedUnpermute) {
  UnpermuteBackwardCase c(30, 3, 5, 50, DType::kFP32, DType::kFP32);
  ASSERT_TRUE(succeeds(unpermute_backward(tested(), c.args())));
  TestTensor y(DType::kFP32, {30, 50});
  UnpermuteArgs forward;
  forward.rows = c.rows;
  forward.scatter_idx = c.plan.scatter_idx;
  forward.weights = c.weights;
  forward.y = y;
  ASSERT_TRUE(succeeds(unpermute(tested(), forward)));
  const reference::Number through_y = inner(y, c.grad_y, 30),
                          through_rows = inner(c.rows, c.grad_rows, c.plan.routed()),
                          through_weights = inner(c.weights, c.grad_weights, 30);
  // Linear in the rows and in the weights: <y, g> = <rows, grad_rows> = <weights, grad_weights>.
  EXPECT_NEAR(through_y.value, through_rows.value, through_y.bound + through_rows.bound);
  EXPECT_NEAR(through_y.value, through_weights.value, through_y.bound + through_weights.bound);
}

TEST(UnpermuteBackward, OfAPlainSumIsPermute) {
  UnpermuteBackwardCase c(12, 2, 4, 33, DType::kFP16, DType::kFP16);
  UnpermuteBackwardArgs plain = c.args();
  plain.weights = plain.rows = plain.grad_weights = {};
  ASSERT_TRUE(succeeds(unpermute_backward(tested(), plain)));
  TestTensor rows(DType::kFP16, {c.plan.groups.capacity, 33});
  PermuteArgs there;
  there.x = c.grad_y;
  there.gather_idx = c.plan.gather_idx;
  there.rows = rows;
  there.groups = c.plan.groups;
  ASSERT_TRUE(succeeds(permute(tested(), there)));
  EXPECT_TRUE(same_bits(c.grad_rows, rows));
}

TEST(UnpermuteBackward, RefusesBadArgumentsAndSaysWhy) {
  UnpermuteBackwardCase c(4, 2, 3, 8, DType::kBF16, DType::kBF16);
  const std::string capacity = std::to_string(c.plan.groups.capacity);
  const auto expect = [&](auto&& change, const std::string& message) {
    UnpermuteBackwardArgs args = c.args();
    change(args);
    EXPECT_TRUE(fails(unpermute_backward(cpu(), args), Code::kInvalidArgument,
                      "unpermute_backward: " + message));
    EXPECT_TRUE(tail_is_untouched(c.grad_rows, {})) << "an output was written";
    EXPECT_TRUE(tail_is_untouched(c.grad_weights, {})) << "an output was written";
  };
  std::vector<std::byte> scatter = with_room(c.plan.scatter_idx);
  using A = UnpermuteBackwardArgs;
  expect([](A& a) { a.grad_rows = a.grad_weights = {}; },
         "there is nothing to do: grad_rows or grad_weights must be present");
  expect([](A& a) { a.grad_y = {}; }, "grad_y is absent, needs fp32, bf16 or fp16 of rank 2");
  expect([](A& a) { a.grad_y.dtype = MOIRE_INT32; }, "grad_y is int32 [4, 8], needs fp32");
  expect([](A& a) { a.scatter_idx = {}; }, "scatter_idx is absent, needs int32 or int64 of rank 2");
  expect([](A& a) { a.scatter_idx.shape[0] = 3; },
         "scatter_idx is int32 [3, 2] but grad_y is bf16 [4, 8]: both must have the same number");
  expect([](A& a) { a.weights.shape[1] = 1; }, "weights is fp32 [4, 1], needs [T, k] = [4, 2]");
  expect([](A& a) { a.weights.dtype = MOIRE_FP16; }, "weights is fp16 [4, 2], needs fp32");
  expect([&](A& a) { a.rows = {}; },
         "rows is absent, needs fp32, bf16 or fp16 [capacity, H] = [" + capacity + ", 8]");
  expect([&](A& a) { a.rows.shape[1] = 7; },
         "rows is bf16 [" + capacity + ", 7], needs [capacity, H] = [" + capacity + ", 8]");
  expect([&](A& a) { a.grad_rows.shape[0] = 1; },
         "grad_rows is bf16 [1, 8], needs [capacity, H] = [" + capacity + ", 8]");
  expect([](A& a) { a.grad_rows.dtype = MOIRE_FP16; }, "grad_y is bf16 [4, 8] but grad_rows is");
  expect([](A& a) { a.grad_weights.shape[0] = 5; },
         "grad_weights is fp32 [5, 2], needs [T, k] = [4, 2]");
  expect([](A& a) { a.tail = -1; }, "tail is -1, must be 0 to 1");
  expect([](A& a) { a.groups.capacity = -1; }, "groups.capacity is -1, must not be negative");
  expect([](A& a) { a.grad_y.data = a.grad_rows.data; }, "grad_rows and grad_y overlap");
  expect([](A& a) { a.grad_rows.data = a.rows.data; }, "grad_rows and rows overlap");
  expect([](A& a) { a.weights.data = a.grad_rows.data; }, "grad_rows and weights overlap");
  expect([&](A& a) { a.scatter_idx.data = a.grad_rows.data = scatter.data(); },
         "grad_rows and scatter_idx overlap");
  expect([](A& a) { a.grad_weights.data = a.grad_y.data; }, "grad_weights and grad_y overlap");
  expect([](A& a) { a.grad_weights.data = a.rows.data; }, "grad_weights and rows overlap");
  expect([](A& a) { a.grad_weights.data = a.weights.data; }, "grad_weights and weights overlap");
  expect([](A& a) { a.grad_weights.data = a.scatter_idx.data; },
         "grad_weights and scatter_idx overlap");
  expect([](A& a) { a.grad_weights.data = a.grad_rows.data; },
         "grad_weights and grad_rows overlap");
  const std::string used = std::to_string(c.plan.routed());
  c.plan.offsets.as<int64_t>()[3] += 1;
  expect([](A&) {}, "scatter_idx names " + used + " rows but the groups have " +
                        std::to_string(c.plan.routed()) + ", must be those of the same plan");
  c.plan.offsets.as<int64_t>()[3] -= 1;
  set_index(c.plan.scatter_idx, 2, 1, c.plan.routed());
  expect([](A&) {}, "scatter_idx[2, 1] is " + used + ", must be -1 to");
}

}  // namespace
}  // namespace moire::test
