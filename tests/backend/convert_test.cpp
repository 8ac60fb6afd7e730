// The SIMD conversions against core/float_formats.h, on every target that this machine runs.
#include "backend/cpu/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tests/backend/convert_test.cpp"
#include <hwy/foreach_target.h>
// The inline headers come after foreach_target.h.
#include "backend/cpu/convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moire::cpu::HWY_NAMESPACE {
namespace {

void decode_row(const void* src, DType dtype, size_t n, float* dst) {
  DecodeRow(src, dtype, n, dst);
}
void encode_row(const float* src, size_t n, DType dtype, void* dst) {
  EncodeRow(src, n, dtype, dst);
}
void round_row(float* values, size_t n, DType dtype) { RoundRow(values, n, dtype); }

// Pairs: `src` holds 2n elements; through vectors, n a multiple of 16.
void split_pairs(const void* src, DType dtype, size_t n, float* first, float* second) {
  with_format(dtype, [&](auto format) HWY_ATTR {
    using Format = decltype(format);
    const FloatTag d;
    const auto* p = static_cast<const typename Format::Element*>(src);
    for (size_t i = 0; i < n; i += hn::Lanes(d)) {
      auto a = hn::Zero(d), b = hn::Zero(d);
      Format::LoadPairs(d, p + 2 * i, a, b);
      hn::StoreU(a, d, first + i);
      hn::StoreU(b, d, second + i);
    }
  });
}
void join_pairs(const float* first, const float* second, size_t n, DType dtype, void* dst) {
  with_format(dtype, [&](auto format) HWY_ATTR {
    using Format = decltype(format);
    const FloatTag d;
    auto* p = static_cast<typename Format::Element*>(dst);
    for (size_t i = 0; i < n; i += hn::Lanes(d)) {
      Format::StorePairs(d, hn::LoadU(d, first + i), hn::LoadU(d, second + i), p + 2 * i);
    }
  });
}

}  // namespace
}  // namespace moire::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "core/float_environment.h"
#include "tests/backend/each_target.h"
#include "tests/backend/hard_floats.h"
#include "tests/support/random.h"

namespace moire::cpu {
namespace {

HWY_EXPORT(decode_row);
HWY_EXPORT(encode_row);
HWY_EXPORT(round_row);
HWY_EXPORT(split_pairs);
HWY_EXPORT(join_pairs);

constexpr DType kHalves[] = {DType::kBF16, DType::kFP16};

uint16_t encode(DType dtype, float x) {
  return dtype == DType::kBF16 ? float_to_bf16(x) : float_to_fp16(x);
}
float decode(DType dtype, uint16_t x) {
  return dtype == DType::kBF16 ? bf16_to_float(x) : fp16_to_float(x);
}
// A random finite float, small enough for FP16 now and then.
template <class Random>
float finite(Random random_bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(random_bits) & 0xBFFFFFFFU);
}

std::vector<uint16_t> every_pattern() {
  std::vector<uint16_t> out(0x10000);
  for (size_t i = 0; i < out.size(); ++i) out[i] = static_cast<uint16_t>(i);
  return out;
}

// Every value of `dtype`, the middle to the next and its two neighbours, and random bit patterns.
std::vector<float> hard_floats(DType dtype, std::mt19937_64& random) {
  std::vector<float> out;
  for (const uint16_t bits : every_pattern()) {
    const float low = decode(dtype, bits), high = decode(dtype, static_cast<uint16_t>(bits + 1));
    out.push_back(low);
    if (!std::isfinite(low) || !std::isfinite(high)) continue;
    add_middle(low, high, out);
  }
  for (const float x : {65519.996F, 65520.0F, 65536.0F, 3.4e38F, 1e-45F, 0x1p-25F, 0x1.8p-24F}) {
    out.push_back(x);
    out.push_back(-x);
  }
  add_random_patterns(random, 1'000'000, out);
  return out;
}

TEST(Convert, DecodesEveryPatternLikeTheScalarDefinition) {
  const FloatEnvironment exact;
  const std::vector<uint16_t> in = every_pattern();
  for_each_target([&] {
    for (const DType dtype : kHalves) {
      std::vector<float> out(in.size());
      HWY_DYNAMIC_DISPATCH(decode_row)(in.data(), dtype, in.size(), out.data());
      for (size_t i = 0; i < in.size(); ++i) {
        ASSERT_EQ(bits_of(out[i]), bits_of(decode(dtype, in[i]))) << dtype_name(dtype) << " " << i;
      }
    }
  });
}

TEST(Convert, EncodesAndRoundsLikeTheScalarDefinition) {
  const FloatEnvironment exact;
  test::Random random;
  for (const DType dtype : kHalves) {
    const std::vector<float> in = hard_floats(dtype, random.engine());
    for_each_target([&] {
      std::vector<uint16_t> out(in.size());
      HWY_DYNAMIC_DISPATCH(encode_row)(in.data(), in.size(), dtype, out.data());
      std::vector<float> rounded = in;
      HWY_DYNAMIC_DISPATCH(round_row)(rounded.data(), rounded.size(), dtype);
      for (size_t i = 0; i < in.size(); ++i) {
        const uint16_t want = encode(dtype, in[i]);
        ASSERT_EQ(out[i], want) << dtype_name(dtype) << " of bits " << bits_of(in[i]);
        ASSERT_EQ(bits_of(rounded[i]), bits_of(decode(dtype, want))) << bits_of(in[i]);
      }
    });
  }
}

TEST(Convert, RowsOfAnyLengthWriteExactlyThatLength) {
  const FloatEnvironment exact;
  test::Random fresh;
  std::mt19937_64& random = fresh.engine();
  for_each_target([&] {
    for (const DType dtype : {DType::kFP32, DType::kBF16, DType::kFP16}) {
      const auto size = static_cast<size_t>(dtype_size(dtype));
      for (size_t n = 0; n <= 70; ++n) {
        std::vector<float> values(n + 1, -77.0F);
        for (size_t i = 0; i < n; ++i) values[i] = finite(random());
        std::vector<unsigned char> stored((n + 1) * size, 0xA5);
        HWY_DYNAMIC_DISPATCH(encode_row)(values.data(), n, dtype, stored.data());
        for (size_t i = n * size; i < stored.size(); ++i) ASSERT_EQ(stored[i], 0xA5) << n;
        std::vector<float> back(n + 1, -77.0F), rounded = values;
        HWY_DYNAMIC_DISPATCH(decode_row)(stored.data(), dtype, n, back.data());
        HWY_DYNAMIC_DISPATCH(round_row)(rounded.data(), n, dtype);
        ASSERT_EQ(std::memcmp(back.data(), rounded.data(), (n + 1) * sizeof(float)), 0) << n;
      }
    }
  });
}

TEST(Convert, PairsAreTheEvenAndTheOddElements) {
  const FloatEnvironment exact;
  constexpr size_t kPairs = 64;
  test::Random fresh;
  std::mt19937_64& random = fresh.engine();
  for_each_target([&] {
    for (const DType dtype : {DType::kFP32, DType::kBF16, DType::kFP16}) {
      std::vector<float> values(2 * kPairs), first(kPairs), second(kPairs), back(2 * kPairs);
      for (float& x : values) x = finite(random());
      std::vector<unsigned char> stored(2 * kPairs * sizeof(float)), joined = stored;
      HWY_DYNAMIC_DISPATCH(encode_row)(values.data(), values.size(), dtype, stored.data());
      HWY_DYNAMIC_DISPATCH(decode_row)(stored.data(), dtype, values.size(), back.data());
      HWY_DYNAMIC_DISPATCH(split_pairs)(stored.data(), dtype, kPairs, first.data(), second.data());
      for (size_t i = 0; i < kPairs; ++i) {
        ASSERT_EQ(bits_of(first[i]), bits_of(back[2 * i])) << i;
        ASSERT_EQ(bits_of(second[i]), bits_of(back[2 * i + 1])) << i;
      }
      HWY_DYNAMIC_DISPATCH(join_pairs)(first.data(), second.data(), kPairs, dtype, joined.data());
      ASSERT_EQ(joined, stored);
    }
  });
}

}  // namespace
}  // namespace moire::cpu
#endif
