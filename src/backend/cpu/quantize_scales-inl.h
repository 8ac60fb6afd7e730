// What is quantised, the largest magnitudes of its blocks, along rows and down columns, and the
// scales that follow from them: the bits of core/fp8.h. Include after simd_targets.h, inside the
// foreach_target pattern.
#include "backend/cpu/fp8-inl.h"

#if defined(MOIRE_QUANTIZE_SCALES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOIRE_QUANTIZE_SCALES_INL_H_
#undef MOIRE_QUANTIZE_SCALES_INL_H_
#else
#define MOIRE_QUANTIZE_SCALES_INL_H_
#endif

#include <hwy/cache_control.h>

#include <algorithm>
#include <bit>

HWY_BEFORE_NAMESPACE();
namespace moire::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// ---- what is quantised ----

// What holds the bits of an element.
template <class Source>
using BitsOf = hwy::MakeUnsigned<typename Source::Element>;

// The rows of a piece, each from its first column on.
template <class Source>
struct PitchedRows {
  using Format = Source;
  const typename Source::Element* first;
  int64_t pitch;

  const typename Source::Element* row(int64_t r) const { return first + r * pitch; }
  HWY_INLINE void prefetch(const typename Source::Element*, int64_t) const {}
  PitchedRows from(int64_t column) const { return {first + column, pitch}; }
  PitchedRows settled() const { return *this; }
};
// Rows of a tensor, gathered perhaps. What lies `ahead` elements further right is asked for while
// the piece is read for the first time.
template <class Source>
struct ListedRows {
  using Format = Source;
  const void* const* rows;
  int64_t column, ahead;

  const typename Source::Element* row(int64_t r) const {
    return static_cast<const typename Source::Element*>(rows[r]) + column;
  }
  // Of n elements, as many as a vector has.
  HWY_INLINE void prefetch(const typename Source::Element* p, int64_t n) const {
    constexpr auto kPerLine = static_cast<int64_t>(64 / sizeof(typename Source::Element));
    if (ahead == 0) return;
    for (int64_t i = 0; i < n; i += kPerLine) hwy::Prefetch(p + ahead + i);
  }
  // The same rows further right, and the same, read before.
  ListedRows from(int64_t c) const { return {rows, column + c, ahead}; }
  ListedRows settled() const { return {rows, column, 0}; }
};

// Bits of elements; a block of 32 is whole vectors.
template <class Source>
using BitsTag = hn::CappedTag<BitsOf<Source>, 32>;

// The bits of |x| in x's own type, which order as the values do; NaN counts as zero where
// kSkipsNan.
template <class Source, bool kSkipsNan, class D>
HWY_INLINE hn::VFromD<D> Magnitude(D d, const typename Source::Element* p) {
  using T = hn::TFromD<D>;
  const hn::RebindToSigned<D> di;
  constexpr auto kMask = static_cast<T>(static_cast<T>(~T{0}) >> 1);
  const auto bits = hn::And(hn::LoadU(d, reinterpret_cast<const T*>(p)), hn::Set(d, kMask));
  if constexpr (!kSkipsNan) return bits;
  const auto infinity = hn::BitCast(di, hn::Set(d, static_cast<T>(Source::kInfinity)));
  const auto is_nan = hn::Gt(hn::BitCast(di, bits), infinity);
  return hn::IfThenZeroElse(hn::RebindMask(d, is_nan), bits);
}

// ---- largest magnitudes ----

// Blocks along rows whose scales are computed together.
inline constexpr int64_t kScaleBatch = 16;
// Rows that a pass over the columns' largest values so far takes together.
inline constexpr int64_t kRowsPerPass = 4;

// Of n elements.
template <class Source, bool kSkipsNan>
HWY_INLINE BitsOf<Source> RunAmax(const typename Source::Element* p, int64_t n) {
  const BitsTag<Source> d;
  const hn::CappedTag<BitsOf<Source>, 1> one;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  auto amax = hn::Zero(d);
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    amax = hn::Max(amax, Magnitude<Source, kSkipsNan>(d, p + i));
  }
  auto out = hn::GetLane(hn::MaxOfLanes(d, amax));
  for (; i < n; ++i) {
    out = std::max(out, hn::GetLane(Magnitude<Source, kSkipsNan>(one, p + i)));
  }
  return out;
}

// Vectors of 16-bit magnitudes become one vector of their largest lanes: out[i] that of vector i,
// of kScaleBatch vectors.
using MaximaTag = hn::CappedTag<uint16_t, kScaleBatch>;
#if HWY_TARGET == HWY_SCALAR
HWY_INLINE void LargestLanes(const uint16_t* vectors, uint16_t* out) {
  std::copy(vectors, vectors + kScaleBatch, out);
}
inline constexpr int64_t kMaximaBytes = 1;
template <class D>
HWY_INLINE void StoreMaxima(D d, hn::VFromD<D> v, uint8_t* p) {
  hn::Store(v, d, p);
}
HWY_INLINE void LargestBytes(const uint8_t* vectors, uint8_t* out) {
  std::copy(vectors, vectors + 16, out);
}
#else
// Lanes 0, 2, ... of each 128 bits are the larger of a's, 1, 3, ... of b's; a lane is a T wide.
template <class T, class D>
HWY_INLINE hn::VFromD<D> MergeLargest(D d, hn::VFromD<D> a, hn::VFromD<D> b) {
  const hn::Repartition<T, D> dt;
  const auto at = hn::BitCast(dt, a), bt = hn::BitCast(dt, b);
  return hn::Max(hn::BitCast(d, hn::InterleaveLower(dt, at, bt)),
                 hn::BitCast(d, hn::InterleaveUpper(dt, at, bt)));
}
// Of kCount vectors, in order, the largest lane of each 128 bits, of which they fill as many.
template <size_t kCount, class D>
HWY_INLINE hn::VFromD<D> LargestOf(D d, const hn::TFromD<D>* vectors) {
  using T = hn::TFromD<D>;
  if constexpr (kCount == 1) {
    return hn::Load(d, vectors);
  } else {
    using Wide = hwy::UnsignedFromSize<sizeof(T) * kCount / 2>;
    const T* const middle = vectors + kCount / 2 * hn::MaxLanes(d);
    return MergeLargest<Wide>(d, LargestOf<kCount / 2>(d, vectors),
                              LargestOf<kCount / 2>(d, middle));
  }
}
template <class D = MaximaTag>
HWY_INLINE void LargestLanes(const uint16_t* vectors, uint16_t* out) {
  const D d;
  constexpr int64_t kLanes = hn::MaxLanes(D());
  const auto first = LargestOf<8>(d, vectors), second = LargestOf<8>(d, vectors + 8 * kLanes);
  if constexpr (kLanes == 8) {
    hn::Store(first, d, out);
    hn::Store(second, d, out + 8);
  } else {
    hn::Store(
        hn::Max(hn::ConcatLowerLower(d, second, first), hn::ConcatUpperUpper(d, second, first)), d,
        out);
  }
}

// The same of bytes: out[i] = the largest of kMaximaBytes bytes that StoreMaxima made of vector i,
// of 16 vectors.
inline constexpr int64_t kMaximaBytes = 16;
template <class D>
HWY_INLINE void StoreMaxima(D d, hn::VFromD<D> v, uint8_t* p) {
  if constexpr (hn::MaxLanes(D()) == kMaximaBytes) {
    hn::Store(v, d, p);
  } else {
    const hn::Half<D> dh;
    StoreMaxima(dh, hn::Max(hn::LowerHalf(dh, v), hn::UpperHalf(dh, v)), p);
  }
}
HWY_INLINE void LargestBytes(const uint8_t* vectors, uint8_t* out) {
  const hn::CappedTag<uint8_t, kMaximaBytes> d;
  hn::Store(LargestOf<16>(d, vectors), d, out);
}
#endif

// Of at most kScaleBatch whole blocks of 16-bit elements; amax has room for kScaleBatch.
template <class Source, int64_t kBlock, class Rows>
HWY_INLINE void FindBlockAmax(const Rows& rows, int64_t begin, int64_t count, int64_t first,
                              int64_t end, uint16_t* amax) {
  const MaximaTag d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  alignas(64) uint16_t maxima[kScaleBatch * hn::MaxLanes(MaximaTag())];
  uint16_t* at = maxima;
  for (int64_t r = begin; r < begin + count; ++r) {
    const uint16_t* const row = rows.row(r);
    for (int64_t c = first; c < end; c += kBlock, at += lanes) {
      auto largest = hn::Zero(d);
      for (int64_t i = c; i < c + kBlock; i += lanes) {
        largest = hn::Max(largest, Magnitude<Source, false>(d, row + i));
      }
      hn::Store(largest, d, at);
    }
  }
  std::fill(at, maxima + kScaleBatch * lanes, uint16_t{0});
  LargestLanes(maxima, amax);
}

// amax[i] = the larger of it and column i's of kRows rows from r on.
template <bool kSkipsNan, int64_t kRows, class Rows, class T>
HWY_INLINE void AddToColumnAmax(const Rows& rows, int64_t r, int64_t columns,
                                T* HWY_RESTRICT amax) {
  using Source = typename Rows::Format;
  const typename Source::Element* of[kRows];
  for (int64_t j = 0; j < kRows; ++j) of[j] = rows.row(r + j);
  const auto add = [&](auto d, int64_t i) HWY_ATTR {
    auto largest = hn::LoadU(d, amax + i);
    for (const auto* row : of) {
      rows.prefetch(row + i, static_cast<int64_t>(hn::Lanes(d)));
      largest = hn::Max(largest, Magnitude<Source, kSkipsNan>(d, row + i));
    }
    hn::StoreU(largest, d, amax + i);
  };
  const int64_t i = VectorsFrom(BitsTag<Source>(), int64_t{0}, columns, add);
  VectorsFrom(hn::CappedTag<T, 1>(), i, columns, add);
}
template <bool kSkipsNan, class Rows, class T>
HWY_INLINE void FindColumnAmax(const Rows& rows, int64_t num_rows, int64_t columns, T* amax) {
  std::fill(amax, amax + columns, T{0});
  int64_t r = 0;
  for (; r + kRowsPerPass <= num_rows; r += kRowsPerPass) {
    AddToColumnAmax<kSkipsNan, kRowsPerPass>(rows, r, columns, amax);
  }
  for (; r < num_rows; ++r) AddToColumnAmax<kSkipsNan, 1>(rows, r, columns, amax);
}

// ---- scales ----

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

// What is known of blocks by their largest magnitudes: quick ones, finite too, can be encoded in
// 16-bit lanes (quantize_encode-inl.h), where scales are powers of two.
enum class BlockKind { kAny, kFinite, kQuick };
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
HWY_INLINE BlockKind StoreScales(const Scaling& scaling, const BitsOf<Source>* amax, int64_t count,
                                 typename Scaling::Scale::Element* scales, float* multipliers) {
  int32_t largest = 0;
  uint32_t least = ~0U;  // less one: zeros are past all others
  const auto store = [&](auto d, int64_t i) HWY_ATTR __attribute__((always_inline)) {
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
  if (largest >= static_cast<int32_t>(Fp32::kInfinity)) return BlockKind::kAny;
  const bool are_quick = least >= std::bit_cast<uint32_t>(kSmallestQuick) - 1;
  return are_quick ? BlockKind::kQuick : BlockKind::kFinite;
}

}  // namespace moire::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
