// Tensors without elements, of which there may be any number of rows: every op ends at once.
#include <gtest/gtest.h>
#include <unistd.h>

#include "tests/support/expect.h"

namespace moire::test {
namespace {

constexpr int64_t kMany = int64_t{1} << 40;
constexpr DType kFP32 = DType::kFP32, kBF16 = DType::kBF16, kInt64 = DType::kInt64;

TensorView none(DType dtype, std::initializer_list<int64_t> shape) {
  return TensorView(nullptr, dtype, shape);
}

// One group that has all rows.
class NoElements : public testing::Test {
 protected:
  NoElements() { alarm(60); }  // a walk over the rows ends as a failure
  ~NoElements() override { alarm(0); }

  Groups many() const { return {many_, 1, kMany}; }
  Groups no_rows(int64_t capacity = 0) const { return {none_, 1, capacity}; }

  const Tested context_ = Tested(cpu(2));
  const int64_t many_[2] = {0, kMany}, none_[2] = {0, 0};
};

TEST_F(NoElements, Activations) {
  GluBackwardArgs backward;
  backward.z = backward.grad_z = none(kFP32, {kMany, 0});
  backward.grad_act = backward.act = none(kFP32, {kMany, 0});
  EXPECT_TRUE(succeeds(glu_backward(context_, backward)));
  GluArgs args;
  args.z = args.act = none(kFP32, {kMany, 0});
  EXPECT_TRUE(succeeds(glu(context_, args)));
  args.groups = many();
  EXPECT_TRUE(succeeds(glu(context_, args)));
  ConvertGluArgs convert;
  convert.source = convert.target = none(kFP32, {kMany, 0});
  EXPECT_TRUE(succeeds(convert_glu(context_, convert)));
}

TEST_F(NoElements, Routing) {
  UnpermuteArgs sum;
  sum.rows = none(kFP32, {0, 0});
  sum.scatter_idx = none(kInt64, {kMany, 0});
  sum.y = none(kFP32, {kMany, 0});
  EXPECT_TRUE(succeeds(unpermute(context_, sum)));
  UnpermuteBackwardArgs gradient;
  gradient.grad_y = none(kFP32, {kMany, 0});
  gradient.scatter_idx = none(kInt64, {kMany, 0});
  gradient.grad_rows = none(kFP32, {0, 0});
  gradient.groups = no_rows();
  EXPECT_TRUE(succeeds(unpermute_backward(context_, gradient)));
  const TestTensor probs(kFP32, {3});
  PermuteArgs move;
  move.topk_weights = none(kFP32, {kMany, 0});
  move.scatter_idx = none(kInt64, {kMany, 0});
  move.probs = probs;
  move.groups = no_rows(3);
  EXPECT_TRUE(succeeds(permute(context_, move)));
  EXPECT_EQ(static_cast<const float*>(probs.view().data)[2], 0)
      << "the tail is an output that has elements";
  const TestTensor offsets(kInt64, {3});
  PermutePlanArgs plan;
  plan.topk_idx = plan.scatter_idx = none(kInt64, {kMany, 0});
  plan.num_groups = 2;
  plan.offsets = offsets;
  plan.gather_idx = none(kInt64, {0});
  EXPECT_TRUE(succeeds(run(context_, plan)));
  EXPECT_EQ(static_cast<const int64_t*>(offsets.view().data)[2], 0);
}

TEST_F(NoElements, Quantisation) {
  const moire_quantized rowwise = {none(DType::kE4M3, {kMany, 0}), none(DType::kE8M0, {kMany, 0})};
  const moire_quantized columnwise = {none(DType::kE4M3, {kMany, 0}),
                                      none(DType::kE8M0, {kMany / 32 + 1, 0})};
  QuantizeArgs args;
  args.source = none(kFP32, {kMany, 0});
  args.scaling = MOIRE_SCALING_MXFP8;
  args.rowwise = rowwise;
  args.columnwise = columnwise;
  EXPECT_TRUE(succeeds(quantize(context_, args)));
  RequantizeArgs again;
  again.source = rowwise;
  again.scaling = MOIRE_SCALING_MXFP8;
  again.target = columnwise;
  again.groups = many();
  EXPECT_TRUE(succeeds(requantize(context_, again)));
  DequantizeArgs back;
  back.source = rowwise;
  back.scaling = MOIRE_SCALING_MXFP8;
  back.target = none(kFP32, {kMany, 0});
  EXPECT_TRUE(succeeds(dequantize(context_, back)));
  ConvertScalesArgs convert;
  convert.source = convert.target = rowwise.scales;
  convert.to = MOIRE_SCALES_DENSE;
  convert.groups = many();
  EXPECT_TRUE(succeeds(convert_scales(context_, convert)));
}

TEST_F(NoElements, Products) {
  GroupedGemmArgs gemm;
  gemm.a = gemm.d = none(kBF16, {kMany, 0});
  gemm.b = Weight(none(kBF16, {1, 0, 0}));
  gemm.groups = many();
  EXPECT_TRUE(succeeds(run(context_, gemm)));
  gemm.a = none(kBF16, {0, 0});
  gemm.b = Weight(none(kBF16, {1, kMany, 0}));
  gemm.d = none(kBF16, {0, kMany});
  gemm.groups = no_rows();
  EXPECT_TRUE(succeeds(run(context_, gemm))) << "columns";
  GroupedGemmWgradArgs wgrad;
  wgrad.a = wgrad.b = none(kBF16, {kMany, 0});
  wgrad.d = Weight(none(kBF16, {1, 0, 0}));
  wgrad.groups = many();
  EXPECT_TRUE(succeeds(run(context_, wgrad)));
  wgrad.a = none(kBF16, {0, kMany});
  wgrad.b = none(kBF16, {0, 0});
  wgrad.d = Weight(none(kBF16, {1, kMany, 0}));
  wgrad.groups = no_rows();
  EXPECT_TRUE(succeeds(run(context_, wgrad)));
  BiasBackwardArgs bias;
  bias.grad_y = none(kBF16, {kMany, 0});
  bias.grad_bias = none(kBF16, {1, 0});
  bias.groups = many();
  EXPECT_TRUE(succeeds(run(context_, bias)));
}

// Null pointers are handed to nothing that may not get them, which the sanitizers see.
TEST_F(NoElements, CopiesBesideAnOutputThatHasSome) {
  const TestTensor grad_y(kBF16, {40, 8}), grad_probs(kFP32, {40});
  const int64_t offsets[2] = {0, 3};  // the second row of scales is no block's
  GroupedGemmGluBackwardArgs args;
  args.grad_y = grad_y;
  args.w2 = Weight(none(kBF16, {1, 8, 0}));
  args.z = none(kBF16, {40, 0});
  args.grad_z_columnwise = {none(DType::kE4M3, {40, 0}), none(DType::kE8M0, {2, 0})};
  args.grad_probs = grad_probs;
  args.groups = {offsets, 1, 40};
  EXPECT_TRUE(succeeds(run(context_, args)));
  for (int64_t i = 0; i < 40; ++i) {
    EXPECT_EQ(static_cast<const float*>(grad_probs.view().data)[i], 0) << "row " << i;
  }
}

TEST_F(NoElements, Layers) {
  GroupedMlpArgs forward;
  forward.x = forward.z = forward.act = forward.y = none(kBF16, {kMany, 0});
  forward.w1 = forward.w2 = Weight(none(kBF16, {1, 0, 0}));
  forward.groups = many();
  EXPECT_TRUE(succeeds(run(context_, forward)));
  forward.recipe = MOIRE_RECIPE_FP8_BLOCK;
  forward.act_columnwise = {none(DType::kE4M3, {kMany, 0}), none(kFP32, {kMany / 128 + 1, 0})};
  EXPECT_TRUE(succeeds(run(context_, forward)));
  GroupedMlpBackwardArgs backward;
  backward.x = backward.z = backward.grad_y = backward.grad_x = none(kBF16, {kMany, 0});
  backward.w1 = backward.w2 = backward.grad_w1 = backward.grad_w2 = forward.w1;
  backward.grad_b1 = none(kBF16, {1, 0});
  backward.groups = many();
  EXPECT_TRUE(succeeds(run(context_, backward)));
}

}  // namespace
}  // namespace moire::test
