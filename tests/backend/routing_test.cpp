// Router and unpermute, forward and backward: the same bits on every SIMD target.
#include <gtest/gtest.h>
#include <moire/routing.h>

#include <vector>

// Defines HWY_TARGETS as the kernels see it.
#include "backend/cpu/simd_targets.h"
#include "tests/backend/each_target.h"
#include "tests/ops/routing_support.h"

namespace moire::test {
namespace {

// Runs `call` on every target; `outputs` must come out the same.
template <class Call>
void expect_same_on_every_target(const std::vector<TestTensor*>& outputs, const Call& call) {
  std::vector<TestTensor> first;
  cpu::for_each_target([&] {
    for (TestTensor* output : outputs) output->poison();
    ASSERT_TRUE(succeeds(call()));
    if (first.empty()) {
      for (const TestTensor* output : outputs) first.push_back(*output);
    }
    for (size_t i = 0; i < outputs.size(); ++i) EXPECT_TRUE(same_bits(*outputs[i], first[i]));
  });
}

TEST(RoutingTargets, RouterHasTheSameBits) {
  Random random;
  const Context context = test::cpu(1);
  for (const int mode : {0, 1, 2, 3}) {
    for (const int64_t num_experts : {5, 64, 250}) {
      TestTensor logits(DType::kFP32, {40, num_experts}), idx(DType::kInt32, {40, 4}),
          weights(DType::kFP32, {40, 4}), grads(DType::kFP32, {40, num_experts});
      logits.randomize(random, 3);
      RouterArgs args;
      args.logits = logits;
      args.kind = mode % 2;
      args.normalize = mode / 2;
      args.topk_idx = idx;
      args.topk_weights = weights;
      expect_same_on_every_target({&idx, &weights}, [&] { return router(context, args); });
      RouterBackwardArgs backward;
      backward.logits = logits;
      backward.topk_idx = idx;
      backward.grad_topk_weights = weights;
      backward.kind = args.kind;
      backward.normalize = args.normalize;
      backward.grad_logits = grads;
      expect_same_on_every_target({&grads}, [&] { return router_backward(context, backward); });
    }
  }
}

TEST(RoutingTargets, UnpermuteHasTheSameBits) {
  Random random;
  const Context context = test::cpu(1);
  for (const DType dtype : {DType::kFP32, DType::kBF16, DType::kFP16}) {
    for (const int64_t hidden : {7, 64, 203}) {
      const RandomPlan plan(random, 25, 3, 6, 0);
      TestTensor rows(dtype, {plan.groups.capacity, hidden}), weights(DType::kFP32, {25, 3}),
          y(dtype, {25, hidden}), grad_rows(dtype, {plan.groups.capacity, hidden}),
          grad_weights(DType::kFP32, {25, 3});
      rows.randomize(random);
      weights.randomize(random);
      UnpermuteArgs args;
      args.rows = rows;
      args.scatter_idx = plan.scatter_idx;
      args.weights = weights;
      args.y = y;
      expect_same_on_every_target({&y}, [&] { return unpermute(context, args); });
      UnpermuteBackwardArgs backward;
      backward.grad_y = y;
      backward.rows = rows;
      backward.scatter_idx = plan.scatter_idx;
      backward.weights = weights;
      backward.grad_rows = grad_rows;
      backward.grad_weights = grad_weights;
      backward.groups = plan.groups;
      expect_same_on_every_target({&grad_rows, &grad_weights},
                                  [&] { return unpermute_backward(context, backward); });
    }
  }
}

}  // namespace
}  // namespace moire::test
