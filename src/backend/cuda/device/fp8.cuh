// FP8 elements and their scales on the device: core/fp8.h, two elements at a time by the
// processor's conversions where it has them (sm_89), which round, saturate and treat NaN as
// core/fp8.h does (tests/gpu/quantize_test.cpp compares them on every BF16 input). The element type
// is told apart at run time: a branch that all threads take alike.
#pragma once

#include <cuda_fp16.h>
#include <moire.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/fp8.h"

namespace moire::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define MOIRE_HAS_FP8_CONVERSIONS 1
#else
#define MOIRE_HAS_FP8_CONVERSIONS 0
#endif

// bit_cast for CUDA's own types, which are not trivially copyable.
template <class To, class From>
__device__ inline To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

// Codes of two values, the first in the low byte.
__device__ inline uint32_t encode_pair(float first, float second, bool is_e5m2) {
#if MOIRE_HAS_FP8_CONVERSIONS
  uint16_t codes;
  if (is_e5m2) {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %2, %1;" : "=h"(codes) : "f"(first), "f"(second));
  } else {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %2, %1;" : "=h"(codes) : "f"(first), "f"(second));
  }
  return codes;
#else
  if (is_e5m2) {
    return float_to_fp8<E5M2>(first) | static_cast<uint32_t>(float_to_fp8<E5M2>(second)) << 8;
  }
  return float_to_fp8<E4M3>(first) | static_cast<uint32_t>(float_to_fp8<E4M3>(second)) << 8;
#endif
}

// The values of two codes, which lie in the low bytes.
__device__ inline float2 decode_pair(uint32_t codes, bool is_e5m2) {
#if MOIRE_HAS_FP8_CONVERSIONS
  uint32_t halves;
  if (is_e5m2) {
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(codes)));
  } else {
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(codes)));
  }
  return __half22float2(bits_as<__half2>(halves));
#else
  const auto first = static_cast<uint8_t>(codes), second = static_cast<uint8_t>(codes >> 8);
  if (is_e5m2) return {fp8_to_float<E5M2>(first), fp8_to_float<E5M2>(second)};
  return {fp8_to_float<E4M3>(first), fp8_to_float<E4M3>(second)};
#endif
}

// A scale as it is stored, and what elements are multiplied by before they are cast.
template <class Stored>
struct StoredScale {
  Stored scale;
  float multiplier;
};

// mx_scale() and e8m0_reciprocal() of core/fp8.h without their branches; `amax` is not NaN.
__device__ inline StoredScale<uint8_t> mx_scale_of(float amax, bool is_e5m2) {
  const float inverse = is_e5m2 ? 1.0F / E5M2::kMax : 1.0F / E4M3::kMax;
  const uint32_t t = bit_cast<uint32_t>(amax * inverse);
  // Rounded up to the next exponent, of which 254 is the last; a subnormal t stays at 0 up to the
  // middle.
  const uint32_t next = min((t + 0x7FFFFFU) >> 23, 254U);
  const uint32_t code = t <= 0x400000U ? 0U : next;
  const uint32_t power = max((254U - code) << 23, 0x00400000U);
  return {static_cast<uint8_t>(code), bit_cast<float>(power)};
}

// The scale of a block whose elements mx_scale_of() multiplies by this.
__device__ inline float mx_scale_of_multiplier(float multiplier) {
  const uint32_t power = bit_cast<uint32_t>(multiplier) & 0x7F800000U;
  return bit_cast<float>(max((254U << 23) - power, 0x00400000U));
}

// block_scale() of core/fp8.h; a power of two without its divisions. The largest numbers of both
// types are 1.75 * 2^n, so that the quotient's exponent follows from a comparison with 1.75: no
// quotient is so close below a power of two that it would be rounded to that.
__device__ inline StoredScale<float> block_scale_of(float amax, bool is_e5m2, bool fractional) {
  if (fractional) {
    const BlockScale s = is_e5m2 ? block_scale<E5M2>(amax, true) : block_scale<E4M3>(amax, true);
    return {s.scale, s.multiplier};
  }
  const uint32_t bits = bit_cast<uint32_t>(amax);
  if (bits == 0 || bits >= 0x7F800000U) return {1.0F, 1.0F};
  const uint32_t top = is_e5m2 ? 127 + 127 + 15 : 127 + 127 + 8;
  const uint32_t exponent = top - (bits >> 23) - ((bits & 0x7FFFFFU) > 0x600000U ? 1U : 0U);
  const uint32_t s = min(exponent, 254U);
  return {bit_cast<float>(max((254U - s) << 23, 0x00400000U)), bit_cast<float>(s << 23)};
}

// What kScaling (moire_scaling) stores beside elements.
template <int kScaling>
struct Scales {
  static constexpr bool kIsMx = kScaling == MOIRE_SCALING_MXFP8;
  static constexpr int kBlock = kIsMx ? 32 : 128;
  using Stored = std::conditional_t<kIsMx, uint8_t, float>;

  __device__ static float decode(Stored scale) {
    if constexpr (kIsMx) {
      return e8m0_to_float(scale);
    } else {
      return scale;
    }
  }
  // Of a block whose largest magnitude is `amax`, which is not NaN.
  __device__ static StoredScale<Stored> of(float amax, bool is_e5m2, bool fractional) {
    if constexpr (kIsMx) {
      return mx_scale_of(amax, is_e5m2);
    } else {
      return block_scale_of(amax, is_e5m2, fractional);
    }
  }
};

}  // namespace moire::cuda
