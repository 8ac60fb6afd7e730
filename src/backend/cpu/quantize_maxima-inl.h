// The largest magnitudes of blocks: along rows and down columns, as bits of the elements' own type.
// Include after simd_targets.h, inside the foreach_target pattern.
#include "backend/cpu/quantize_values-inl.h"

#if defined(MOIRE_QUANTIZE_MAXIMA_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOIRE_QUANTIZE_MAXIMA_INL_H_
#undef MOIRE_QUANTIZE_MAXIMA_INL_H_
#else
#define MOIRE_QUANTIZE_MAXIMA_INL_H_
#endif

#include <algorithm>

HWY_BEFORE_NAMESPACE();
namespace moire::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

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
// Of 8 vectors, the largest lane of each 128 bits.
template <class D>
HWY_INLINE hn::VFromD<D> LargestOf8(D d, const uint16_t* vectors) {
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto two = [&](int64_t i) HWY_ATTR {
    return MergeLargest<uint16_t>(d, hn::Load(d, vectors + i * lanes),
                                  hn::Load(d, vectors + (i + 1) * lanes));
  };
  return MergeLargest<uint64_t>(d, MergeLargest<uint32_t>(d, two(0), two(2)),
                                MergeLargest<uint32_t>(d, two(4), two(6)));
}
template <class D = MaximaTag>
HWY_INLINE void LargestLanes(const uint16_t* vectors, uint16_t* out) {
  const D d;
  constexpr int64_t kLanes = hn::MaxLanes(D());
  const auto first = LargestOf8(d, vectors), second = LargestOf8(d, vectors + 8 * kLanes);
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
  const auto two = [&](int64_t i) HWY_ATTR {
    return MergeLargest<uint8_t>(d, hn::Load(d, vectors + i * kMaximaBytes),
                                 hn::Load(d, vectors + (i + 1) * kMaximaBytes));
  };
  const auto eight = [&](int64_t i) HWY_ATTR {
    return MergeLargest<uint32_t>(d, MergeLargest<uint16_t>(d, two(i), two(i + 2)),
                                  MergeLargest<uint16_t>(d, two(i + 4), two(i + 6)));
  };
  hn::Store(MergeLargest<uint64_t>(d, eight(0), eight(8)), d, out);
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

// amax[i] = the larger of it and column i's of kRows rows from r on, from column i to the last
// whole vector before `columns`; returns where it ended.
template <bool kSkipsNan, int64_t kRows, class Rows, class D>
HWY_INLINE int64_t AddToColumnAmax(D d, const Rows& rows, int64_t r, int64_t i, int64_t columns,
                                   hn::TFromD<D>* HWY_RESTRICT amax) {
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  for (; i + lanes <= columns; i += lanes) {
    auto largest = hn::LoadU(d, amax + i);
    for (int64_t j = 0; j < kRows; ++j) {
      const auto* const p = rows.row(r + j) + i;
      rows.prefetch(p, lanes);
      largest = hn::Max(largest, Magnitude<typename Rows::Format, kSkipsNan>(d, p));
    }
    hn::StoreU(largest, d, amax + i);
  }
  return i;
}
template <bool kSkipsNan, int64_t kRows, class Rows, class T>
HWY_INLINE void AddToColumnAmax(const Rows& rows, int64_t r, int64_t columns, T* amax) {
  const BitsTag<typename Rows::Format> d;
  const int64_t i = AddToColumnAmax<kSkipsNan, kRows>(d, rows, r, 0, columns, amax);
  AddToColumnAmax<kSkipsNan, kRows>(hn::CappedTag<T, 1>(), rows, r, i, columns, amax);
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

}  // namespace moire::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
