// Scalar FP8 and its scales against the reference's definitions in double and, where the CUDA
// toolkit is there, against NVIDIA's own conversions.
#include "core/fp8.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <vector>

#include "core/float_formats.h"
#include "reference/float_format.h"
#include "reference/fp8.h"
#include "tests/support/random.h"
#if defined(MOIRE_TEST_CUDA_FP8)
#include <cuda_fp8.h>
#endif

namespace moire {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Type {
  DType dtype;
  float (*decode)(uint8_t);
  uint8_t (*encode)(float);
  uint8_t (*scale)(float);
};
constexpr Type kTypes[] = {{DType::kE4M3, fp8_to_float<E4M3>, float_to_fp8<E4M3>, mx_scale<E4M3>},
                           {DType::kE5M2, fp8_to_float<E5M2>, float_to_fp8<E5M2>, mx_scale<E5M2>}};

// Every BF16 number, what lies between neighbouring codes with its neighbours, and random bits.
std::vector<float> hard_floats(const Type& type) {
  test::Random random;
  std::vector<float> out;
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    out.push_back(bf16_to_float(static_cast<uint16_t>(bits)));
  }
  for (uint32_t code = 0; code < 255; ++code) {
    const float low = type.decode(static_cast<uint8_t>(code));
    const float high = type.decode(static_cast<uint8_t>(code + 1)), middle = (low + high) / 2;
    for (const float x : {low, middle, std::nextafter(middle, low), std::nextafter(middle, high)}) {
      out.push_back(x);
    }
  }
  for (int i = 0; i < 300'000; ++i) {
    const auto bits = static_cast<uint32_t>(random.engine()());
    out.push_back(std::bit_cast<float>(bits));
    out.push_back(std::bit_cast<float>((bits & 0x807FFFFFU) | (100U + bits % 50U) << 23));
  }
  return out;
}

TEST(Fp8, DecodesEveryCodeToItsDefinition) {
  for (const Type& type : kTypes) {
    for (uint32_t code = 0; code < 256; ++code) {
      const double want = reference::decode(type.dtype, code);
      const float got = type.decode(static_cast<uint8_t>(code));
      ASSERT_TRUE(got == want || (std::isnan(got) && std::isnan(want))) << code;
      ASSERT_EQ(std::signbit(got), code >= 128) << code;
    }
  }
}

TEST(Fp8, EncodesToTheNearestCodeSaturating) {
  for (const Type& type : kTypes) {
    for (const float x : hard_floats(type)) {
      ASSERT_EQ(type.encode(x), reference::encode_fp8(type.dtype, double{x}))
          << dtype_name(type.dtype) << " of " << x;
    }
  }
  EXPECT_EQ(float_to_fp8<E4M3>(448), 0x7E);
  EXPECT_EQ(float_to_fp8<E4M3>(449), 0x7E);
  EXPECT_EQ(float_to_fp8<E4M3>(-kInfinity), 0xFE);
  EXPECT_EQ(float_to_fp8<E4M3>(-kNan), 0x7F);
  EXPECT_EQ(float_to_fp8<E4M3>(-0.0F), 0x80);
  EXPECT_EQ(float_to_fp8<E4M3>(0x1p-10F), 0x00);  // half the smallest number: to even
  EXPECT_EQ(float_to_fp8<E4M3>(0x1.8p-10F), 0x01);
  EXPECT_EQ(float_to_fp8<E5M2>(57344), 0x7B);
  EXPECT_EQ(float_to_fp8<E5M2>(1e30F), 0x7B);
  EXPECT_EQ(float_to_fp8<E5M2>(kInfinity), 0x7B);
  EXPECT_EQ(float_to_fp8<E5M2>(kNan), 0x7F);
}

TEST(E8m0, DecodesEveryCodeAndItsReciprocal) {
  for (uint32_t code = 0; code < 255; ++code) {
    const auto scale = static_cast<uint8_t>(code);
    EXPECT_EQ(e8m0_to_float(scale), std::ldexp(1.0, static_cast<int>(code) - 127)) << code;
    EXPECT_EQ(e8m0_reciprocal(scale), std::ldexp(1.0, 127 - static_cast<int>(code))) << code;
  }
  EXPECT_TRUE(std::isnan(e8m0_to_float(255)));
}

TEST(MxScale, IsTheLeastPowerOfTwoThatHoldsTheLargestValue) {
  for (const Type& type : kTypes) {
    const double reciprocal = static_cast<float>(1 / reference::max_fp8(type.dtype));
    for (const float x : hard_floats(type)) {
      const float amax = std::fabs(x);
      if (!std::isfinite(amax)) continue;
      const int code = type.scale(amax);
      const auto t = static_cast<double>(static_cast<float>(amax * reciprocal));
      EXPECT_GE(std::ldexp(1.0, code - 127), t) << amax;
      EXPECT_TRUE(code == 0 || std::ldexp(1.0, code - 128) < t) << amax;
    }
    EXPECT_EQ(type.scale(0), 0);
    EXPECT_EQ(type.scale(kInfinity), 254);
    EXPECT_EQ(type.scale(kNan), 255);
    // At its edge: the largest number itself, and the next float.
    const auto most = static_cast<float>(reference::max_fp8(type.dtype));
    EXPECT_EQ(type.scale(most), 127);
    EXPECT_EQ(type.scale(std::nextafter(most, kInfinity)), 128);
  }
}

// So what decodes to BF16 loses nothing of them; nor of FP16 numbers, which are multiples of 2^-24
// and have codes under which every element is a BF16 number.
TEST(MxScale, LeavesBF16NumbersOnAGridOfBF16NumbersUnderEveryCode) {
  for (const Type& type : kTypes) {
    for (uint32_t bits = 0; bits < 0x7F80; ++bits) {
      const float x = bf16_to_float(static_cast<uint16_t>(bits));
      for (uint32_t code = type.scale(x); code < 255; ++code) {
        const auto scale = static_cast<uint8_t>(code);
        const float value =
            type.decode(type.encode(x * e8m0_reciprocal(scale))) * e8m0_to_float(scale);
        ASSERT_EQ(std::bit_cast<uint32_t>(value) & 0xFFFFU, 0U) << x << " under the code " << code;
      }
    }
  }
}

TEST(Fold, RoundsEachElementToTheUnitOfItsBlock) {
  for (const bool is_e5m2 : {false, true}) {
    const DType dtype = is_e5m2 ? DType::kE5M2 : DType::kE4M3;
    const double half_unit = is_e5m2 ? 0x1p-17 : 0x1p-10;
    for (int i = 0; i < 256 * 255; ++i) {
      const auto element = static_cast<uint8_t>(i % 256), shift = static_cast<uint8_t>(i / 256);
      for (const uint8_t code : {uint8_t{0}, static_cast<uint8_t>(254 - shift)}) {
        const auto folded = static_cast<uint8_t>(code + shift);
        const uint8_t got = is_e5m2 ? fold_element<E5M2>(element, code, folded)
                                    : fold_element<E4M3>(element, code, folded);
        ASSERT_EQ(got, reference::fold_fp8(dtype, element, code, folded))
            << dtype_name(dtype) << " " << int{element} << " by " << int{shift};
        const double value = reference::decode(dtype, element), now = reference::decode(dtype, got);
        ASSERT_EQ(std::isfinite(now), std::isfinite(value)) << int{element};
        if (!std::isfinite(value)) continue;
        ASSERT_LE(std::abs(now - std::ldexp(value, -shift)), half_unit) << int{element};
        ASSERT_EQ(std::signbit(now), std::signbit(value)) << int{element};
      }
    }
  }
}

TEST(Fold, KeepsWhatIsNoNumber) {
  EXPECT_EQ(fold_element<E4M3>(0x7F, 120, 130), 0x7F);
  EXPECT_EQ(fold_element<E4M3>(0xFF, 120, 130), 0xFF);
  EXPECT_EQ(fold_element<E5M2>(0xFC, 120, 130), 0xFC);  // -infinity
  EXPECT_EQ(fold_element<E5M2>(0x7D, 120, 130), 0x7D);
  EXPECT_EQ(fold_element<E4M3>(0x38, 255, 130), 0x7F);
  EXPECT_EQ(fold_element<E5M2>(0x00, 255, 0), 0x7F);
}

TEST(Fold, TakesTheLargestCodeThatIsANumber) {
  const auto fold = [](std::initializer_list<uint8_t> codes) {
    uint8_t folded = 0;
    for (const uint8_t code : codes) folded = fold_code(folded, code);
    return int{folded};
  };
  EXPECT_EQ(fold({120, 0, 131, 128}), 131);
  EXPECT_EQ(fold({120, 255, 0, 119}), 120);
  EXPECT_EQ(fold({255, 255}), 0);
  EXPECT_EQ(fold({0, 254, 255, 1}), 254);
}

TEST(BlockScale, BringsTheLargestValueToTheLargestNumber) {
  for (const float amax : {1.0F, 3.0F, 448.0F, 449.0F, 1e-30F, 3e38F}) {
    const BlockScale fractional = block_scale<E4M3>(amax, true),
                     power = block_scale<E4M3>(amax, false);
    EXPECT_EQ(fractional.multiplier, 448 / amax);
    EXPECT_EQ(fractional.scale, 1 / fractional.multiplier);
    int exponent = 0;
    EXPECT_EQ(std::frexp(power.multiplier, &exponent), 0.5F) << amax;
    EXPECT_LE(power.multiplier, fractional.multiplier);
    EXPECT_GT(power.multiplier * 2, fractional.multiplier);
    EXPECT_EQ(power.scale * power.multiplier, 1);
  }
  for (const float amax : {0.0F, kInfinity, kNan}) {
    EXPECT_EQ(block_scale<E4M3>(amax, true).multiplier, 1);
    EXPECT_EQ(block_scale<E4M3>(amax, false).scale, 1);
  }
  // 448 / amax overflows: the largest float, or its power of two.
  EXPECT_EQ(block_scale<E4M3>(0x1p-149F, true).multiplier, std::numeric_limits<float>::max());
  EXPECT_EQ(block_scale<E4M3>(0x1p-149F, false).multiplier, 0x1p127F);
  EXPECT_EQ(block_scale<E4M3>(0x1p-149F, false).scale, 0x1p-127F);
}

#if defined(MOIRE_TEST_CUDA_FP8)
__nv_fp8_interpretation_t cuda_type(const Type& type) {
  return type.dtype == DType::kE4M3 ? __NV_E4M3 : __NV_E5M2;
}
#endif

TEST(Cuda, ConvertsTheSame) {
#if defined(MOIRE_TEST_CUDA_FP8)
  for (const Type& type : kTypes) {
    for (uint32_t code = 0; code < 256; ++code) {
      const __half_raw half =
          __nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(code), cuda_type(type));
      const float want = fp16_to_float(half.x), got = type.decode(static_cast<uint8_t>(code));
      ASSERT_TRUE(got == want || (std::isnan(got) && std::isnan(want))) << code;
    }
    for (const float x : hard_floats(type)) {
      ASSERT_EQ(type.encode(x), __nv_cvt_float_to_fp8(x, __NV_SATFINITE, cuda_type(type))) << x;
      const float reciprocal = 1.0F / static_cast<float>(reference::max_fp8(type.dtype));
      ASSERT_EQ(type.scale(std::fabs(x)),
                __nv_cvt_float_to_e8m0(std::fabs(x) * reciprocal, __NV_SATFINITE, cudaRoundPosInf))
          << x;
    }
  }
#else
  GTEST_SKIP() << "the CUDA toolkit, with its cuda_fp8.h, was not there when the tests were built";
#endif
}

}  // namespace
}  // namespace moire
