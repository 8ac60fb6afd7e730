// The reference's grouped products, by hand: two groups with an empty one between them.
#include "reference/grouped_gemm.h"

#include <gtest/gtest.h>
#include <moire/grouped_gemm.h>

#include <vector>

#include "tests/support/expect.h"
#include "tests/support/ragged.h"
#include "tests/support/tensors.h"

namespace moire {
namespace {

using reference::Matrix;
using test::Batch;
using test::TestTensor;
using test::TestWeight;

TestTensor tensor(std::initializer_list<int64_t> shape, const std::vector<double>& values) {
  TestTensor t(DType::kFP32, shape);
  const int64_t columns = t.view().columns();
  for (size_t i = 0; i < values.size(); ++i) {
    t.set(static_cast<int64_t>(i) / columns, static_cast<int64_t>(i) % columns, values[i]);
  }
  return t;
}

std::vector<double> values_of(const Matrix& m) {
  std::vector<double> out;
  for (const reference::Number& n : m.values) out.push_back(n.value);
  return out;
}
using Values = std::vector<double>;

class ReferenceGroupedGemm : public testing::Test {
 protected:
  ReferenceGroupedGemm() {
    for (const int32_t layout : {MOIRE_OUT_IN, MOIRE_IN_OUT}) {
      TestWeight w(DType::kFP32, 3, 2, 2, layout);
      for (int64_t g = 0; g < 3; ++g) {  // group 0: [[1, 2], [3, 4]]; group g: 10 g more
        for (int64_t i = 0; i < 4; ++i) w.set(g, i / 2, i % 2, static_cast<double>(10 * g + i + 1));
      }
      weights.push_back(w);
    }
  }
  Batch batch{{1, 0, 2}, 1};
  std::vector<TestWeight> weights;                     // [out, in], [in, out]
  TestTensor a = tensor({4, 2}, {1, -1, 2, 0, 0, 3});  // the tail is NaN
  TestTensor bias = tensor({3, 2}, {100, 200, 0, 0, 300, 400});
};

TEST_F(ReferenceGroupedGemm, MultipliesByTheTransposedWeightInEitherLayout) {
  for (const TestWeight& w : weights) {
    GroupedGemmArgs args;
    args.a = a;
    args.b = w;
    args.groups = batch.groups();
    EXPECT_EQ(values_of(reference::grouped_gemm(args)), (Values{-1, -1, 42, 46, 66, 72}));
    args.transpose_b = 1;
    EXPECT_EQ(values_of(reference::grouped_gemm(args)), (Values{-2, -2, 42, 44, 69, 72}));
  }
}

TEST_F(ReferenceGroupedGemm, AddsTheScaledBiasOfTheRowsGroup) {
  const TestTensor scale = tensor({4}, {1, 2, -1});
  GroupedGemmArgs args;
  args.a = a;
  args.b = weights[0];
  args.bias = bias;
  args.bias_scale = scale;
  args.groups = batch.groups();
  EXPECT_EQ(values_of(reference::grouped_gemm(args)), (Values{99, 199, 642, 846, -234, -328}));
}

TEST_F(ReferenceGroupedGemm, GathersRows) {
  const TestTensor row_idx = test::index_tensor(DType::kInt32, {2, 0, 0, -1});
  GroupedGemmArgs args;
  args.a = a;
  args.row_idx = row_idx;
  args.b = weights[0];
  args.groups = batch.groups();
  EXPECT_EQ(values_of(reference::grouped_gemm(args)), (Values{6, 12, -1, -1, -1, -1}));
}

TEST_F(ReferenceGroupedGemm, WgradHonoursBetaPerGroupAndEmptyGroups) {
  const TestTensor b = tensor({4, 1}, {5, 7, 11});
  TestWeight d(DType::kFP32, 3, 2, 1);
  const uint8_t beta[] = {0, 1, 1};
  for (int64_t g = 1; g < 3; ++g) {
    d.set(g, 0, 0, 1000);
    d.set(g, 1, 0, 2000);
  }
  GroupedGemmWgradArgs args;
  args.a = a;
  args.b = b;
  args.d = d;
  args.beta_per_group = beta;
  args.groups = batch.groups();
  const reference::Weights got = reference::grouped_gemm_wgrad(args);
  EXPECT_EQ(values_of(got[0]), (Values{5, -5}));
  EXPECT_EQ(values_of(got[1]), (Values{1000, 2000}));
  EXPECT_EQ(got[1].at(0, 0).bound, 0);  // untouched
  EXPECT_EQ(values_of(got[2]), (Values{1014, 2033}));
  args.beta_per_group = nullptr;
  const reference::Weights overwritten = reference::grouped_gemm_wgrad(args);
  EXPECT_EQ(values_of(overwritten[1]), (Values{0, 0}));
  EXPECT_EQ(values_of(overwritten[2]), (Values{14, 33}));
}

TEST_F(ReferenceGroupedGemm, BiasBackwardSumsRowsAndColumns) {
  const TestTensor scale = tensor({4}, {1, 2, -1});
  const TestTensor grad_bias(DType::kFP32, {3, 2}), grad_scale = tensor({4}, {1, 2, 3});
  BiasBackwardArgs args;
  args.grad_y = a;
  args.scale = scale;
  args.bias = bias;
  args.grad_bias = grad_bias;
  args.grad_scale = grad_scale;
  args.groups = batch.groups();
  const reference::BiasBackwardResults got = reference::bias_backward(args);
  EXPECT_EQ(values_of(got.grad_bias), (Values{1, -1, 0, 0, 4, -3}));
  EXPECT_EQ(values_of(got.grad_scale), (Values{-100, 600, 1200}));
  args.beta_scale = 1;
  EXPECT_EQ(values_of(reference::bias_backward(args).grad_scale), (Values{-99, 602, 1203}));
}

}  // namespace
}  // namespace moire
