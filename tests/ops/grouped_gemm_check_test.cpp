// What the grouped GEMMs say of wrong arguments: what was found and what was needed, and no output
// is touched.
#include <gtest/gtest.h>
#include <moire/buffer.h>

#include "core/format.h"
#include "tests/ops/grouped_gemm_rejects.h"

namespace moire::test {
namespace {

class GroupedGemmCheck : public GroupedGemmRejects {
 protected:
  GroupedGemmCheck() : GroupedGemmRejects({2, 2}, 6, GemmOptions()) {}
};

TEST_F(GroupedGemmCheck, RejectsMismatchedKAndNamesBothShapes) {
  GroupedGemmArgs args = gemm.args();
  args.a = TestTensor(DType::kBF16, {4, 32});
  rejects(args, "grouped_gemm: a is bf16 [4, 32] but b has k = 64");
  args = gemm.args();
  args.transpose_b = 1;
  rejects(args, "grouped_gemm: a is fp32 [4, 64] but b has k = 6");
}

TEST_F(GroupedGemmCheck, RejectsWrongShapesAndDTypes) {
  GroupedGemmArgs args = gemm.args();
  args.d.shape[1] = 5;
  rejects(args, "grouped_gemm: d is fp32 [4, 5], needs [capacity, n] = [4, 6]");
  args = gemm.args();
  args.b.tensor.shape[0] = 3;
  rejects(args, "grouped_gemm: b is fp32 [3, 6, 64], needs [G, out, in] = [2, 6, 64]");
  args = gemm.args();
  args.a.dtype = MOIRE_INT32;
  rejects(args, "grouped_gemm: a is int32 [4, 64], needs fp32, bf16, fp16, e4m3 or e5m2");
  args = gemm.args();
  args.bias.shape[1] = 7;
  rejects(args, "needs [G, n] = [2, 6]");
  args = gemm.args();
  args.bias_scale.shape[0] = 3;
  rejects(args, "bias_scale is fp32 [3], needs [capacity] = [4]");
  args = gemm.args();
  args.a.rank = 1;
  rejects(args, "a is fp32 [4], needs [capacity, k] = [4, 64]");
}

TEST_F(GroupedGemmCheck, RejectsAScaleOfNoBias) {
  GroupedGemmArgs args = gemm.args();
  args.bias = {};
  rejects(args, "grouped_gemm: bias_scale is present but bias is absent");
}

TEST_F(GroupedGemmCheck, RejectsNullAndMisalignedPointers) {
  GroupedGemmArgs args = gemm.args();
  args.a.data = nullptr;
  rejects(args, "a is fp32 [4, 64] but its data pointer is null");
  args = gemm.args();
  args.d.data = static_cast<char*>(args.d.data) + 2;
  rejects(args, "not aligned to its 4-byte elements");
  const void* const list[] = {args.b.tensor.data, nullptr};
  args = gemm.args();
  args.b.tensor.data = nullptr;
  args.b.list = list;
  rejects(args, "b[1] of the list is null");
}

TEST_F(GroupedGemmCheck, RejectsEnumeratorsOutOfRange) {
  GroupedGemmArgs args = gemm.args();
  args.tail = 2;
  rejects(args, "tail is 2, must be 0 to 1");
  args = gemm.args();
  args.transpose_b = -1;
  rejects(args, "transpose_b is -1, must be 0 to 1");
  args = gemm.args();
  args.b.layout = 2;
  rejects(args, "b.layout is 2, must be 0 to 1");
}

TEST_F(GroupedGemmCheck, RejectsBadOffsetsAndIndices) {
  batch.offsets()[1] = 5;
  rejects(gemm.args(), "group 0 ends at row 5, past the capacity 4");
  batch.offsets()[1] = 2;
  TestTensor row_idx = index_tensor(DType::kInt32, {0, 1, 4, 0});
  GroupedGemmArgs args = gemm.args();
  args.row_idx = row_idx;
  rejects(args, "row_idx[2] is 4, must be 0 to 3");
}

TEST_F(GroupedGemmCheck, RejectsOutputsThatOverlapInputs) {
  TestTensor square(DType::kFP32, {4, 64});
  GroupedGemmArgs args = gemm.args();
  args.d.data = args.a.data;
  rejects(args, "d and a overlap");
  args = gemm.args();
  args.d.data = args.b.tensor.data;
  rejects(args, "d and b overlap");
  args = gemm.args();
  const void* const list[] = {square.as<float>(), gemm.b.view().tensor.data};
  args.b.tensor.data = nullptr;
  args.b.list = list;
  args.d.data = square.as<float>() + 8;
  rejects(args, "d and b[0] overlap");
  const Buffer workspace(1 << 20);
  args = gemm.args();
  args.workspace = {workspace.data(), workspace.bytes()};
  args.d.data = workspace.data();
  EXPECT_TRUE(
      fails(grouped_gemm(context, args), Code::kInvalidArgument, "d and the workspace overlap"));
}

TEST_F(GroupedGemmCheck, NeedsItsWorkspace) {
  size_t bytes = 0;
  ASSERT_TRUE(succeeds(grouped_gemm_workspace(context, gemm.args(), &bytes)));
  const Buffer workspace(bytes);
  GroupedGemmArgs args = gemm.args();
  args.workspace = {workspace.data(), bytes - 1};
  EXPECT_TRUE(fails(grouped_gemm(context, args), Code::kOutOfMemory,
                    concat("the workspace has ", bytes - 1, " bytes, needs ", bytes)));
  args.workspace = {};
  EXPECT_TRUE(fails(grouped_gemm(context, args), Code::kOutOfMemory, "has 0 bytes"));
}

TEST_F(GroupedGemmCheck, SizesTheWorkspaceFromShapesAlone) {
  size_t with = 0, without = 0;
  GroupedGemmArgs args = gemm.args();
  ASSERT_TRUE(succeeds(grouped_gemm_workspace(context, args, &with)));
  args.a.data = args.d.data = args.b.tensor.data = nullptr;
  args.groups.offsets = nullptr;
  ASSERT_TRUE(succeeds(grouped_gemm_workspace(context, args, &without)));
  EXPECT_EQ(with, without);
}

TEST_F(GroupedGemmCheck, RejectsAnActivationOrALayoutThatCannotBe) {
  GroupedGemmGluArgs args = glu.args();
  args.activation.kind = 5;
  rejects(args, "grouped_gemm_glu: activation.kind is 5, must be 0 to 4");
  args = glu.args();
  args.layout.block = 4;
  rejects(args, "block");
  GroupedGemmGluBackwardArgs backward = glu_backward.args();
  backward.activation = Activation::clamped_swiglu(0.0F);
  rejects(backward, "grouped_gemm_glu_backward: activation.limit is 0, must be positive");
}

TEST_F(GroupedGemmCheck, RejectsAGluWhoseShapesDisagree) {
  GroupedGemmGluArgs args = glu.args();
  args.b.tensor.shape[1] = 13;
  rejects(args, "b has 13 out features, must be even");
  args = glu.args();
  args.z = TestTensor(DType::kBF16, {4, 12});
  rejects(args, "z is bf16 [4, 12] but act is fp32 [4, 6]: the dtypes must be equal");
  args = glu.args();
  args.act.data = args.z.data;
  rejects(args, "act and z overlap");
  GroupedGemmGluBackwardArgs backward = glu_backward.args();
  backward.grad_y = TestTensor(DType::kFP32, {4, 63});
  rejects(backward, "grad_y is fp32 [4, 63] but w2 has k = 64");
  backward = glu_backward.args();
  backward.grad_z.data = backward.z.data;
  rejects(backward, "grad_z and z overlap");
  backward = glu_backward.args();
  backward.beta = 2;
  rejects(backward, "beta is 2, must be 0 to 1");
}

TEST_F(GroupedGemmCheck, RejectsAWgradWhoseShapesDisagree) {
  GroupedGemmWgradArgs args = wgrad.args();
  args.d.tensor.shape[2] = 9;
  rejects(args, "d is fp32 [2, 6, 9], needs [G, m, n] = [2, 6, 8]");
  args = wgrad.args();
  args.d.tensor.data = args.a.data;
  rejects(args, "d and a overlap");
}

TEST_F(GroupedGemmCheck, RejectsBetaOtherThanZeroAndOne) {
  GroupedGemmWgradArgs args = wgrad.args();
  args.beta = 2;
  rejects(args, "grouped_gemm_wgrad: beta is 2, must be 0 to 1");
  const uint8_t beta[] = {1, 3};
  args = wgrad.args();
  args.beta_per_group = beta;
  rejects(args, "beta_per_group[1] is 3, must be 0 or 1");
}

TEST_F(GroupedGemmCheck, RejectsAListOfOutputsThatOverlap) {
  TestTensor memory(DType::kFP32, {100});
  const void* const list[] = {memory.as<float>() + 40, memory.as<float>()};
  GroupedGemmWgradArgs args = wgrad.args();
  args.d.tensor.data = nullptr;
  args.d.list = list;
  rejects(args, "d[1] and d[0] overlap");
}

TEST_F(GroupedGemmCheck, ExplainsWhatWouldRun) {
  const Context explaining = context.explaining();
  ASSERT_TRUE(succeeds(run(explaining, gemm.args())));
  const Explanation steps = explaining.explanation();
  ASSERT_EQ(steps.size(), 1U);
  EXPECT_EQ(steps[0].op, "grouped_gemm");
  EXPECT_EQ(steps[0].problem, "2 groups, capacity 4, [4, 64] x [2, 6, 64] fp32");
  EXPECT_EQ(steps[0].implementation, "cpu");
  EXPECT_NE(steps[0].policy.find("K blocks of 256"), std::string::npos) << steps[0].policy;
  // a, b, bias and bias_scale; d.
  EXPECT_EQ(steps[0].bytes_read, 4 * (4 * 64 + 2 * 6 * 64 + 2 * 6 + 4));
  EXPECT_EQ(steps[0].bytes_written, 4 * 4 * 6);
}

}  // namespace
}  // namespace moire::test
