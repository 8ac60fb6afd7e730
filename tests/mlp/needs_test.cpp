// Every gradient is optional on its own, and none of them depends on which others are asked for;
// weight gradients may be a later call.
#include <string>
#include <utility>

#include "tests/mlp/mlp_checks.h"

namespace moire::test {
namespace {

constexpr MlpNeeds kNone{false, false, false, false, false, false, false};
constexpr bool MlpNeeds::*kMembers[] = {&MlpNeeds::x,       &MlpNeeds::w1, &MlpNeeds::b1,
                                        &MlpNeeds::w2,      &MlpNeeds::b2, &MlpNeeds::probs,
                                        &MlpNeeds::b2_scale};

std::vector<std::pair<std::string, MlpNeeds>> needs_table(bool with_own_b2_scale) {
  std::vector<std::pair<std::string, MlpNeeds>> table{{"all", {}}};
  const char* const names[] = {"x", "w1", "b1", "w2", "b2", "probs", "b2_scale"};
  for (size_t i = 0; i < std::size(kMembers) - (with_own_b2_scale ? 0 : 1); ++i) {
    MlpNeeds only = kNone, without;
    only.*kMembers[i] = true;
    without.*kMembers[i] = false;
    table.emplace_back(std::string("only ") + names[i], only);
    table.emplace_back(std::string("all but ") + names[i], without);
  }
  MlpNeeds frozen_fc1, frozen_fc2, frozen_both;
  frozen_fc1.w1 = frozen_fc1.b1 = false;
  frozen_fc2.w2 = frozen_fc2.b2 = false;
  frozen_both.w1 = frozen_both.b1 = frozen_both.w2 = frozen_both.b2 = false;
  table.emplace_back("FC1 frozen", frozen_fc1);
  table.emplace_back("FC2 frozen", frozen_fc2);
  table.emplace_back("both frozen", frozen_both);
  return table;
}

void poison_gradients(MlpProblem& p) {
  for (TestTensor* t : {&p.grad_x, &p.grad_b1, &p.grad_b2, &p.grad_probs, &p.grad_b2_scale}) {
    t->poison();
  }
  p.grad_w1.poison();
  p.grad_w2.poison();
}

// What was asked for has the bits of `want`; the rest is still poisoned.
void expect_only(const MlpProblem& got, const MlpProblem& untouched, const MlpProblem& want,
                 const MlpNeeds& needs) {
  MlpNeeds others;
  for (const auto member : kMembers) others.*member = !(needs.*member);
  EXPECT_TRUE(same_outputs(got.backward(needs), want.backward(needs)));
  EXPECT_TRUE(same_outputs(got.backward(others), untouched.backward(others)));
}

class GroupedMlpNeeds : public testing::TestWithParam<bool> {};

TEST_P(GroupedMlpNeeds, EachGradientAloneHasTheBitsItHasAmongAll) {
  Random random;
  for (const DType dtype : {DType::kFP32, DType::kBF16}) {
    MlpOptions options;
    options.dtype = dtype;
    options.saves_act = GetParam();
    options.b2_scale = GetParam() ? B2Scale::kProbs : B2Scale::kOwn;
    on_one_device(tested(), [&](const Tested& device) {
      MlpProblem all(options, random);
      ASSERT_TRUE(succeeds(run(device, all.forward())));
      MlpProblem untouched = all;
      MlpProblem some = all;
      ASSERT_TRUE(succeeds(run(device, all.backward())));
      for (const auto& [name, needs] : needs_table(all.with_own_b2_scale())) {
        SCOPED_TRACE(name);
        poison_gradients(some);
        ASSERT_TRUE(succeeds(run(device, some.backward(needs))));
        expect_only(some, untouched, all, needs);
      }
    });
  }
}

TEST(GroupedMlpGradients, OfWhichNoneIsAskedForAreRefused) {
  Random random;
  const MlpProblem p({}, random);
  EXPECT_TRUE(fails(grouped_mlp_backward(cpu(), p.backward(kNone)), Code::kInvalidArgument,
                    "grouped_mlp_backward: there is nothing to do: act, grad_z, grad_x, grad_w1, "
                    "grad_b1, grad_w2, grad_b2, grad_probs, act_columnwise, grad_z_columnwise or "
                    "grad_b2_scale must be present"));
  GroupedLinearBackwardArgs linear;
  linear.grad_y = p.z;
  linear.groups = p.batch.groups();
  size_t bytes = 0;
  EXPECT_TRUE(fails(grouped_linear_backward_workspace(cpu(), linear, &bytes),
                    Code::kInvalidArgument,
                    "grouped_linear_backward: there is nothing to do: grad_x, grad_w, grad_bias or "
                    "grad_scale must be present"));
}

INSTANTIATE_TEST_SUITE_P(SavePolicy, GroupedMlpNeeds, testing::Bool());

// Operands that no asked-for gradient needs may be absent.
TEST(GroupedMlpGradients, AbsentOperandsAreFineWhereNothingReadsThem) {
  Random random;
  const MlpProblem p({}, random);
  ASSERT_TRUE(succeeds(run(tested(), p.forward())));
  MlpNeeds needs = kNone;
  needs.w2 = needs.b2 = true;
  GroupedMlpBackwardArgs args = p.backward(needs);
  args.x = {};
  args.w1 = {};
  args.w2 = {};
  args.b2 = {};
  expect_right(tested(), args);
}

// A linear layer's backward, of which z is grad_y.
Status run_backward_from_z(const MlpProblem& p, GroupedLinearBackwardArgs linear) {
  linear.grad_y = p.z;
  linear.groups = p.batch.groups();
  return run(Tested(cpu()), linear);
}

// Nor is it looked at: neither its shape nor, where it is listed, what lies behind the list.
TEST(GroupedMlpGradients, AListThatNothingReadsIsNotWalked) {
  Random random;
  MlpOptions options;
  options.listed = true;
  const MlpProblem p(options, random);
  ASSERT_TRUE(succeeds(run(cpu(), p.forward())));
  MlpNeeds needs = kNone;
  needs.w2 = needs.b2 = true;
  GroupedMlpBackwardArgs args = p.backward(needs);
  for (moire_weight* w : {&args.w1, &args.w2}) w->tensor.shape[0] = 1 << 20;
  args.grad_w1 = {{}, args.w1.list, 0};
  args.grad_w1.tensor.shape[0] = 1 << 20;
  EXPECT_TRUE(succeeds(run(cpu(), args)));

  GroupedLinearBackwardArgs linear;
  linear.x = p.x;
  linear.w = args.w1;
  linear.grad_w = p.grad_w1;
  EXPECT_TRUE(succeeds(run_backward_from_z(p, linear)));
}

// Nor the shape of an x that is there for a weight gradient.
TEST(GroupedMlpGradients, AnXThatNothingReadsMayHaveAnyShape) {
  Random random;
  const MlpProblem p({}, random);
  ASSERT_TRUE(succeeds(run(cpu(), p.forward())));
  MlpNeeds needs;
  needs.w1 = false;
  GroupedMlpBackwardArgs args = p.backward(needs);
  ++args.x.shape[1];
  EXPECT_TRUE(succeeds(run(cpu(), args)));

  GroupedLinearBackwardArgs linear;
  linear.x = args.x;
  linear.w = p.w1;
  linear.grad_x = p.grad_x;
  EXPECT_TRUE(succeeds(run_backward_from_z(p, linear)));
}

TEST(GroupedMlpGradients, WeightGradientsMayBeALaterCall) {
  Random random;
  on_one_device(tested(), [&](const Tested& device) {
    MlpProblem now({}, random);
    ASSERT_TRUE(succeeds(run(device, now.forward())));
    MlpProblem later = now;
    ASSERT_TRUE(succeeds(run(device, now.backward())));

    MlpNeeds needs;
    needs.w1 = needs.w2 = false;
    GroupedMlpBackwardArgs args = later.backward(needs);
    args.grad_z = later.grad_z;
    args.act = later.act;
    ASSERT_TRUE(succeeds(run(device, args)));
    GroupedLinearBackwardArgs fc1, fc2;
    fc1.x = later.x;
    fc1.grad_y = later.grad_z;
    fc1.grad_w = later.grad_w1;
    fc1.groups = later.batch.groups();
    fc2.x = later.act;
    fc2.grad_y = later.grad_y;
    fc2.grad_w = later.grad_w2;
    fc2.groups = later.batch.groups();
    for (const GroupedLinearBackwardArgs& linear : {fc1, fc2}) {
      ASSERT_TRUE(succeeds(run(device, linear)));
    }
    EXPECT_TRUE(same_bits(later.grad_w1, now.grad_w1));
    EXPECT_TRUE(same_bits(later.grad_w2, now.grad_w2));
    EXPECT_TRUE(same_bits(later.grad_x, now.grad_x));
  });
}

TEST(GroupedMlpUnread, WithoutGradW1NothingIsAskedOfX) {
  Random random;
  on_one_device(tested(), [&](const Tested& device) {
    MlpOptions options;
    options.dtype = DType::kBF16;
    MlpProblem p(options, random);
    ASSERT_TRUE(succeeds(run(device, p.forward())));
    MlpNeeds needs;
    needs.w1 = false;
    GroupedMlpBackwardArgs args = p.backward(needs);
    args.recipe = MOIRE_RECIPE_MXFP8;
    args.x = {};
    args.x_columnwise.data = p.grad_x;  // no copy of x, and written
    EXPECT_TRUE(succeeds(run(device, args)));
  });
}

}  // namespace
}  // namespace moire::test
