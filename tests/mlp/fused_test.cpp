// The fused MLP is grouped_linear, glu, grouped_linear and their gradients, bit for bit.
#include <moire/glu.h>

#include "tests/mlp/mlp_checks.h"

namespace moire::test {
namespace {

// The forward in three calls; `p` receives z, act and y.
void run_unfused_forward(const Tested& device, const MlpProblem& p) {
  GroupedLinearArgs fc1;
  fc1.x = p.x;
  fc1.row_idx = p.row_idx;
  fc1.w = p.w1;
  fc1.bias = p.b1;
  fc1.y = p.z;
  fc1.groups = p.batch.groups();
  fc1.tail = MOIRE_TAIL_UNTOUCHED;
  ASSERT_TRUE(succeeds(run(device, fc1)));
  GluArgs activation;
  activation.z = p.z;
  activation.probs = p.probs;
  activation.act = p.act;
  activation.groups = p.batch.groups();
  activation.activation = p.options.activation;
  activation.layout = p.options.layout;
  activation.tail = MOIRE_TAIL_UNTOUCHED;
  ASSERT_TRUE(succeeds(glu(device, activation)));
  GroupedLinearArgs fc2;
  fc2.x = p.act;
  fc2.w = p.w2;
  fc2.bias = p.b2;
  fc2.scale = p.factor_of_b2();
  fc2.y = p.y;
  fc2.groups = p.batch.groups();
  fc2.tail = p.options.tail;
  ASSERT_TRUE(succeeds(run(device, fc2)));
}

// The backward in three calls, after a forward; grad_probs has one path where it does not scale b2.
void run_unfused_backward(const Tested& device, const MlpProblem& p) {
  TestTensor grad_act(p.options.dtype, {p.batch.capacity(), p.options.width});
  GroupedLinearBackwardArgs fc2;
  fc2.x = p.act;
  fc2.w = p.w2;
  fc2.grad_y = p.grad_y;
  fc2.grad_x = grad_act;
  fc2.grad_w = p.grad_w2;
  fc2.bias = p.b2;
  fc2.scale = p.factor_of_b2();
  if (p.options.with_b2) fc2.grad_bias = p.grad_b2;
  if (p.with_own_b2_scale()) fc2.grad_scale = p.grad_b2_scale;
  fc2.groups = p.batch.groups();
  fc2.tail = MOIRE_TAIL_UNTOUCHED;
  ASSERT_TRUE(succeeds(run(device, fc2)));
  GluBackwardArgs activation;
  activation.z = p.z;
  activation.probs = p.probs;
  activation.grad_act = grad_act;
  activation.grad_z = p.grad_z;
  if (p.options.with_probs) activation.grad_probs = p.grad_probs;
  activation.groups = p.batch.groups();
  activation.activation = p.options.activation;
  activation.layout = p.options.layout;
  activation.tail = p.options.tail;
  ASSERT_TRUE(succeeds(glu_backward(device, activation)));
  GroupedLinearBackwardArgs fc1;
  fc1.x = p.x;
  fc1.row_idx = p.row_idx;
  fc1.w = p.w1;
  fc1.grad_y = p.grad_z;
  fc1.grad_x = p.grad_x;
  fc1.grad_w = p.grad_w1;
  if (p.options.with_b1) fc1.grad_bias = p.grad_b1;
  fc1.groups = p.batch.groups();
  fc1.tail = p.options.tail;
  ASSERT_TRUE(succeeds(run(device, fc1)));
}

void expect_fused_is_unfused(const MlpOptions& options, Random& random) {
  SCOPED_TRACE(testing::PrintToString(options));
  on_one_device(tested(), [&](const Tested& device) {
    const MlpProblem fused(options, random);
    const MlpProblem unfused = fused;
    const int64_t rows = fused.batch.rows();
    ASSERT_TRUE(succeeds(run(device, fused.forward())));
    run_unfused_forward(device, unfused);
    EXPECT_TRUE(same_bits(fused.z, unfused.z, rows)) << "z";
    EXPECT_TRUE(same_bits(fused.y, unfused.y)) << "y";
    if (options.saves_act) {
      EXPECT_TRUE(same_bits(fused.act, unfused.act, rows)) << "act";
    }
    ASSERT_TRUE(succeeds(run(device, fused.backward())));
    run_unfused_backward(device, unfused);
    const MlpNeeds whole{.b2_scale = false};
    EXPECT_TRUE(same_outputs(fused.backward(whole), unfused.backward(whole)));
    EXPECT_TRUE(same_bits(fused.grad_b2_scale, unfused.grad_b2_scale, rows)) << "grad_b2_scale";
  });
}

TEST(Fused, EqualsUnfusedBitForBit) {
  Random random;
  for (const RaggedCase& ragged : ragged_table()) {
    for (const DType dtype : {DType::kFP32, DType::kBF16, DType::kFP16}) {
      MlpOptions options;
      options.ragged = ragged;
      options.dtype = dtype;
      options.with_b2 = false;
      expect_fused_is_unfused(options, random);
    }
  }
}

// Widths on both sides of the 64 columns of a partial sum, and of every tile.
TEST(Fused, EqualsUnfusedForEveryActivationLayoutAndWidth) {
  Random random;
  for (const Activation& activation : activations()) {
    for (const GluLayout& layout : glu_layouts()) {
      for (const int64_t width : {8, 72, 136, 200}) {
        MlpOptions options;
        options.ragged = {"Two", {70, 5}};
        options.width = width;
        options.hidden = 24;  // rows that TMA takes
        options.dtype = DType::kBF16;
        options.activation = activation;
        options.layout = layout;
        options.with_b2 = false;
        options.saves_act = true;
        expect_fused_is_unfused(options, random);
      }
    }
  }
}

TEST(Fused, EqualsUnfusedWhereB2HasAScaleOfItsOwnOrNone) {
  Random random;
  for (const B2Scale b2_scale : {B2Scale::kNothing, B2Scale::kOwn}) {
    for (const DType dtype : {DType::kFP32, DType::kBF16, DType::kFP16}) {
      for (const int64_t out : {9, 24, 136}) {
        MlpOptions options;
        options.ragged = {"Three", {70, 0, 5}, 2};
        options.out = out;
        options.dtype = dtype;
        options.b2_scale = b2_scale;
        expect_fused_is_unfused(options, random);
      }
    }
  }
}

TEST(Fused, ForwardWithoutSavingZHasTheSameBits) {
  Random random;
  MlpOptions options;
  options.dtype = DType::kBF16;
  const MlpProblem saving(options, random);
  const MlpProblem forgetting = saving;
  ASSERT_TRUE(succeeds(run(cpu(), saving.forward())));
  GroupedMlpArgs args = forgetting.forward();
  args.z = {};
  ASSERT_TRUE(succeeds(run(cpu(), args)));
  EXPECT_TRUE(same_bits(saving.y, forgetting.y));
}

// Gathered rows have the bits of rows permuted first.
TEST(Fused, GatheringEqualsPermutingFirst) {
  Random random;
  for (const DType dtype : {DType::kFP32, DType::kBF16, DType::kFP16}) {
    MlpOptions options;
    options.dtype = dtype;
    options.ragged = {"Three", {40, 0, 9}, 1};
    options.gathered = options.gathered_grad_y = true;
    const MlpProblem gathering(options, random);
    MlpProblem permuted = gathering;
    permuted.options.gathered = permuted.options.gathered_grad_y = false;
    permuted.x = TestTensor(dtype, {permuted.batch.capacity(), options.hidden});
    permuted.grad_y = permuted.x;
    for (int64_t i = 0; i < permuted.batch.rows(); ++i) {
      const int64_t row = reference::read_index(gathering.row_idx.view(), 0, i);
      for (int64_t j = 0; j < options.hidden; ++j) {
        permuted.x.set(i, j, gathering.x.get(row, j));
        permuted.grad_y.set(i, j, gathering.grad_y.get(row, j));
      }
    }
    permuted.row_idx = TestTensor();
    on_one_device(tested(), [&](const Tested& device) {
      const MlpProblem gathers = gathering, permutes = permuted;
      for (const MlpProblem* p : {&gathers, &permutes}) {
        ASSERT_TRUE(succeeds(run(device, p->forward())));
        ASSERT_TRUE(succeeds(run(device, p->backward())));
      }
      expect_same_results(gathers, permutes);
    });
  }
}

}  // namespace
}  // namespace moire::test
