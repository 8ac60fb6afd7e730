// FP8 elements and their scales on the device: core/fp8.h, two elements at a time by the
// processor's conversions where it has them (sm_89), which round, saturate and treat NaN as
// core/fp8.h does (tests/gpu/quantize_test.cpp compares them on every BF16 input). The element type
// is told apart at run time: a branch that all threads take alike.
#pragma once

#include <cuda_fp8.h>

#include "backend/cuda/device/fp8_bits.h"
#include "backend/cuda/device/values.cuh"

namespace moire::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define MOIRE_HAS_FP8_CONVERSIONS 1
#else
#define MOIRE_HAS_FP8_CONVERSIONS 0
#endif

// Codes of four values, the first in the low byte: two conversions, of which the second keeps what
// the first has made.
__device__ inline uint32_t encode_four(float a, float b, float c, float d, bool is_e5m2) {
#if MOIRE_HAS_FP8_CONVERSIONS
  uint32_t codes;
  if (is_e5m2) {
    asm("{.reg .b16 low, high;\n"
        "cvt.rn.satfinite.e5m2x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e5m2x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};}"
        : "=r"(codes)
        : "f"(a), "f"(b), "f"(c), "f"(d));
  } else {
    asm("{.reg .b16 low, high;\n"
        "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};}"
        : "=r"(codes)
        : "f"(a), "f"(b), "f"(c), "f"(d));
  }
  return codes;
#else
  uint32_t codes = 0;
  for (const float v : {d, c, b, a}) {
    codes = codes << 8 | fp8_code(v, is_e5m2);
  }
  return codes;
#endif
}

// The values of four codes as FP16 numbers, in pairs; the second conversion takes the upper half of
// the register.
__device__ inline uint2 decode_halves(uint32_t codes, bool is_e5m2) {
#if MOIRE_HAS_FP8_CONVERSIONS
  uint2 halves;
  if (is_e5m2) {
    asm("{.reg .b16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e5m2x2 %0, low;\n"
        "cvt.rn.f16x2.e5m2x2 %1, high;}"
        : "=r"(halves.x), "=r"(halves.y)
        : "r"(codes));
  } else {
    asm("{.reg .b16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\n"
        "cvt.rn.f16x2.e4m3x2 %1, high;}"
        : "=r"(halves.x), "=r"(halves.y)
        : "r"(codes));
  }
  return halves;
#else
  const auto decode = [&](uint32_t two) {
    return bits_as<uint32_t>(
        is_e5m2 ? __floats2half2_rn(fp8_value<E5M2>(two), fp8_value<E5M2>(two >> 8))
                : __floats2half2_rn(fp8_value<E4M3>(two), fp8_value<E4M3>(two >> 8)));
  };
  return {decode(codes), decode(codes >> 16)};
#endif
}
// The same as floats.
__device__ inline float4 decode_four(uint32_t codes, bool is_e5m2) {
  const uint2 halves = decode_halves(codes, is_e5m2);
  const float2 low = __half22float2(bits_as<__half2>(halves.x)),
               high = __half22float2(bits_as<__half2>(halves.y));
  return {low.x, low.y, high.x, high.y};
}
// The codes of four FP16 numbers.
__device__ inline uint32_t encode_halves(uint32_t low, uint32_t high, bool is_e5m2) {
#if MOIRE_HAS_FP8_CONVERSIONS
  const auto encode = [&](uint32_t halves) -> uint32_t {
    return __nv_cvt_halfraw2_to_fp8x2(bits_as<__half2>(halves), __NV_SATFINITE,
                                      is_e5m2 ? __NV_E5M2 : __NV_E4M3);
  };
  return encode(high) << 16 | encode(low);
#else
  const float2 a = __half22float2(bits_as<__half2>(low)),
               b = __half22float2(bits_as<__half2>(high));
  return encode_four(a.x, a.y, b.x, b.y, is_e5m2);
#endif
}

// Four codes, none of which is infinity, in units of other scales: `factors(j)` are what elements j
// and j + 1 are multiplied by before they are cast again (fold_factors()).
template <class Factors>
__device__ inline uint32_t fold_four(uint32_t codes, bool is_e5m2, Factors&& factors) {
  if (is_e5m2) {
    const float4 v = decode_four(codes, true);
    const auto of_low = __bfloat1622float2(bits_as<__nv_bfloat162>(factors(0)));
    const auto of_high = __bfloat1622float2(bits_as<__nv_bfloat162>(factors(2)));
    return encode_four(v.x * of_low.x, v.y * of_low.y, v.z * of_high.x, v.w * of_high.y, true);
  }
  const uint2 halves = decode_halves(codes, false);
  const auto product = [](uint32_t a, uint32_t b) {
    return bits_as<uint32_t>(__hmul2(bits_as<__half2>(a), bits_as<__half2>(b)));
  };
  return encode_halves(product(halves.x, uint32_t{factors(0)}),
                       product(halves.y, uint32_t{factors(2)}), false);
}
// The factors for elements of two blocks, whose codes are so much smaller than the folded one's, as
// a pair of 16 bits each. E4M3's products lose none of the bits from which they are rounded as FP16
// numbers, in which a factor below 2^-24 is 0, as is what it makes of an element; E5M2 has larger
// ones, and BF16 factors.
__device__ inline uint32_t fold_factors(uint32_t first_shift, uint32_t second_shift, bool is_e5m2) {
  const auto power = [](uint32_t shift) { return bit_cast<float>((127 - min(shift, 64U)) << 23); };
  const float first = power(first_shift), second = power(second_shift);
  return is_e5m2 ? bits_as<uint32_t>(__floats2bfloat162_rn(first, second))
                 : bits_as<uint32_t>(__floats2half2_rn(first, second));
}

// A scale as it is stored, and what elements are multiplied by before they are cast.
template <class Stored>
struct StoredScale {
  Stored scale;
  float multiplier;
};

// What elements of a block with this code are multiplied by: e8m0_reciprocal().
__device__ inline float mx_multiplier(uint32_t code) {
  return bit_cast<float>(max((254U - code) << 23, 0x00400000U));
}

// mx_scale() and e8m0_reciprocal() of core/fp8.h without their branches; `amax` is not NaN.
__device__ inline StoredScale<uint8_t> mx_scale_of(float amax, bool is_e5m2) {
  const float inverse = is_e5m2 ? 1.0F / E5M2::kMax : 1.0F / E4M3::kMax;
  const uint32_t t = bit_cast<uint32_t>(amax * inverse);
  // Rounded up to the next exponent, of which 254 is the last; a subnormal t stays at 0 up to the
  // middle.
  const uint32_t next = min((t + 0x7FFFFFU) >> 23, 254U);
  const uint32_t code = t <= 0x400000U ? 0U : next;
  return {static_cast<uint8_t>(code), mx_multiplier(code)};
}

// The scale of a block whose elements mx_scale_of() multiplies by this.
__device__ inline float mx_scale_of_multiplier(float multiplier) {
  const uint32_t power = bit_cast<uint32_t>(multiplier) & 0x7F800000U;
  return bit_cast<float>(max((254U << 23) - power, 0x00400000U));
}

// The largest magnitudes of blocks, as far as a quick way asks: that each is 0 or of a range.
struct Largest {
  uint32_t least = ~0U, most = 0;  // 0 comes last of the least

  __device__ void add(float amax) {
    least = min(least, bit_cast<uint32_t>(amax) - 1);
    most = max(most, bit_cast<uint32_t>(amax));
  }
  __device__ bool are_finite() const { return most < 0x7F800000U; }
  // From 2^low on, and less than 2^high.
  __device__ bool lie_in(int low, int high) const {
    return least >= (static_cast<uint32_t>(low + 127) << 23) - 1 &&
           most < static_cast<uint32_t>(high + 127) << 23;
  }
};

// BF16 numbers straight to what E4M3 makes of them, two at a time, without codes: rounded_to_e4m3()
// has the bits of encoding and decoding where the block's largest magnitude is 0 or lies in 2^-100
// ... 2^100, for then no step leaves BF16's normal numbers.

// The scale's 2^-6, E4M3's least normal number, for two elements by what they are multiplied by. A
// block of zeros, whose multiplier is 2^127, has a negative one, which changes nothing.
__device__ inline uint32_t least_normals(float first, float second) {
  constexpr uint32_t kTop = (127 + 127 - 6) << 23;
  return __byte_perm(kTop - bit_cast<uint32_t>(first), kTop - bit_cast<uint32_t>(second), 0x7632);
}
// Four significant bits are steps of q / 8, q the power of two below |x|, and 2^-9 of the scale
// below its least normal number. Those are the last bits of BF16 between 16 q and 32 q: the sum
// with 24 q is rounded there, to nearest even as 192 steps are even.
__device__ inline uint32_t rounded_to_e4m3(uint32_t pair, uint32_t least_normals) {
  const auto x = bits_as<__nv_bfloat162>(pair);
  const auto q =
      __hmax2(bits_as<__nv_bfloat162>(pair & 0x7F807F80U), bits_as<__nv_bfloat162>(least_normals));
  const auto many = bits_as<__nv_bfloat162>(0x41C041C0U);  // 24
  const auto less = bits_as<__nv_bfloat162>(0xC1C0C1C0U);
  const auto rounded = __hfma2(q, less, __hfma2(q, many, x));
  return bits_as<uint32_t>(rounded) | (pair & 0x80008000U);  // a sum that is 0 has lost its sign
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

// A kScaling beside those of moire_scaling: MXFP8 along lines, folded (docs/numerics.md).
inline constexpr int kFoldedMx = 4;

// What an element of it is multiplied by before it is cast, the upper half of a float, and before
// it is cast again, in the lower half of its bits.
struct FoldedMultiplier {
  uint32_t bits;

  // Of a block with this code in a folded one; as it is where that has the same.
  __device__ static FoldedMultiplier of(uint32_t code, uint32_t folded, bool is_e5m2) {
    const uint32_t factor = fold_factors(folded - code, 0, is_e5m2) & 0xFFFF;
    return {bit_cast<uint32_t>(mx_multiplier(code)) | factor};
  }
};

// What kScaling (moire_scaling) stores beside elements.
template <int kScaling>
struct Scales {
  static constexpr bool kIsMx = kScaling == MOIRE_SCALING_MXFP8;
  static constexpr bool kIsFolded = kScaling == kFoldedMx;
  static constexpr int kBlock = kIsMx ? 32 : 128;
  using Stored = std::conditional_t<kIsMx, uint8_t, float>;

  __device__ static float decode(Stored scale) {
    if constexpr (kIsMx) {  // e8m0_to_float() without its branches: infinity times 0 is NaN
      const auto power = bit_cast<float>(max(uint32_t{scale} << 23, 0x00400000U));
      return __fmaf_rn(power, 0.0F, power);
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
