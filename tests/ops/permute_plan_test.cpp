// permute_plan against the definition: rows sorted by expert, stable in token and choice order.
#include <gtest/gtest.h>
#include <moire/routing.h>

#include <algorithm>
#include <string>

#include "reference/routing.h"
#include "tests/ops/routing_support.h"
#include "tests/support/outputs.h"

namespace moire::test {
namespace {

// The tensors of one plan.
struct PlanCase {
  PlanCase(int64_t num_tokens, int64_t k, int64_t num_groups, DType choice_type, DType row_type,
           int64_t tail, int64_t padding = 0)
      : topk_idx(random_choices(random, choice_type, num_tokens, k, num_groups, padding)),
        offsets(DType::kInt64, {num_groups + 1}),
        gather_idx(row_type, {num_tokens * k + tail}),
        scatter_idx(row_type, {num_tokens, k}, padding) {
    args.num_groups = num_groups;
  }

  PermutePlanArgs& filled() {
    args.topk_idx = topk_idx;
    args.offsets = offsets;
    args.gather_idx = gather_idx;
    args.scatter_idx = scatter_idx;
    return args;
  }
  Status run(const Tested& context) { return test::run(context, filled()); }
  void check(const Tested& context) {
    expect_right(context, filled());
    EXPECT_TRUE(offsets.is_undamaged() && gather_idx.is_undamaged() && scatter_idx.is_undamaged());
  }

  Random random;
  TestTensor topk_idx, offsets, gather_idx, scatter_idx;
  PermutePlanArgs args;
};

TEST(PermutePlan, EqualsTheDefinitionForAnyShapeAndIndexType) {
  const Tested context = tested();
  for (const DType choices : {DType::kInt32, DType::kInt64}) {
    for (const DType rows : {DType::kInt32, DType::kInt64}) {
      for (const int64_t num_groups : {1, 3, 128, 512}) {
        for (const int64_t k : {1, 2, 8}) {
          for (const int64_t num_tokens : {0, 1, 7, 100}) {
            SCOPED_TRACE(testing::Message()
                         << num_tokens << " tokens, k " << k << ", " << num_groups << " groups");
            PlanCase c(num_tokens, k, num_groups, choices, rows, 5);
            c.check(context);
          }
        }
      }
    }
  }
}

TEST(PermutePlan, IsStableInTokenThenChoiceOrder) {
  PlanCase c(3, 2, 2, DType::kInt32, DType::kInt32, 2);
  const int64_t choices[3][2] = {{1, 1}, {0, -1}, {2, 0}};  // 2 = G: dropped
  for (int64_t t = 0; t < 3; ++t) {
    for (int64_t j = 0; j < 2; ++j) set_index(c.topk_idx, t, j, choices[t][j]);
  }
  ASSERT_TRUE(succeeds(c.run(tested())));
  EXPECT_TRUE(same_indices(c.offsets, {0, 2, 4}));
  EXPECT_TRUE(same_indices(c.gather_idx, {1, 2, 0, 0, -1, -1, -1, -1}));
  EXPECT_TRUE(same_indices(c.scatter_idx, {2, 3, 0, -1, -1, 1}));
}

// Several blocks of tokens, with row strides.
TEST(PermutePlan, IsTheSameForAnyNumberOfThreads) {
  PlanCase c(5000, 6, 64, DType::kInt64, DType::kInt32, 70000, 3);
  c.check(cpu(1));
  expect_same_on_any_threads(c.filled());
}

// As a GPU has it: of few choices one block does all, of many there are parts, whose counters of
// many experts lie in the workspace.
TEST(PermutePlan, IsTheDefinitionsOfFewAndManyChoicesExpertsAndRows) {
  struct Sizes {
    int64_t tokens, k, groups, room;
  };
  for (const Sizes s : {Sizes{1, 8, 128, 0},
                        {512, 8, 128, 5},
                        {513, 8, 128, 5},
                        {600, 8, 1500, 0},
                        {3, 2, 3000, 9},
                        {4, 2, 5, 20000},
                        {1000, 4, 12000, 0}}) {
    SCOPED_TRACE(testing::Message() << s.tokens << " tokens, " << s.groups << " experts");
    PlanCase c(s.tokens, s.k, s.groups, DType::kInt64, DType::kInt32, s.room);
    c.check(tested());
  }
}

TEST(PermutePlan, TakesNoGroups) {
  PlanCase c(4, 2, 0, DType::kInt32, DType::kInt64, 0);
  ASSERT_TRUE(succeeds(c.run(tested())));
  EXPECT_TRUE(same_indices(c.offsets, {0}));
  EXPECT_TRUE(same_indices(c.scatter_idx, std::vector<int64_t>(8, -1)));
}

TEST(PermutePlan, TakesACapacityOfExactlyTheRoutedRows) {
  PlanCase c(20, 4, 6, DType::kInt32, DType::kInt32, 0);
  ASSERT_TRUE(succeeds(c.run(cpu())));
  const int64_t routed = c.offsets.as<int64_t>()[6];
  c.gather_idx = TestTensor(DType::kInt32, {routed});
  c.check(cpu());
  c.gather_idx = TestTensor(DType::kInt32, {routed - 1});
  const TestTensor offsets = c.offsets, scatter_idx = c.scatter_idx, gather_idx = c.gather_idx;
  EXPECT_TRUE(fails(c.run(cpu()), Code::kInvalidArgument,
                    "permute_plan: gather_idx has a capacity of " + std::to_string(routed - 1) +
                        " rows but " + std::to_string(routed) + " are routed"));
  EXPECT_TRUE(same_bits(c.offsets, offsets));
  EXPECT_TRUE(same_bits(c.gather_idx, gather_idx));
  EXPECT_TRUE(same_bits(c.scatter_idx, scatter_idx));
}

TEST(PermutePlan, SizesItsWorkspaceFromShapesAlone) {
  PlanCase c(4, 2, 16, DType::kInt32, DType::kInt32, 0);
  PermutePlanArgs args = c.filled();
  args.topk_idx.data = args.offsets.data = args.gather_idx.data = args.scatter_idx.data = nullptr;
  size_t bytes = 0;
  ASSERT_TRUE(succeeds(permute_plan_workspace(cpu(), args, &bytes)));
  EXPECT_EQ(bytes, 2 * 16 * sizeof(int64_t));
  const std::string needs = "permute_plan: the workspace has 0 bytes, needs 256";
  EXPECT_TRUE(fails(permute_plan(cpu(), c.filled()), Code::kOutOfMemory, needs));
}

TEST(PermutePlan, RefusesBadArgumentsAndSaysWhy) {
  PlanCase c(4, 2, 3, DType::kInt32, DType::kInt32, 0);
  const auto expect = [&](auto&& change, const std::string& message) {
    PermutePlanArgs args = c.filled();
    change(args);
    EXPECT_TRUE(
        fails(permute_plan(cpu(), args), Code::kInvalidArgument, "permute_plan: " + message));
    EXPECT_EQ(c.offsets.as<int64_t>()[0], -1) << "an output was written";
  };
  using A = PermutePlanArgs;
  expect([](A& a) { a.topk_idx = {}; }, "topk_idx is absent, needs int32 or int64 of rank 2");
  expect([](A& a) { a.topk_idx.rank = 1; }, "topk_idx has rank 1, needs rank 2");
  expect([](A& a) { a.topk_idx.dtype = MOIRE_FP32; },
         "topk_idx is fp32 [4, 2], needs int32 or int64");
  expect([](A& a) { a.topk_idx.data = nullptr; },
         "topk_idx is int32 [4, 2] but its data pointer is null");
  expect([](A& a) { a.num_groups = -1; }, "num_groups is -1, must be 0 to 2^30");
  expect([](A& a) { a.num_groups = (int64_t{1} << 30) + 1; },
         "num_groups is 1073741825, must be 0 to 2^30");
  expect([](A& a) { a.num_groups = int64_t{1} << 30; },
         "offsets is int64 [4], needs [num_groups + 1] = [1073741825]");
  expect([](A& a) { a.num_groups = 4; }, "offsets is int64 [4], needs [num_groups + 1] = [5]");
  expect([](A& a) { a.offsets.dtype = MOIRE_INT32; }, "offsets is int32 [4], needs int64");
  expect([](A& a) { a.gather_idx.dtype = MOIRE_UINT8; },
         "gather_idx is uint8 [8], needs int32 or int64");
  expect([](A& a) { a.gather_idx.dtype = MOIRE_INT64; },
         "gather_idx is int64 [8] but scatter_idx is int32 [4, 2]: the dtypes must be equal");
  expect([](A& a) { a.scatter_idx.shape[1] = 3; },
         "scatter_idx is int32 [4, 3], needs [T, k] = [4, 2]");
  expect([](A& a) { a.gather_idx.data = a.topk_idx.data; }, "gather_idx and topk_idx overlap");
  expect([](A& a) { a.scatter_idx.data = a.topk_idx.data; }, "scatter_idx and topk_idx overlap");
  expect([](A& a) { a.gather_idx.data = a.scatter_idx.data; },
         "scatter_idx and gather_idx overlap");
  set_index(c.topk_idx, 2, 1, 4);
  expect([](A&) {}, "topk_idx[2, 1] is 4, must be -1 to 3");
  set_index(c.topk_idx, 1, 0, -2);
  expect([](A&) {}, "topk_idx[1, 0] is -2, must be -1 to 3");
}

TEST(PermutePlan, ExplainsItself) {
  PlanCase c(4, 2, 3, DType::kInt32, DType::kInt64, 1);
  const Context explaining = cpu(2).explaining();
  ASSERT_TRUE(succeeds(c.run(explaining)));
  const Step step = explaining.explanation().at(0);
  EXPECT_EQ(step.op, "permute_plan");
  EXPECT_EQ(step.implementation, "cpu");
  EXPECT_EQ(step.problem, "4 tokens, top 2, 3 groups, capacity 9");
  EXPECT_EQ(step.policy, "counting sort, 1 blocks of 4 tokens, 2 threads");
  EXPECT_EQ(step.bytes_read, 4 * 2 * 4);
  EXPECT_EQ(step.bytes_written, 4 * 8 + 9 * 8 + 4 * 2 * 8);
}

}  // namespace
}  // namespace moire::test
