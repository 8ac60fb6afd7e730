// Prepared weights: a layer that is given them has the bits of one that is not; each wrong one is
// refused with a sentence.
#include "tests/mlp/prepared_weight.h"

#include <moire/grouped_tensor.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "core/format.h"
#include "tests/mlp/mlp_checks.h"

namespace moire::test {
namespace {

ContextOptions hopper_options() {
  ContextOptions options;
  options.device = Device::kCuda;
  options.plan_for = "sm90";
  return options;
}
// Without such a GPU.
Result<Context> planned_for_hopper() { return Context::create(hopper_options()); }

MlpOptions layer(const RaggedCase& ragged = {"Three", {40, 0, 150}, 3}, int64_t hidden = 40,
                 int64_t width = 72) {
  MlpOptions options;
  options.ragged = ragged;
  options.hidden = hidden;
  options.width = width;
  options.dtype = DType::kBF16;
  options.in_8_bits = true;
  return options;
}

// Also with dequantized weights, where the recipe has them.
template <class F>
void for_each_form(F&& f) {
  for (const RecipeCase& c : recipes()) {
    for (const int32_t dequantized : {0, 1}) {
      if (dequantized != 0 && c.recipe != MOIRE_RECIPE_MXFP8) continue;
      SCOPED_TRACE(testing::PrintToString(c) + ", dequantized " + std::to_string(dequantized));
      f(c, dequantized);
    }
  }
}

// The layer with no weights but the prepared ones, their layouts said.
template <class A>
A with_prepared(A args, const Prepared& w1, const Prepared& w2) {
  args.w1 = moire_weight{{}, nullptr, args.w1.layout};
  args.w2 = moire_weight{{}, nullptr, args.w2.layout};
  args.w1_prepared = w1;
  args.w2_prepared = w2;
  return args;
}

void expect_no_change(const RecipeCase& c, int32_t dequantized, const MlpOptions& options,
                      Random& random) {
  SCOPED_TRACE(testing::PrintToString(options));
  on_one_device(tested(), [&](const Tested& device) {
    const MlpProblem plain(options, random);
    const MlpProblem p = plain;
    ASSERT_TRUE(succeeds(run(device, c.in(plain.forward()))));
    ASSERT_TRUE(succeeds(run(device, c.in(plain.backward()))));
    PrepareWeightArgs of_w1 = prepare_args(c, p.w1), of_w2 = prepare_args(c, p.w2);
    of_w1.dequantized = of_w2.dequantized = dequantized;
    const Prepared w1 = prepare(of_w1, device), w2 = prepare(of_w2, device);
    ASSERT_TRUE(succeeds(run(device, with_prepared(c.in(p.forward()), w1, w2))));
    ASSERT_TRUE(succeeds(run(device, with_prepared(c.in(p.backward()), w1, w2))));
    expect_same_results(p, plain);
  });
}

TEST(PreparedWeight, ChangesNoBitOfALayerOfAnyLayoutAndType) {
  Random random;
  for_each_form([&](const RecipeCase& c, int32_t dequantized) {
    for (const int32_t layouts : {0, 1, 2, 3}) {
      for (const DType dtype : {DType::kFP32, DType::kBF16, DType::kFP16}) {
        MlpOptions options = layer();
        options.dtype = dtype;
        options.w1_layout = layouts & 1;
        options.w2_layout = layouts >> 1;
        options.listed = dtype == DType::kBF16;
        options.gathered = options.gathered_grad_y = dtype == DType::kFP16;
        expect_no_change(c, dequantized, options, random);
      }
    }
  });
}

// Sizes of which FP8 tensor cores, where a device has them, take every product.
TEST(PreparedWeight, ChangesNoBitOfSizesForFp8TensorCores) {
  Random random;
  for_each_form([&](const RecipeCase& c, int32_t dequantized) {
    for (const int32_t layouts : {0, 1, 2, 3}) {
      MlpOptions options = layer({"Three", {140, 0, 300}, 3}, 48, 80);
      options.w1_layout = layouts & 1;
      options.w2_layout = layouts >> 1;
      options.gathered = options.gathered_grad_y = layouts == 2;
      expect_no_change(c, dequantized, options, random);
    }
  });
}

TEST(PreparedWeight, ChangesNoBitOfOddSizesAndWithoutRowsOrGroups) {
  Random random;
  for_each_form([&](const RecipeCase& c, int32_t dequantized) {
    for (const RaggedCase& ragged : {RaggedCase{"Odd", {1, 0, 133}, 2},
                                     RaggedCase{"No rows", {0, 0}}, RaggedCase{"No groups", {}}}) {
      MlpOptions options = layer(ragged);
      options.hidden = 37;
      options.width = 133;
      expect_no_change(c, dequantized, options, random);
    }
  });
}

void expect_no_change_of_linear(const Tested& device, const RecipeCase& c, int32_t dequantized,
                                const MlpProblem& p) {  // its x, w1, b1 and z are the layer's
  GroupedLinearArgs forward;
  forward.x = p.x;
  forward.w = p.w1;
  forward.bias = p.b1;
  forward.y = p.z;
  forward.groups = p.batch.groups();
  GroupedLinearBackwardArgs backward;
  backward.grad_y = p.z;
  backward.w = p.w1;
  backward.grad_x = p.grad_x;
  backward.groups = p.batch.groups();
  const auto run_both = [&] {
    ASSERT_TRUE(succeeds(run(device, c.in(forward))));
    ASSERT_TRUE(succeeds(run(device, c.in(backward))));
  };
  run_both();
  const TestTensor y = p.z, grad_x = p.grad_x;
  PrepareWeightArgs args = prepare_args(c, p.w1);
  args.dequantized = dequantized;
  const Prepared w = prepare(args, device);
  forward.w = backward.w = moire_weight{{}, nullptr, p.options.w1_layout};
  forward.w_prepared = backward.w_prepared = w;
  run_both();
  EXPECT_TRUE(same_bits(p.z, y, p.batch.rows())) << "y";
  EXPECT_TRUE(same_bits(p.grad_x, grad_x)) << "grad_x";
}

TEST(PreparedWeight, ChangesNoBitOfALinearLayer) {
  Random random;
  for_each_form([&](const RecipeCase& c, int32_t dequantized) {
    for (const int32_t layout : {MOIRE_OUT_IN, MOIRE_IN_OUT}) {
      MlpOptions options = layer();
      options.w1_layout = layout;
      const MlpProblem p(options, random);
      on_one_device(tested(), [&](const Tested& device) {
        expect_no_change_of_linear(device, c, dequantized, p);
      });
    }
  });
}

TEST(PreparedWeight, HasTheBytesOfWhatItsProductsRead) {
  Random random;
  const TestWeight w = TestWeight(DType::kBF16, 4, 64, 96).randomize(random);
  const auto bytes_of = [&](const Context& context, const RecipeCase& c, int32_t dequantized,
                            int32_t forward_only) {
    PrepareWeightArgs args = prepare_args(c, w);
    args.dequantized = dequantized;
    args.forward_only = forward_only;
    moire_prepared_weight form{};
    EXPECT_TRUE(succeeds(prepare_weight_form(context, args, &form)));
    return form.memory.shape[0];
  };
  constexpr int64_t kElements = int64_t{4} * 64 * 96;
  const int64_t rowwise = kElements + int64_t{4} * 64 * 16;  // scales: rows of 16 bytes
  const int64_t columnwise = kElements + int64_t{4} * 2 * 96;
  const RecipeCase mxfp8{MOIRE_RECIPE_MXFP8}, block{MOIRE_RECIPE_FP8_BLOCK};
  EXPECT_EQ(bytes_of(cpu(), mxfp8, 0, 0), rowwise + columnwise);
  EXPECT_EQ(bytes_of(cpu(), mxfp8, 0, 1), rowwise);
  EXPECT_EQ(bytes_of(cpu(), mxfp8, 1, 0), rowwise + columnwise) << "nothing to keep decoded";
  EXPECT_EQ(bytes_of(cpu(), block, 0, 0), kElements + 256) << "tiles serve both directions";
  const Result<Context> hopper = planned_for_hopper();
  if (!hopper.ok()) GTEST_SKIP() << hopper.status().message();
  EXPECT_TRUE(fails(QuantizedWeight::create(hopper.value(), prepare_args(mxfp8, w)).status(),
                    Code::kOutOfMemory, "QuantizedWeight::create: no memory on "));
  EXPECT_EQ(bytes_of(hopper.value(), mxfp8, 1, 0), 4 * kElements);
  EXPECT_EQ(bytes_of(hopper.value(), mxfp8, 1, 1), 2 * kElements);
  EXPECT_EQ(bytes_of(hopper.value(), mxfp8, 0, 0), rowwise + columnwise);
  // For FP8 tensor cores: rows of 128 bytes as the weight lies and turned over, and their tiles.
  constexpr int64_t kAsItLies = int64_t{4} * 64 * 128 + 256, kTurned = int64_t{4} * 96 * 128 + 256;
  for (const RecipeCase& fast : {block, RecipeCase{MOIRE_RECIPE_MXFP8_FAST}}) {
    EXPECT_EQ(bytes_of(hopper.value(), fast, 0, 0), kAsItLies + kTurned);
    EXPECT_EQ(bytes_of(hopper.value(), fast, 0, 1), kAsItLies);
  }
  // Plain kernels read codes.
  ContextOptions options = hopper_options();
  options.implementation = "portable";
  const Context plain = hopper.value().sharing(options).value();
  EXPECT_EQ(bytes_of(plain, mxfp8, 1, 0), rowwise + columnwise);
  EXPECT_EQ(bytes_of(plain, {MOIRE_RECIPE_MXFP8_FAST}, 0, 0), rowwise + columnwise);
  EXPECT_EQ(bytes_of(plain, block, 0, 0), bytes_of(cpu(), block, 0, 0));
}

// On a GPU that is planned for: the quantiser makes values, and with decoded weights nothing is
// decoded before a product.
TEST(PreparedWeight, IsNotDecodedAgainOnHopper) {
  const Result<Context> hopper = planned_for_hopper();
  if (!hopper.ok()) GTEST_SKIP() << hopper.status().message();
  const Context explaining = hopper.value().explaining();
  Random random;
  const RecipeCase mxfp8{MOIRE_RECIPE_MXFP8};
  const MlpProblem p(layer(), random);
  const auto planned = [&](const TestWeight& w) {
    PrepareWeightArgs args = prepare_args(mxfp8, w);
    args.dequantized = 1;
    Prepared out;
    EXPECT_TRUE(succeeds(prepare_weight_form(explaining, args, &out.weight)));
    out.memory = std::make_shared<Buffer>(static_cast<size_t>(out.weight.memory.shape[0]));
    out.weight.memory.data = out.memory->data();
    return out;
  };
  const Prepared w1 = planned(p.w1), w2 = planned(p.w2);
  GroupedMlpArgs args = with_prepared(mxfp8.in(p.forward()), w1, w2);
  size_t bytes = 0;
  ASSERT_TRUE(succeeds(moire::grouped_mlp_workspace(explaining, args, &bytes)));
  const Buffer workspace(bytes);
  args.workspace = workspace.workspace();
  ASSERT_TRUE(succeeds(moire::grouped_mlp(explaining, args)));
  for (const Step& step : explaining.explanation()) {
    if (!step.op.starts_with("grouped_gemm")) continue;
    EXPECT_EQ(step.policy.find("decoding"), std::string::npos) << step.policy;
  }
}

// Which may lie as tensor cores do not take them, for whose sake alone MXFP8 is folded.
TEST(PreparedWeight, IsNotFoldedForRowsThatAreGiven) {
  const Result<Context> hopper = planned_for_hopper();
  if (!hopper.ok()) GTEST_SKIP() << hopper.status().message();
  const TestTensor codes(DType::kE4M3, {257, 512}), mx(DType::kE8M0, {256, 16}),
      block(DType::kFP32, {256, 4}), made(DType::kBF16, {256, 512}),
      offsets = index_tensor(DType::kInt64, {0, 100, 256});
  const TestWeight w(DType::kBF16, 2, 512, 512);
  for (const int32_t recipe : {MOIRE_RECIPE_MXFP8_FAST, MOIRE_RECIPE_FP8_BLOCK}) {
    const bool folds = recipe == MOIRE_RECIPE_MXFP8_FAST;
    for (const int64_t shift : {0, 8}) {
      const TensorView rows(static_cast<char*>(codes.view().data) + shift, DType::kE4M3,
                            {256, 512});
      const auto expect_steps = [&](auto& call) {
        const Context context = hopper.value().explaining();
        call.recipe = recipe;
        call.w = w;
        call.groups = {static_cast<const int64_t*>(offsets.view().data), 2, 256};
        EXPECT_TRUE(succeeds(run(context, call)));
        const Explanation steps = context.explanation();
        EXPECT_EQ(steps.at(0).op, folds ? "quantize_weight" : "prepare_weight");
        const Step& product = steps.back();
        EXPECT_TRUE(!folds || product.implementation == "sm90") << product.policy;
      };
      GroupedLinearArgs forward;
      forward.x = rows;
      forward.x_scales = folds ? mx : block;
      forward.y = made;
      expect_steps(forward);
      GroupedLinearBackwardArgs backward;
      backward.grad_y_rowwise = {rows, folds ? mx : block};
      backward.grad_x = made;
      expect_steps(backward);
    }
  }
}

TEST(PreparedWeight, IsExplainedWithItsBytes) {
  Random random;
  const TestWeight w = TestWeight(DType::kBF16, 4, 64, 96).randomize(random);
  const Context explaining = cpu().explaining();
  PrepareWeightArgs args = prepare_args({MOIRE_RECIPE_FP8_BLOCK}, w);
  ASSERT_TRUE(succeeds(prepare_weight_form(explaining, args, &args.prepared)));
  Buffer memory(static_cast<size_t>(args.prepared.memory.shape[0]));
  args.prepared.memory.data = memory.data();
  ASSERT_TRUE(succeeds(moire::prepare_weight(explaining, args)));
  const Explanation steps = explaining.explanation();
  ASSERT_EQ(steps.size(), 1U);
  EXPECT_EQ(steps[0].op, "prepare_weight");
  EXPECT_EQ(steps[0].problem, "bf16 [4, 64, 96], FP8_TILE");
  EXPECT_EQ(steps[0].policy, "codes, 24832 bytes");
  EXPECT_EQ(steps[0].bytes_written, 24832);
}

TEST(PreparedWeight, OfNothingIsNothing) {
  Random random;
  for (const RecipeCase& c : recipes()) {
    const Prepared none = prepare(prepare_args(c, TestWeight(DType::kBF16, 0, 64, 96)));
    EXPECT_EQ(none.weight.memory.shape[0], 0);
  }
}

// What was infinite is said of the op and of its operand, as of a layer's.
TEST(PreparedWeight, SaysWhatWasInfinite) {
  Random random;
  for (const RecipeCase& c : recipes()) {
    TestWeight w = TestWeight(DType::kBF16, 1030, 64, 96).randomize(random);
    for (const int64_t g : {1028, 2}) {  // of a GPU's second launch, and of the first
      w.set(g, 5, 7, std::numeric_limits<double>::infinity());
      const Tested context = tested();
      prepare(prepare_args(c, w), Tested::finding(context));
      EXPECT_TRUE(fails(context.check(), Code::kInvalidArgument,
                        concat("prepare_weight: w[", g, ", 5, 7]")))
          << c;
    }
  }
}

template <class A>
struct Wrong {
  std::function<void(A&)> spoil;
  const char* message;
};

// Each on the CPU: what is refused is refused before any device.
TEST(PreparedWeight, OfAnotherKindIsRefusedWithASentence) {
  Random random;
  const RecipeCase mxfp8{MOIRE_RECIPE_MXFP8};
  const MlpProblem p(layer({"Two", {33, 70}, 2}), random);  // H = 40, F = 72
  const Tested device(cpu());
  const Prepared w1 = prepare(prepare_args(mxfp8, p.w1), device);
  const Prepared w2 = prepare(prepare_args(mxfp8, p.w2), device);
  PrepareWeightArgs forward_only = prepare_args(mxfp8, p.w1);
  forward_only.forward_only = 1;
  const Prepared w1_forward = prepare(forward_only, device);
  using A = GroupedMlpArgs;
  const std::vector<Wrong<A>> table = {
      {[](A& a) { a.w1_prepared.version = 7; }, "w1_prepared was prepared with version 7, needs 1"},
      {[](A& a) { a.w1_prepared.device = MOIRE_CUDA; },
       "w1_prepared was prepared with device 1, needs 0"},
      {[](A& a) { a.w2_prepared.index = 3; }, "w2_prepared was prepared with index 3, needs 0"},
      {[](A& a) { a.recipe = MOIRE_RECIPE_MXFP8_FAST; },
       "w2_prepared was prepared with recipe 1, needs 2"},
      {[](A& a) { a.recipe = MOIRE_RECIPE_AS_STORED; },
       "w1_prepared is present but recipe is 0 (as stored), which quantises nothing"},
      {[](A& a) { a.w1_prepared.fractional_scales = 1; },
       "w1_prepared was prepared with fractional_scales 1, needs 0"},
      {[](A& a) { a.w1.layout = MOIRE_IN_OUT; }, "w1_prepared was prepared with layout 0, needs 1"},
      {[&](A& a) { a.w1_prepared = w2; },
       "w1_prepared was prepared of [2, 40, 72], needs [2, 144, 40]"},
      {[](A& a) { a.groups.num_groups = 1; },
       "w2_prepared was prepared of [2, 40, 72], needs [1, 40, 72]"},
      {[](A& a) { a.w1_prepared.form = 9; }, "w1_prepared has form 9, which recipe 1 has not"},
      {[](A& a) { a.w1_prepared.memory.shape[0] -= 1; }, "w1_prepared.memory is uint8 ["},
      {[](A& a) { a.w1_prepared.memory.data = nullptr; }, "but its data pointer is null"},
      {[](A& a) { a.w1_prepared.memory.data = static_cast<char*>(a.w1_prepared.memory.data) + 8; },
       "w1_prepared.memory is not aligned to 64 bytes"},
      {[&](A& a) { a.y.data = a.w1_prepared.memory.data; }, "overlap in their address ranges"},
  };
  for (const Wrong<A>& wrong : table) {
    A args = with_prepared(mxfp8.in(p.forward()), w1, w2);
    wrong.spoil(args);
    EXPECT_TRUE(fails(run(cpu(), args), Code::kInvalidArgument, wrong.message));
    EXPECT_TRUE(std::isnan(p.y.get(0, 0))) << "y is as it was: " << wrong.message;
  }
  EXPECT_TRUE(succeeds(run(cpu(), with_prepared(mxfp8.in(p.forward()), w1_forward, w2))));
  EXPECT_TRUE(fails(run(cpu(), with_prepared(mxfp8.in(p.backward()), w1_forward, w2)),
                    Code::kInvalidArgument,
                    "w1_prepared was prepared with forward_only 1, needs 0: its gradient of x is "
                    "asked for"));
}

TEST(PreparedWeight, IsMadeOfSoundArgumentsAlone) {
  Random random;
  const MlpProblem p(layer({"Two", {33, 70}, 2}), random);
  using A = PrepareWeightArgs;
  const std::vector<Wrong<A>> table = {
      {[](A& a) { a.recipe = 0; },
       "recipe is 0, needs 1 to 3: the products of others read weights as they are"},
      {[](A& a) { a.recipe = 4; }, "recipe is 4, needs 1 to 3"},
      {[](A& a) { a.fractional_scales = 1; },
       "fractional_scales is 1, but the scales of MXFP8 are powers of two"},
      {[](A& a) { a.dequantized = 1, a.recipe = MOIRE_RECIPE_MXFP8_FAST; },
       "dequantized is 1 but recipe is 2, needs 1 (mxfp8), whose products may be of decoded"},
      {[](A& a) { a.dequantized = 2; }, "dequantized is 2, must be 0 to 1"},
      {[](A& a) { a.forward_only = -1; }, "forward_only is -1, must be 0 to 1"},
      {[](A& a) { a.w.layout = 2; }, "w.layout is 2, must be 0 to 1"},
      {[](A& a) { a.w = moire_weight{}; }, "w is absent, needs fp32, bf16 or fp16 [G, n, k]"},
      {[](A& a) { a.w.tensor.rank = 2; }, "w has rank 2, needs rank 3 [G, n, k]"},
      {[](A& a) { a.w.tensor.dtype = MOIRE_E4M3; }, "w is e4m3 [2, 144, 40], needs fp32, bf16"},
  };
  const Context context = cpu();
  for (const Wrong<A>& wrong : table) {
    A args = prepare_args({MOIRE_RECIPE_MXFP8}, p.w1);
    wrong.spoil(args);
    moire_prepared_weight form{};
    EXPECT_TRUE(fails(prepare_weight_form(context, args, &form), Code::kInvalidArgument,
                      std::string("prepare_weight_form: ") + wrong.message));
    EXPECT_EQ(form.version, 0) << "form is as it was";
  }
  A args = prepare_args({MOIRE_RECIPE_MXFP8}, p.w1);
  EXPECT_TRUE(fails(prepare_weight_form(context, args, nullptr), Code::kInvalidArgument,
                    "prepare_weight_form: form is null, needs an address"));
  size_t bytes = 0;
  EXPECT_TRUE(fails(moire::prepare_weight_workspace(context, args, &bytes), Code::kInvalidArgument,
                    "prepare_weight: prepared was prepared with version 0, needs 1"));
  ASSERT_TRUE(succeeds(prepare_weight_form(context, args, &args.prepared)));
  EXPECT_TRUE(fails(moire::prepare_weight(context, args), Code::kInvalidArgument,
                    "prepare_weight: prepared.memory is uint8 ["));
}

// One that is kept follows versions, at an address that stays.
TEST(PreparedWeight, IsKeptByQuantizedWeight) {
  Random random;
  const RecipeCase c{MOIRE_RECIPE_MXFP8};
  const MlpProblem p(layer(), random);
  TestWeight w = p.w2;
  QuantizedWeight kept = QuantizedWeight::create(cpu(), prepare_args(c, w)).value();
  const moire_prepared_weight before = kept.prepared();
  EXPECT_FALSE(kept.view().has_rowwise());
  std::memset(before.memory.data, 0xFF, static_cast<size_t>(before.memory.shape[0]));  // padding
  const auto holds = [&](const TestWeight& weight) {
    const Prepared want = prepare(prepare_args(c, weight), Tested(cpu()));
    const moire_prepared_weight& got = kept.prepared();
    return got.memory.data == before.memory.data &&
           std::memcmp(got.memory.data, want.memory->data(), want.memory->bytes()) == 0;
  };
  ASSERT_TRUE(succeeds(kept.update(cpu(), Weight(w), 1)));
  EXPECT_TRUE(holds(p.w2));
  w.randomize(random);
  ASSERT_TRUE(succeeds(kept.update(cpu(), Weight(w), 1)));
  EXPECT_TRUE(holds(p.w2)) << "the version is the same";
  ASSERT_TRUE(succeeds(kept.update(cpu(), Weight(w), 2)));
  EXPECT_TRUE(holds(w));
  const TestWeight other(DType::kBF16, 3, 40, 73);
  EXPECT_TRUE(fails(kept.update(cpu(), Weight(other), 3), Code::kInvalidArgument,
                    "prepare_weight: prepared was prepared of [3, 40, 72], needs [3, 40, 73]"));
}

}  // namespace
}  // namespace moire::test
