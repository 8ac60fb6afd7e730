// Scalar conversions between FP32 and the storage types, exact or rounded to nearest even; the
// definition that SIMD code must match bit for bit.
#pragma once

#include <bit>
#include <cstdint>

namespace moire {

constexpr float bf16_to_float(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

// Every NaN becomes 0x7FFF, as the GPU's conversion has it.
constexpr uint16_t float_to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7FFFFFFFU) > 0x7F800000U) return 0x7FFFU;
  return static_cast<uint16_t>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
}

constexpr float fp16_to_float(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000U) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1FU;
  const uint32_t mantissa = bits & 0x3FFU;
  if (exponent == 0x1FU) return std::bit_cast<float>(sign | 0x7F800000U | (mantissa << 13));
  if (exponent != 0)
    return std::bit_cast<float>(sign | ((exponent + 112U) << 23) | (mantissa << 13));
  // Subnormal: mantissa * 2^-24, exact in FP32.
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24F;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | sign);
}

// Overflow goes to infinity; NaN becomes 0x7FFF.
constexpr uint16_t float_to_fp16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000U;
  const uint32_t magnitude = bits & 0x7FFFFFFFU;
  if (magnitude > 0x7F800000U) return 0x7FFFU;
  if (magnitude >= 0x477FF000U) return static_cast<uint16_t>(sign | 0x7C00U);  // >= 65520
  if (magnitude < 0x38800000U) {  // below 2^-14: a multiple of 2^-24
    // Adding 0.5 puts the unit in the last place at 2^-24 and rounds to nearest even.
    const float rounded = std::bit_cast<float>(magnitude) + 0.5F;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(rounded) - 0x3F000000U));
  }
  const uint32_t rounded = magnitude + 0xFFFU + ((magnitude >> 13) & 1U);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000U) >> 13));
}

}  // namespace moire
