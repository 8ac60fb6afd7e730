// What check() says of infinities and NaN that a layer quantised: the layer's name and its
// operand's, whichever step met them.
#include <cmath>
#include <functional>
#include <limits>
#include <string>

#include "tests/mlp/mlp_checks.h"
#include "tests/mlp/recipe_cases.h"

namespace moire::test {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

MlpOptions options(int64_t hidden) {
  MlpOptions o;
  o.ragged = {"Uneven", {40, 0, 33}, 3};
  o.hidden = hidden;
  o.width = 64;
  o.dtype = DType::kBF16;
  o.in_8_bits = true;
  return o;
}

struct Spoilt {
  std::string said;
  std::function<void(MlpProblem&)> spoil;
};

// Of a problem that a finite forward has run on; FP8 tensor cores take weights with a hidden size
// of 48, not of 40.
void expect_said(const RecipeCase& c, const Spoilt& s,
                 const std::function<Status(const Tested&, const MlpProblem&)>& call) {
  for (const int64_t hidden : {40, 48}) {
    SCOPED_TRACE(testing::Message()
                 << testing::PrintToString(c) << ", hidden " << hidden << ", " << s.said);
    Random random;
    const Tested context = tested();
    MlpProblem p(options(hidden), random);
    ASSERT_TRUE(succeeds(run(context, c.in(p.forward()))));
    ASSERT_TRUE(succeeds(call(context, p)));
    EXPECT_TRUE(succeeds(context.check())) << "everything is finite";
    s.spoil(p);
    ASSERT_TRUE(succeeds(call(Tested::finding(context), p)));
    EXPECT_TRUE(fails(context.check(), Code::kInvalidArgument, s.said + " is infinite or NaN"));
    EXPECT_TRUE(succeeds(context.check())) << "it was said once";
  }
}

TEST(Findings, OfAnMlpNameItsOperand) {
  const Spoilt cases[] = {
      {"grouped_mlp: x[41, 5]", [](MlpProblem& p) { p.x.set(41, 5, kNan); }},
      {"grouped_mlp: w1[2, 3, 1]", [](MlpProblem& p) { p.w1.set(2, 3, 1, kInfinity); }},
      {"grouped_mlp: w2[1, 0, 7]", [](MlpProblem& p) { p.w2.set(1, 0, 7, kNan); }},
      {"grouped_mlp: act[40, 9]", [](MlpProblem& p) { p.b1.set(2, 9, kNan); }},
  };
  for (const RecipeCase& c : recipes()) {
    for (const Spoilt& s : cases) {
      expect_said(c, s, [&](const Tested& context, const MlpProblem& p) {
        return run(context, c.in(p.forward()));
      });
    }
  }
}

TEST(Findings, OfAnMlpsBackwardNameItsOperand) {
  const Spoilt cases[] = {
      {"grouped_mlp_backward: grad_y[41, 5]", [](MlpProblem& p) { p.grad_y.set(41, 5, kNan); }},
      {"grouped_mlp_backward: x[41, 5]", [](MlpProblem& p) { p.x.set(41, 5, -kInfinity); }},
      {"grouped_mlp_backward: w1[2, 3, 1]", [](MlpProblem& p) { p.w1.set(2, 3, 1, kNan); }},
      {"grouped_mlp_backward: w2[1, 0, 7]", [](MlpProblem& p) { p.w2.set(1, 0, 7, kNan); }},
      {"grouped_mlp_backward: grad_z[50, 9]", [](MlpProblem& p) { p.z.set(50, 9, kNan); }},
  };
  for (const RecipeCase& c : recipes()) {
    for (const Spoilt& s : cases) {
      expect_said(c, s, [&](const Tested& context, const MlpProblem& p) {
        return run(context, c.in(p.backward()));
      });
    }
    // Without FC2's dgrad the activation is made, and quantised, by steps of their own.
    const Spoilt alone{"grouped_mlp_backward: act[50, 9]",
                       [](MlpProblem& p) { p.z.set(50, 9, kNan); }};
    expect_said(c, alone, [&](const Tested& context, const MlpProblem& p) {
      const MlpNeeds needs{false, false, false, true, false, false};
      return run(context, c.in(p.backward(needs)));
    });
  }
}

// FC1 of the problem, as a layer of its own.
GroupedLinearArgs linear(const MlpProblem& p) {
  GroupedLinearArgs args;
  args.x = p.x;
  args.w = p.w1;
  args.y = p.z;
  args.groups = p.batch.groups();
  return args;
}

GroupedLinearBackwardArgs linear_backward(const MlpProblem& p) {
  GroupedLinearBackwardArgs args;
  args.x = p.x;
  args.w = p.w1;
  args.grad_y = p.z;
  args.grad_x = p.grad_x;
  args.grad_w = p.grad_w1;
  args.groups = p.batch.groups();
  return args;
}

TEST(Findings, OfALinearLayerNameItsOperand) {
  const auto forward = [](const RecipeCase& c) {
    return
        [&c](const Tested& context, const MlpProblem& p) { return run(context, c.in(linear(p))); };
  };
  const auto backward = [](const RecipeCase& c) {
    return [&c](const Tested& context, const MlpProblem& p) {
      return run(context, c.in(linear_backward(p)));
    };
  };
  const auto spoil_x = [](MlpProblem& p) { p.x.set(41, 5, kNan); };
  const auto spoil_w = [](MlpProblem& p) { p.w1.set(2, 3, 1, kNan); };
  const auto spoil_grad_y = [](MlpProblem& p) { p.z.set(50, 9, kNan); };
  for (const RecipeCase& c : recipes()) {
    expect_said(c, {"grouped_linear: x[41, 5]", spoil_x}, forward(c));
    expect_said(c, {"grouped_linear: w[2, 3, 1]", spoil_w}, forward(c));
    expect_said(c, {"grouped_linear_backward: x[41, 5]", spoil_x}, backward(c));
    expect_said(c, {"grouped_linear_backward: w[2, 3, 1]", spoil_w}, backward(c));
    expect_said(c, {"grouped_linear_backward: grad_y[50, 9]", spoil_grad_y}, backward(c));
  }
}

}  // namespace
}  // namespace moire::test
