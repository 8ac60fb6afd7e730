// permute: tokens into expert order, weights beside them.
#include <gtest/gtest.h>
#include <moire/routing.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "reference/routing.h"
#include "tests/ops/routing_support.h"
#include "tests/support/outputs.h"

namespace moire::test {
namespace {

// Both pairs of tensors of one call.
struct PermuteCase {
  PermuteCase(int64_t num_tokens, int64_t k, int64_t num_groups, int64_t hidden, DType dtype,
              int64_t tail, DType index_type = DType::kInt32, int64_t padding = 0)
      : plan(random, num_tokens, k, num_groups, tail, index_type),
        x(dtype, {num_tokens, hidden}, padding),
        rows(dtype, {plan.groups.capacity, hidden}, padding),
        topk_weights(DType::kFP32, {num_tokens, k}, padding),
        probs(DType::kFP32, {plan.groups.capacity}) {
    x.randomize(random);
    topk_weights.randomize(random);
  }

  PermuteArgs args(int32_t tail = MOIRE_TAIL_ZERO) {
    PermuteArgs a;
    a.x = x;
    a.gather_idx = plan.gather_idx;
    a.rows = rows;
    a.topk_weights = topk_weights;
    a.scatter_idx = plan.scatter_idx;
    a.probs = probs;
    a.groups = plan.groups;
    a.tail = tail;
    return a;
  }
  void check(const Tested& context, int32_t tail = MOIRE_TAIL_ZERO) {
    expect_right(context, args(tail));
    EXPECT_TRUE(rows.is_undamaged() && probs.is_undamaged());
  }

  Random random;
  RandomPlan plan;
  TestTensor x, rows, topk_weights, probs;
};

TEST(Permute, GathersRowsAndWeightsForAnyShapeAndType) {
  const Tested context = tested();
  for (const DType dtype : {DType::kFP32, DType::kBF16, DType::kFP16}) {
    for (const DType index_type : {DType::kInt32, DType::kInt64}) {
      for (const int64_t num_tokens : {0, 1, 33}) {
        for (const int64_t hidden : {0, 1, 7, 96}) {
          SCOPED_TRACE(testing::Message()
                       << dtype_name(dtype) << ", " << num_tokens << " tokens of " << hidden);
          PermuteCase c(num_tokens, 3, 5, hidden, dtype, 4, index_type, 2);
          c.check(context);
        }
      }
    }
  }
}

TEST(Permute, LeavesTheTailUntouchedWhenAsked) {
  PermuteCase c(10, 2, 4, 24, DType::kBF16, 7);
  c.check(tested(), MOIRE_TAIL_UNTOUCHED);
}

TEST(Permute, NeverReadsTheTailOfGatherIdx) {
  PermuteCase c(10, 2, 4, 24, DType::kFP32, 7);
  for (int64_t i = c.plan.routed(); i < c.plan.groups.capacity; ++i) {
    set_index(c.plan.gather_idx, 0, i, 1'000'000);
  }
  c.check(tested());
}

TEST(Permute, CopiesBits) {
  PermuteCase c(3, 1, 2, 4, DType::kBF16, 0);
  for (int64_t t = 0; t < 3; ++t) {  // a signalling NaN, -0, a subnormal, -inf
    const uint16_t bits[] = {0x7F81, 0x8000, 0x0001, 0xFF80};
    std::copy(bits, bits + 4, c.x.as<uint16_t>() + 4 * t);
  }
  ASSERT_TRUE(succeeds(permute(cpu(), c.args())));
  for (int64_t i = 0; i < c.plan.routed(); ++i) {
    EXPECT_EQ(0, std::memcmp(c.rows.as<uint16_t>() + 4 * i, c.x.as<uint16_t>(), 8));
  }
}

TEST(Permute, EitherPairMayBeAbsent) {
  PermuteCase both(20, 3, 4, 16, DType::kFP16, 2);
  ASSERT_TRUE(succeeds(permute(tested(), both.args())));
  const TestTensor rows = both.rows, probs = both.probs;
  both.rows.poison();
  both.probs.poison();
  PermuteArgs only_rows = both.args();
  only_rows.topk_weights = only_rows.scatter_idx = only_rows.probs = {};
  ASSERT_TRUE(succeeds(permute(tested(), only_rows)));
  EXPECT_TRUE(same_bits(both.rows, rows));
  PermuteArgs only_probs = both.args();
  only_probs.x = only_probs.gather_idx = only_probs.rows = {};
  ASSERT_TRUE(succeeds(permute(tested(), only_probs)));
  EXPECT_TRUE(same_bits(both.probs, probs));
}

TEST(Permute, WithoutGroupsEveryRowIsTail) {
  Random random;
  TestTensor x(DType::kFP32, {2, 3}), rows(DType::kFP32, {4, 3});
  x.randomize(random);
  TestTensor gather_idx(DType::kInt32, {4});
  PermuteArgs args;
  args.x = x;
  args.gather_idx = gather_idx;
  args.rows = rows;
  args.groups.capacity = 4;
  ASSERT_TRUE(succeeds(permute(tested(), args)));
  EXPECT_TRUE(tail_is_zero(rows, args.groups));
}

// Enough rows for several tasks.
TEST(Permute, IsTheSameForAnyNumberOfThreads) {
  PermuteCase c(600, 4, 16, 300, DType::kFP32, 300);
  c.check(cpu(1));
  expect_same_on_any_threads(c.args());
}

TEST(Permute, RefusesBadArgumentsAndSaysWhy) {
  PermuteCase c(4, 2, 3, 8, DType::kFP32, 2);
  const std::string capacity = std::to_string(c.plan.groups.capacity),
                    used = std::to_string(c.plan.routed());
  const auto expect = [&](auto&& change, const std::string& message) {
    PermuteArgs args = c.args();
    change(args);
    EXPECT_TRUE(fails(permute(cpu(), args), Code::kInvalidArgument, "permute: " + message));
    EXPECT_TRUE(tail_is_untouched(c.rows, {})) << "an output was written";
    EXPECT_TRUE(tail_is_untouched(c.probs, {})) << "an output was written";
  };
  // Where two tensors overlap, the smaller lies on the larger: what lies behind it does not matter.
  std::vector<std::byte> gather = with_room(c.plan.gather_idx),
                         scatter = with_room(c.plan.scatter_idx);
  using A = PermuteArgs;
  expect([](A& a) { a = A(); }, "there is nothing to do: x and rows, or topk_weights");
  expect([](A& a) { a.x = {}; }, "x is absent, needs fp32, bf16 or fp16 of rank 2");
  expect([](A& a) { a.x.dtype = MOIRE_E4M3; }, "x is e4m3 [4, 8], needs fp32, bf16 or fp16");
  expect([](A& a) { a.x.data = nullptr; }, "x is fp32 [4, 8] but its data pointer is null");
  expect([&](A& a) { a.rows = {}; },
         "rows is absent, needs fp32, bf16 or fp16 [capacity, H] = [" + capacity + ", 8]");
  expect([](A& a) { a.rows.shape[1] = 7; }, "rows is fp32 [" + capacity + ", 7], needs [capacity");
  expect([](A& a) { a.rows.dtype = MOIRE_BF16; }, "x is fp32 [4, 8] but rows is bf16");
  expect([](A& a) { a.x.data = a.rows.data; }, "rows and x overlap");
  expect([&](A& a) { a.gather_idx.data = a.rows.data = gather.data(); },
         "rows and gather_idx overlap");
  expect([](A& a) { a.gather_idx = {}; }, "gather_idx is absent, needs int32 or int64 [capacity]");
  expect([](A& a) { a.gather_idx.dtype = MOIRE_FP32; },
         "gather_idx is fp32 [" + capacity + "], needs int32 or int64");
  expect([](A& a) { a.topk_weights = {}; }, "topk_weights is absent, needs fp32 of rank 2");
  expect([](A& a) { a.topk_weights.dtype = MOIRE_BF16; },
         "topk_weights is bf16 [4, 2], needs fp32");
  expect([](A& a) { a.scatter_idx.shape[1] = 1; },
         "scatter_idx is int32 [4, 1], needs [T, k] = [4, 2]");
  expect([](A& a) { a.probs.shape[0] -= 1; }, "probs is fp32 [");
  expect([](A& a) { a.topk_weights.shape[0] = a.scatter_idx.shape[0] = 3; },
         "x is fp32 [4, 8] but topk_weights is fp32 [3, 2]: both must have the same number");
  expect([](A& a) { a.topk_weights.data = a.probs.data; }, "probs and topk_weights overlap");
  expect([&](A& a) { a.scatter_idx.data = a.probs.data = scatter.data(); },
         "probs and scatter_idx overlap");
  expect([](A& a) { a.probs.data = a.rows.data; }, "probs and rows overlap");
  expect([](A& a) { a.tail = 2; }, "tail is 2, must be 0 to 1");
  expect([](A& a) { a.groups.num_groups = -1; }, "groups.num_groups is -1");
  expect([](A& a) { a.groups.offsets = nullptr; }, "groups.offsets is null");
  expect([](A& a) { a.groups.num_groups = 0; },
         "scatter_idx[");  // a row that no group owns
  c.plan.offsets.as<int64_t>()[3] += 1;
  expect([](A& a) { a.x = a.gather_idx = a.rows = {}; }, "scatter_idx names " + used + " rows but");
  expect([](A&) {}, "gather_idx[" + used + "] is -1, must be 0 to 3");
  c.plan.offsets.as<int64_t>()[3] -= 1;
  set_index(c.plan.gather_idx, 0, 0, 4);
  expect([](A&) {}, "gather_idx[0] is 4, must be 0 to 3");
}

// scatter_idx, but with the rows of two choices exchanged, or one named twice, is no inverse.
TEST(Permute, RefusesAScatterThatIsNotTheInverseOfTheGather) {
  for (const DType dtype : {DType::kInt32, DType::kInt64}) {
    PermuteCase c(40, 3, 4, 8, DType::kFP32, 2, dtype);
    TestTensor& scatter = c.plan.scatter_idx;
    const auto row_of = [&](int64_t t, int64_t j) { return reference::read_index(scatter, t, j); };
    int64_t token = 1, choice = 0;
    while (row_of(token, choice) < 0) choice == 2 ? (++token, choice = 0) : ++choice;
    const int64_t first = row_of(0, 0), other = row_of(token, choice);
    const auto refused = [&](int64_t row) {
      const int64_t from = reference::read_index(c.plan.gather_idx, 0, row);
      const std::string t = std::to_string(from);
      return fails(permute(cpu(), c.args()), Code::kInvalidArgument,
                   "permute: row " + std::to_string(row) + " is gathered from token " + t +
                       " but scatter_idx[" + t + "] does not name it; scatter_idx must be the " +
                       "inverse of gather_idx");
    };
    set_index(scatter, 0, 0, other);
    EXPECT_TRUE(refused(first)) << "row " << other << " is named twice";
    set_index(scatter, token, choice, first);
    EXPECT_TRUE(refused(std::min(first, other))) << "rows exchanged";
    EXPECT_TRUE(tail_is_untouched(c.rows, {})) << "an output was written";
    PermuteArgs one_pair = c.args();
    one_pair.x = one_pair.gather_idx = one_pair.rows = {};
    EXPECT_TRUE(succeeds(permute(cpu(), one_pair))) << "without gather_idx nothing contradicts it";
    set_index(scatter, 0, 0, first);
    set_index(scatter, token, choice, other);
    c.check(cpu());
  }
}

TEST(Permute, ExplainsItselfWithoutReadingValues) {
  PermuteCase c(4, 2, 3, 8, DType::kBF16, 2, DType::kInt64);
  c.plan.gather_idx.poison();
  const Context explaining = cpu(2).explaining();
  ASSERT_TRUE(succeeds(permute(explaining, c.args())));
  const Step step = explaining.explanation().at(0);
  const int64_t capacity = c.plan.groups.capacity;
  EXPECT_EQ(step.op, "permute");
  EXPECT_EQ(step.problem, "3 groups, capacity " + std::to_string(capacity) + ", bf16 [" +
                              std::to_string(capacity) + ", 8]");
  EXPECT_EQ(step.policy, "copy, 8192 rows per task, 2 threads");
  const int64_t tokens = std::min<int64_t>(4, capacity) * 8 * 2;  // each once, if in so many rows
  EXPECT_EQ(step.bytes_read, tokens + capacity * 8 + 4 * 2 * (4 + 8));
  EXPECT_EQ(step.bytes_written, capacity * (8 * 2 + 4));
}

}  // namespace
}  // namespace moire::test
