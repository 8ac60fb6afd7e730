// FP8 vectors and scaled rows against core/fp8.h, on every target that this machine runs.
#include "backend/cpu/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tests/backend/fp8_test.cpp"
#include <hwy/foreach_target.h>
// The inline headers come after foreach_target.h.
#include "backend/cpu/fp8-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moire::cpu::HWY_NAMESPACE {
namespace {

void decode_codes(const uint8_t* codes, DType dtype, size_t n, float* out) {
  if (dtype == DType::kE8M0) {
    const FloatTag d;
    for (size_t i = 0; i < n; i += hn::Lanes(d)) hn::StoreU(E8m0::Load(d, codes + i), d, out + i);
    return;
  }
  with_fp8_format(dtype, [&](auto format) HWY_ATTR { DecodeRun<decltype(format)>(codes, n, out); });
}
void encode_codes(const float* values, size_t n, DType dtype, uint8_t* out) {
  with_fp8_format(dtype,
                  [&](auto format) HWY_ATTR { EncodeRun<decltype(format)>(values, n, out); });
}
void decode_scaled(const void* row, DType dtype, const void* scales, DType scale_dtype,
                   bool columnwise, int64_t first, int64_t n, float* out) {
  if (!columnwise) return DecodeRowwise(row, dtype, scales, scale_dtype, first, n, out);
  const ColumnScaledRows rows{static_cast<const uint8_t*>(row), 0, 1};
  DecodeColumnwise(rows, dtype, scales, scale_dtype, first, n, out);
}

}  // namespace
}  // namespace moire::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "core/float_environment.h"
#include "tests/backend/each_target.h"
#include "tests/backend/hard_floats.h"
#include "tests/support/random.h"

namespace moire::cpu {
namespace {

HWY_EXPORT(decode_codes);
HWY_EXPORT(encode_codes);
HWY_EXPORT(decode_scaled);

constexpr DType kFp8Types[] = {DType::kE4M3, DType::kE5M2};

float decode(DType dtype, uint8_t code) {
  if (dtype == DType::kE8M0) return e8m0_to_float(code);
  return dtype == DType::kE4M3 ? fp8_to_float<E4M3>(code) : fp8_to_float<E5M2>(code);
}
uint8_t encode(DType dtype, float x) {
  return dtype == DType::kE4M3 ? float_to_fp8<E4M3>(x) : float_to_fp8<E5M2>(x);
}

std::vector<uint8_t> every_code() {
  std::vector<uint8_t> out(256);
  for (size_t i = 0; i < out.size(); ++i) out[i] = static_cast<uint8_t>(i);
  return out;
}

// Every BF16 number, the middle between neighbouring codes with its neighbours, random patterns.
std::vector<float> hard_floats(DType dtype, std::mt19937_64& random) {
  std::vector<float> out;
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    out.push_back(bf16_to_float(static_cast<uint16_t>(bits)));
  }
  for (uint32_t code = 0; code < 255; ++code) {
    const float low = decode(dtype, static_cast<uint8_t>(code));
    const float high = decode(dtype, static_cast<uint8_t>(code + 1));
    add_middle(low, high, out);
  }
  add_random_patterns(random, 500'000, out);
  // Random signs and fractions at exponents around the format's own.
  for (int i = 0; i < 500'000; ++i) {
    const auto bits = static_cast<uint32_t>(random());
    out.push_back(std::bit_cast<float>((bits & 0x807FFFFFU) | (100U + bits % 50U) << 23));
  }
  return out;
}

TEST(Fp8, DecodesEveryCodeLikeTheScalarDefinition) {
  const FloatEnvironment exact;
  const std::vector<uint8_t> codes = every_code();
  for_each_target([&] {
    for (const DType dtype : {DType::kE4M3, DType::kE5M2, DType::kE8M0}) {
      std::vector<float> out(codes.size());
      HWY_DYNAMIC_DISPATCH(decode_codes)(codes.data(), dtype, codes.size(), out.data());
      for (size_t i = 0; i < codes.size(); ++i) {
        ASSERT_EQ(bits_of(out[i]), bits_of(decode(dtype, codes[i])))
            << dtype_name(dtype) << " " << i;
      }
    }
  });
}

TEST(Fp8, EncodesLikeTheScalarDefinition) {
  const FloatEnvironment exact;
  test::Random random;
  for (const DType dtype : kFp8Types) {
    const std::vector<float> in = hard_floats(dtype, random.engine());
    for_each_target([&] {
      std::vector<uint8_t> out(in.size());
      HWY_DYNAMIC_DISPATCH(encode_codes)(in.data(), in.size(), dtype, out.data());
      for (size_t i = 0; i < in.size(); ++i) {
        ASSERT_EQ(out[i], encode(dtype, in[i])) << dtype_name(dtype) << " of " << bits_of(in[i]);
      }
    });
  }
}

// A row of random codes with scales of either kind, decoded from `first` on.
struct ScaledRow {
  ScaledRow(std::mt19937_64& random, DType dtype_, DType scale_dtype_, bool columnwise_)
      : dtype(dtype_), scale_dtype(scale_dtype_), columnwise(columnwise_) {
    for (uint8_t& code : codes) code = static_cast<uint8_t>(random());
    for (uint8_t& scale : e8m0) scale = static_cast<uint8_t>(random());
    for (float& scale : fp32) {
      scale = std::bit_cast<float>(static_cast<uint32_t>(random()) & 0x7FFFFFFFU);
    }
  }
  const void* scales() const {
    return scale_dtype == DType::kE8M0 ? static_cast<const void*>(e8m0.data()) : fp32.data();
  }
  float want(int64_t column) const {
    const int64_t block = columnwise ? 1 : scale_dtype == DType::kE8M0 ? 32 : 128;
    const auto at = static_cast<size_t>(column / block);
    const float scale = scale_dtype == DType::kE8M0 ? e8m0_to_float(e8m0[at]) : fp32[at];
    return decode(dtype, codes[static_cast<size_t>(column)]) * scale;
  }

  DType dtype, scale_dtype;
  bool columnwise;
  std::vector<uint8_t> codes = std::vector<uint8_t>(600), e8m0 = codes;
  std::vector<float> fp32 = std::vector<float>(600);
};

void expect_decoded(const ScaledRow& row, int64_t first, int64_t n) {
  std::vector<float> out(static_cast<size_t>(n) + 1, -77.0F);
  HWY_DYNAMIC_DISPATCH(decode_scaled)
  (row.codes.data(), row.dtype, row.scales(), row.scale_dtype, row.columnwise, first, n,
   out.data());
  for (int64_t i = 0; i < n; ++i) {
    const float got = out[static_cast<size_t>(i)], want = row.want(first + i);
    ASSERT_TRUE(bits_of(got) == bits_of(want) || (std::isnan(got) && std::isnan(want)))
        << "column " << first + i << " of " << first << " + " << n << ": " << got << ", want "
        << want;
  }
  ASSERT_EQ(out.back(), -77.0F);
}

TEST(Fp8, ScaledRowsDecodeFromAnyColumnAndWriteExactlyTheirLength) {
  const FloatEnvironment exact;
  test::Random fresh;
  for_each_target([&] {
    for (const DType dtype : kFp8Types) {
      for (const DType scale_dtype : {DType::kE8M0, DType::kFP32}) {
        for (const bool columnwise : {false, true}) {
          const ScaledRow row(fresh.engine(), dtype, scale_dtype, columnwise);
          for (const int64_t first : {0, 1, 16, 31, 32, 96, 128, 200}) {
            for (int64_t n = 0; n < 300; n = n < 40 ? n + 1 : n + 37) {
              expect_decoded(row, first, n);
            }
          }
        }
      }
    }
  });
}

}  // namespace
}  // namespace moire::cpu
#endif
