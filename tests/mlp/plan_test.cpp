// What would run of a layer in FP8: on GPUs, planned without one, and on a CPU.
#include <moire/explain.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "core/divide.h"
#include "core/format.h"
#include "tests/mlp/recipe_cases.h"
#include "tests/support/expect.h"
#include "tests/support/mlp_problem.h"

namespace moire::test {
namespace {

// What explains what would run on a GPU.
Context planning(const std::string& gpu = "sm90") {
  ContextOptions planned;
  planned.device = Device::kCuda;
  planned.plan_for = gpu;
  return Context::create(planned).value().explaining();
}

// The steps of a forward and a backward.
Explanation steps(const std::string& gpu, int32_t recipe,
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
  const Context explaining = planning(gpu);
  const RecipeCase c{recipe};
  EXPECT_TRUE(succeeds(run(explaining, c.in(p.forward()))));
  EXPECT_TRUE(succeeds(run(explaining, c.in(p.backward()))));
  return explaining.explanation();
}
std::vector<Step> products(const Explanation& steps) {
  std::vector<Step> out;
  for (const Step& step : steps) {
    if (step.op.starts_with("grouped_gemm")) out.push_back(step);
  }
  EXPECT_EQ(out.size(), 6U);
  return out;
}
int64_t count(const Explanation& steps, std::string_view op) {
  return std::count_if(steps.begin(), steps.end(), [&](const Step& s) { return s.op == op; });
}

bool is_built_with_cuda() {
  for (const auto& found : available_implementations()) {
    if (found.device == "cuda") return true;
  }
  return false;
}

// An op without groups has a plan, too.
TEST(Plan, OfNoGroups) {
  if (!is_built_with_cuda()) GTEST_SKIP() << "built without CUDA";
  for (const char* gpu : {"sm80", "sm90"}) {
    const Context context = planning(gpu);
    ConvertScalesArgs args;
    args.source = TensorView(nullptr, DType::kE8M0, {0, 2});
    args.to = MOIRE_SCALES_DENSE;
    args.target = TensorView(nullptr, DType::kE8M0, {0, 2});
    args.k = 64;
    ASSERT_TRUE(succeeds(run(context, args)));
    EXPECT_EQ(context.explanation().at(0).op, "convert_scales");
  }
}

// What the composites make for MXFP8 comes as values, beside weights that the products decode.
TEST(Plan, OfMxfp8DecodesWeightsInRegistersOnHopper) {
  if (!is_built_with_cuda()) GTEST_SKIP() << "built without CUDA";
  for (const Step& step : products(steps("sm90", MOIRE_RECIPE_MXFP8))) {
    SCOPED_TRACE(step.op + ": " + step.policy);
    EXPECT_EQ(step.implementation, "sm90");
    EXPECT_EQ(step.policy.starts_with("weight decoded in registers"),
              step.op != "grouped_gemm_wgrad");
    EXPECT_EQ(step.policy.find("after decoding"), std::string::npos);
    if (step.op != "grouped_gemm_glu_backward") continue;
    EXPECT_TRUE(step.policy.ends_with("quantised in the same pass, grad_bias summed"));
  }
}
// Where a weight, its scales or the rows lie as that does not take them, the weight is decoded
// before, into a workspace that is larger by it.
TEST(Plan, OfMxfp8SizesAWorkspaceByHowOperandsLie) {
  if (!is_built_with_cuda()) GTEST_SKIP() << "built without CUDA";
  const Context context = planning();
  alignas(16) static char memory[32];
  const auto bytes = [&](char* codes, int64_t stride, char* rows) {
    GroupedGemmArgs args;
    args.a = TensorView(rows, DType::kBF16, {1024, 256});
    args.b = Weight(TensorView(codes, DType::kE4M3, {4, 64, 256}), MOIRE_OUT_IN);
    args.b_scales = TensorView(memory, DType::kE8M0, {4, 64, 8}, stride);
    args.d = TensorView(memory, DType::kBF16, {1024, 64});
    args.groups.num_groups = 4;
    args.groups.capacity = 1024;
    size_t out = 0;
    EXPECT_TRUE(succeeds(moire::grouped_gemm_workspace(context, args, &out)));
    return out;
  };
  constexpr size_t kDecoded = 2 * 4 * 64 * 256;
  EXPECT_EQ(bytes(nullptr, 8, nullptr), 0U);
  EXPECT_EQ(bytes(memory, 8, memory), 0U);
  EXPECT_GE(bytes(memory + 1, 8, memory), kDecoded);
  EXPECT_GE(bytes(memory, 9, memory), kDecoded);
  EXPECT_GE(bytes(memory, 8, memory + 2), kDecoded);
}

// Scales of columns are read in pairs, of which an odd number makes none.
TEST(Plan, OfMxfp8DecodesAWeightOfOddColumnsBefore) {
  if (!is_built_with_cuda()) GTEST_SKIP() << "built without CUDA";
  std::vector<double> inputs(size_t{1} << 17), d(size_t{1} << 17);  // a MiB each
  alignas(256) static char workspace[1 << 16];
  const int64_t offsets[3] = {};
  for (const int64_t n : {80, 65, 1}) {
    GroupedGemmArgs args;
    args.a = TensorView(inputs.data(), DType::kBF16, {82, 64});
    args.b = Weight(TensorView(inputs.data(), DType::kE4M3, {2, 64, n}, 80), MOIRE_OUT_IN);
    args.b_scales = TensorView(inputs.data(), DType::kE8M0, {2, 2, n}, 80);
    args.d = TensorView(d.data(), DType::kBF16, {82, n}, 80);
    args.transpose_b = 1;
    args.groups.num_groups = 2;
    args.groups.capacity = 82;
    args.groups.offsets = offsets;
    args.workspace = {workspace, sizeof workspace};
    const Context context = planning();
    ASSERT_TRUE(succeeds(run(context, args)));
    const std::string policy = context.explanation().at(0).policy;
    const std::string refused = concat("; weight not decoded in registers: b_scales have ", n,
                                       " columns, the kernel reads them in pairs");
    EXPECT_EQ(policy.ends_with(refused), n != 80) << policy;
    EXPECT_EQ(policy.starts_with("weight decoded in registers"), n == 80) << policy;
  }
}

// A product and its activation, whose weight is decoded by the product.
TEST(Plan, OfMxfp8RoundsActInTheActivationsPass) {
  if (!is_built_with_cuda()) GTEST_SKIP() << "built without CUDA";
  for (const Step& step : products(steps("sm90", MOIRE_RECIPE_MXFP8, {140, 200}, 48, 80))) {
    if (step.op != "grouped_gemm_glu") continue;
    EXPECT_TRUE(step.policy.starts_with("weight decoded in registers")) << step.policy;
    EXPECT_TRUE(step.policy.ends_with(", act quantised in the same pass")) << step.policy;
  }
}

// FC1, or FC2's dgrad, on 4 groups and a capacity of 1024; of act and grad_z values are asked for,
// which begin at `values`, all else at `memory`.
GroupedGemmGluArgs fc1(int ask, int64_t width, char* memory, char* values) {
  GroupedGemmGluArgs args;
  args.a = TensorView(memory, DType::kBF16, {1024, 256});
  args.b = Weight(TensorView(memory, DType::kBF16, {4, 2 * width, 256}), MOIRE_OUT_IN);
  const Quantized act(TensorView(values, DType::kBF16, {1024, width}), {});
  if ((ask & 1) != 0) args.act_rowwise = act;
  if ((ask & 2) != 0) args.act_columnwise = act;
  if ((ask & 4) != 0) args.act = TensorView(memory, DType::kBF16, {1024, width});
  args.groups.num_groups = 4;
  args.groups.capacity = 1024;
  return args;
}
GroupedGemmGluBackwardArgs fc2_dgrad(int ask, int64_t width, char* memory, char* values) {
  GroupedGemmGluBackwardArgs args;
  args.grad_y = TensorView(memory, DType::kBF16, {1024, 256});
  args.w2 = Weight(TensorView(memory, DType::kBF16, {4, 256, width}), MOIRE_OUT_IN);
  args.z = TensorView(memory, DType::kBF16, {1024, 2 * width});
  const Quantized grad_z(TensorView(values, DType::kBF16, {1024, 2 * width}), {});
  if ((ask & 1) != 0) {
    args.act_columnwise = Quantized(TensorView(values, DType::kBF16, {1024, width}), {});
  }
  if ((ask & 2) != 0) args.grad_z_rowwise = grad_z;
  if ((ask & 4) != 0) args.grad_z_columnwise = grad_z;
  if (ask < 2) args.grad_z = args.z;
  args.groups.num_groups = 4;
  args.groups.capacity = 1024;
  return args;
}

// The activation makes what a call asks for as values alone, whatever the weight is in; beside act
// itself they are made behind the epilogue that stores it.
TEST(Plan, OfValuesLeavesThemToTheActivation) {
  if (!is_built_with_cuda()) GTEST_SKIP() << "built without CUDA";
  const int64_t offsets[5] = {};
  std::vector<double> memory(size_t{1} << 17), values(size_t{1} << 17);  // a MiB each
  for (const int ask : {1, 5}) {
    const Context context = planning();
    GroupedGemmGluArgs args = fc1(ask, 80, reinterpret_cast<char*>(memory.data()),
                                  reinterpret_cast<char*>(values.data()));
    args.groups.offsets = offsets;
    if (is_present(args.act)) args.act.data = memory.data() + (size_t{1} << 16);
    EXPECT_TRUE(succeeds(run(context, args)));
    const std::string policy = context.explanation().at(0).policy;
    EXPECT_EQ(policy.ends_with(", act quantised in the same pass"), ask == 1) << policy;
    EXPECT_EQ(policy.ends_with(", then act quantised"), ask == 5) << policy;
  }
}

// The same in FP8 by fp8_block's scales, whose copies the activation makes where it can.
struct BlockScaled {
  BlockScaled(char* at, std::initializer_list<int64_t> shape, std::initializer_list<int64_t> blocks)
      : data(at, DType::kE4M3, shape),
        scales(at == nullptr ? nullptr : floats, DType::kFP32, blocks) {}
  Quantized copy() const { return {data, scales}; }
  TensorView data, scales;
  static inline float floats[1];
};
GroupedGemmGluArgs fc1_fp8(int ask, int64_t width, char* memory, char* values) {
  GroupedGemmGluArgs args = fc1(ask & 4, width, memory, values);
  const int64_t blocks = ceil_div(width, 128), blocks_of_z = ceil_div(2 * width, 128);
  const BlockScaled a(memory, {1024, 256}, {1024, 2});
  const BlockScaled b(memory, {4, 2 * width, 256}, {4, blocks_of_z, 2});
  args.a = a.data, args.a_scales = a.scales;
  args.b = Weight(b.data, MOIRE_OUT_IN), args.b_scales = b.scales;
  args.accumulation = MOIRE_ACCUMULATE_FAST;
  if ((ask & 1) != 0) args.act_rowwise = BlockScaled(values, {1024, width}, {1024, blocks}).copy();
  if ((ask & 2) != 0) args.act_columnwise = BlockScaled(values, {1024, width}, {12, width}).copy();
  if (ask == 4) args.act_rowwise = BlockScaled(values, {1024, width}, {1024, blocks}).copy();
  return args;
}
GroupedGemmGluBackwardArgs fc2_dgrad_fp8(int ask, int64_t width, char* memory, char* values) {
  GroupedGemmGluBackwardArgs args = fc2_dgrad(0, width, memory, values);
  const int64_t blocks = ceil_div(width, 128), columns_of_z = 2 * width;
  const BlockScaled grad_y(memory, {1024, 256}, {1024, 2});
  const BlockScaled w2(memory, {4, 256, width}, {4, 2, blocks});
  args.grad_y = grad_y.data, args.grad_y_scales = grad_y.scales;
  args.w2 = Weight(w2.data, MOIRE_OUT_IN), args.w2_scales = w2.scales;
  args.accumulation = MOIRE_ACCUMULATE_FAST;
  if (ask >= 2) args.grad_z = {};
  if ((ask & 1) != 0) args.act_columnwise = BlockScaled(values, {1024, width}, {12, width}).copy();
  if ((ask & 2) != 0) {
    args.grad_z_rowwise =
        BlockScaled(values, {1024, columns_of_z}, {1024, ceil_div(columns_of_z, 128)}).copy();
  }
  if ((ask & 4) != 0) {
    args.grad_z_columnwise = BlockScaled(values, {1024, columns_of_z}, {12, columns_of_z}).copy();
  }
  args.grad_probs =
      TensorView(memory == nullptr ? nullptr : BlockScaled::floats, DType::kFP32, {1024});
  return args;
}

// The one that is sized before there is memory, wherever that begins then.
template <class A>
void expect_one_workspace(A (*call)(int, int64_t, char*, char*),
                          Status (*size)(const Context&, const A&, size_t*)) {
  const Context context = planning();
  alignas(16) static char memory[32];
  for (int ask = 1; ask < 8; ++ask) {
    for (const int64_t width : {64, 68, 80, 128}) {
      SCOPED_TRACE(testing::Message() << "ask " << ask << ", width " << width);
      const auto bytes = [&](char* at, char* values) {
        size_t out = 0;
        EXPECT_TRUE(succeeds(size(context, call(ask, width, at, values), &out)));
        return out;
      };
      const size_t sized = bytes(nullptr, nullptr);
      EXPECT_EQ(bytes(memory, memory), sized);
      EXPECT_LE(bytes(memory, memory + 2), sized) << "values that TMA does not take";
      EXPECT_LE(bytes(memory + 2, memory), sized) << "operands that TMA does not take";
    }
  }
}

TEST(Plan, SizesAWorkspaceFromShapesAlone) {
  if (!is_built_with_cuda()) GTEST_SKIP() << "built without CUDA";
  expect_one_workspace(fc1, moire::grouped_gemm_glu_workspace);
  expect_one_workspace(fc2_dgrad, moire::grouped_gemm_glu_backward_workspace);
  expect_one_workspace(fc1_fp8, moire::grouped_gemm_glu_workspace);
  expect_one_workspace(fc2_dgrad_fp8, moire::grouped_gemm_glu_backward_workspace);
}

TEST(Plan, OfRecipesWithFastSumsUsesFp8TensorCores) {
  if (!is_built_with_cuda()) GTEST_SKIP() << "built without CUDA";
  for (const int32_t recipe : {MOIRE_RECIPE_MXFP8_FAST, MOIRE_RECIPE_FP8_BLOCK}) {
    for (const Step& step : products(steps("sm90", recipe))) {
      SCOPED_TRACE(step.op + ": " + step.policy);
      EXPECT_EQ(step.implementation, "sm90");
      EXPECT_TRUE(step.policy.starts_with("FP8 tensor cores, "));
      // What layers quantise for these products is stored as they read it.
      const auto says = [&](const char* word) {
        return step.policy.find(word) != std::string::npos;
      };
      EXPECT_FALSE(says("folding"));
      EXPECT_FALSE(says("_scales"));
      EXPECT_FALSE(says("transposing"));
    }
  }
}

// As the product reads it, in one pass; W1 and W2 of a forward and of a backward.
TEST(Plan, OfRecipesWithFastSumsPreparesWeightsWithoutCopies) {
  if (!is_built_with_cuda()) GTEST_SKIP() << "built without CUDA";
  for (const int32_t recipe : {MOIRE_RECIPE_MXFP8_FAST, MOIRE_RECIPE_FP8_BLOCK}) {
    for (const bool listed : {false, true}) {
      const Explanation found = steps("sm90", recipe, {140, 200}, 128, 64, listed);
      EXPECT_EQ(count(found, "prepare_weight"), 4);
      EXPECT_EQ(count(found, "quantize_weight"), 0);
    }
    const Explanation odd = steps("sm90", recipe, {140, 200}, 120, 64);  // rows of 120 bytes
    EXPECT_EQ(count(odd, "prepare_weight"), 0);
    EXPECT_EQ(count(odd, "quantize_weight"), 4);
  }
}

// No product has an epilogue for it.
TEST(Plan, OfExpertsWithoutAGateActivatesInKernelsOfItsOwn) {
  if (!is_built_with_cuda()) GTEST_SKIP() << "built without CUDA";
  for (const std::string gpu : {"sm80", "sm90"}) {
    for (const int32_t recipe : {MOIRE_RECIPE_AS_STORED, MOIRE_RECIPE_MXFP8,
                                 MOIRE_RECIPE_MXFP8_FAST, MOIRE_RECIPE_FP8_BLOCK}) {
      for (const Step& step :
           products(steps(gpu, recipe, {140, 200}, 128, 64, false, GluLayout::ungated()))) {
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
    for (const Step& step : products(steps("sm90", recipe, {140, 300}, 48, 96))) {
      EXPECT_TRUE(step.policy.starts_with("FP8 tensor cores, ")) << step.op << ": " << step.policy;
    }
    const std::vector<Step> odd = products(steps("sm90", recipe, {140, 300}, 40, 72));
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

// Gradients of FP8 products too, whose weights are packed codes.
TEST(Plan, OfListsWritesTheirAddressesOnAnyGpu) {
  if (!is_built_with_cuda()) GTEST_SKIP() << "built without CUDA";
  for (const std::string gpu : {"sm80", "sm90"}) {
    for (const int32_t recipe : {MOIRE_RECIPE_AS_STORED, MOIRE_RECIPE_MXFP8_FAST}) {
      for (const Step& step : products(steps(gpu, recipe, {140, 200}, 128, 64, /*listed=*/true))) {
        SCOPED_TRACE(gpu + " " + step.op + ": " + step.policy);
        EXPECT_EQ(step.implementation, gpu == "sm90" ? "sm90" : "portable");
        const bool is_listed = recipe == MOIRE_RECIPE_AS_STORED || step.op == "grouped_gemm_wgrad";
        const auto at = step.policy.find(", after writing the addresses of 2 matrices");
        EXPECT_EQ(at != std::string::npos, is_listed);
      }
    }
  }
}

// A product with three matrices at these addresses, where nothing is.
Step product_of_list(const std::vector<uintptr_t>& addresses) {
  const auto at = [](uintptr_t address) { return reinterpret_cast<void*>(address); };
  const void* const list[] = {at(addresses[0]), at(addresses[1]), at(addresses[2])};
  const int64_t offsets[4] = {};
  GroupedGemmArgs args;
  args.a = TensorView(at(0x1000), DType::kBF16, {64, 64});
  args.b = Weight(TensorView(nullptr, DType::kBF16, {3, 64, 64}), list);
  args.d = TensorView(at(0x4000), DType::kBF16, {64, 64});
  args.groups.num_groups = 3;
  args.groups.offsets = offsets;
  args.groups.capacity = 64;
  args.workspace = {at(0x10000), 0x1000};
  ContextOptions planned;
  planned.device = Device::kCuda;
  planned.plan_for = "sm90";
  const Context explaining = Context::create(planned).value().explaining();
  EXPECT_TRUE(succeeds(grouped_gemm(explaining, args)));
  return explaining.explanation().at(0);
}

TEST(Plan, OfAListRunsPlainProductsWhereTmaDoesNotReachAMatrix) {
  if (!is_built_with_cuda()) GTEST_SKIP() << "built without CUDA";
  constexpr uintptr_t kFirst = 1 << 20, kNext = kFirst + 0x2000, kMost = uintptr_t{1} << 44;
  const Step taken = product_of_list({kNext, kFirst + kMost - 0x2000, kFirst});
  EXPECT_EQ(taken.implementation, "sm90");
  EXPECT_EQ(taken.launches, 2);
  EXPECT_EQ(taken.workspace_bytes, 256);
  const auto expect_refused = [](const std::vector<uintptr_t>& addresses, const char* reason) {
    const Step step = product_of_list(addresses);
    EXPECT_EQ(step.implementation, "portable");
    ASSERT_EQ(step.refused.size(), 1U);
    EXPECT_EQ(step.refused[0].reason, reason);
  };
  expect_refused({kNext, kFirst + kMost, kFirst},
                 "the matrices of b lie 17592186044416 bytes apart at multiples of 8192, of which "
                 "the kernel counts 2^31");
  expect_refused({kFirst, kNext + 8, kNext + 0x4000},
                 "b[1] is not aligned to 16 bytes, which TMA needs");
}

// Operands that lie transposed, or whose scales lie turned over, are read once each, whatever their
// rows are many of.
TEST(Plan, CountsBytesOfOperandsAsTensorCoresReadThem) {
  if (!is_built_with_cuda()) GTEST_SKIP() << "built without CUDA";
  constexpr int64_t kRows = 303, kTransposedRows = 4 * 128, kHidden = 128, kWidth = 64;
  for (const int32_t recipe : {MOIRE_RECIPE_MXFP8_FAST, MOIRE_RECIPE_FP8_BLOCK}) {
    for (const Step& step : products(steps("sm90", recipe, {140, 160}, kHidden, kWidth))) {
      SCOPED_TRACE(step.op + ": " + step.policy);
      ASSERT_TRUE(step.policy.starts_with("FP8 tensor cores"));
      if (step.op == "grouped_gemm_wgrad") {
        EXPECT_LT(step.bytes_read, 2 * (kTransposedRows + 4) * (2 * kWidth + kHidden));
      } else {  // rows of 8 bits, z and act of 16, weights of 8, four bytes a row of scales
        EXPECT_LT(step.bytes_read, kRows * (kHidden + 2 * 2 * kWidth + 8) +
                                       2 * 2 * kWidth * kHidden + 8 * kTransposedRows + 1024);
      }
    }
  }
}

TEST(Plan, SaysWhyPlainProductsRun) {
  if (!is_built_with_cuda()) GTEST_SKIP() << "built without CUDA";
  for (const Step& step : products(steps("sm90", MOIRE_RECIPE_FP8_BLOCK, {40, 100}))) {
    if (step.op != "grouped_gemm_wgrad") continue;
    EXPECT_EQ(step.implementation, "portable");
    ASSERT_EQ(step.refused.size(), 1U);
    EXPECT_EQ(step.refused[0].reason,
              "143 rows in 2 groups, transposed, would be padded by up to 256 more");
  }
  for (const int32_t recipe : {MOIRE_RECIPE_MXFP8_FAST, MOIRE_RECIPE_FP8_BLOCK}) {
    for (const Step& step : products(steps("sm80", recipe))) {
      EXPECT_EQ(step.implementation, "portable");
      EXPECT_EQ(step.policy.find("decoding"), std::string::npos) << step.policy;
    }
  }
  for (const Step& step : products(steps("sm80", MOIRE_RECIPE_MXFP8))) {  // weights beside values
    EXPECT_EQ(step.implementation, "portable");
    EXPECT_EQ(step.policy.find(", after decoding ") == std::string::npos,
              step.op == "grouped_gemm_wgrad")
        << step.policy;
  }
}

TEST(Plan, OfACpuSumsAnUnscaledB2InTheReadThatQuantisesGradY) {
  Random random;
  for (const B2Scale b2_scale : {B2Scale::kNothing, B2Scale::kProbs}) {
    MlpOptions options;
    options.ragged = {"Two", {70, 5}};
    options.dtype = DType::kBF16;
    options.in_8_bits = true;
    options.b2_scale = b2_scale;
    const MlpProblem p(options, random);
    const Context explaining = cpu().explaining();
    ASSERT_TRUE(succeeds(run(explaining, recipes().front().in(p.backward()))));
    int in_the_read = 0, apart = 0;
    for (const Step& step : explaining.explanation()) {
      in_the_read += step.op == "quantize" && step.problem.ends_with(", bias gradient") ? 1 : 0;
      apart += step.op == "bias_backward" ? 1 : 0;
    }
    EXPECT_EQ(in_the_read, b2_scale == B2Scale::kNothing ? 1 : 0);
    EXPECT_EQ(apart, 1 - in_the_read);
  }
}

}  // namespace
}  // namespace moire::test
