// The conversions of FP8 that a GPU without instructions for them runs, beside those of core/fp8.h.
#include "backend/cuda/device/fp8_bits.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <random>

namespace moire::cuda {
namespace {

void expect_same_codes(uint32_t bits) {
  const float value = bit_cast<float>(bits);
  ASSERT_EQ(fp8_code(value, false), float_to_fp8<E4M3>(value)) << std::hex << bits;
  ASSERT_EQ(fp8_code(value, true), float_to_fp8<E5M2>(value)) << std::hex << bits;
}

TEST(Fp8Bits, EncodeWhatCoreEncodes) {
  for (uint32_t bits = 0; bits < 1U << 16; ++bits) {
    for (const uint32_t low : {0x0000U, 0x0001U, 0x7FFFU, 0x8000U, 0xFFFFU}) {
      expect_same_codes(bits << 16 | low);
    }
  }
  std::mt19937 random(std::random_device{}());
  for (int i = 0; i < 1 << 20; ++i) expect_same_codes(static_cast<uint32_t>(random()));
}

template <class Format>
void expect_same_values() {
  for (uint32_t code = 0; code < 256; ++code) {
    const float want = fp8_to_float<Format>(static_cast<uint8_t>(code));
    EXPECT_EQ(bit_cast<uint32_t>(fp8_value<Format>(code)), bit_cast<uint32_t>(want)) << code;
    EXPECT_EQ(bit_cast<uint32_t>(fp8_value<Format>(0xAB00U | code)), bit_cast<uint32_t>(want));
  }
}

TEST(Fp8Bits, DecodeWhatCoreDecodes) {
  expect_same_values<E4M3>();
  expect_same_values<E5M2>();
}

// What is scaled by the reciprocal of the code 0.
template <class Format>
void expect_that_blocks_have_what_their_codes_do(bool is_e5m2) {
  EXPECT_FALSE(has_nonzero(0, is_e5m2));
  for (int exponent = -149; exponent < -127; ++exponent) {
    for (const float amax : {std::ldexp(1.0F, exponent), std::ldexp(1.5F, exponent)}) {
      ASSERT_EQ(mx_scale<Format>(amax), 0);
      const uint8_t code = float_to_fp8<Format>(amax * e8m0_reciprocal(0));
      EXPECT_EQ(has_nonzero(amax, is_e5m2), code != 0) << amax;
    }
  }
}

TEST(Fp8Bits, KnowWhetherABlockHasMoreThanZeros) {
  expect_that_blocks_have_what_their_codes_do<E4M3>(false);
  expect_that_blocks_have_what_their_codes_do<E5M2>(true);
}

TEST(Fp8Bits, ScaleAFoldByItsCodeUnlessItIsOfZeros) {
  EXPECT_EQ(fold_scale(131, true), 16.0F);
  EXPECT_EQ(fold_scale(131, false), 16.0F);
  EXPECT_EQ(fold_scale(0, true), 0x1p-127F);
  EXPECT_EQ(fold_scale(0, false), 1.0F);
}

}  // namespace
}  // namespace moire::cuda
