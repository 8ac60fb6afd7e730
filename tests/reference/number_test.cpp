// The storage formats of the reference against values worked out by hand, and the rule by which it
// accepts results.
#include "reference/number.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

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

}  // namespace
}  // namespace moire::reference
