// The reference's activations and layouts: small cases by hand, gradients by differences.
#include "reference/glu.h"

#include <gtest/gtest.h>
#include <moire/glu.h>

#include <cmath>
#include <sstream>
#include <vector>

#include "tests/support/differences.h"
#include "tests/support/expect.h"
#include "tests/support/random.h"

namespace moire {
namespace {

using reference::glu_columns;
using test::kDifferenceError;
using test::kDifferenceStep;
using test::Random;
using test::TestTensor;

// 'g0' for gate column 0, 'u3' for up column 3, in memory order.
std::string spelled(const GluLayout& layout, int64_t width) {
  std::vector<int64_t> column(static_cast<size_t>(2 * width)), half = column;
  for (int64_t j = 0; j < width; ++j) {
    const reference::GluColumns at = glu_columns(layout, width, j);
    column[static_cast<size_t>(at.gate)] = column[static_cast<size_t>(at.up)] = j;
    half[static_cast<size_t>(at.up)] = 1;
  }
  std::ostringstream text;
  for (size_t i = 0; i < column.size(); ++i) text << "gu"[half[i]] << column[i] << ' ';
  return text.str();
}

TEST(GluColumns, SpellOutEveryKindOfLayout) {
  EXPECT_EQ(spelled(GluLayout::halves(), 4), "g0 g1 g2 g3 u0 u1 u2 u3 ");
  EXPECT_EQ(spelled(GluLayout::interleaved(1), 4), "g0 u0 g1 u1 g2 u2 g3 u3 ");
  EXPECT_EQ(spelled(GluLayout::interleaved(2), 4), "g0 g1 u0 u1 g2 g3 u2 u3 ");
  EXPECT_EQ(spelled(GluLayout::interleaved(4), 4), "g0 g1 g2 g3 u0 u1 u2 u3 ");
  EXPECT_EQ(spelled(GluLayout::interleaved(2, MOIRE_UP_FIRST), 4), "u0 u1 g0 g1 u2 u3 g2 g3 ");
  EXPECT_EQ(glu_columns(GluLayout::ungated(), 4, 3).gate, 3);
  EXPECT_EQ(glu_columns(GluLayout::ungated(), 4, 3).up, reference::kNoUp);
}

double value(const Activation& activation, double a, double b, double p = 1) {
  return reference::glu(activation, {a}, {b}, p).value;
}

TEST(ReferenceGlu, HasTheDefinedValues) {
  EXPECT_NEAR(value(Activation::swiglu(), 1, 2), 2 / (1 + std::exp(-1.0)), 1e-15);
  EXPECT_NEAR(value(Activation::swiglu(), 1, 2, -0.5), -1 / (1 + std::exp(-1.0)), 1e-15);
  // gelu_tanh in its usual form.
  const double u = std::sqrt(2 / 3.14159265358979324) * (1.5 + 0.044715 * 1.5 * 1.5 * 1.5);
  EXPECT_NEAR(value(Activation::geglu_tanh(), 1.5, 2), 1.5 * (1 + std::tanh(u)), 1e-14);
  const Activation clamped = Activation::clamped_swiglu(7, 2, 1);
  EXPECT_NEAR(value(clamped, 1, 2), 3 / (1 + std::exp(-2.0)), 1e-15);
  EXPECT_NEAR(value(clamped, 100, 2), 7 * 3 / (1 + std::exp(-14.0)), 1e-14);
  EXPECT_NEAR(value(clamped, 1, -100), -6 / (1 + std::exp(-2.0)), 1e-15);
  EXPECT_NEAR(value(clamped, -100, 8), -800 / (1 + std::exp(200.0)), 1e-90);  // no lower limit
}

TEST(ReferenceGlu, HasReluAndItsSquareWithAndWithoutAGate) {
  EXPECT_EQ(value(Activation::reglu(), 1.5, 2, 0.5), 1.5);
  EXPECT_EQ(value(Activation::reglu2(), 1.5, 2, 0.5), 2.25);
  EXPECT_EQ(value(Activation::reglu2(), -1.5, 2), 0);
  EXPECT_EQ(reference::ungated(Activation::reglu2(), {3}, 0.5).value, 4.5);
  EXPECT_EQ(reference::ungated_gradient(Activation::reglu2(), 3, 0.5).value, 3);
  EXPECT_EQ(reference::ungated_gradient(Activation::reglu(), 3, 0.5).value, 0.5);
  for (const double a : {0.0, -1.0}) {
    EXPECT_EQ(reference::ungated_gradient(Activation::reglu(), a, 1).value, 0);
    EXPECT_EQ(reference::glu_gradient(Activation::reglu2(), a, 2, 1).gate.value, 0);
  }
  EXPECT_NEAR(reference::ungated(Activation::swiglu(), {1}, 2).value, 2 / (1 + std::exp(-1.0)),
              1e-15);
  EXPECT_TRUE(std::isnan(reference::ungated_gradient(Activation::reglu(), NAN, 1).value));
}

TEST(ReferenceGlu, GradientPassesAtTheLimitAndNotBeyond) {
  const Activation clamped = Activation::clamped_swiglu(7, 1.702F, 1);
  EXPECT_NE(reference::glu_gradient(clamped, 7, 1, 1).gate.value, 0);
  EXPECT_EQ(reference::glu_gradient(clamped, 7.01, 1, 1).gate.value, 0);
  EXPECT_NE(reference::glu_gradient(clamped, 1, -7, 1).up.value, 0);
  EXPECT_EQ(reference::glu_gradient(clamped, 1, -7.01, 1).up.value, 0);
  EXPECT_EQ(reference::glu_gradient(clamped, 1, 7.01, 1).up.value, 0);
}

TEST(ReferenceGlu, GradientsAreItsDerivatives) {
  Random random;
  for (const Activation& activation :
       {Activation::swiglu(), Activation::clamped_swiglu(), Activation::geglu_tanh(),
        Activation::reglu(), Activation::reglu2()}) {
    for (int i = 0; i < 200; ++i) {
      const double a = 2 * random.normal(), b = 2 * random.normal(), p = random.normal();
      const double h = kDifferenceStep;
      const reference::GluGradient got = reference::glu_gradient(activation, a, b, p);
      const double by_a =
          (value(activation, a + h, b, p) - value(activation, a - h, b, p)) / (2 * h);
      const double by_b =
          (value(activation, a, b + h, p) - value(activation, a, b - h, p)) / (2 * h);
      const double size = 1 + std::abs(b * p) + std::abs(a * p);
      ASSERT_NEAR(got.gate.value, by_a, kDifferenceError * size) << activation.kind;
      ASSERT_NEAR(got.up.value, by_b, kDifferenceError * size) << activation.kind;
    }
  }
}

TEST(ReferenceGlu, AnUncertainZWidensTheBoundByTheSlope) {
  const reference::Number exact = reference::glu(Activation::swiglu(), {1}, {2}, 1);
  const reference::Number uncertain = reference::glu(Activation::swiglu(), {1}, {2, 0.01}, 1);
  EXPECT_LT(exact.bound, 1e-6);
  EXPECT_NEAR(uncertain.bound, 0.01 / (1 + std::exp(-1.0)), 1e-6);
}

TEST(ReferenceGlu, BackwardOfRowsSumsTheGradientOfProbs) {
  Random random;
  TestTensor z = TestTensor(DType::kFP64, {1, 6}).randomize(random);
  TestTensor grad_act = TestTensor(DType::kFP64, {1, 3}).randomize(random);
  TestTensor probs = TestTensor(DType::kFP64, {1}).randomize(random);
  const auto loss = [&] {
    GluArgs args;
    args.z = z;
    args.probs = probs;
    args.layout = GluLayout::interleaved(1);
    const reference::Matrix act = reference::glu(args);
    double sum = 0;
    for (int64_t j = 0; j < 3; ++j) sum += act.at(0, j).value * grad_act.get(0, j);
    return sum;
  };
  GluBackwardArgs args;
  args.z = z;
  args.probs = probs;
  args.grad_act = grad_act;
  args.layout = GluLayout::interleaved(1);
  const reference::GluBackwardResults got = reference::glu_backward(args);
  EXPECT_NEAR(got.grad_probs.at(0, 0).value, test::central_difference(probs, 0, 0, loss),
              10 * kDifferenceError);
  for (int64_t j = 0; j < 6; ++j) {
    EXPECT_NEAR(got.grad_z.at(0, j).value, test::central_difference(z, 0, j, loss),
                10 * kDifferenceError);
  }
}

TEST(ReferenceConvertGlu, MovesRowsAndColumns) {
  TestTensor source = test::index_tensor(DType::kInt32, {0, 1, 2, 3, 10, 11, 12, 13});
  ConvertGluArgs args;
  args.source = source;
  args.from = GluLayout::halves();
  args.to = GluLayout::interleaved(2, MOIRE_UP_FIRST);
  std::vector<std::byte> bytes = reference::convert_glu(args);
  EXPECT_TRUE(test::same_indices(TensorView(bytes.data(), DType::kInt32, {8}),
                                 {10, 11, 0, 1, 12, 13, 2, 3}));
  args.source.rank = 2;  // [4, 2]: rows 0 and 1 are gates
  args.source.shape[0] = 4;
  args.source.shape[1] = 2;
  args.to = GluLayout::interleaved(1);
  bytes = reference::convert_glu(args);
  EXPECT_TRUE(test::same_indices(TensorView(bytes.data(), DType::kInt32, {4, 2}),
                                 {0, 1, 10, 11, 2, 3, 12, 13}));
}

}  // namespace
}  // namespace moire
