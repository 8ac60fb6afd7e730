// The reference's own gradients of the whole MLP against central differences of its forward, in
// double, without any rounding of intermediates.
#include "reference/grouped_mlp.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/support/differences.h"
#include "tests/support/mlp_problem.h"

namespace moire {
namespace {

using reference::Rounding;
using test::central_difference;
using test::MlpOptions;
using test::MlpProblem;
using test::Random;
using test::TestTensor;

double loss_of(const MlpProblem& p) {
  const reference::Matrix y = reference::grouped_mlp(p.forward(), Rounding::kNone).y;
  double loss = 0;
  for (int64_t i = 0; i < y.rows; ++i) {
    const int64_t row =
        p.options.gathered_grad_y ? reference::read_index(p.row_idx.view(), 0, i) : i;
    for (int64_t j = 0; j < y.columns; ++j) loss += y.at(i, j).value * p.grad_y.get(row, j);
  }
  return loss;
}

void store_z(MlpProblem& p) {
  const reference::Matrix z = reference::grouped_mlp(p.forward(), Rounding::kNone).z;
  for (int64_t i = 0; i < z.rows; ++i) {
    for (int64_t j = 0; j < z.columns; ++j) p.z.set(i, j, z.at(i, j).value);
  }
}

class ReferenceMlpGradients : public testing::TestWithParam<MlpOptions> {};

TEST_P(ReferenceMlpGradients, AreTheDerivativesOfItsForward) {
  Random random;
  MlpOptions options = GetParam();
  options.dtype = DType::kFP64;
  options.hidden = 5;
  options.width = 4;
  MlpProblem p(options, random);
  store_z(p);
  const reference::MlpGradients got =
      reference::grouped_mlp_backward(p.backward(), Rounding::kNone);
  const auto loss = [&] { return loss_of(p); };
  const double allowed = test::kDifferenceError * (10 + std::abs(loss()));

  for (int64_t g = 0; g < p.batch.num_groups(); ++g) {
    const auto group = static_cast<size_t>(g);
    const bool w1_out_in = options.w1_layout == MOIRE_OUT_IN;
    const bool w2_out_in = options.w2_layout == MOIRE_OUT_IN;
    for (int64_t out = 0; out < 2 * options.width; ++out) {
      ASSERT_NEAR(got.grad_b1.at(g, out).value, central_difference(p.b1, g, out, loss), allowed);
      for (int64_t in = 0; in < options.hidden; ++in) {
        ASSERT_NEAR(got.grad_w1[group].at(w1_out_in ? out : in, w1_out_in ? in : out).value,
                    central_difference(p.w1, g, out, in, loss), allowed);
      }
    }
    for (int64_t out = 0; out < options.out_features(); ++out) {
      ASSERT_NEAR(got.grad_b2.at(g, out).value, central_difference(p.b2, g, out, loss), allowed);
      for (int64_t in = 0; in < options.width; ++in) {
        ASSERT_NEAR(got.grad_w2[group].at(w2_out_in ? out : in, w2_out_in ? in : out).value,
                    central_difference(p.w2, g, out, in, loss), allowed);
      }
    }
  }
  for (int64_t i = 0; i < p.batch.rows(); ++i) {
    ASSERT_NEAR(got.grad_probs.at(i, 0).value, central_difference(p.probs, 0, i, loss), allowed);
    if (p.with_own_b2_scale()) {
      ASSERT_NEAR(got.grad_b2_scale.at(i, 0).value, central_difference(p.b2_scale, 0, i, loss),
                  allowed);
    }
  }
  // x is gathered: several rows may read one of its rows, whose gradient is their sum.
  for (int64_t t = 0; t < p.x.view().num_rows(); ++t) {
    if (!options.gathered && t >= p.batch.rows()) break;
    for (int64_t j = 0; j < options.hidden; ++j) {
      double sum = 0;
      for (int64_t i = 0; i < p.batch.rows(); ++i) {
        const int64_t row = options.gathered ? reference::read_index(p.row_idx.view(), 0, i) : i;
        if (row == t) sum += got.grad_x.at(i, j).value;
      }
      ASSERT_NEAR(sum, central_difference(p.x, t, j, loss), allowed);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Cases, ReferenceMlpGradients,
    testing::Values(MlpOptions{}, MlpOptions{.layout = GluLayout::interleaved(1)},
                    MlpOptions{.layout = GluLayout::interleaved(2, MOIRE_UP_FIRST)},
                    MlpOptions{.activation = Activation::clamped_swiglu()},
                    MlpOptions{.activation = Activation::geglu_tanh()},
                    MlpOptions{.out = 7, .b2_scale = test::B2Scale::kOwn},
                    MlpOptions{.out = 3, .b2_scale = test::B2Scale::kNothing},
                    MlpOptions{.w1_layout = MOIRE_IN_OUT, .w2_layout = MOIRE_IN_OUT},
                    MlpOptions{.listed = true, .gathered = true, .gathered_grad_y = true}));

TEST(ReferenceMlp, RoundsIntermediatesOnlyAsSpecified) {
  Random random;
  MlpOptions options;
  options.dtype = DType::kBF16;
  const MlpProblem p(options, random);
  const reference::MlpResults rounded = reference::grouped_mlp(p.forward());
  const reference::MlpResults exact = reference::grouped_mlp(p.forward(), Rounding::kNone);
  double largest = 0;
  for (size_t i = 0; i < exact.z.values.size(); ++i) {
    EXPECT_EQ(rounded.z.values[i].value,
              reference::round_to(DType::kBF16, exact.z.values[i].value));
    largest = std::max(largest, std::abs(rounded.y.values[i % rounded.y.values.size()].value -
                                         exact.y.values[i % exact.y.values.size()].value));
  }
  EXPECT_GT(largest, 0);
  EXPECT_LT(largest, 0.1);
}

TEST(ReferenceMlp, AccumulatesOntoWhatTheGradientsHold) {
  Random random;
  MlpOptions options;
  options.dtype = DType::kFP64;
  options.accumulate = true;
  MlpProblem p(options, random);
  store_z(p);
  const reference::MlpGradients added =
      reference::grouped_mlp_backward(p.backward(), Rounding::kNone);
  GroupedMlpBackwardArgs args = p.backward();
  args.beta_w1 = args.beta_w2 = args.beta_bias = 0;
  const reference::MlpGradients alone = reference::grouped_mlp_backward(args, Rounding::kNone);
  for (int64_t g = 0; g < p.batch.num_groups(); ++g) {
    const auto group = static_cast<size_t>(g);
    EXPECT_NEAR(added.grad_w1[group].at(1, 2).value,
                alone.grad_w1[group].at(1, 2).value + p.grad_w1.get(g, 1, 2), 1e-12);
    EXPECT_NEAR(added.grad_b2.at(g, 3).value, alone.grad_b2.at(g, 3).value + p.grad_b2.get(g, 3),
                1e-12);
  }
}

}  // namespace
}  // namespace moire
