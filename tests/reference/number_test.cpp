// The storage formats of the reference against values worked out by hand, and the rule by which it
// accepts results.
#include "reference/number.h"

#include <gtest/gtest.h>

#include <cmath>
#include <initializer_list>
#include <limits>
#include <random>

#include "reference/float_format.h"

namespace moire::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

TEST(FloatFormat, DecodesHandComputedPatterns) {
  EXPECT_EQ(decode(DType::kBF16, 0x3F80), 1.0);
  EXPECT_EQ(decode(DType::kBF16, 0xC049), -3.140625);
  EXPECT_EQ(decode(DType::kBF16, 0x0001), std::ldexp(1.0, -133));
  EXPECT_EQ(decode(DType::kFP16, 0x3C00), 1.0);
  EXPECT_EQ(decode(DType::kFP16, 0x7BFF), 65504.0);
  EXPECT_EQ(decode(DType::kFP16, 0x8001), -std::ldexp(1.0, -24));
  EXPECT_EQ(decode(DType::kFP32, 0x40490FDB), static_cast<double>(3.14159274F));
  EXPECT_EQ(decode(DType::kFP64, 0x400921FB54442D18), 3.141592653589793);
  EXPECT_EQ(decode(DType::kFP16, 0xFC00), -kInfinity);
  EXPECT_TRUE(std::isnan(decode(DType::kBF16, 0x7FC0)));
}

TEST(FloatFormat, EncodesEveryPatternToItself) {
  for (const DType dtype : {DType::kBF16, DType::kFP16}) {
    for (uint64_t bits = 0; bits < 0x10000; ++bits) {
      const double value = decode(dtype, bits);
      if (std::isnan(value)) continue;
      ASSERT_EQ(encode(dtype, value), bits);
      ASSERT_EQ(round_to(dtype, value), value);
    }
  }
}

TEST(Number, RoundsAsTheHardwareDoesToFP32) {
  for (const double value : {1.0 / 3, 1e-40, -2.5e-45, 3.4028235677973366e38, 1e39, 7.0e-46}) {
    EXPECT_EQ(round_to(DType::kFP32, value), static_cast<double>(static_cast<float>(value)));
  }
}

TEST(Number, RoundsTiesToEven) {
  EXPECT_EQ(round_to(DType::kBF16, 1.0 + 0x1p-8), 1.0);
  EXPECT_EQ(round_to(DType::kBF16, 1.0 + 3 * 0x1p-8), 1.0 + 0x1p-6);
  EXPECT_EQ(round_to(DType::kFP16, 0x1p-25), 0.0);
  EXPECT_EQ(round_to(DType::kFP16, 65519.9), 65504.0);
  EXPECT_EQ(round_to(DType::kFP16, -65520.0), -kInfinity);
}

TEST(Number, LeavesNoFreedomFarFromARoundingBoundary) {
  const Number far = round_to(DType::kBF16, Number{1.001, 1e-6});
  EXPECT_EQ(far.value, 1.0);
  EXPECT_EQ(far.bound, 0.0);
  const Number near = round_to(DType::kBF16, Number{1.0 + 0x1p-8 - 1e-7, 1e-6});
  EXPECT_EQ(near.value, 1.0);
  EXPECT_EQ(near.bound, 0x1p-7);
}

TEST(Number, AcceptsWhatRoundsFromWithinTheBoundAndNothingElse) {
  EXPECT_TRUE(accepts(DType::kBF16, {1.001, 1e-6}, 1.0));
  EXPECT_FALSE(accepts(DType::kBF16, {1.001, 1e-6}, 1.0 + 0x1p-7));
  EXPECT_TRUE(accepts(DType::kFP32, {1.0, 0x1p-22}, 1.0 + 0x1p-22));
  EXPECT_FALSE(accepts(DType::kFP32, {1.0, 0x1p-22}, 1.0 + 0x1p-21));
  EXPECT_FALSE(accepts(DType::kFP32, {0, 0}, 0x1p-149));
  EXPECT_FALSE(accepts(DType::kFP32, {1.0, 1.0}, std::nan("")));
  EXPECT_TRUE(accepts(DType::kFP32, {std::nan(""), 0}, std::nan("")));
  EXPECT_TRUE(accepts(DType::kFP32, {kInfinity, 0}, kInfinity));
  EXPECT_FALSE(accepts(DType::kFP32, {kInfinity, 0}, 1e38));
}

TEST(Dot, BoundsBothItsOwnRoundingAndWhatItsFactorsBring) {
  Dot dot;
  dot.add({3.0, 0.5}, {-2.0});
  dot.add({1.0}, {4.0});
  EXPECT_EQ(dot.sum().value, -2.0);
  EXPECT_EQ(dot.sum().bound, 1.0 + dot_tolerance(2, 10.0));
}

// An element of E4M3 under a scale, as tensor cores read it.
Number element(double value, float scale = 1) { return {value * scale, 0, scale, -6}; }

// Tensor cores align it as the smallest normal number, and cut off what is below 24 bits of that.
TEST(Dot, BoundsWhatASubnormalFp16NumberCosts) {
  const int least = least_exponent(DType::kFP16);
  const double product = 0x1p-21 * (1 + 0x1p-9 + 0x1p-20);
  const auto bound = [&](double other, int exponent) {
    Dot dot;
    dot.add({0x1p-13 * (1 + 0x1p-10), 0, 0, exponent}, {0x1p-8 * (1 + 0x1p-10), 0, 0, exponent});
    dot.add({other, 0, 0, exponent}, {1, 0, 0, exponent});
    const Number sum = dot.sum();
    EXPECT_EQ(sum.value, product + other);
    return sum.bound;
  };
  EXPECT_GE(bound(0x1p-24, least), 0x1p-41);
  EXPECT_GE(bound(0x1p-24, least), 10 * 0x1p-24 * 0x1p-14);
  EXPECT_LT(bound(0x1p-24, 0), 0x1p-40) << "of other types it is small";
  EXPECT_EQ(bound(0, least), bound(0, 0)) << "zero states no exponent";
  EXPECT_EQ(round_to(DType::kFP16, Number{0x1p-20}).least_exponent, -14);
  EXPECT_EQ(round_to(DType::kBF16, Number{0x1p-20}).least_exponent, 0);
}

TEST(Dot, EmulatesTensorCoresTermByTerm) {
  const auto sum_of = [](std::initializer_list<double> products) {
    Dot dot(Dot::Factors::kEmulated);
    for (const double p : products) dot.add(element(p, 4), element(1, 0.5F));
    return dot.sum().value / 2;
  };
  EXPECT_EQ(sum_of({64, 0x1p-7, 0x1p-8}), 64 + 0x1p-7);    // 13 bits below the first
  EXPECT_EQ(sum_of({64, -0x1p-7, -0x1p-8}), 64 - 0x1p-7);  // towards zero
  EXPECT_EQ(sum_of({64, -0x1p-8, -0x1p-8}), 64);
  EXPECT_EQ(sum_of({0x1p-9, 0x1p-9}), 0x1p-8);
}

TEST(Dot, EmulatedLiesWithinWhatTensorCoresCutOff) {
  std::mt19937_64 engine(7);
  const auto draw = [&](float scale) {
    const uint64_t code = engine() % 0x7F | (engine() % 2) << 7;
    return element(decode(DType::kE4M3, code) * (engine() % 3 == 0 ? 0 : 1), scale);
  };
  double largest = 0;
  for (int i = 0; i < 2000; ++i) {
    Dot dot(Dot::Factors::kEmulated), exact;
    for (uint64_t k = engine() % 300; k != 0; --k) {
      const Number a = draw(0.125F), b = draw(3);
      dot.add(a, b);
      exact.add(a, b);
    }
    const Number got = dot.sum();
    ASSERT_TRUE(std::isfinite(got.value));  // else it is further away than it may be
    largest = std::max(largest, std::abs(got.value - exact.sum().value) / (got.bound + 1e-30));
  }
  EXPECT_GT(largest, 100);  // far from the exact sums, by what those may be off
}

}  // namespace
}  // namespace moire::reference
