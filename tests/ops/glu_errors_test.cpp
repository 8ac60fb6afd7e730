// What glu and glu_backward say of bad calls, and that they leave outputs untouched.
#include <gtest/gtest.h>
#include <moire/glu.h>

#include "tests/support/expect.h"
#include "tests/support/ragged.h"

namespace moire::test {
namespace {

class GluErrors : public testing::Test {
 protected:
  GluErrors() { reset(); }

  void reset() {
    forward = {};
    forward.z = z;
    forward.probs = probs;
    forward.act = act;
    forward.groups = batch.groups();
    backward = {};
    backward.z = z;
    backward.probs = probs;
    backward.grad_act = grad_act;
    backward.grad_z = grad_z;
    backward.act = act;
    backward.grad_probs = grad_probs;
    backward.groups = batch.groups();
  }
  void expect_forward(const std::string& text) {
    EXPECT_TRUE(fails(glu(cpu(), forward), Code::kInvalidArgument, "glu: " + text));
    expect_untouched();
  }
  void expect_backward(const std::string& text) {
    EXPECT_TRUE(
        fails(glu_backward(cpu(), backward), Code::kInvalidArgument, "glu_backward: " + text));
    expect_untouched();
  }
  void expect_untouched() {
    const TestTensor poisoned_act(DType::kBF16, {6, 8}), poisoned_grad(DType::kBF16, {6, 16});
    EXPECT_TRUE(same_bits(act, poisoned_act));
    EXPECT_TRUE(same_bits(grad_z, poisoned_grad));
    EXPECT_TRUE(same_bits(grad_probs, TestTensor(DType::kFP32, {6})));
    reset();
  }

  Batch batch{{2, 3}, 1};
  TestTensor z{DType::kBF16, {6, 16}}, probs{DType::kFP32, {6}}, act{DType::kBF16, {6, 8}};
  TestTensor grad_act{DType::kBF16, {6, 8}}, grad_z{DType::kBF16, {6, 16}};
  TestTensor grad_probs{DType::kFP32, {6}};
  GluArgs forward;
  GluBackwardArgs backward;
};

TEST_F(GluErrors, NameShapesAndDTypesFoundAndNeeded) {
  const TestTensor odd(DType::kBF16, {6, 15}), ints(DType::kInt32, {6, 16});
  const TestTensor small(DType::kBF16, {6, 7}), half(DType::kFP16, {6, 8});
  const TestTensor few(DType::kFP32, {5}), wrong(DType::kBF16, {6});
  forward.z = {};
  expect_forward("z is absent, needs fp32, bf16 or fp16 of rank 2");
  forward.z = odd;
  expect_forward("z is bf16 [6, 15], needs an even number of columns (gate and up)");
  forward.z = ints;
  expect_forward("z is int32 [6, 16], needs fp32, bf16 or fp16");
  forward.act = small;
  expect_forward("act is bf16 [6, 7], needs [capacity, F] = [6, 8]");
  forward.act = half;
  expect_forward("z is bf16 [6, 16] but act is fp16 [6, 8]: the dtypes must be equal");
  forward.act = {};
  expect_forward("act is absent, needs fp32, bf16 or fp16 [capacity, F] = [6, 8]");
  forward.probs = few;
  expect_forward("probs is fp32 [5], needs [capacity] = [6]");
  forward.probs = wrong;
  expect_forward("probs is bf16 [6], needs fp32");
  forward.z.data = nullptr;
  expect_forward("z is bf16 [6, 16] but its data pointer is null");
  backward.grad_act = z;
  expect_backward("grad_act is bf16 [6, 16], needs [capacity, F] = [6, 8]");
  backward.grad_z = {};
  expect_backward("grad_z is absent, needs fp32, bf16 or fp16 [capacity, 2F] = [6, 16]");
  backward.grad_act = half;
  expect_backward("z is bf16 [6, 16] but grad_act is fp16 [6, 8]: the dtypes must be equal");
  backward.grad_probs = few;
  expect_backward("grad_probs is fp32 [5], needs [capacity] = [6]");
}

TEST_F(GluErrors, NameTheActivationAndTheLayout) {
  forward.layout.block = 3;
  expect_forward("layout.block is 3, must divide F = 8 (0: F)");
  forward.layout.block = -1;
  expect_forward("layout.block is -1, must divide F = 8 (0: F)");
  forward.layout.block = 16;
  expect_forward("layout.block is 16, must divide F = 8 (0: F)");
  forward.layout.order = 3;
  expect_forward("layout.order is 3, must be 0 to 2");
  forward.activation.kind = 5;
  expect_forward("activation.kind is 5, must be 0 to 4");
  forward.activation = Activation::clamped_swiglu(0);
  expect_forward("activation.limit is 0, must be positive (GPT-OSS uses 7)");
  forward.activation = Activation::clamped_swiglu(7, -1);
  expect_forward("activation.alpha is -1, must be positive and finite (GPT-OSS uses 1.702)");
  forward.tail = 2;
  expect_forward("tail is 2, must be 0 to 1");
  backward.layout.block = 5;
  expect_backward("layout.block is 5, must divide F = 8 (0: F)");
}

TEST_F(GluErrors, NameTheGroup) {
  forward.groups.capacity = 7;
  expect_forward("groups.capacity is 7 but z is bf16 [6, 16]");
  batch.offsets()[2] = 7;
  expect_forward("group 1 ends at row 7, past the capacity 6");
  batch.offsets()[2] = 1;
  expect_backward("group 1 has offsets 2 to 1, must not decrease");
}

TEST_F(GluErrors, OutputsMayNotOverlapInputsOrEachOther) {
  forward.act = TensorView(z.view().data, DType::kBF16, {6, 8});
  expect_forward("act and z overlap in their address ranges, must be apart");
  backward.grad_z = z;
  expect_backward("grad_z and z overlap in their address ranges, must be apart");
  backward.act = grad_act;
  expect_backward("act and grad_act overlap in their address ranges, must be apart");
  backward.grad_probs = probs;
  expect_backward("grad_probs and probs overlap in their address ranges, must be apart");
  backward.act = TensorView(grad_z.view().data, DType::kBF16, {6, 8});
  expect_backward("act and grad_z overlap in their address ranges, must be apart");
}

TEST_F(GluErrors, AnExplanationNamesTheProblemAndItsBytes) {
  const Context explaining = cpu(2).explaining();
  ASSERT_TRUE(succeeds(glu(explaining, forward)));
  ASSERT_TRUE(succeeds(glu_backward(explaining, backward)));
  const Explanation steps = explaining.explanation();
  ASSERT_EQ(steps.size(), 2U);
  EXPECT_EQ(steps[0].problem, "swiglu of bf16 [6, 16], halves");
  EXPECT_EQ(steps[0].bytes_read, 6 * 16 * 2 + 6 * 4);
  EXPECT_EQ(steps[0].bytes_written, 6 * 8 * 2);
  EXPECT_EQ(steps[1].bytes_written, 6 * 16 * 2 + 6 * 8 * 2 + 6 * 4);
  expect_untouched();
}

}  // namespace
}  // namespace moire::test
