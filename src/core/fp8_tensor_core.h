// The sums of Hopper's FP8 tensor cores, bit for bit: docs/numerics.md defines them,
// benchmarks/hopper_fp8_sums.cu holds a GPU to them, MOIRE_ACCUMULATE_EMULATED computes them.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>

namespace moire {

inline constexpr int64_t kMmaProducts = 32;        // that one instruction adds to a sum
inline constexpr int64_t kPromotedProducts = 128;  // that are summed under one scale

// Elements of one FP8 type, decoded, and the exponent of its smallest normal number.
struct Fp8Elements {
  const float* data;
  int least_exponent;
};

// One instruction: a sum, and `count` products from the first one on, which are exact in FP32.
inline float add_products(float sum, const Fp8Elements& a, const Fp8Elements& b, int64_t first,
                          int64_t count) {
  constexpr int kFractionBits = 13, kNone = -1000;
  constexpr uint32_t kSpecial = 0xFF;  // the exponent of infinity and NaN
  const auto bits_of = [](float x) { return std::bit_cast<uint32_t>(x) & 0x7FFFFFFFU; };
  int largest = sum == 0 ? kNone : std::ilogb(sum);
  uint32_t field = bits_of(sum) >> 23;
  for (int64_t i = first; i < first + count; ++i) {
    const uint32_t x = bits_of(a.data[i]), y = bits_of(b.data[i]);
    const int exponent = std::max(static_cast<int>(x >> 23) - 127, a.least_exponent) +
                         std::max(static_cast<int>(y >> 23) - 127, b.least_exponent);
    largest = std::max(largest, x == 0 || y == 0 ? kNone : exponent);
    field = std::max(field, std::max(x, y) >> 23);
  }
  if (field == kSpecial) {
    for (int64_t i = first; i < first + count; ++i) sum += a.data[i] * b.data[i];
    return sum;
  }
  if (largest == kNone) return 0;
  const float per_unit = std::ldexp(1.0F, kFractionBits - largest);
  auto units = static_cast<int32_t>(sum * per_unit);  // cut towards zero
  for (int64_t i = first; i < first + count; ++i) {
    units += static_cast<int32_t>(a.data[i] * b.data[i] * per_unit);
  }
  const auto size = static_cast<uint32_t>(std::abs(units));
  const int32_t last = 1 << std::max(static_cast<int>(std::bit_width(size)) - 1 - kFractionBits, 0);
  units -= units % last;
  return static_cast<float>(units) / per_unit;
}

// `count` products, at most 128, from zero.
inline float sum_products(const Fp8Elements& a, const Fp8Elements& b, int64_t count) {
  float sum = 0;
  for (int64_t i = 0; i < count; i += kMmaProducts) {
    sum = add_products(sum, a, b, i, std::min(kMmaProducts, count - i));
  }
  return sum;
}

// Adds such a sum, with the scales of its operands, to those before it.
inline float promote(float total, float sum, float a_scale, float b_scale) {
  const float scale = a_scale * b_scale;
  if (std::isnormal(scale)) return std::fma(sum, scale, total);
  const float small = std::min(a_scale, b_scale), large = std::max(a_scale, b_scale);
  return std::fma(sum * small, large, total);
}

}  // namespace moire
