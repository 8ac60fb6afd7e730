// Scales of blocks of FP8 elements, a vector of blocks at a time: the bits of core/fp8.h. Include
// after simd_targets.h, inside the foreach_target pattern.
#include "backend/cpu/fp8-inl.h"

#if defined(MOIRE_QUANTIZE_SCALES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOIRE_QUANTIZE_SCALES_INL_H_
#undef MOIRE_QUANTIZE_SCALES_INL_H_
#else
#define MOIRE_QUANTIZE_SCALES_INL_H_
#endif

#include <algorithm>
#include <bit>

#include "backend/cpu/quantize_block.h"

HWY_BEFORE_NAMESPACE();
namespace moire::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// One E8M0 scale per 32 elements: mx_scale() of core/fp8.h.
template <class Format>
struct MxScaling {
  using Scale = E8m0;
  static constexpr int64_t kBlock = 32;
  static constexpr bool is_power_of_two() { return true; }

  // The multipliers of Lanes(d) blocks, whose scales are stored.
  template <class D>
  HWY_INLINE hn::VFromD<D> Store(D d, hn::VFromD<D> amax, uint8_t* scales) const {
    const hn::RebindToUnsigned<D> du;
    const hn::RebindToSigned<D> di;
    const auto t = hn::BitCast(di, hn::Mul(amax, hn::Set(d, 1.0F / Format::Scalar::kMax)));
    // Rounded up to the next exponent, of which 254 is the last; a subnormal t stays at 0 up to the
    // middle.
    const auto next = hn::ShiftRight<23>(hn::Add(t, hn::Set(di, 0x7FFFFF)));
    const auto is_small = hn::Gt(hn::Set(di, 0x400001), t);
    const auto code = hn::IfThenZeroElse(is_small, hn::Min(next, hn::Set(di, 254)));
    StoreBytes(d, hn::BitCast(du, code), scales);
    const auto power = hn::ShiftLeft<23>(hn::Sub(hn::Set(di, 254), code));
    return hn::BitCast(d, hn::Max(power, hn::Set(di, 0x00400000)));
  }
};

// One FP32 scale per 128 elements, or per tile: block_scale() of core/fp8.h.
template <class Format>
struct BlockScaling {
  using Scale = Fp32;
  static constexpr int64_t kBlock = 128;
  bool fractional = false;
  bool is_power_of_two() const { return !fractional; }

  float store(float amax, float* scale) const {
    const BlockScale s = block_scale<typename Format::Scalar>(amax, fractional);
    *scale = s.scale;
    return s.multiplier;
  }
  template <class D>
  HWY_INLINE hn::VFromD<D> Store(D d, hn::VFromD<D> amax, float* scales) const {
    const hn::RebindToSigned<D> di;
    const auto one = hn::Set(d, 1.0F);
    const auto bits = hn::BitCast(di, amax);
    const auto is_sound =
        hn::And(hn::Gt(bits, hn::Zero(di)), hn::Lt(bits, hn::Set(di, 0x7F800000)));
    const auto divisor = hn::IfThenElse(hn::RebindMask(d, is_sound), amax, one);
    const auto quotient = hn::BitCast(di, hn::Div(hn::Set(d, Format::Scalar::kMax), divisor));
    auto s = hn::Min(quotient, hn::Set(di, 0x7F7FFFFF));
    if (!fractional) s = hn::And(s, hn::Set(di, 0x7F800000));
    const auto multiplier = hn::IfThenElse(hn::RebindMask(d, is_sound), hn::BitCast(d, s), one);
    hn::StoreU(hn::Div(one, multiplier), d, scales);
    return multiplier;
  }
};

// What holds the bits of an element.
template <class Source>
using BitsOf = hwy::MakeUnsigned<typename Source::Element>;

// What is known of blocks by their largest magnitudes: quick ones can be encoded in 16-bit lanes
// (quantize_quick-inl.h), where scales are powers of two.
struct BlockKinds {
  bool are_quick, are_finite;
};
// From here to the largest finite number, blocks are quick: all that their codes depend on are
// comparisons with numbers that BF16 has among its normal ones. So are blocks of zeros.
inline constexpr float kSmallestQuick = 0x1p-90F;

// Elements by their bits.
template <class Source, class D>
HWY_INLINE hn::VFromD<D> FromBits(D d, const BitsOf<Source>* p) {
  if constexpr (sizeof(BitsOf<Source>) == 4) {
    return hn::BitCast(d, hn::LoadU(hn::RebindToUnsigned<D>(), p));
  } else {
    return Source::Load(d, p);
  }
}

// Scales of blocks with these largest magnitudes, and what their elements are multiplied by.
template <class Source, class Scaling>
HWY_INLINE BlockKinds StoreScales(const Scaling& scaling, const BitsOf<Source>* amax, int64_t count,
                                  typename Scaling::Scale::Element* scales, float* multipliers) {
  int32_t largest = 0;
  uint32_t least = ~0U;  // less one: zeros are past all others
  const auto store = [&](auto d, int64_t i) HWY_ATTR {
    const hn::RebindToSigned<decltype(d)> di;
    const hn::RebindToUnsigned<decltype(d)> du;
    const auto values = FromBits<Source>(d, amax + i);
    hn::StoreU(scaling.Store(d, values, scales + i), d, multipliers + i);
    const auto bits = hn::BitCast(du, values);
    largest = std::max(largest, hn::GetLane(hn::MaxOfLanes(di, hn::BitCast(di, bits))));
    least = std::min(least, hn::GetLane(hn::MinOfLanes(du, hn::Sub(bits, hn::Set(du, 1U)))));
  };
  const FloatTag d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) store(d, i);
  for (; i < count; ++i) store(hn::CappedTag<float, 1>(), i);
  const bool are_finite = largest < static_cast<int32_t>(Fp32::kInfinity);
  return {are_finite && least >= std::bit_cast<uint32_t>(kSmallestQuick) - 1, are_finite};
}

// Calls f(format, scaling) with what `how` says.
template <class F>
HWY_INLINE void with_quantize_format(const QuantizeFormat& how, F&& f) {
  with_fp8_format(how.element, [&](auto format) HWY_ATTR {
    using Format = decltype(format);
    if (how.scaling == MOIRE_SCALING_MXFP8) {
      f(format, MxScaling<Format>{});
    } else {
      f(format, BlockScaling<Format>{how.fractional});
    }
  });
}

}  // namespace moire::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
