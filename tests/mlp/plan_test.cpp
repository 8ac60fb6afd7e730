// What GPUs would run of a layer in FP8, planned without one.
#include <moire/explain.h>

#include <string>
#include <vector>

#include "tests/mlp/recipe_cases.h"
#include "tests/support/expect.h"
#include "tests/support/mlp_problem.h"

namespace moire::test {
namespace {

// The products of a forward and a backward.
std::vector<Step> products(const std::string& gpu, int32_t recipe,
                           const std::vector<int64_t>& splits = {140, 200}, int64_t hidden = 128,
                           int64_t width = 64, bool listed = false, const GluLayout& layout = {}) {
  Random random;
  MlpOptions options;
  options.ragged = {"Two", splits, 3};
  options.hidden = hidden;
  options.width = width;
  options.dtype = DType::kBF16;
  options.in_8_bits = recipe != MOIRE_RECIPE_AS_STORED;
  options.listed = listed;
  options.layout = layout;
  const MlpProblem p(options, random);
  ContextOptions planned;
  planned.device = Device::kCuda;
  planned.plan_for = gpu;
  const Context explaining = Context::create(planned).value().explaining();
  const RecipeCase c{recipe};
  EXPECT_TRUE(succeeds(run(explaining, c.in(p.forward()))));
  EXPECT_TRUE(succeeds(run(explaining, c.in(p.backward()))));
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

// What the composites make for MXFP8 comes as values, and the weights alone are decoded.
TEST(Plan, OfMxfp8MultipliesDecodedOperandsOnHopper) {
  if (!is_built_with_cuda()) GTEST_SKIP() << "built without CUDA";
  for (const Step& step : products("sm90", MOIRE_RECIPE_MXFP8)) {
    const bool is_backward = step.op == "grouped_gemm_glu_backward";
    SCOPED_TRACE(step.op + ": " + step.policy);
    EXPECT_EQ(step.implementation, "sm90");
    const std::string decoded =
        std::string(", after decoding ") + (is_backward ? "w2" : "b") + " into bf16";
    const bool is_decoded = step.policy.find(decoded) != std::string::npos;
    EXPECT_EQ(is_decoded, step.op != "grouped_gemm_wgrad");
    if (!step.op.starts_with("grouped_gemm_glu")) continue;
    EXPECT_TRUE(step.policy.ends_with(is_backward ? ", then grad_z and act quantised"
                                                  : ", then act quantised"));
  }
}

TEST(Plan, OfRecipesWithFastSumsUsesFp8TensorCores) {
  if (!is_built_with_cuda()) GTEST_SKIP() << "built without CUDA";
  for (const int32_t recipe : {MOIRE_RECIPE_MXFP8_FAST, MOIRE_RECIPE_FP8_BLOCK}) {
    for (const Step& step : products("sm90", recipe)) {
      SCOPED_TRACE(step.op + ": " + step.policy);
      EXPECT_EQ(step.implementation, "sm90");
      EXPECT_TRUE(step.policy.starts_with("FP8 tensor cores, "));
      EXPECT_EQ(step.policy.find("fold") != std::string::npos, recipe == MOIRE_RECIPE_MXFP8_FAST);
      const bool turns = step.op == "grouped_gemm_wgrad" || step.op.ends_with("backward");
      EXPECT_TRUE(!turns || step.policy.find("transposing") != std::string::npos);
    }
  }
}

// No product has an epilogue for it.
TEST(Plan, OfExpertsWithoutAGateActivatesInKernelsOfItsOwn) {
  if (!is_built_with_cuda()) GTEST_SKIP() << "built without CUDA";
  for (const std::string gpu : {"sm80", "sm90"}) {
    for (const int32_t recipe : {MOIRE_RECIPE_AS_STORED, MOIRE_RECIPE_MXFP8,
                                 MOIRE_RECIPE_MXFP8_FAST, MOIRE_RECIPE_FP8_BLOCK}) {
      for (const Step& step :
           products(gpu, recipe, {140, 200}, 128, 64, false, GluLayout::ungated())) {
        SCOPED_TRACE(gpu + " " + step.op + ": " + step.policy);
        EXPECT_EQ(step.implementation, gpu == "sm90" ? "sm90" : "portable");
        const bool is_apart = step.policy.find(", then the activation") != std::string::npos;
        EXPECT_EQ(is_apart, step.op.starts_with("grouped_gemm_glu"));
      }
    }
  }
}

// The sizes of tests of recipes, which are to run on both kinds of kernels.
TEST(Plan, UsesFp8TensorCoresForRowsThatTheyCanRead) {
  if (!is_built_with_cuda()) GTEST_SKIP() << "built without CUDA";
  constexpr const char* kRefused[] = {
      "rows of a lie 40 bytes apart, which for TMA must be a multiple of 16",
      "rows of a lie 72 bytes apart, which for TMA must be a multiple of 16",
      "of the product of a = grad_y and b = w2: rows of a lie 40 bytes apart, which for TMA must "
      "be a multiple of 16",
      "rows of a lie 40 bytes apart, which for TMA must be a multiple of 16",
      "rows of b lie 40 bytes apart, which for TMA must be a multiple of 16",
      "rows of b lie 40 bytes apart, which for TMA must be a multiple of 16"};
  for (const int32_t recipe : {MOIRE_RECIPE_MXFP8_FAST, MOIRE_RECIPE_FP8_BLOCK}) {
    for (const Step& step : products("sm90", recipe, {140, 300}, 48, 80)) {
      EXPECT_TRUE(step.policy.starts_with("FP8 tensor cores, ")) << step.op << ": " << step.policy;
    }
    const std::vector<Step> odd = products("sm90", recipe, {140, 300}, 40, 72);
    ASSERT_EQ(odd.size(), std::size(kRefused));
    for (size_t i = 0; i < odd.size(); ++i) {
      SCOPED_TRACE(odd[i].op + ": " + odd[i].policy);
      if (recipe == MOIRE_RECIPE_FP8_BLOCK) {
        ASSERT_EQ(odd[i].refused.size(), 1U);
        EXPECT_EQ(odd[i].refused[0].reason, kRefused[i]);
      } else {  // whose exact products are sm90's as well
        EXPECT_EQ(odd[i].implementation, "sm90");
        EXPECT_NE(odd[i].policy.find(std::string("; no FP8 tensor cores: ") + kRefused[i]),
                  std::string::npos);
      }
    }
  }
}

TEST(Plan, OfListsRunsPlainProducts) {
  if (!is_built_with_cuda()) GTEST_SKIP() << "built without CUDA";
  const std::vector<Step> steps =
      products("sm90", MOIRE_RECIPE_AS_STORED, {140, 200}, 128, 64, /*listed=*/true);
  for (const Step& step : steps) {
    SCOPED_TRACE(step.op + ": " + step.policy);
    EXPECT_EQ(step.implementation, "portable");
    EXPECT_TRUE(step.policy.ends_with(", after writing the addresses of 2 matrices"));
    ASSERT_EQ(step.refused.size(), 1U);
    EXPECT_TRUE(step.refused[0].reason.ends_with(" is a list, the kernel takes packed weights"));
  }
}

TEST(Plan, SaysWhyPlainProductsRun) {
  if (!is_built_with_cuda()) GTEST_SKIP() << "built without CUDA";
  for (const Step& step : products("sm90", MOIRE_RECIPE_FP8_BLOCK, {40, 100})) {
    if (step.op != "grouped_gemm_wgrad") continue;
    EXPECT_EQ(step.implementation, "portable");
    ASSERT_EQ(step.refused.size(), 1U);
    EXPECT_EQ(step.refused[0].reason,
              "143 rows in 2 groups, turned over, would be padded by up to 256 more");
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
