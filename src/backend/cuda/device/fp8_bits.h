// The conversions of core/fp8.h without branches, for devices that have no instruction for them:
// kernels have dozens in a row, and a compiler takes minutes over as many branches. And the scale
// that is stored of a fold.
#pragma once

#include "core/fp8.h"

namespace moire::cuda {

// float_to_fp8(), to either type.
MOIRE_HOST_DEVICE inline uint32_t fp8_code(float value, bool is_e5m2) {
  const auto of = [&](uint32_t e5m2, uint32_t e4m3) { return is_e5m2 ? e5m2 : e4m3; };
  const uint32_t shift = of(23 - E5M2::kMantissaBits, 23 - E4M3::kMantissaBits);
  const uint32_t rebias = of(127 - E5M2::kBias, 127 - E4M3::kBias) << 23;
  const uint32_t unit = rebias + ((shift + 1) << 23);
  const uint32_t most = of(bit_cast<uint32_t>(E5M2::kMax), bit_cast<uint32_t>(E4M3::kMax));
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint32_t unbounded = bits & 0x7FFFFFFFU;
  const uint32_t magnitude = unbounded < most ? unbounded : most;
  const uint32_t subnormal =
      bit_cast<uint32_t>(bit_cast<float>(magnitude) + bit_cast<float>(unit)) - unit;
  const uint32_t half = (1U << (shift - 1)) - 1U + ((magnitude >> shift) & 1U);
  const uint32_t normal = (magnitude - rebias + half) >> shift;
  const uint32_t code = magnitude < rebias + (1U << 23) ? subnormal : normal;
  return unbounded > 0x7F800000U ? 0x7FU : code | ((bits >> 24) & 0x80U);
}

// fp8_to_float(): the code's bits are a float's whose exponent lacks the difference of the biases.
template <class Format>
MOIRE_HOST_DEVICE constexpr float fp8_value(uint32_t code) {
  constexpr uint32_t kDistance = static_cast<uint32_t>(127 + 127 - Format::kBias) << 23;
  const uint32_t magnitude = code & 0x7FU;
  const float value =
      bit_cast<float>(magnitude << (23 - Format::kMantissaBits)) * bit_cast<float>(kDistance);
  const bool is_infinity = Format::kHasInfinity && magnitude == Format::kFirstSpecial;
  const uint32_t special = is_infinity ? 0x7F800000U : 0x7FC00000U;
  const uint32_t bits = magnitude < Format::kFirstSpecial ? bit_cast<uint32_t>(value) : special;
  return bit_cast<float>(bits | (code & 0x80U) << 24);
}

// Whether a block with this largest magnitude has an element other than 0 if its code is 0: whether
// that is more than half of the smallest number, 2^-137 or, of E5M2, 2^-144.
MOIRE_HOST_DEVICE inline bool has_nonzero(float amax, bool is_e5m2) {
  const uint32_t bits = bit_cast<uint32_t>(amax);
  return is_e5m2 ? bits > 1U << (149 - 144) : bits > 1U << (149 - 137);
}
// The scale that is stored of a folded block (fold_code() in core/fp8.h). Where it has code 0 and
// no finite element other than 0, any would do: 1 is one that no sum has to take care of, as of
// 2^-127.
MOIRE_HOST_DEVICE constexpr float fold_scale(uint8_t folded, bool is_nonzero) {
  return folded != 0 || is_nonzero ? e8m0_to_float(folded) : 1.0F;
}

}  // namespace moire::cuda
