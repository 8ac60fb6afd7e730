// FP8 codes and scales of blocks along rows, two passes over a batch of them: the first finds the
// largest magnitudes, the second encodes. Include after simd_targets.h, inside the foreach_target
// pattern.
#include "backend/cpu/quantize_floats-inl.h"
#include "backend/cpu/quantize_maxima-inl.h"
#include "backend/cpu/quantize_quick-inl.h"

#if defined(MOIRE_QUANTIZE_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOIRE_QUANTIZE_ROWS_INL_H_
#undef MOIRE_QUANTIZE_ROWS_INL_H_
#else
#define MOIRE_QUANTIZE_ROWS_INL_H_
#endif

#include <algorithm>
#include <bit>

HWY_BEFORE_NAMESPACE();
namespace moire::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Columns [first, end) of rows [begin, begin + count): at most kScaleBatch blocks. The last block
// of a row may be short.
template <int64_t kBlock>
struct RowBatch {
  int64_t begin, count, first, end;

  bool is_whole() const { return (end - first) % kBlock == 0; }
  int64_t blocks_per_row() const { return (end - first + kBlock - 1) / kBlock; }
  // Calls f(i, r, c, n) for block i, n columns from c on of row r.
  template <class F>
  HWY_INLINE void for_each(F&& f) const {
    int64_t i = 0;
    for (int64_t r = begin; r < begin + count; ++r) {
      for (int64_t c = first; c < end; c += kBlock) f(i++, r, c, std::min(kBlock, end - c));
    }
  }
  // The same of whole blocks: f(i, r, c), which becomes part of the loop.
  template <class F>
  HWY_INLINE void for_each_whole(F&& f) const {
    int64_t i = 0;
    for (int64_t r = begin; r < begin + count; ++r) {
      for (int64_t c = first; c < end; c += kBlock) f(i++, r, c);
    }
  }
};

// The bits of the blocks' largest magnitudes; zeros for those that there are not.
template <int64_t kBlock, class Rows, class T>
HWY_INLINE void FindRowAmax(const Rows& rows, const RowBatch<kBlock>& batch, T* amax) {
  using Source = typename Rows::Format;
  if constexpr (sizeof(T) == 2) {
    if (batch.is_whole()) {
      FindBlockAmax<Source, kBlock>(rows, batch.begin, batch.count, batch.first, batch.end, amax);
      return;
    }
  }
  std::fill(amax, amax + kScaleBatch, T{0});
  if (batch.is_whole()) {
    batch.for_each_whole([&](int64_t i, int64_t r, int64_t c) HWY_ATTR {
      amax[i] = RunAmax<Source, false>(rows.row(r) + c, kBlock);
    });
  } else {
    batch.for_each([&](int64_t i, int64_t r, int64_t c, int64_t n)
                       HWY_ATTR { amax[i] = RunAmax<Source, false>(rows.row(r) + c, n); });
  }
}

template <class Format, class Scaling, class Rows>
inline void QuantizeRowBatch(const Scaling& scaling, const Rows& rows,
                             const RowBatch<Scaling::kBlock>& batch, const QuantizedPiece& out) {
  using Source = typename Rows::Format;
  using Scale = typename Scaling::Scale::Element;
  alignas(64) BitsOf<Source> amax[kScaleBatch];
  alignas(64) float multipliers[kScaleBatch];
  alignas(64) Scale scales[kScaleBatch];
  bool is_finite[kScaleBatch];
  const auto store_scales = [&]() HWY_ATTR {
    return StoreScales<Source>(scaling, amax, kScaleBatch, scales, multipliers);
  };
  FindRowAmax(rows, batch, amax);
  const BlockKinds kinds = store_scales();
  for (int64_t i = 0; i < kScaleBatch; ++i) is_finite[i] = amax[i] < Source::kInfinity;
  if (!kinds.are_finite) {
    batch.for_each([&](int64_t i, int64_t r, int64_t c, int64_t n) HWY_ATTR {
      if (!is_finite[i]) amax[i] = RunAmax<Source, true>(rows.row(r) + c, n);
    });
    store_scales();
  }
  for (int64_t r = 0, per_row = batch.blocks_per_row(); r < batch.count; ++r) {
    std::copy_n(scales + r * per_row, per_row,
                static_cast<Scale*>(out.scales) + (batch.begin + r) * out.scale_stride +
                    batch.first / Scaling::kBlock);
  }
  if (kinds.are_quick && scaling.is_power_of_two() && batch.is_whole()) {
    alignas(64) uint16_t subnormal[kScaleBatch];
    FindLargestSubnormals<Format>(multipliers, kScaleBatch, subnormal);
    batch.for_each_whole([&](int64_t i, int64_t r, int64_t c) HWY_ATTR {
      EncodeQuickRun<Format>(rows, r, c, Scaling::kBlock, subnormal[i], out);
    });
  } else if (kinds.are_finite && batch.is_whole()) {
    batch.for_each_whole([&](int64_t i, int64_t r, int64_t c) HWY_ATTR {
      EncodeRun<Format, true>(rows, r, c, Scaling::kBlock, multipliers[i], out);
    });
  } else {
    batch.for_each([&](int64_t i, int64_t r, int64_t c, int64_t n) HWY_ATTR {
      EncodeRun<Format>(rows, r, c, n, multipliers[i], is_finite[i], out);
    });
  }
}

template <class Format, class Scaling, class Rows>
inline void QuantizeAlongRows(const Scaling& scaling, const Rows& rows, int64_t num_rows,
                              int64_t columns, const QuantizedPiece& out) {
  constexpr int64_t kBlock = Scaling::kBlock, kColumns = kScaleBatch * kBlock;
  const int64_t whole = columns / kBlock * kBlock;
  const int64_t width = std::max(std::min(whole, kColumns), kBlock);
  const int64_t rows_at_once = kScaleBatch / (width / kBlock);
  const auto quantize = [&](int64_t r, int64_t at_once, int64_t first, int64_t end) HWY_ATTR {
    const RowBatch<kBlock> batch{r, std::min(at_once, num_rows - r), first, end};
    QuantizeRowBatch<Format>(scaling, rows, batch, out);
  };
  for (int64_t r = 0; r < num_rows; r += rows_at_once) {
    for (int64_t c = 0; c < whole; c += width) {
      quantize(r, rows_at_once, c, std::min(whole, c + width));
    }
  }
  if (whole == columns) return;
  for (int64_t r = 0; r < num_rows; r += kScaleBatch) quantize(r, kScaleBatch, whole, columns);
}

}  // namespace moire::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
