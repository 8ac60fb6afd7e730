// The quick way to FP8: BF16 numbers times a power of two, in 16-bit lanes and without becoming
// floats. Rounding drops low bits of a number whose exponent was moved; the few that become
// subnormal codes are counted past the middles between those. Nearly all of a matrix goes this way;
// blocks with other values (infinite, NaN, or so small that a BF16 number beside the smallest code
// is subnormal) are refused, and go through floats. Include after simd_targets.h, inside the
// foreach_target pattern.
#include "backend/cpu/quantize_values-inl.h"

#if defined(MOIRE_QUANTIZE_BF16_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOIRE_QUANTIZE_BF16_INL_H_
#undef MOIRE_QUANTIZE_BF16_INL_H_
#else
#define MOIRE_QUANTIZE_BF16_INL_H_
#endif

#include <bit>

HWY_BEFORE_NAMESPACE();
namespace moire::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using Bf16Tag = hn::ScalableTag<uint16_t>;
// A block of 32 is whole vectors.
using Bf16RowTag = hn::CappedTag<uint16_t, 32>;

constexpr uint16_t bf16_bits(float x) {
  return static_cast<uint16_t>(std::bit_cast<uint32_t>(x) >> 16);
}

template <class D>
HWY_INLINE hn::VFromD<D> Bf16Magnitude(D d, hn::VFromD<D> bits) {
  return hn::And(bits, hn::Set(d, uint16_t{0x7FFF}));
}
// Whether blocks with these largest magnitudes may go this way.
template <class D>
HWY_INLINE bool AreQuick(D, hn::VFromD<D> amax) {
  const hn::RebindToSigned<D> di;
  const auto bits = hn::BitCast(di, amax);
  const auto is_large = hn::Gt(bits, hn::Set(di, int16_t{0x7F7F}));
  const auto is_tiny =
      hn::And(hn::Gt(bits, hn::Zero(di)),
              hn::Gt(hn::Set(di, static_cast<int16_t>(bf16_bits(0x1p-90F))), bits));
  return hn::AllFalse(di, hn::Or(is_large, is_tiny));
}

// The largest BF16 magnitude that times `multipliers`, powers of two, is no normal number of the
// format. At least what leaves room for subnormal codes, which matters to zeros alone.
template <class Format, class D>
HWY_INLINE hn::Vec<hn::Rebind<uint16_t, D>> LargestSubnormal(D, hn::VFromD<D> multipliers) {
  const hn::RebindToSigned<D> di;
  const auto one_over_it = hn::Set(di, static_cast<int32_t>(Format::kSmallestNormal) + (127 << 23));
  const auto smallest = hn::Sub(one_over_it, hn::BitCast(di, multipliers));
  const auto bits = hn::ShiftRight<16>(hn::Max(smallest, hn::Set(di, 6 << 23)));
  return hn::DemoteTo(hn::Rebind<uint16_t, D>(), hn::Sub(bits, hn::Set(di, 1)));
}

// Codes of magnitudes, of which `subnormal` are the largest that become no normal code.
template <class Format>
struct Bf16Codes {
  static constexpr int kMantissaBits = Format::Scalar::kMantissaBits;
  static constexpr int kDropped = 7 - kMantissaBits;

  // Wrong for what is neither zero nor a normal code.
  template <class D>
  static HWY_INLINE hn::VFromD<D> Normal(D d, hn::VFromD<D> magnitude, hn::VFromD<D> subnormal) {
    // Rounded to nearest even by adding a little less than half, and the lowest bit that is kept.
    constexpr uint16_t kHalf = (1U << (kDropped - 1)) - 1;
    const auto odd = hn::And(hn::ShiftRight<kDropped>(magnitude), hn::Set(d, uint16_t{1}));
    const auto base = hn::Sub(subnormal, hn::Set(d, uint16_t{0x80 + kHalf - 1}));
    return hn::ShiftRight<kDropped>(hn::SaturatedSub(hn::Add(magnitude, odd), base));
  }
  // The same, right for all.
  template <class D>
  static HWY_INLINE hn::VFromD<D> Any(D d, hn::VFromD<D> magnitude, hn::VFromD<D> subnormal) {
    const hn::RebindToSigned<D> di;
    const auto m = hn::BitCast(di, magnitude), s = hn::BitCast(di, subnormal);
    auto count = hn::Zero(di);
#pragma GCC unroll 8
    for (int code = 0; code < 1 << kMantissaBits; ++code) {
      // The middle between two codes goes to the even one.
      const float middle = (static_cast<float>(code) + 0.5F) / (1 << kMantissaBits);
      const auto below_one = static_cast<int16_t>(bf16_bits(1.0F) - bf16_bits(middle));
      const auto last = hn::Sub(s, hn::Set(di, static_cast<int16_t>(below_one - 1 + code % 2)));
      count = hn::Sub(count, hn::VecFromMask(di, hn::Gt(m, last)));
    }
    const auto is_normal = hn::Gt(m, s);
    return hn::BitCast(
        d, hn::IfThenElse(is_normal, hn::BitCast(di, Normal(d, magnitude, subnormal)), count));
  }

  // Lanes(d) codes with their signs; past the cache only where `codes` is aligned.
  template <class D>
  static HWY_INLINE void Store(D d, const uint16_t* p, hn::VFromD<D> subnormal, bool bypasses_cache,
                               uint8_t* codes) {
    const auto bits = hn::LoadU(d, p), magnitude = Bf16Magnitude(d, bits);
    auto code = Normal(d, magnitude, subnormal);
    // Zeros wrap around and are no fewer than any.
    const auto short_by = hn::SaturatedSub(subnormal, hn::Sub(magnitude, hn::Set(d, uint16_t{1})));
    if (HWY_UNLIKELY(!hn::AllTrue(d, hn::Eq(short_by, hn::Zero(d))))) {
      code = Any(d, magnitude, subnormal);
    }
    code = hn::Or(code, hn::And(hn::ShiftRight<8>(bits), hn::Set(d, uint16_t{0x80})));
    const hn::Rebind<uint8_t, D> d8;
    const auto bytes = hn::DemoteTo(d8, hn::BitCast(hn::RebindToSigned<D>(), code));
    if (bypasses_cache && hn::MaxLanes(d8) > 1) {
      hn::Stream(bytes, d8, codes);
    } else {
      hn::StoreU(bytes, d8, codes);
    }
  }
};

// Scales of blocks with these largest magnitudes, and what their codes are made by.
template <class Format, class Scaling>
HWY_INLINE void StoreQuickScales(const Scaling& scaling, const uint16_t* amax, int64_t count,
                                 typename Scaling::Scale::Element* scales, uint16_t* subnormal) {
  const auto store = [&](auto d, int64_t i) HWY_ATTR {
    const hn::Rebind<uint16_t, decltype(d)> d16;
    const auto multipliers = scaling.Store(d, Bf16::Load(d, amax + i), scales + i);
    hn::StoreU(LargestSubnormal<Format>(d, multipliers), d16, subnormal + i);
  };
  const FloatTag d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) store(d, i);
  for (; i < count; ++i) store(hn::CappedTag<float, 1>(), i);
}

}  // namespace moire::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
