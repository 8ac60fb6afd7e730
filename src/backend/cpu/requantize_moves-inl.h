// The arithmetic of requantize_quick-inl.h: exponents of scales, and codes that are added to.
// Include after simd_targets.h, inside the foreach_target pattern.
#include "backend/cpu/quantize_values-inl.h"

#if defined(MOIRE_REQUANTIZE_MOVES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOIRE_REQUANTIZE_MOVES_INL_H_
#undef MOIRE_REQUANTIZE_MOVES_INL_H_
#else
#define MOIRE_REQUANTIZE_MOVES_INL_H_
#endif

#include <algorithm>
#include <bit>

#include "backend/cpu/quantize.h"

HWY_BEFORE_NAMESPACE();
namespace moire::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Columns of a strip, and blocks in all its rows, at most.
inline constexpr int64_t kMostMoved = kMaxStripColumns;
// A block of 32 is whole vectors.
using CodeTag = hn::CappedTag<uint8_t, 32>;

// The exponents of n scales; false where one is not between 2^-95 and 2^93, for which no decoded
// value is subnormal or infinite, or is no power of two.
inline bool FindExponents(const uint8_t* HWY_RESTRICT scales, int64_t n,
                          uint8_t* HWY_RESTRICT out) {
  uint8_t least = 255, most = 0;
  for (int64_t i = 0; i < n; ++i) {
    least = std::min(least, scales[i]);
    most = std::max(most, scales[i]);
    out[i] = scales[i];
  }
  return least >= 32 && most <= 220;
}
inline bool FindExponents(const float* HWY_RESTRICT scales, int64_t n, uint8_t* HWY_RESTRICT out) {
  uint32_t others = 0, least = 255, most = 0;
  for (int64_t i = 0; i < n; ++i) {
    const auto bits = std::bit_cast<uint32_t>(scales[i]);
    others |= bits & 0x807FFFFFU;
    least = std::min(least, bits >> 23);
    most = std::max(most, bits >> 23);
    out[i] = static_cast<uint8_t>(bits >> 23);
  }
  return least >= 32 && most <= 220 && others == 0;
}

// Magnitudes of codes count `kStep` to a power of two.
template <class Format>
struct Moves {
  static constexpr int kStep = 1 << Format::Scalar::kMantissaBits;

  // What n codes lie below others of the exponents `top`; false where that is too far.
  static bool find_below(const uint8_t* HWY_RESTRICT top, const uint8_t* HWY_RESTRICT exponents,
                         int64_t n, uint8_t* HWY_RESTRICT below) {
    uint8_t most = 0;
    for (int64_t i = 0; i < n; ++i) {
      const auto octaves = static_cast<uint8_t>(top[i] - exponents[i]);
      most = std::max(most, octaves);
      below[i] = static_cast<uint8_t>(kStep * octaves);
    }
    return most <= 127 / kStep;
  }

  // From the largest code of each block, counted by the largest exponent `top` that it sees: its
  // scale, and what is added to codes that are counted so. False where that code need not be the
  // largest: where one of another scale, subnormal, could be larger, unless is_zero(i), which says
  // that a block holds nothing but zeros.
  template <class Scaling, class IsZero>
  static bool scale(const Scaling& scaling, const uint8_t* HWY_RESTRICT largest,
                    const uint8_t* HWY_RESTRICT top, int64_t count, IsZero&& is_zero,
                    typename Scaling::Scale::Element* scales, uint8_t* HWY_RESTRICT up) {
    alignas(64) uint32_t amax[kMostMoved];
    alignas(64) float multipliers[kMostMoved];
    uint8_t least = 255;
    for (int64_t i = 0; i < count; ++i) {
      const auto exponent = static_cast<uint32_t>(top[i] - Format::Scalar::kBias) << 23;
      amax[i] = (static_cast<uint32_t>(largest[i]) << Format::kShift) + exponent;
      least = std::min(least, largest[i]);
    }
    for (int64_t i = 0; least < kStep && i < count; ++i) {
      if (largest[i] >= kStep) continue;
      if (largest[i] != 0 || !is_zero(i)) return false;
      amax[i] = 0;
    }
    StoreScales<Fp32>(scaling, amax, count, scales, multipliers);
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t exponent = 254 - (std::bit_cast<uint32_t>(multipliers[i]) >> 23);
      up[i] = static_cast<uint8_t>(kStep * (top[i] - exponent));
    }
    return true;
  }

  // Codes times 2^(move / kStep), which is as much as their new scale is smaller.
  template <class D>
  static HWY_NOINLINE hn::VFromD<D> MoveFloats(D d, hn::VFromD<D> codes, hn::VFromD<D> move) {
    const hn::CappedTag<float, hn::MaxLanes(D())> df;
    const hn::RebindToSigned<decltype(df)> di;
    constexpr size_t kLanes = hn::MaxLanes(D());
    alignas(64) uint8_t bytes[kLanes];
    alignas(64) int8_t moves[kLanes];
    hn::Store(codes, d, bytes);
    hn::Store(hn::BitCast(hn::RebindToSigned<D>(), move), hn::RebindToSigned<D>(), moves);
    for (size_t i = 0; i < kLanes; i += hn::Lanes(df)) {
      const auto steps =
          hn::PromoteTo(di, hn::LoadU(hn::Rebind<int8_t, decltype(df)>(), moves + i));
      const auto octaves = hn::ShiftRight<Format::Scalar::kMantissaBits>(steps);
      const auto power = hn::ShiftLeft<23>(hn::Add(octaves, hn::Set(di, 127)));
      const auto v = hn::Mul(Format::Load(df, bytes + i), hn::BitCast(df, power));
      Format::StoreLowByte(df, v, bytes + i);
    }
    return hn::Load(d, bytes);
  }
  template <class D>
  static HWY_INLINE hn::VFromD<D> Move(D d, hn::VFromD<D> codes, hn::VFromD<D> move) {
    const hn::RebindToSigned<D> di;
    const auto magnitude = hn::And(codes, hn::Set(d, uint8_t{0x7F}));
    const auto moved = hn::Add(magnitude, move);
    const auto smaller = hn::Min(hn::BitCast(di, magnitude), hn::BitCast(di, moved));
    const auto is_small = hn::RebindMask(d, hn::Gt(hn::Set(di, int8_t{kStep}), smaller));
    const auto is_zero = hn::Eq(magnitude, hn::Zero(d));
    if (HWY_UNLIKELY(!hn::AllFalse(d, hn::AndNot(is_zero, is_small)))) {
      return MoveFloats(d, codes, move);
    }
    const auto sign = hn::And(codes, hn::Set(d, uint8_t{0x80}));
    return hn::Or(hn::IfThenZeroElse(is_zero, moved), sign);
  }
};

}  // namespace moire::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
