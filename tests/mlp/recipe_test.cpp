// The 8-bit recipes: each composite is its ops one after the other, bit for bit, and copies that
// are given or kept change nothing.
#include <moire/quantize.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "core/divide.h"
#include "core/scale_shapes.h"
#include "tests/mlp/mlp_checks.h"
#include "tests/mlp/recipe_cases.h"

namespace moire::test {
namespace {

// One direction's copy and its memory.
struct Copy {
  TestTensor data, scales;

  operator moire_quantized() const { return {data, scales}; }
};

// Rows of scales lie a multiple of 16 bytes apart, as a layer's own do and FP8 tensor cores ask
// for, and one more than they need.
TestTensor scale_memory(int32_t scaling, std::initializer_list<int64_t> shape) {
  const DType dtype = scale_dtype(scaling);
  const int64_t columns = *(shape.end() - 1), pitch = 16 / dtype_size(dtype);
  return {dtype, shape, round_up(columns, pitch) + pitch - columns};
}

Copy ragged_memory(const RecipeCase& c, DType element, int32_t direction, const Batch& batch,
                   int64_t columns) {
  const ScaleShape shape =
      ragged_scales(c.scaling(), direction, batch.capacity(), batch.groups().num_groups, columns);
  return {TestTensor(element, {batch.capacity(), columns}),
          scale_memory(c.scaling(), {shape.rows, shape.columns})};
}

// `source` in the order of the groups, by the op.
Copy copy_of(const Tested& device, const RecipeCase& c, DType element, int32_t direction,
             const Batch& batch, const TestTensor& source, const TestTensor& row_idx = {}) {
  Copy copy = ragged_memory(c, element, direction, batch, source.view().columns());
  if (batch.groups().num_groups == 0) return copy;
  QuantizeArgs args;
  args.source = source;
  args.row_idx = row_idx;
  args.scaling = c.scaling();
  args.fractional_scales = c.fractional_scales;
  (direction == MOIRE_ROWWISE ? args.rowwise : args.columnwise) = copy;
  args.groups = batch.groups();
  EXPECT_TRUE(succeeds(quantize(device, args)));
  return copy;
}

Copy copy_of(const Tested& device, const RecipeCase& c, const TestWeight& weight, bool along_in) {
  const moire_weight w = weight;
  const bool tiles = c.weight_scaling() == MOIRE_SCALING_FP8_TILE;
  const bool rowwise = tiles || (w.layout == MOIRE_OUT_IN) == along_in;
  const int64_t* shape = w.tensor.shape;
  const ScaleShape s = matrix_scales(c.weight_scaling(), rowwise ? MOIRE_ROWWISE : MOIRE_COLUMNWISE,
                                     shape[1], shape[2]);
  Copy copy{TestTensor(DType::kE4M3, {shape[0], shape[1], shape[2]}),
            scale_memory(c.weight_scaling(), {shape[0], s.rows, s.columns})};
  QuantizeWeightArgs args;
  args.source = w;
  args.scaling = c.weight_scaling();
  args.fractional_scales = c.fractional_scales;
  (rowwise ? args.rowwise : args.columnwise) = copy;
  EXPECT_TRUE(succeeds(quantize_weight(device, args)));
  return copy;
}

void multiply(const Tested& device, const RecipeCase& c, const Batch& batch, const Copy& a,
              const Copy& w, int32_t layout, bool transpose, const TestTensor& bias,
              const TestTensor& scale, const TestTensor& d) {
  GroupedGemmArgs args;
  args.accumulation = c.accumulation();
  args.a = a.data;
  args.a_scales = a.scales;
  args.b = Weight(w.data.view(), layout);
  args.b_scales = w.scales;
  args.transpose_b = transpose ? 1 : 0;
  args.bias = bias;
  args.bias_scale = scale;
  args.d = d;
  args.groups = batch.groups();
  ASSERT_TRUE(succeeds(run(device, args)));
}

void multiply_rows(const Tested& device, const RecipeCase& c, const Batch& batch,
                   const Copy& grad_y, const Copy& x, const TestWeight& grad_w, int32_t beta) {
  const moire_weight d = grad_w;
  const bool out_in = d.layout == MOIRE_OUT_IN;
  const Copy &a = out_in ? grad_y : x, &b = out_in ? x : grad_y;
  GroupedGemmWgradArgs args;
  args.accumulation = c.accumulation();
  args.a = a.data;
  args.a_scales = a.scales;
  args.b = b.data;
  args.b_scales = b.scales;
  args.d = d;
  args.beta = beta;
  args.groups = batch.groups();
  ASSERT_TRUE(succeeds(run(device, args)));
}

// z, act and y of `p`, op by op.
void run_ops_forward(const Tested& device, const RecipeCase& c, const MlpProblem& p) {
  const MlpOptions& o = p.options;
  const DType e4m3 = DType::kE4M3;
  multiply(device, c, p.batch, copy_of(device, c, e4m3, MOIRE_ROWWISE, p.batch, p.x, p.row_idx),
           copy_of(device, c, p.w1, true), o.w1_layout, false, p.b1, {}, p.z);
  GluArgs activation;
  activation.z = p.z;
  activation.probs = p.probs;
  activation.act = p.act;
  activation.groups = p.batch.groups();
  activation.activation = o.activation;
  activation.layout = o.layout;
  ASSERT_TRUE(succeeds(glu(device, activation)));
  multiply(device, c, p.batch, copy_of(device, c, e4m3, MOIRE_ROWWISE, p.batch, p.act),
           copy_of(device, c, p.w2, true), o.w2_layout, false, p.b2, p.factor_of_b2(), p.y);
}

// The gradients of b2 and of a scale of its own.
void run_bias_backward(const Tested& device, const MlpProblem& p, const TestTensor& grad_y_idx) {
  BiasBackwardArgs args;
  args.grad_y = p.grad_y;
  args.row_idx = grad_y_idx;
  args.scale = p.factor_of_b2();
  args.bias = p.b2;
  args.grad_bias = p.grad_b2;
  if (p.with_own_b2_scale()) args.grad_scale = p.grad_b2_scale;
  args.beta = p.options.accumulate ? 1 : 0;
  args.groups = p.batch.groups();
  ASSERT_TRUE(succeeds(run(device, args)));
}

// All gradients of `p` op by op, after a forward.
void run_ops_backward(const Tested& device, const RecipeCase& c, const MlpProblem& p) {
  const MlpOptions& o = p.options;
  const TestTensor grad_y_idx = o.gathered_grad_y ? p.row_idx : TestTensor();
  const auto gradient = [&](int32_t direction, const TestTensor& t, const TestTensor& idx) {
    return copy_of(device, c, c.gradient(), direction, p.batch, t, idx);
  };
  const auto columnwise = [&](const TestTensor& t, const TestTensor& idx) {
    return copy_of(device, c, DType::kE4M3, MOIRE_COLUMNWISE, p.batch, t, idx);
  };
  TestTensor grad_act(DType::kBF16, {p.batch.capacity(), o.width});
  multiply(device, c, p.batch, gradient(MOIRE_ROWWISE, p.grad_y, grad_y_idx),
           copy_of(device, c, p.w2, false), o.w2_layout, true, {}, {}, grad_act);
  GluBackwardArgs activation;
  activation.z = p.z;
  activation.probs = p.probs;
  activation.grad_act = grad_act;
  activation.grad_z = p.grad_z;
  activation.act = p.act;
  if (o.with_probs) activation.grad_probs = p.grad_probs;
  activation.groups = p.batch.groups();
  activation.activation = o.activation;
  activation.layout = o.layout;
  ASSERT_TRUE(succeeds(glu_backward(device, activation)));
  if (o.with_b2) run_bias_backward(device, p, grad_y_idx);
  const int32_t beta = o.accumulate ? 1 : 0;
  multiply(device, c, p.batch, gradient(MOIRE_ROWWISE, p.grad_z, {}),
           copy_of(device, c, p.w1, false), o.w1_layout, true, {}, {}, p.grad_x);
  multiply_rows(device, c, p.batch, gradient(MOIRE_COLUMNWISE, p.grad_z, {}),
                columnwise(p.x, p.row_idx), p.grad_w1, beta);
  multiply_rows(device, c, p.batch, gradient(MOIRE_COLUMNWISE, p.grad_y, grad_y_idx),
                columnwise(p.act, {}), p.grad_w2, beta);
}

// Without b2 grad_probs has one path.
MlpOptions without_b2(const RaggedCase& ragged) {
  MlpOptions options;
  options.ragged = ragged;
  options.hidden = 40;
  options.width = 72;
  options.dtype = DType::kBF16;
  options.in_8_bits = true;
  options.with_b2 = false;
  return options;
}

// A layer whose products FP8 tensor cores refuse for its sizes, and one of which they take all.
template <class F>
void for_each_recipe_of_three(F&& f) {
  MlpOptions fitting = without_b2({"Three", {140, 0, 300}, 3});
  fitting.hidden = 48;
  fitting.width = 96;
  for (const RecipeCase& c : recipes()) {
    f(c, without_b2({"Three", {40, 0, 150}, 3}));
    f(c, fitting);
  }
}

void expect_composite_is_its_ops(const RecipeCase& c, const MlpOptions& options, Random& random,
                                 const std::function<void(MlpProblem&)>& change = {}) {
  SCOPED_TRACE(testing::PrintToString(c) + ", " + testing::PrintToString(options));
  on_one_device(tested(), [&](const Tested& device) {
    MlpProblem composite(options, random);
    if (change) change(composite);
    const MlpProblem ops = composite;
    ASSERT_TRUE(succeeds(run(device, c.in(composite.forward()))));
    run_ops_forward(device, c, ops);
    ASSERT_TRUE(succeeds(run(device, c.in(composite.backward()))));
    run_ops_backward(device, c, ops);
    EXPECT_TRUE(same_bits(composite.z, ops.z, ops.batch.rows())) << "z";
    EXPECT_TRUE(same_bits(composite.y, ops.y)) << "y";
    const MlpNeeds made{.b1 = false};  // which has no part in the ops above
    EXPECT_TRUE(same_outputs(composite.backward(made), ops.backward(made)));
    EXPECT_TRUE(composite.is_undamaged());
  });
}

TEST(Recipe, IsItsOpsBitForBitOnEveryRaggedCase) {
  Random random;
  for (const RaggedCase& ragged : ragged_table()) {
    for (const RecipeCase& c : recipes()) {
      expect_composite_is_its_ops(c, without_b2(ragged), random);
      if (testing::Test::HasFailure()) return;
    }
  }
}

TEST(Recipe, IsItsOpsForEveryDtypeLayoutAndGathering) {
  Random random;
  for_each_recipe_of_three([&](const RecipeCase& c, MlpOptions options) {
    for (const DType dtype : {DType::kFP32, DType::kBF16, DType::kFP16}) {
      for (const bool gathered : {false, true}) {
        for (const int32_t weight_layout : {MOIRE_OUT_IN, MOIRE_IN_OUT}) {
          options.dtype = dtype;
          options.gathered = options.gathered_grad_y = gathered;
          options.w1_layout = options.w2_layout = weight_layout;
          options.listed = gathered;
          options.accumulate = gathered;
          expect_composite_is_its_ops(c, options, random);
        }
      }
    }
  });
}

TEST(Recipe, IsItsOpsForEveryActivationAndGateAndUpLayout) {
  Random random;
  for (const RecipeCase& c : recipes()) {
    for (const Activation& activation : activations()) {
      for (const GluLayout& layout : glu_layouts()) {
        for (const int64_t width : {8, 160, 176}) {
          MlpOptions options = without_b2({"Two", {70, 5}});
          options.activation = activation;
          options.layout = layout;
          options.width = width;
          expect_composite_is_its_ops(c, options, random);
        }
      }
    }
  }
}

TEST(Recipe, IsItsOpsWhereYIsOfAnotherWidthAndB2ScaledOtherwise) {
  Random random;
  for (const RecipeCase& c : recipes()) {
    for (const B2Scale b2_scale : {B2Scale::kNothing, B2Scale::kOwn}) {
      for (const int64_t out : {24, 136}) {
        MlpOptions options = without_b2({"Three", {40, 0, 150}, 3});
        options.out = out;
        options.with_b2 = true;
        options.b2_scale = b2_scale;
        options.gathered = options.gathered_grad_y = out == 24;
        options.w2_layout = out == 24 ? MOIRE_OUT_IN : MOIRE_IN_OUT;
        expect_composite_is_its_ops(c, options, random);
      }
    }
  }
}

// Three blocks of act: below 2^-101, above 2^100, which epilogues leave to a pass, and plain.
void spread_act(MlpProblem& p) {
  constexpr int kExponents[] = {-115, 108, 0};
  const int64_t width = p.options.width, hidden = p.options.hidden;
  for (int64_t i = 0; i < p.batch.groups().num_groups * width * hidden; ++i) {
    const int64_t g = i / (width * hidden), j = i / hidden % width, k = i % hidden;
    p.w1.set(g, width + j, k, std::ldexp(p.w1.get(g, width + j, k), kExponents[j / 32]));
  }
}

TEST(Recipe, IsItsOpsWhereBlocksOfActAreOfAllMagnitudes) {
  Random random;
  for_each_recipe_of_three([&](const RecipeCase& c, MlpOptions options) {
    options.with_b1 = false;
    expect_composite_is_its_ops(c, options, random, spread_act);
  });
}

// Copies of the weights made before, x quantised before, and the copies that a forward keeps.
void expect_copies_change_no_bit(const Tested& device, const RecipeCase& c,
                                 const MlpOptions& options, Random& random) {
  const MlpProblem plain(options, random);
  const MlpProblem given = plain;
  const Batch& batch = given.batch;
  ASSERT_TRUE(succeeds(run(device, c.in(plain.forward()))));
  ASSERT_TRUE(succeeds(run(device, c.in(plain.backward()))));

  GroupedMlpArgs forward = c.in(given.forward());
  const Copy w1 = copy_of(device, c, given.w1, true), w2 = copy_of(device, c, given.w2, true);
  const Copy act_kept = ragged_memory(c, DType::kE4M3, MOIRE_COLUMNWISE, batch, options.width);
  const Copy x_kept = ragged_memory(c, DType::kE4M3, MOIRE_COLUMNWISE, batch, options.hidden);
  forward.w1 = forward.w2 = moire_weight{};
  forward.w1_quantized = w1;
  forward.w2_quantized = w2;
  forward.x_columnwise = x_kept;
  forward.act_columnwise = act_kept;
  ASSERT_TRUE(succeeds(run(device, forward)));

  const Copy x = copy_of(device, c, DType::kE4M3, MOIRE_ROWWISE, batch, given.x);
  forward.x = x.data;
  forward.x_scales = x.scales;
  forward.x_columnwise = {};
  const TestTensor y = given.y;
  forward.y = y;
  ASSERT_TRUE(succeeds(run(device, forward)));
  EXPECT_TRUE(same_bits(y, given.y)) << "from an x that was quantised before";

  GroupedMlpBackwardArgs backward = c.in(given.backward());
  const Copy w1_back = copy_of(device, c, given.w1, false),
             w2_back = copy_of(device, c, given.w2, false);
  const Copy rows = copy_of(device, c, c.gradient(), MOIRE_ROWWISE, batch, given.grad_y);
  const Copy columns = copy_of(device, c, c.gradient(), MOIRE_COLUMNWISE, batch, given.grad_y);
  backward.w1 = backward.w2 = moire_weight{};
  backward.w1_quantized = w1_back;
  backward.w2_quantized = w2_back;
  backward.x = moire_tensor{};
  backward.x_columnwise = x_kept;
  backward.act = moire_tensor{};
  backward.act_columnwise = act_kept;
  backward.act_is_saved = 1;
  backward.grad_y = moire_tensor{};
  backward.grad_y_rowwise = rows;
  backward.grad_y_columnwise = columns;
  ASSERT_TRUE(succeeds(run(device, backward)));
  expect_same_results(given, plain);
}

TEST(Recipe, GivenAndKeptCopiesChangeNoBit) {
  Random random;
  for_each_recipe_of_three([&](const RecipeCase& c, const MlpOptions& options) {
    SCOPED_TRACE(testing::PrintToString(c) + ", " + testing::PrintToString(options));
    on_one_device(tested(), [&](const Tested& device) {
      expect_copies_change_no_bit(device, c, options, random);
    });
  });
}

// Any subset of the gradients has the bits that it has beside the others.
TEST(Recipe, EachGradientAloneHasTheSameBits) {
  Random random;
  for (const RecipeCase& c : recipes()) {
    MlpOptions options = without_b2({"Two", {33, 70}, 2});
    options.with_b2 = true;
    on_one_device(tested(), [&](const Tested& device) {
      const MlpProblem all(options, random);
      ASSERT_TRUE(succeeds(run(device, c.in(all.forward()))));
      const MlpProblem before = all;
      ASSERT_TRUE(succeeds(run(device, c.in(all.backward()))));
      for (int only = 0; only < 6; ++only) {
        SCOPED_TRACE(only);
        const MlpProblem p = before;
        const MlpNeeds needs{only == 0, only == 1, only == 2, only == 3, only == 4, only == 5};
        ASSERT_TRUE(succeeds(run(device, c.in(p.backward(needs)))));
        EXPECT_TRUE(same_outputs(p.backward(needs), all.backward(needs)));
      }
    });
  }
}

void expect_linear_is_its_ops(const Tested& device, const RecipeCase& c, const MlpOptions& options,
                              Random& random) {
  const MlpProblem p(options, random);  // its x, w1, b1 and z are the layer's
  const Batch& batch = p.batch;
  GroupedLinearArgs forward;
  forward.x = p.x;
  forward.row_idx = p.row_idx;
  forward.w = p.w1;
  forward.bias = p.b1;
  forward.y = p.z;
  forward.groups = batch.groups();
  ASSERT_TRUE(succeeds(run(device, c.in(forward))));
  TestTensor want(options.dtype, {batch.capacity(), options.fc1_width()});
  multiply(device, c, batch, copy_of(device, c, DType::kE4M3, MOIRE_ROWWISE, batch, p.x, p.row_idx),
           copy_of(device, c, p.w1, true), options.w1_layout, false, p.b1, {}, want);
  EXPECT_TRUE(same_bits(p.z, want)) << "y";

  const TestTensor grad_y = want;
  TestWeight grad_w = p.grad_w1;
  GroupedLinearBackwardArgs backward;
  backward.x = p.x;
  backward.row_idx = p.row_idx;
  backward.w = p.w1;
  backward.grad_y = grad_y;
  backward.grad_x = p.grad_x;
  backward.grad_w = p.grad_w1;
  backward.groups = batch.groups();
  ASSERT_TRUE(succeeds(run(device, c.in(backward))));
  TestTensor want_x(options.dtype, {batch.capacity(), options.hidden});
  multiply(device, c, batch, copy_of(device, c, c.gradient(), MOIRE_ROWWISE, batch, grad_y),
           copy_of(device, c, p.w1, false), options.w1_layout, true, {}, {}, want_x);
  EXPECT_TRUE(same_bits(p.grad_x, want_x)) << "grad_x";
  multiply_rows(device, c, batch, copy_of(device, c, c.gradient(), MOIRE_COLUMNWISE, batch, grad_y),
                copy_of(device, c, DType::kE4M3, MOIRE_COLUMNWISE, batch, p.x, p.row_idx), grad_w,
                0);
  EXPECT_TRUE(same_bits(p.grad_w1, grad_w)) << "grad_w";
}

TEST(Recipe, LinearIsItsOpsBitForBit) {
  Random random;
  for_each_recipe_of_three([&](const RecipeCase& c, MlpOptions options) {
    for (const bool gathered : {false, true}) {
      options.gathered = gathered;
      SCOPED_TRACE(testing::PrintToString(c) + ", " + testing::PrintToString(options));
      on_one_device(tested(), [&](const Tested& device) {
        expect_linear_is_its_ops(device, c, options, random);
      });
    }
  });
}

template <class A>
struct BadCopy {
  std::function<void(A&)> spoil;
  std::string message;
};

TEST(Recipe, RefusesWrongCopiesWithASentence) {
  Random random;
  const RecipeCase mxfp8{MOIRE_RECIPE_MXFP8};
  const MlpOptions options = without_b2({"Two", {33, 70}, 2});  // H = 40, F = 72, capacity 105
  const MlpProblem p(options, random);
  const Copy x = copy_of(tested(), mxfp8, DType::kE4M3, MOIRE_ROWWISE, p.batch, p.x);
  const Copy w1 = copy_of(tested(), mxfp8, p.w1, true),
             w1_back = copy_of(tested(), mxfp8, p.w1, false);
  const Copy kept = ragged_memory(mxfp8, DType::kE4M3, MOIRE_COLUMNWISE, p.batch, 40);
  using A = GroupedMlpArgs;
  const std::vector<BadCopy<A>> table = {
      {[&](A& a) { a.recipe = 0, a.w1_quantized = w1; },
       "w1_quantized is present but recipe is 0 (as stored), which quantises nothing"},
      {[&](A& a) { a.recipe = 0, a.x_scales = x.scales; }, "x_scales is present but recipe is 0"},
      {[&](A& a) { a.w1_quantized = w1_back; }, "w1_quantized.scales is e8m0 [2, 5, 40]"},
      {[&](A& a) { a.w1_quantized = w1, a.w1_quantized.scales = {}; },
       "w1_quantized.scales is absent, needs e8m0"},
      {[&](A& a) { a.w1_quantized.scales = w1.scales; },
       "w1_quantized.data is absent, needs e4m3 or e5m2 [G, out, in] = [2, 144, 40]"},
      {[&](A& a) { a.x_columnwise.scales = kept.scales; },
       "x_columnwise.data is absent, needs e4m3 or e5m2 [capacity, k] = [105, 40]"},
      {[&](A& a) { a.w1 = moire_weight{}; }, "w1 is absent, needs fp32, bf16 or fp16"},
      {[&](A& a) { a.x = x.data; }, "x is e4m3 [105, 40], needs fp32, bf16 or fp16"},
      {[&](A& a) { a.x_scales = x.scales; }, "x is bf16 [105, 40], needs e4m3 or e5m2"},
      {[&](A& a) { a.x = x.data, a.x_scales = x.scales, a.x_columnwise = kept; },
       "x_columnwise is asked for but x is quantised already"},
      {[&](A& a) { a.x_columnwise = kept, a.x_columnwise.data.shape[1] = 39; },
       "x_columnwise.data is e4m3 [105, 39], needs"},
      {[&](A& a) { a.x_columnwise = x; }, "x_columnwise.scales is e8m0 [105, 2]"},
      {[&](A& a) { a.recipe = MOIRE_RECIPE_FP8_BLOCK, a.w1_quantized = w1; },
       "w1_quantized.scales is e8m0 [2, 144, 2] with row stride 32, needs fp32"},
      {[&](A& a) { a.z.dtype = MOIRE_FP16; }, "z is fp16 [105, 144], needs bf16"},
      {[&](A& a) { a.act = p.act, a.act.dtype = MOIRE_FP16; }, "act is fp16 [105, 72], needs bf16"},
      {[&](A& a) { a.emulate_accumulation = 1; },
       "emulate_accumulation is 1 but recipe is 1, needs 2 (mxfp8_fast) or 3 (fp8_block)"},
      {[&](A& a) { a.fractional_scales = 1; }, "fractional_scales is 1 but recipe is 1"},
      {[&](A& a) { a.recipe = MOIRE_RECIPE_FP8_BLOCK, a.fractional_scales = 2; },
       "fractional_scales is 2 but recipe is 3, needs 0, or 1 with recipe 3"},
      {[&](A& a) { a.x_columnwise = kept, a.x_columnwise.data.data = p.y.view().data; },
       "overlap in their address ranges"},
  };
  for (const BadCopy<A>& bad : table) {
    GroupedMlpArgs args = mxfp8.in(p.forward());
    bad.spoil(args);
    EXPECT_TRUE(fails(run(cpu(), args), Code::kInvalidArgument, bad.message));
    EXPECT_TRUE(std::isnan(p.y.get(0, 0))) << "y is as it was: " << bad.message;
  }
  GroupedMlpBackwardArgs backward = mxfp8.in(p.backward());
  backward.gradient_dtype = MOIRE_FP32;
  EXPECT_TRUE(fails(run(cpu(), backward), Code::kInvalidArgument,
                    "gradient_dtype is fp32, needs e4m3 (or 0) or e5m2"));
  backward = p.backward();
  backward.gradient_dtype = MOIRE_E5M2;
  EXPECT_TRUE(fails(run(cpu(), backward), Code::kInvalidArgument,
                    "gradient_dtype is e5m2 but recipe is 0 (as stored), which quantises nothing"));
  backward = mxfp8.in(p.backward()), backward.z.dtype = MOIRE_FP16;
  EXPECT_TRUE(
      fails(run(cpu(), backward), Code::kInvalidArgument, "z is fp16 [105, 144], needs bf16"));
  backward = mxfp8.in(p.backward()), backward.grad_y = {};
  EXPECT_TRUE(fails(run(cpu(), backward), Code::kInvalidArgument, "grad_y is absent"));
}

}  // namespace
}  // namespace moire::test
