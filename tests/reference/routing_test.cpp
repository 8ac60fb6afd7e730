// The reference's routing: cases by hand, permute and unpermute as inverses and as each other's
// transposes, the router's gradient by differences.
#include "reference/routing.h"

#include <gtest/gtest.h>
#include <moire/routing.h>

#include <cmath>
#include <vector>

#include "tests/support/differences.h"
#include "tests/support/expect.h"

namespace moire {
namespace {

using test::index_tensor;
using test::Random;
using test::TestTensor;
using Indices = std::vector<int64_t>;

// [tokens, k] indices.
TensorView reshaped(const TestTensor& t, int64_t columns) {
  TensorView v = t;
  const int64_t n = v.columns();
  return {v.data, v.type(), {n / columns, columns}};
}

TEST(ReferenceSplits, BecomeOffsets) {
  const TestTensor splits = index_tensor(DType::kInt32, {2, 0, 3});
  const moire_offsets_output outputs[] = {{{}, 0, 0}, {{}, 10, 1}};
  SplitsToOffsetsArgs args;
  args.splits = splits;
  args.outputs = outputs;
  args.num_outputs = 2;
  EXPECT_EQ(reference::splits_to_offsets(args), (std::vector<Indices>{{0, 2, 2, 5}, {20, 20, 50}}));
  const TestTensor ends = index_tensor(DType::kInt64, {2, 2, 5});
  args.splits = ends;
  args.kind = MOIRE_ENDS;
  EXPECT_EQ(reference::splits_to_offsets(args)[0], (Indices{0, 2, 2, 5}));
  const TestTensor offsets = index_tensor(DType::kInt64, {0, 2, 2, 5});
  args.splits = offsets;
  args.kind = MOIRE_OFFSETS;
  EXPECT_EQ(reference::splits_to_offsets(args)[1], (Indices{20, 20, 50}));
}

TEST(ReferencePlan, SortsByExpertStablyAndDrops) {
  // Token 0 goes to experts 1 and 0, token 1 to 1 and nowhere, token 2 to nowhere (3 = G) and 0.
  const TestTensor topk = index_tensor(DType::kInt64, {1, 0, 1, -1, 3, 0});
  const TestTensor gather = index_tensor(DType::kInt64, Indices(6));
  PermutePlanArgs args;
  args.topk_idx = reshaped(topk, 2);
  args.num_groups = 3;
  args.gather_idx = gather;
  const reference::PlanResults plan = reference::permute_plan(args);
  EXPECT_EQ(plan.offsets, (Indices{0, 2, 4, 4}));
  EXPECT_EQ(plan.gather_idx, (Indices{0, 2, 0, 1, -1, -1}));
  EXPECT_EQ(plan.scatter_idx, (Indices{2, 0, 3, -1, -1, 1}));
}

// A random plan of T tokens to k of E experts.
struct Plan {
  Plan(int64_t tokens, int64_t k_, int64_t experts, Random& random) : k(k_) {
    Indices choices;
    for (int64_t i = 0; i < tokens * k; ++i) choices.push_back(random.integer(-1, experts));
    const TestTensor topk = index_tensor(DType::kInt64, choices);
    const TestTensor room = index_tensor(DType::kInt64, Indices(choices.size()));
    PermutePlanArgs args;
    args.topk_idx = reshaped(topk, k);
    args.num_groups = experts;
    args.gather_idx = room;
    results = reference::permute_plan(args);
    gather = index_tensor(DType::kInt64, results.gather_idx);
    scatter = index_tensor(DType::kInt64, results.scatter_idx);
    groups = Groups(results.offsets.data(), experts, static_cast<int64_t>(choices.size()));
  }
  int64_t k;
  reference::PlanResults results;
  TestTensor gather, scatter;
  Groups groups;
};

TEST(ReferencePermute, ThenPlainUnpermuteCountsEachTokensRows) {
  Random random;
  const Plan plan(9, 3, 4, random);
  const TestTensor x = TestTensor(DType::kFP64, {9, 5}).randomize(random);
  TestTensor rows(DType::kFP64, {27, 5});
  PermuteArgs permute;
  permute.x = x;
  permute.gather_idx = plan.gather;
  permute.rows = rows;
  permute.groups = plan.groups;
  const reference::Matrix permuted = reference::permute(permute).rows;
  for (int64_t i = 0; i < permuted.rows; ++i) {
    for (int64_t j = 0; j < 5; ++j) rows.set(i, j, permuted.at(i, j).value);
  }
  const TestTensor y(DType::kFP64, {9, 5});
  UnpermuteArgs unpermute;
  unpermute.rows = rows;
  unpermute.scatter_idx = reshaped(plan.scatter, 3);
  unpermute.y = y;
  const reference::Matrix sums = reference::unpermute(unpermute).y;
  for (int64_t t = 0; t < 9; ++t) {
    double count = 0;
    for (size_t j = 0; j < 3; ++j) {
      count += plan.results.scatter_idx[static_cast<size_t>(t) * 3 + j] >= 0 ? 1 : 0;
    }
    for (int64_t j = 0; j < 5; ++j) EXPECT_NEAR(sums.at(t, j).value, count * x.get(t, j), 1e-12);
  }
}

TEST(ReferenceUnpermute, GradientsAreItsDerivatives) {
  Random random;
  const Plan plan(6, 2, 3, random);
  TestTensor rows = TestTensor(DType::kFP64, {12, 4}).randomize(random);
  TestTensor weights = TestTensor(DType::kFP64, {6, 2}).randomize(random);
  const TestTensor grad_y = TestTensor(DType::kFP64, {6, 4}).randomize(random);
  UnpermuteArgs forward;
  forward.rows = rows;
  forward.scatter_idx = reshaped(plan.scatter, 2);
  forward.weights = weights;
  forward.y = grad_y;  // for its shape
  const auto loss = [&] {
    const reference::Matrix y = reference::unpermute(forward).y;
    double sum = 0;
    for (int64_t t = 0; t < 6; ++t) {
      for (int64_t j = 0; j < 4; ++j) sum += y.at(t, j).value * grad_y.get(t, j);
    }
    return sum;
  };
  const TestTensor grad_rows(DType::kFP64, {12, 4}), grad_weights(DType::kFP64, {6, 2});
  UnpermuteBackwardArgs args;
  args.grad_y = grad_y;
  args.rows = rows;
  args.scatter_idx = reshaped(plan.scatter, 2);
  args.weights = weights;
  args.grad_rows = grad_rows;
  args.grad_weights = grad_weights;
  args.groups = plan.groups;
  const reference::UnpermuteBackwardResults got = reference::unpermute_backward(args);
  const double allowed = 10 * test::kDifferenceError;
  for (int64_t i = 0; i < got.grad_rows.rows; ++i) {
    for (int64_t j = 0; j < 4; ++j) {
      EXPECT_NEAR(got.grad_rows.at(i, j).value, test::central_difference(rows, i, j, loss),
                  allowed);
    }
  }
  for (int64_t t = 0; t < 6; ++t) {
    for (int64_t j = 0; j < 2; ++j) {
      EXPECT_NEAR(got.grad_weights.at(t, j).value, test::central_difference(weights, t, j, loss),
                  allowed);
    }
  }
}

TEST(ReferenceRouter, ChoosesTheLargestAndBreaksTiesByIndex) {
  TestTensor logits(DType::kFP32, {1, 4}), topk(DType::kInt64, {1, 3});
  const TestTensor topk_weights(DType::kFP32, {1, 3});
  const double values[] = {1, 3, 1, 2};
  for (int64_t e = 0; e < 4; ++e) logits.set(0, e, values[e]);
  RouterArgs args;
  args.logits = logits;
  args.normalize = 1;
  args.topk_idx = topk;
  args.topk_weights = topk_weights;
  const reference::RouterResults got = reference::router(args);
  EXPECT_EQ(got.topk_idx, (Indices{1, 3, 0}));
  const double sum = std::exp(3) + std::exp(2) + std::exp(1);
  EXPECT_NEAR(got.topk_weights.at(0, 0).value, std::exp(3) / sum, 1e-15);
  EXPECT_NEAR(got.topk_weights.at(0, 2).value, std::exp(1) / sum, 1e-15);
}

TEST(ReferenceRouter, BiasChangesTheChoiceAndNotTheWeights) {
  TestTensor logits(DType::kFP32, {1, 2}), bias(DType::kFP32, {2}), topk(DType::kInt64, {1, 1});
  const TestTensor topk_weights(DType::kFP32, {1, 1});
  logits.set(0, 0, 2);
  logits.set(0, 1, 0);
  bias.set(0, 0, 0);
  bias.set(0, 1, 1);
  RouterArgs args;
  args.logits = logits;
  args.expert_bias = bias;
  args.kind = MOIRE_ROUTER_SIGMOID;
  args.scale = 2.5;
  args.topk_idx = topk;
  args.topk_weights = topk_weights;
  const reference::RouterResults got = reference::router(args);
  EXPECT_EQ(got.topk_idx, (Indices{1}));
  EXPECT_EQ(got.topk_weights.at(0, 0).value, 1.25);
}

TEST(ReferenceRouter, GradientsAreItsDerivatives) {
  Random random;
  for (const int32_t kind : {MOIRE_ROUTER_SOFTMAX, MOIRE_ROUTER_SIGMOID}) {
    for (const int32_t normalize : {0, 1}) {
      TestTensor logits = TestTensor(DType::kFP64, {3, 6}).randomize(random);
      const TestTensor topk(DType::kInt64, {3, 2});
      const TestTensor incoming = TestTensor(DType::kFP64, {3, 2}).randomize(random);
      RouterArgs args;
      args.logits = logits;
      args.kind = kind;
      args.normalize = normalize;
      args.scale = 1.5;
      args.topk_idx = topk;
      const Indices choice = reference::router(args).topk_idx;
      const auto loss = [&] {
        const reference::Matrix weights = reference::router_weights(args, choice);
        double sum = 0;
        for (int64_t i = 0; i < 6; ++i) {
          sum += weights.at(i / 2, i % 2).value * incoming.get(i / 2, i % 2);
        }
        return sum;
      };
      const TestTensor chosen = index_tensor(DType::kInt64, choice);
      RouterBackwardArgs backward;
      backward.logits = logits;
      backward.topk_idx = reshaped(chosen, 2);
      backward.grad_topk_weights = incoming;
      backward.kind = kind;
      backward.normalize = normalize;
      backward.scale = 1.5;
      const reference::Matrix got = reference::router_backward(backward);
      for (int64_t i = 0; i < 18; ++i) {
        EXPECT_NEAR(got.at(i / 6, i % 6).value,
                    test::central_difference(logits, i / 6, i % 6, loss),
                    10 * test::kDifferenceError)
            << kind << " " << normalize;
      }
    }
  }
}

}  // namespace
}  // namespace moire
