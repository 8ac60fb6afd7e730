// What the grouped GEMMs say of FP8 operands whose scales do not fit them.
#include <gtest/gtest.h>

#include "core/scale_shapes.h"
#include "tests/ops/grouped_gemm_rejects.h"

namespace moire::test {
namespace {

GemmOptions mxfp8() {
  GemmOptions o;
  o.a = o.b = {DType::kE4M3, DType::kE8M0};
  return o;
}

class ScalesCheck : public GroupedGemmRejects {
 protected:
  ScalesCheck() : GroupedGemmRejects({2, 68}, 96, mxfp8()) {}
};

TEST_F(ScalesCheck, NeedsScalesExactlyBesideFp8) {
  GroupedGemmArgs args = gemm.args();
  args.a_scales = {};
  rejects(args, "grouped_gemm: a is e4m3 [70, 64] but a_scales is absent, needs its e8m0 or fp32");
  args = gemm.args();
  args.b_scales = {};
  rejects(args, "b is e4m3 [2, 96, 64] but b_scales is absent");
  args = gemm.args();
  const TestTensor bf16(DType::kBF16, {70, 64});
  args.a = bf16;
  rejects(args, "a_scales is e8m0 [70, 2] with row stride 5 but a is bf16 [70, 64], needs e4m3 or");
  GroupedGemmGluBackwardArgs backward = glu_backward.args();
  backward.w2_scales = {};
  rejects(backward, "w2 is e4m3 [2, 64, 6] but w2_scales is absent");
}

TEST_F(ScalesCheck, SaysWhichShapeIsNeeded) {
  GroupedGemmArgs args = gemm.args();
  args.a_scales = TestTensor(DType::kE8M0, {70, 3});
  rejects(args, "a_scales is e8m0 [70, 3], needs [capacity, ceil(k / 32)] = [70, 2]");
  args.a_scales = TestTensor(DType::kFP32, {70, 2});
  rejects(args, "a_scales is fp32 [70, 2], needs [capacity, ceil(k / 128)] = [70, 1]");
  args.a_scales = TestTensor(DType::kBF16, {70, 2});
  rejects(args, "a_scales is bf16 [70, 2], needs e8m0 or fp32");
  args = gemm.args();
  args.b_scales = TestTensor(DType::kFP32, {2, 96, 1});
  rejects(args,
          "b_scales is fp32 [2, 96, 1], needs [G, ceil(out / 128), ceil(in / 128)] = [2, 1, 1]");
  GroupedGemmWgradArgs w = wgrad.args();
  w.b_scales = TestTensor(DType::kE8M0, {3, 8});
  rejects(w, "b_scales is e8m0 [3, 8], needs [capacity / 32 + G, n] = [4, 8]");
}

TEST_F(ScalesCheck, RecognisesTheOtherDirection) {
  GroupedGemmArgs args = gemm.args();
  args.a_scales = TestTensor(DType::kE8M0, {4, 64});
  rejects(args,
          "a_scales is e8m0 [4, 64], which is the shape of columnwise scales; this call needs "
          "rowwise ones, [capacity, ceil(k / 32)] = [70, 2]");
  args = gemm.args();
  args.b_scales = TestTensor(DType::kE8M0, {2, 3, 64});
  rejects(args,
          "which is the shape of columnwise scales; this call needs rowwise ones, [G, out, ceil(in "
          "/ 32)] = [2, 96, 2]");
  args = gemm.args();
  args.transpose_b = 1;
  args.a = TestTensor(DType::kFP32, {70, 96});
  args.a_scales = args.bias = args.bias_scale = {};
  args.d = TestTensor(DType::kFP32, {70, 64});
  rejects(args,
          "b_scales is e8m0 [2, 96, 2], which is the shape of rowwise scales; this call needs "
          "columnwise ones, [G, ceil(out / 32), in] = [2, 3, 64]");
  GroupedGemmWgradArgs w = wgrad.args();
  w.a_scales = TestTensor(DType::kE8M0, {70, 1});
  rejects(w, "a_scales is e8m0 [70, 1], which is the shape of rowwise scales");
}

TEST_F(ScalesCheck, RefusesWhatHasNoScales) {
  GroupedGemmArgs args = gemm.args();
  const void* const list[] = {args.b.tensor.data, args.b.tensor.data};
  args.b.tensor.data = nullptr;
  args.b.list = list;
  rejects(args, "b is a list of e4m3 matrices, needs packed weights");
  args = gemm.args();
  args.bias = TestTensor(DType::kE4M3, {2, 96});
  rejects(args, "bias is e4m3 [2, 96], needs fp32, bf16 or fp16");
  args = gemm.args();
  args.d = TestTensor(DType::kE4M3, {70, 96});
  rejects(args, "d is e4m3 [70, 96], needs fp32, bf16 or fp16");
  GroupedGemmGluArgs g = glu.args();
  g.z = TestTensor(DType::kE5M2, {70, 12});
  rejects(g, "z is e5m2 [70, 12], needs fp32, bf16 or fp16");
  g = glu.args();
  g.probs = TestTensor(DType::kE4M3, {70});
  rejects(g, "probs is e4m3 [70], needs fp32");
  GroupedGemmGluBackwardArgs backward = glu_backward.args();
  backward.z = TestTensor(DType::kE4M3, {70, 12});
  rejects(backward, "z is e4m3 [70, 12], needs fp32, bf16 or fp16");
}

TEST_F(ScalesCheck, RefusesToGatherColumnwiseOperands) {
  const TestTensor row_idx = index_tensor(DType::kInt32, std::vector<int64_t>(70, 1));
  GroupedGemmWgradArgs args = wgrad.args();
  args.a_row_idx = row_idx;
  rejects(args,
          "grouped_gemm_wgrad: a_row_idx is present but a is e4m3 [70, 6], whose columnwise "
          "scales are in the order of the groups");
}

TEST_F(ScalesCheck, KeepsOutputsApartFromScales) {
  TestTensor memory(DType::kFP32, {70, 96});
  GroupedGemmArgs args = gemm.args();
  args.d = memory;
  args.b_scales.data = memory.as<uint8_t>() + 100;
  rejects(args, "d and b_scales overlap");
  GroupedGemmWgradArgs w = wgrad.args();
  w.a_scales.data = w.d.tensor.data;
  rejects(w, "d and a_scales overlap");
  GroupedGemmGluArgs g = glu.args();
  g.a_scales.data = g.act.data;
  rejects(g, "act and a_scales overlap");
}

TEST_F(ScalesCheck, EmulatesFp8Only) {
  GroupedGemmArgs args = gemm.args();
  args.accumulation = 3;
  rejects(args, "accumulation is 3, must be 0 to 2");
  args.accumulation = MOIRE_ACCUMULATE_EMULATED;
  const TestTensor a(DType::kFP32, {70, 64});
  args.a = a;
  args.a_scales = {};
  rejects(args, "accumulation is 2 (emulated) but a is fp32 [70, 64], needs e4m3 or e5m2 operands");
}

TEST_F(ScalesCheck, LooksAtQuantisedOutputs) {
  const TestTensor data(DType::kE4M3, {70, 6}), rows(DType::kE8M0, {70, 1});
  const TestTensor columns(DType::kE8M0, {4, 6}), fp32(DType::kFP32, {2, 6});
  GroupedGemmGluArgs args = glu.args();
  args.act_rowwise = {data, {}};
  rejects(args, "act_rowwise.data is e4m3 [70, 6] but act_rowwise.scales is absent");
  args.act_rowwise = {{}, rows};
  rejects(args, "act_rowwise.data is absent, needs e4m3 or e5m2 [capacity, F] = [70, 6]");
  args.act_rowwise = {data, columns};
  rejects(args, "act_rowwise.scales is e8m0 [4, 6], which is the shape of columnwise scales");
  args.act_rowwise = {data, rows};
  args.act_columnwise = {data, columns};
  rejects(args, "act_columnwise.data and act_rowwise.data overlap in their address ranges");
  const TestTensor other(DType::kE4M3, {70, 6});
  args.act_columnwise = {other, fp32};
  rejects(
      args,
      "act_rowwise.scales is e8m0 [70, 1] but act_columnwise.scales is fp32 [2, 6]: both copies "
      "must be quantised alike");
  args.act_columnwise = {other, columns};
  args.fractional_scales = 1;
  rejects(args, "fractional_scales is 1, but the scales of MXFP8 are powers of two");
  args.fractional_scales = 0;
  args.act_columnwise.scales.data = args.z.data;
  rejects(args, "act_columnwise.scales and z overlap in their address ranges");
  args = glu.args();
  args.act = {};
  rejects(args, "act is absent, needs fp32, bf16 or fp16 [capacity, F] = [70, 6]");
  args.act_rowwise = {data, rows};
  args.z = {};
  args.storage = MOIRE_E4M3;
  rejects(args, "storage is e4m3, must be fp32, bf16, fp16 or 0 (bf16)");
  GroupedGemmGluBackwardArgs backward = glu_backward.args();
  backward.grad_z = {};
  rejects(backward, "grad_z is absent, needs fp32, bf16 or fp16 [capacity, 2F] = [70, 12]");
  backward = glu_backward.args();
  backward.act_columnwise = {data, TestTensor(DType::kE8M0, {3, 6})};
  rejects(backward, "act_columnwise.scales is e8m0 [3, 6], needs [capacity / 32 + G, F] = [4, 6]");
}

TEST_F(ScalesCheck, ExplainsTheBytesOfScales) {
  const Context explaining = context.explaining();
  ASSERT_TRUE(succeeds(run(explaining, gemm.args())));
  const Explanation steps = explaining.explanation();
  ASSERT_EQ(steps.size(), 1U);
  EXPECT_EQ(steps[0].problem, "2 groups, capacity 70, [70, 64] x [2, 96, 64] e4m3");
  // a, b and their scales; bias and bias_scale.
  const int64_t weights = 2 * 96 * 64 + 2 * 96 * 2, vectors = 4 * (2 * 96 + 70);
  EXPECT_EQ(steps[0].bytes_read, 70 * 64 + 70 * 2 + weights + vectors);

  // Gathered rows are read as often as they are used, and so are their scales.
  GroupedGemmArgs gathered = gemm.args();
  const TestTensor row_idx = index_tensor(DType::kInt32, std::vector<int64_t>(70, 0));
  gathered.row_idx = row_idx;
  gathered.a.shape[0] = gathered.a_scales.shape[0] = 8;
  ASSERT_TRUE(succeeds(run(explaining, gathered)));
  EXPECT_EQ(explaining.explanation().at(1).bytes_read,
            70 * 64 + 70 * 2 + 70 * 4 + weights + vectors);
}

// T = ceil(k / 128) = 128 (capacity / 128 + G): scales as they are, in the shape of others that are
// turned over.
TEST(TurnedScales, AreOfRowsInExpertOrder) {
  const moire_groups groups{nullptr, 1, 100};
  const TensorView gathered(nullptr, DType::kE4M3, {128, 16384});
  const TensorView ordered(nullptr, DType::kE4M3, {100, 16384});
  const TensorView scales(nullptr, DType::kFP32, {128, 128});
  EXPECT_FALSE(has_turned_scales(gathered, scales, groups));
  EXPECT_TRUE(has_turned_scales(ordered, scales, groups));
}

}  // namespace
}  // namespace moire::test
