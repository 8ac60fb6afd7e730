// What GPUs would run of a layer in FP8, planned without one.
#include <moire/explain.h>

#include <string>
#include <vector>

#include "tests/mlp/recipe_cases.h"
#include "tests/support/expect.h"
#include "tests/support/mlp_problem.h"

namespace moire::test {
namespace {

template <class A>
void expect_explained(const Context& explaining, A args, Status (*op)(const Context&, const A&),
                      Status (*size)(const Context&, const A&, size_t*)) {
  size_t bytes = 0;
  ASSERT_TRUE(succeeds(size(explaining, args, &bytes)));
  const TestWorkspace workspace(bytes);
  args.workspace = workspace.get();
  EXPECT_TRUE(succeeds(op(explaining, args)));
}

// The products of a forward and a backward.
std::vector<Step> products(const std::string& gpu, int32_t recipe) {
  Random random;
  MlpOptions options;
  options.ragged = {"Two", {40, 100}, 3};
  options.hidden = 128;
  options.width = 64;
  options.dtype = DType::kBF16;
  options.in_8_bits = true;
  const MlpProblem p(options, random);
  ContextOptions planned;
  planned.device = Device::kCuda;
  planned.plan_for = gpu;
  const Context explaining = Context::create(planned).value().explaining();
  const RecipeCase c{recipe};
  expect_explained(explaining, c.in(p.forward()), moire::grouped_mlp, moire::grouped_mlp_workspace);
  expect_explained(explaining, c.in(p.backward()), moire::grouped_mlp_backward,
                   moire::grouped_mlp_backward_workspace);
  std::vector<Step> out;
  for (const Step& step : explaining.explanation()) {
    if (step.op.starts_with("grouped_gemm")) out.push_back(step);
  }
  EXPECT_EQ(out.size(), 6U);
  return out;
}

bool is_built_with_cuda() {
  for (const auto& found : available_implementations()) {
    if (found.device == "cuda") return true;
  }
  return false;
}

TEST(Plan, OfMxfp8MultipliesDecodedOperandsOnHopper) {
  if (!is_built_with_cuda()) GTEST_SKIP() << "built without CUDA";
  for (const int32_t recipe : {MOIRE_RECIPE_MXFP8, MOIRE_RECIPE_MXFP8_FAST}) {
    // What the composites make for MXFP8 comes as values, and the weights alone are decoded.
    const bool has_values = recipe == MOIRE_RECIPE_MXFP8;
    for (const Step& step : products("sm90", recipe)) {
      const bool is_backward = step.op == "grouped_gemm_glu_backward";
      SCOPED_TRACE(step.op + ": " + step.policy);
      EXPECT_EQ(step.implementation, "sm90");
      const std::string decoded =
          has_values ? (is_backward ? "w2" : "b") : (is_backward ? "grad_y and w2" : "a and b");
      const bool is_decoded =
          step.policy.find(", after decoding " + decoded + " into bf16") != std::string::npos;
      EXPECT_EQ(is_decoded, !has_values || step.op != "grouped_gemm_wgrad");
      if (!step.op.starts_with("grouped_gemm_glu")) continue;
      EXPECT_TRUE(step.policy.ends_with(is_backward ? ", then grad_z and act quantised"
                                                    : ", then act quantised"));
    }
  }
}

TEST(Plan, SaysWhyPlainProductsRun) {
  if (!is_built_with_cuda()) GTEST_SKIP() << "built without CUDA";
  for (const Step& step : products("sm90", MOIRE_RECIPE_FP8_BLOCK)) {
    EXPECT_EQ(step.implementation, "portable");
    ASSERT_EQ(step.refused.size(), 1U);
    const bool is_backward = step.op == "grouped_gemm_glu_backward";
    EXPECT_EQ(step.refused[0].reason,
              std::string(is_backward ? "grad_y" : "a") +
                  " has fp32 scales, with which decoded elements are no bf16 numbers");
  }
  for (const int32_t recipe : {MOIRE_RECIPE_MXFP8_FAST, MOIRE_RECIPE_FP8_BLOCK}) {
    for (const Step& step : products("sm80", recipe)) {
      EXPECT_EQ(step.implementation, "portable");
      EXPECT_EQ(step.policy.find("decoding"), std::string::npos) << step.policy;
    }
  }
  for (const Step& step : products("sm80", MOIRE_RECIPE_MXFP8)) {  // weights beside values
    EXPECT_EQ(step.implementation, "portable");
    EXPECT_EQ(step.policy.find(", after decoding ") == std::string::npos,
              step.op == "grouped_gemm_wgrad")
        << step.policy;
  }
}

}  // namespace
}  // namespace moire::test
