// BF16 and FP16 conversions against definitions in double, for every 16-bit pattern and for values
// between them.
#include "core/float_formats.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

namespace moire {
namespace {

// The value of a 16-bit float with `mantissa_bits`, from its definition.
double value_of(uint16_t bits, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const double sign = (bits & 0x8000) != 0 ? -1 : 1;
  if (exponent == (1 << exponent_bits) - 1) {
    return mantissa == 0 ? sign * std::numeric_limits<double>::infinity()
                         : std::numeric_limits<double>::quiet_NaN();
  }
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

struct Format {
  int exponent_bits, mantissa_bits;
  float (*decode)(uint16_t);
  uint16_t (*encode)(float);
};
constexpr Format kFormats[] = {{8, 7, bf16_to_float, float_to_bf16},
                               {5, 10, fp16_to_float, float_to_fp16}};

TEST(FloatFormats, DecodeEveryPatternToItsDefinition) {
  for (const Format& f : kFormats) {
    for (uint32_t bits = 0; bits < 0x10000; ++bits) {
      const double want = value_of(static_cast<uint16_t>(bits), f.exponent_bits, f.mantissa_bits);
      const float got = f.decode(static_cast<uint16_t>(bits));
      if (std::isnan(want)) {
        ASSERT_TRUE(std::isnan(got)) << bits;
      } else {
        ASSERT_EQ(got, want) << bits;
        ASSERT_EQ(std::signbit(got), std::signbit(want)) << bits;
        ASSERT_EQ(f.encode(got), bits);
      }
    }
  }
}

TEST(FloatFormats, RoundToTheNearestAndTiesToTheEven) {
  for (const Format& f : kFormats) {
    for (uint32_t bits = 0; bits + 1 < 0x8000; ++bits) {
      const float low = f.decode(static_cast<uint16_t>(bits)),
                  high = f.decode(static_cast<uint16_t>(bits + 1));
      if (!std::isfinite(low) || !std::isfinite(high)) continue;
      const float middle = static_cast<float>((static_cast<double>(low) + high) / 2);
      const uint32_t even = bits % 2 == 0 ? bits : bits + 1;
      ASSERT_EQ(f.encode(middle), even);
      ASSERT_EQ(f.encode(std::nextafter(middle, low)), bits);
      ASSERT_EQ(f.encode(std::nextafter(middle, high)), bits + 1);
      ASSERT_EQ(f.encode(-middle), even | 0x8000U);
    }
  }
}

TEST(FloatFormats, KeepNaNAndOverflowToInfinity) {
  EXPECT_EQ(float_to_bf16(std::numeric_limits<float>::quiet_NaN()), 0x7FFF);
  EXPECT_EQ(float_to_fp16(std::numeric_limits<float>::quiet_NaN()), 0x7FFF);
  EXPECT_EQ(float_to_bf16(std::numeric_limits<float>::max()), 0x7F80);
  EXPECT_EQ(float_to_fp16(65519.996F), 0x7BFF);
  EXPECT_EQ(float_to_fp16(65520.0F), 0x7C00);
  EXPECT_EQ(float_to_fp16(-1e30F), 0xFC00);
}

}  // namespace
}  // namespace moire
