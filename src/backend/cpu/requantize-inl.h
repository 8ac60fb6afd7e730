// The quick way from FP8 in one direction to FP8 in the other, of one element type and with scales
// that are powers of two: a normal code that stays one changes its exponent and nothing else, so
// bytes are added to as they are and never decoded. Vectors with other codes go through floats;
// pieces with infinities, NaN, scales out of the ordinary or a block without a normal code are
// refused. Include after simd_targets.h, inside the foreach_target pattern.
#include "backend/cpu/quantize_block-inl.h"

#if defined(MOIRE_REQUANTIZE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOIRE_REQUANTIZE_INL_H_
#undef MOIRE_REQUANTIZE_INL_H_
#else
#define MOIRE_REQUANTIZE_INL_H_
#endif

#include <hwy/cache_control.h>

#include <algorithm>
#include <bit>

HWY_BEFORE_NAMESPACE();
namespace moire::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Columns of a strip, and blocks in all its rows, at most.
inline constexpr int64_t kMostMoved = kMaxStripColumns;
// A block of 32 is whole vectors.
using CodeTag = hn::CappedTag<uint8_t, 32>;

// The exponents of n scales; false where one is not between 2^-95 and 2^93, for which no decoded
// value is subnormal or infinite, or is no power of two.
template <class Scale>
inline bool FindExponents(const Scale* HWY_RESTRICT scales, int64_t n, uint8_t* HWY_RESTRICT out) {
  using Bits = hwy::MakeUnsigned<Scale>;
  constexpr int kShift = sizeof(Scale) == 1 ? 0 : 23;
  constexpr auto kOthers = static_cast<Bits>(~(Bits{0xFF} << kShift));
  Bits others = 0, least = 255, most = 0;
  for (int64_t i = 0; i < n; ++i) {
    const auto bits = std::bit_cast<Bits>(scales[i]);
    const auto exponent = static_cast<uint8_t>(bits >> kShift);
    others |= bits & kOthers;
    least = std::min<Bits>(least, exponent);
    most = std::max<Bits>(most, exponent);
    out[i] = exponent;
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

// Rows of a strip that lies in memory are asked for ahead: no prefetcher knows where they start.
inline constexpr int64_t kRowsAhead = 2;
inline const uint8_t* CodesAt(const Strip& strip, int64_t r, int64_t column) {
  return static_cast<const uint8_t*>(strip.source.rows[r]) + column;
}

// From a scale per block of a row to one per column.
template <class Format, class Scaling>
inline bool MoveToColumns(const Scaling& scaling, const Strip& strip, int64_t column, int64_t n,
                          const QuantizedPiece& out) {
  using M = Moves<Format>;
  using Scale = typename Scaling::Scale::Element;
  constexpr int64_t kBlock = Scaling::kBlock;
  const CodeTag d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const int64_t blocks = n / kBlock;
  const auto row = [&](int64_t r) { return CodesAt(strip, r, column); };
  alignas(64) uint8_t exponents[kMostMoved], top[kMostMoved], below[kMostMoved];
  alignas(64) uint8_t largest[kMostMoved] = {}, up[kMostMoved];
  std::fill(top, top + blocks, uint8_t{0});
  for (int64_t r = 0; r < strip.num_rows; ++r) {
    const auto* const scales = static_cast<const Scale*>(strip.source.scales[r]);
    uint8_t* const e = exponents + r * blocks;
    if (!FindExponents(scales + column / kBlock, blocks, e)) return false;
    for (int64_t b = 0; b < blocks; ++b) top[b] = std::max(top[b], e[b]);
  }
  for (int64_t r = 0; r < strip.num_rows; ++r) {
    if (!M::find_below(top, exponents + r * blocks, blocks, below + r * blocks)) return false;
  }
  for (int64_t i = n - 1; i >= 0; --i) top[i] = top[i / kBlock];
  auto largest_code = hn::Zero(d);
  for (int64_t r = 0; r < strip.num_rows; ++r) {
    const uint8_t* const codes = row(r);
    const uint8_t* const ahead = row(std::min(r + kRowsAhead, strip.num_rows - 1));
    for (int64_t i = 0; i < n; i += lanes) {
      if (i % 64 == 0) hwy::Prefetch(ahead + i);
      const auto magnitude = hn::And(hn::LoadU(d, codes + i), hn::Set(d, uint8_t{0x7F}));
      const auto counted = hn::SaturatedSub(magnitude, hn::Set(d, below[r * blocks + i / kBlock]));
      largest_code = hn::Max(largest_code, magnitude);
      hn::Store(hn::Max(hn::Load(d, largest + i), counted), d, largest + i);
    }
  }
  const auto is_zero = [&](int64_t i) {
    int codes = 0;
    for (int64_t r = 0; r < strip.num_rows; ++r) codes |= row(r)[i] & 0x7F;
    return codes == 0;
  };
  if (!Format::AreNumbers(d, largest_code) ||
      !M::scale(scaling, largest, top, n, is_zero, static_cast<Scale*>(out.scales), up)) {
    return false;
  }
  for (int64_t r = 0; r < strip.num_rows; ++r) {
    const uint8_t* const codes = row(r);
    uint8_t* const target = out.data + r * out.stride;
    for (int64_t i = 0; i < n; i += lanes) {
      const auto move = hn::Sub(hn::Load(d, up + i), hn::Set(d, below[r * blocks + i / kBlock]));
      StoreCodes(d, M::Move(d, hn::LoadU(d, codes + i), move), out.bypasses_cache, target + i);
    }
  }
  return true;
}

// From a scale per column to one per block of a row.
template <class Format, class Scaling>
inline bool MoveToRows(const Scaling& scaling, const Strip& strip, int64_t column, int64_t n,
                       const QuantizedPiece& out) {
  using M = Moves<Format>;
  using Scale = typename Scaling::Scale::Element;
  constexpr int64_t kBlock = Scaling::kBlock;
  const CodeTag d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const int64_t blocks = n / kBlock, count = strip.num_rows * blocks;
  const auto row = [&](int64_t r) { return CodesAt(strip, r, column); };
  alignas(64) uint8_t exponents[kMostMoved], top[kMostMoved], below[kMostMoved];
  alignas(64) uint8_t largest[kMostMoved], up[kMostMoved];
  alignas(64) uint8_t maxima[kMostMoved * kMaximaBytes];
  alignas(64) Scale scales[kMostMoved];
  if (!FindExponents(static_cast<const Scale*>(strip.source.scales[0]) + column, n, exponents)) {
    return false;
  }
  for (int64_t i = 0; i < n; i += kBlock) {
    const uint8_t most = *std::max_element(exponents + i, exponents + i + kBlock);
    std::fill(top + i, top + i + kBlock, most);
  }
  if (!M::find_below(top, exponents, n, below)) return false;
  auto largest_code = hn::Zero(d);
  for (int64_t r = 0; r < strip.num_rows; ++r) {
    const uint8_t* const codes = row(r);
    const uint8_t* const ahead = row(std::min(r + kRowsAhead, strip.num_rows - 1));
    for (int64_t b = 0; b < blocks; ++b) {
      auto counted = hn::Zero(d);
      for (int64_t i = b * kBlock; i < (b + 1) * kBlock; i += lanes) {
        if (i % 64 == 0) hwy::Prefetch(ahead + i);
        const auto magnitude = hn::And(hn::LoadU(d, codes + i), hn::Set(d, uint8_t{0x7F}));
        counted = hn::Max(counted, hn::SaturatedSub(magnitude, hn::Load(d, below + i)));
        largest_code = hn::Max(largest_code, magnitude);
      }
      StoreMaxima(d, counted, maxima + (r * blocks + b) * kMaximaBytes);
    }
  }
  std::fill(maxima + count * kMaximaBytes, maxima + (count + 15) / 16 * 16 * kMaximaBytes,
            uint8_t{0});
  for (int64_t i = 0; i < count; i += 16) LargestBytes(maxima + i * kMaximaBytes, largest + i);
  for (int64_t b = 0; b < blocks; ++b) top[b] = top[b * kBlock];
  for (int64_t i = blocks; i < count; ++i) top[i] = top[i - blocks];
  const auto is_zero = [&](int64_t i) {
    const uint8_t* const codes = row(i / blocks) + i % blocks * kBlock;
    return std::all_of(codes, codes + kBlock, [](uint8_t c) { return c % 128 == 0; });
  };
  if (!Format::AreNumbers(d, largest_code) ||
      !M::scale(scaling, largest, top, count, is_zero, scales, up)) {
    return false;
  }
  for (int64_t r = 0; r < strip.num_rows; ++r) {
    const uint8_t* const codes = row(r);
    uint8_t* const target = out.data + r * out.stride;
    std::copy(scales + r * blocks, scales + (r + 1) * blocks,
              static_cast<Scale*>(out.scales) + r * out.scale_stride);
    for (int64_t i = 0; i < n; i += lanes) {
      const auto move = hn::Sub(hn::Set(d, up[r * blocks + i / kBlock]), hn::Load(d, below + i));
      StoreCodes(d, M::Move(d, hn::LoadU(d, codes + i), move), out.bypasses_cache, target + i);
    }
  }
  return true;
}

// A strip of FP8 as `out`, a copy in the other direction from the strip's first column on; false,
// and what was written is anything, where it has to go through floats.
inline bool RequantizeQuick(const QuantizeFormat& how, const Strip& strip,
                            const QuantizedPiece& out) {
  const int64_t column = strip.first, n = strip.end - column;
  if (how.fractional || strip.source.dtype != how.element || n % how.block() != 0) return false;
  bool is_done = false;
  with_quantize_format(how, [&](auto format, auto scaling) HWY_ATTR {
    using Format = decltype(format);
    const bool from_columns = strip.source.direction == MOIRE_COLUMNWISE;
    is_done = from_columns ? MoveToRows<Format>(scaling, strip, column, n, out)
                           : MoveToColumns<Format>(scaling, strip, column, n, out);
  });
  return is_done;
}

}  // namespace moire::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
