// FP8 elements and E8M0 scales, scalar: the definition (docs/numerics.md) that SIMD code and every
// device must match bit for bit. Host and device.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace moire {

// std::bit_cast, which is no device function.
template <class To, class From>
MOIRE_HOST_DEVICE constexpr To bit_cast(const From& from) {
  return __builtin_bit_cast(To, from);
}

// What the arithmetic of an FP8 type needs to know of it.
struct E4M3 {
  static constexpr int kMantissaBits = 3;
  static constexpr int kBias = 7;
  static constexpr bool kHasInfinity = false;
  static constexpr uint8_t kMaxCode = 0x7E;       // 448
  static constexpr uint8_t kFirstSpecial = 0x7F;  // NaN
  static constexpr float kMax = 448.0F;
};
struct E5M2 {
  static constexpr int kMantissaBits = 2;
  static constexpr int kBias = 15;
  static constexpr bool kHasInfinity = true;
  static constexpr uint8_t kMaxCode = 0x7B;       // 57344
  static constexpr uint8_t kFirstSpecial = 0x7C;  // infinity, then NaN
  static constexpr float kMax = 57344.0F;
};

// Every NaN becomes 0x7F, infinities and whatever rounds past the largest number become that
// number; nearest even; the sign of zero is kept.
template <class Format>
MOIRE_HOST_DEVICE constexpr uint8_t float_to_fp8(float value) {
  constexpr int kShift = 23 - Format::kMantissaBits;
  constexpr uint32_t kRebias = static_cast<uint32_t>(127 - Format::kBias) << 23;
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7FFFFFFFU;
  if (magnitude > 0x7F800000U) return 0x7F;
  const auto sign = static_cast<uint8_t>((bits >> 24) & 0x80U);
  if (magnitude >= bit_cast<uint32_t>(Format::kMax)) return sign | Format::kMaxCode;
  // Below the smallest normal number: a multiple of 2^(1 - bias - mantissa bits). Adding a power of
  // two whose unit in the last place that is rounds to nearest even.
  constexpr uint32_t kUnit =
      static_cast<uint32_t>(127 + 23 + 1 - Format::kBias - Format::kMantissaBits) << 23;
  if (magnitude < kRebias + (1U << 23)) {
    const float rounded = bit_cast<float>(magnitude) + bit_cast<float>(kUnit);
    return sign | static_cast<uint8_t>(bit_cast<uint32_t>(rounded) - kUnit);
  }
  const uint32_t half = (1U << (kShift - 1)) - 1U + ((magnitude >> kShift) & 1U);
  return sign | static_cast<uint8_t>((magnitude - kRebias + half) >> kShift);
}

template <class Format>
MOIRE_HOST_DEVICE constexpr float fp8_to_float(uint8_t code) {
  constexpr int kShift = 23 - Format::kMantissaBits;
  constexpr uint32_t kSmallestNormal = static_cast<uint32_t>(128 - Format::kBias) << 23;
  const uint32_t sign = static_cast<uint32_t>(code & 0x80U) << 24;
  const uint32_t magnitude = code & 0x7FU;
  if (magnitude >= Format::kFirstSpecial) {
    const bool is_infinity = Format::kHasInfinity && magnitude == Format::kFirstSpecial;
    return bit_cast<float>(sign | (is_infinity ? 0x7F800000U : 0x7FC00000U));
  }
  if (magnitude < (1U << Format::kMantissaBits)) {
    // Subnormal: magnitude units; a unit is the smallest normal number / 2^mantissa bits.
    const float unit =
        bit_cast<float>(kSmallestNormal - (static_cast<uint32_t>(Format::kMantissaBits) << 23));
    const float value = static_cast<float>(magnitude) * unit;
    return bit_cast<float>(bit_cast<uint32_t>(value) | sign);
  }
  constexpr uint32_t kRebias = static_cast<uint32_t>(127 - Format::kBias) << 23;
  return bit_cast<float>(sign | ((magnitude << kShift) + kRebias));
}

// 2^(code - 127); 255 is NaN.
MOIRE_HOST_DEVICE constexpr float e8m0_to_float(uint8_t code) {
  if (code == 0) return bit_cast<float>(0x00400000U);
  if (code == 255) return bit_cast<float>(0x7FC00000U);
  return bit_cast<float>(static_cast<uint32_t>(code) << 23);
}

// 2^(127 - code), what elements are multiplied by before they are cast; code 0 ... 254.
MOIRE_HOST_DEVICE constexpr float e8m0_reciprocal(uint8_t code) {
  return e8m0_to_float(static_cast<uint8_t>(254 - code));
}

// The MXFP8 scale of a block whose largest absolute value is `amax`: amax / largest number of the
// element type, rounded up to a power of two.
template <class Format>
MOIRE_HOST_DEVICE constexpr uint8_t mx_scale(float amax) {
  const uint32_t bits = bit_cast<uint32_t>(amax * (1.0F / Format::kMax));
  const uint32_t exponent = bits >> 23, mantissa = bits & 0x7FFFFFU;
  if (exponent == 255) return mantissa != 0 ? 255 : 254;
  if (exponent == 0 && mantissa <= 0x400000U) return 0;
  return static_cast<uint8_t>(exponent + (mantissa != 0 && exponent != 254 ? 1U : 0U));
}

// ---- the fold of MXFP8: four blocks of 32, or those of a 128 x 128 tile of a weight, share a code

// The code of a folded block is the largest of its blocks' codes, NaN (255) aside; 0 of none.
MOIRE_HOST_DEVICE constexpr uint8_t fold_code(uint8_t folded, uint8_t code) {
  return code != 255 && code > folded ? code : folded;
}
// An element of a block with this code in the folded block: its value in units of 2^(folded - 127),
// to nearest even. Only what becomes subnormal loses bits. NaN and infinity stay, and whatever the
// code 255 makes NaN becomes it.
template <class Format>
MOIRE_HOST_DEVICE constexpr uint8_t fold_element(uint8_t element, uint8_t code, uint8_t folded) {
  if (code == 255) return 0x7F;
  if ((element & 0x7FU) >= Format::kFirstSpecial) return element;
  const int shift = folded - code;
  const auto factor = static_cast<uint8_t>(shift < 127 ? 127 - shift : 0);
  return float_to_fp8<Format>(fp8_to_float<Format>(element) * e8m0_to_float(factor));
}

// What elements of a block or tile are multiplied by before they are cast, and the scale that is
// stored.
struct BlockScale {
  float multiplier;  // s
  float scale;       // 1 / s
};

template <class Format>
MOIRE_HOST_DEVICE constexpr BlockScale block_scale(float amax, bool fractional) {
  const uint32_t bits = bit_cast<uint32_t>(amax);
  if (bits == 0 || bits >= 0x7F800000U) return {1.0F, 1.0F};
  float s = Format::kMax / amax;
  uint32_t s_bits = bit_cast<uint32_t>(s);
  if (s_bits >= 0x7F800000U) s_bits = 0x7F7FFFFFU;
  if (!fractional) s_bits &= 0x7F800000U;
  s = bit_cast<float>(s_bits);
  return {s, 1.0F / s};
}

}  // namespace moire
