// FP8 codes and scales of blocks along rows of BF16 numbers (quantize_bf16-inl.h). Include after
// simd_targets.h, inside the foreach_target pattern.
#include "backend/cpu/quantize_bf16-inl.h"

#if defined(MOIRE_QUANTIZE_BF16_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOIRE_QUANTIZE_BF16_ROWS_INL_H_
#undef MOIRE_QUANTIZE_BF16_ROWS_INL_H_
#else
#define MOIRE_QUANTIZE_BF16_ROWS_INL_H_
#endif

#include <algorithm>

HWY_BEFORE_NAMESPACE();
namespace moire::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using MaximaTag = hn::CappedTag<uint16_t, kScaleBatch>;

#if HWY_TARGET == HWY_SCALAR
HWY_INLINE void LargestLanes(const uint16_t* vectors, uint16_t* out) {
  std::copy(vectors, vectors + kScaleBatch, out);
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
// out[i] = the largest lane of vector i, of kScaleBatch vectors.
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
#endif

// At most kScaleBatch whole blocks: columns [first, end) of rows [begin, begin + count). False, and
// nothing done, where a block has to go through floats.
template <class Format, class Scaling, class Rows>
inline bool QuantizeBf16RowBatch(const Scaling& scaling, const Rows& rows, int64_t begin,
                                 int64_t count, int64_t first, int64_t end,
                                 const QuantizedPiece& out) {
  using Scale = typename Scaling::Scale::Element;
  constexpr int64_t kBlock = Scaling::kBlock;
  const MaximaTag dm;
  const Bf16RowTag d;
  const auto maxima_lanes = static_cast<int64_t>(hn::Lanes(dm));
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  alignas(64) uint16_t maxima[kScaleBatch * hn::MaxLanes(MaximaTag())];
  alignas(64) uint16_t amax[kScaleBatch], subnormal[kScaleBatch];
  alignas(64) Scale scales[kScaleBatch];
  uint16_t* at = maxima;
  for (int64_t r = begin; r < begin + count; ++r) {
    const uint16_t* const row = rows.row(r);
    for (int64_t c = first; c < end; c += kBlock, at += maxima_lanes) {
      auto largest = hn::Zero(dm);
      for (int64_t i = 0; i < kBlock; i += maxima_lanes) {
        largest = hn::Max(largest, Bf16Magnitude(dm, hn::LoadU(dm, row + c + i)));
      }
      hn::Store(largest, dm, at);
    }
  }
  std::fill(at, maxima + kScaleBatch * maxima_lanes, uint16_t{0});
  LargestLanes(maxima, amax);
  for (int64_t i = 0; i < kScaleBatch; i += maxima_lanes) {
    if (!AreQuick(dm, hn::Load(dm, amax + i))) return false;
  }
  StoreQuickScales<Format>(scaling, amax, kScaleBatch, scales, subnormal);
  int64_t block = 0;
  for (int64_t r = begin; r < begin + count; ++r) {
    const uint16_t* const row = rows.row(r);
    uint8_t* const codes = out.data + r * out.stride;
    auto* row_scales = static_cast<Scale*>(out.scales) + r * out.scale_stride + first / kBlock;
    for (int64_t c = first; c < end; c += kBlock, ++block) {
      *row_scales++ = scales[block];
      const auto s = hn::Set(d, subnormal[block]);
      for (int64_t i = c; i < c + kBlock; i += lanes) {
        rows.prefetch(row + i);
        Bf16Codes<Format>::Store(d, row + i, s, out.bypasses_cache, codes + i);
      }
    }
  }
  return true;
}

}  // namespace moire::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
