// Runs a grouped MLP problem and holds every output to the reference.
#pragma once

#include <gtest/gtest.h>

#include "reference/grouped_mlp.h"
#include "tests/support/expect.h"
#include "tests/support/mlp_problem.h"

namespace moire::test {

inline Status run_forward(const Tested& context, const GroupedMlpArgs& args) {
  return run(context, args, grouped_mlp, grouped_mlp_workspace);
}
inline Status run_backward(const Tested& context, const GroupedMlpBackwardArgs& args) {
  return run(context, args, grouped_mlp_backward, grouped_mlp_backward_workspace);
}

// Zeros or the caller's bytes, as the options ask.
inline testing::AssertionResult has_right_tail(const TestTensor& t, const MlpProblem& p) {
  return p.options.tail == MOIRE_TAIL_ZERO ? tail_is_zero(t, p.batch.groups())
                                           : tail_is_untouched(t, p.batch.groups());
}

inline void expect_forward_is_right(const Tested& context, const MlpProblem& p) {
  const Groups& groups = p.batch.groups();
  const reference::MlpResults want = reference::grouped_mlp(p.forward());
  ASSERT_TRUE(succeeds(run_forward(context, p.forward())));
  EXPECT_TRUE(matches(p.z, want.z, groups)) << "z";
  if (p.options.saves_act) {
    EXPECT_TRUE(matches(p.act, want.act, groups)) << "act";
  }
  EXPECT_TRUE(matches(p.y, want.y, groups)) << "y";
  EXPECT_TRUE(has_right_tail(p.y, p)) << "y";
  EXPECT_TRUE(tail_is_untouched(p.z, groups)) << "z";
  EXPECT_TRUE(p.is_undamaged());
}

// After a forward, whose z (and act) it reads.
inline void expect_backward_is_right(const Tested& context, const MlpProblem& p,
                                     const MlpNeeds& needs = {}) {
  const Groups& groups = p.batch.groups();
  const GroupedMlpBackwardArgs args = p.backward(needs);
  const reference::MlpGradients want = reference::grouped_mlp_backward(args);
  ASSERT_TRUE(succeeds(run_backward(context, args)));
  if (is_present(args.grad_x)) {
    EXPECT_TRUE(matches(p.grad_x, want.grad_x, groups)) << "grad_x";
    EXPECT_TRUE(has_right_tail(p.grad_x, p)) << "grad_x";
  }
  if (is_present(args.grad_probs)) {
    EXPECT_TRUE(matches(p.grad_probs, want.grad_probs, groups)) << "grad_probs";
    EXPECT_TRUE(has_right_tail(p.grad_probs, p)) << "grad_probs";
  }
  if (is_present(args.grad_b2_scale)) {
    EXPECT_TRUE(matches(p.grad_b2_scale, want.grad_b2_scale, groups)) << "grad_b2_scale";
    EXPECT_TRUE(has_right_tail(p.grad_b2_scale, p)) << "grad_b2_scale";
  }
  if (is_present(args.grad_w1)) {
    EXPECT_TRUE(matches(p.grad_w1, want.grad_w1)) << "grad_w1";
  }
  if (is_present(args.grad_w2)) {
    EXPECT_TRUE(matches(p.grad_w2, want.grad_w2)) << "grad_w2";
  }
  if (is_present(args.grad_b1)) {
    EXPECT_TRUE(matches(p.grad_b1, want.grad_b1)) << "grad_b1";
  }
  if (is_present(args.grad_b2)) {
    EXPECT_TRUE(matches(p.grad_b2, want.grad_b2)) << "grad_b2";
  }
  EXPECT_TRUE(p.is_undamaged());
}

inline void expect_mlp_is_right(const Tested& context, const MlpOptions& options, Random& random) {
  SCOPED_TRACE(testing::PrintToString(options));
  const MlpProblem p(options, random);
  expect_forward_is_right(context, p);
  if (testing::Test::HasFatalFailure()) return;
  expect_backward_is_right(context, p);
}

inline constexpr B2Scale kB2Scales[] = {B2Scale::kProbs, B2Scale::kNothing, B2Scale::kOwn};

// Where gate and up, block by block, may lie for F = 8 and multiples of it; and no up at all.
inline std::vector<GluLayout> glu_layouts() {
  return {GluLayout::halves(),
          moire_glu_layout{0, MOIRE_UP_FIRST},
          GluLayout::interleaved(1),
          GluLayout::interleaved(8),
          GluLayout::interleaved(2, MOIRE_UP_FIRST),
          GluLayout::ungated()};
}

inline std::vector<Activation> activations() {
  return {Activation::swiglu(), Activation::clamped_swiglu(), Activation::geglu_tanh(),
          Activation::reglu(), Activation::reglu2()};
}

}  // namespace moire::test
