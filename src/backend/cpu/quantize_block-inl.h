// Values to FP8 codes and scales, a piece of a matrix at a time: the one place that does it, so
// that quantising in an epilogue and quantising the stored tensor give the same bytes. The values
// of an epilogue are floats that were rounded to the stored tensor's type. Two passes over a batch
// of blocks: the first finds the largest magnitudes, the second encodes. Include after
// simd_targets.h, inside the foreach_target pattern.
#include "backend/cpu/quantize_encode-inl.h"

#if defined(MOIRE_QUANTIZE_BLOCK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOIRE_QUANTIZE_BLOCK_INL_H_
#undef MOIRE_QUANTIZE_BLOCK_INL_H_
#else
#define MOIRE_QUANTIZE_BLOCK_INL_H_
#endif

#include <algorithm>
#include <type_traits>

HWY_BEFORE_NAMESPACE();
namespace moire::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// ---- blocks along rows ----

// Columns [first, end) of rows [begin, begin + count): at most kScaleBatch blocks, all of them
// whole, or one short one per row.
template <int64_t kBlock, bool kWhole>
struct RowBatch {
  int64_t begin, count, first, end;

  int64_t blocks_per_row() const { return kWhole ? (end - first) / kBlock : 1; }
  // Calls f(i, r, c, n) for block i, n columns from c on of row r; n is a constant of whole ones.
  template <class F>
  HWY_INLINE void for_each(F&& f) const {
    int64_t i = 0;
    for (int64_t r = begin; r < begin + count; ++r) {
      for (int64_t c = first; c < end; c += kBlock, ++i) {
        if constexpr (kWhole) {
          f(i, r, c, std::integral_constant<int64_t, kBlock>());
        } else {
          f(i, r, c, end - c);
        }
      }
    }
  }
};

// The bits of the blocks' largest magnitudes; zeros for those that there are not.
template <int64_t kBlock, bool kWhole, class Rows, class T>
HWY_INLINE void FindRowAmax(const Rows& rows, const RowBatch<kBlock, kWhole>& batch, T* amax) {
  using Source = typename Rows::Format;
  if constexpr (kWhole && sizeof(T) == 2) {
    FindBlockAmax<Source, kBlock>(rows, batch.begin, batch.count, batch.first, batch.end, amax);
  } else {
    std::fill(amax, amax + kScaleBatch, T{0});
    batch.for_each([&](int64_t i, int64_t r, int64_t c, auto n)
                       HWY_ATTR { amax[i] = RunAmax<Source, false>(rows.row(r) + c, n); });
  }
}

template <class Format, bool kWhole, class Scaling, class Rows>
inline void QuantizeRowBatch(const Scaling& scaling, const Rows& rows,
                             const RowBatch<Scaling::kBlock, kWhole>& batch,
                             const QuantizedPiece& out) {
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
  const BlockKind kind = store_scales();
  for (int64_t i = 0; i < kScaleBatch; ++i) is_finite[i] = amax[i] < Source::kInfinity;
  if (kind == BlockKind::kAny) {
    batch.for_each([&](int64_t i, int64_t r, int64_t c, auto n) HWY_ATTR {
      if (!is_finite[i]) amax[i] = RunAmax<Source, true>(rows.row(r) + c, n);
    });
    store_scales();
  }
  for (int64_t r = 0, per_row = batch.blocks_per_row(); r < batch.count; ++r) {
    std::copy_n(scales + r * per_row, per_row,
                static_cast<Scale*>(out.scales) + (batch.begin + r) * out.scale_stride +
                    batch.first / Scaling::kBlock);
  }
  if (kWhole && kind == BlockKind::kQuick && scaling.is_power_of_two()) {
    alignas(64) uint16_t subnormal[kScaleBatch];
    FindLargestSubnormals<Format>(multipliers, kScaleBatch, subnormal);
    batch.for_each([&](int64_t i, int64_t r, int64_t c, auto n)
                       HWY_ATTR { EncodeQuickRun<Format>(rows, r, c, n, subnormal[i], out); });
  } else if (kWhole && kind != BlockKind::kAny) {
    batch.for_each([&](int64_t i, int64_t r, int64_t c, auto n)
                       HWY_ATTR { EncodeRun<Format, true>(rows, r, c, n, multipliers[i], out); });
  } else {
    batch.for_each([&](int64_t i, int64_t r, int64_t c, auto n) HWY_ATTR {
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
  for (int64_t r = 0; r < num_rows; r += rows_at_once) {
    const int64_t count = std::min(rows_at_once, num_rows - r);
    for (int64_t c = 0; c < whole; c += width) {
      QuantizeRowBatch<Format, true>(scaling, rows, {r, count, c, std::min(whole, c + width)}, out);
    }
  }
  for (int64_t r = 0; whole != columns && r < num_rows; r += kScaleBatch) {
    const int64_t count = std::min(kScaleBatch, num_rows - r);
    QuantizeRowBatch<Format, false>(scaling, rows, {r, count, whole, columns}, out);
  }
}

// ---- blocks down columns ----

// Columns whose scales are computed together: rows are read and written that far at a time.
inline constexpr int64_t kColumnBatch = 1024;

// At most kColumnBatch columns of one block of rows.
template <class Format, class Scaling, class Rows>
inline void QuantizeColumnBatch(const Scaling& scaling, const Rows& rows, int64_t num_rows,
                                int64_t columns, const QuantizedPiece& out) {
  using Source = typename Rows::Format;
  alignas(64) BitsOf<Source> amax[kColumnBatch];
  alignas(64) float multipliers[kColumnBatch];
  const auto store_scales = [&]() HWY_ATTR {
    auto* const scales = static_cast<typename Scaling::Scale::Element*>(out.scales);
    return StoreScales<Source>(scaling, amax, columns, scales, multipliers);
  };
  FindColumnAmax<false>(rows, num_rows, columns, amax);
  const BlockKind kind = store_scales();
  if (kind == BlockKind::kQuick && scaling.is_power_of_two()) {
    alignas(64) uint16_t subnormal[kColumnBatch];
    FindLargestSubnormals<Format>(multipliers, columns, subnormal);
    EncodeQuickColumns<Format>(rows, num_rows, columns, subnormal, out);
    return;
  }
  if (kind == BlockKind::kAny) {
    FindColumnAmax<true>(rows, num_rows, columns, amax);
    store_scales();
  }
  EncodeColumns<Format>(rows, num_rows, columns, multipliers, kind != BlockKind::kAny, out);
}

template <class Format, class Scaling, class Rows>
inline void QuantizeDownColumns(const Scaling& scaling, const Rows& rows, int64_t num_rows,
                                int64_t columns, const QuantizedPiece& out) {
  using Scale = typename Scaling::Scale::Element;
  for (int64_t c = 0; c < columns; c += kColumnBatch) {
    QuantizedPiece batch = out;
    batch.data += c;
    batch.scales = static_cast<Scale*>(out.scales) + c;
    QuantizeColumnBatch<Format>(scaling, rows.from(c), num_rows,
                                std::min(kColumnBatch, columns - c), batch);
  }
}

// ---- either, by what `how` says, and tiles ----

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

// `columns` columns of some rows as a copy in one direction. Column 0 starts a block of a rowwise
// copy; row 0 starts one of a columnwise copy, and the rows are at most a block.
template <class Rows>
inline void QuantizeRowwise(const QuantizeFormat& how, const Rows& rows, int64_t num_rows,
                            int64_t columns, const QuantizedPiece& out) {
  with_quantize_format(how, [&](auto format, auto scaling) HWY_ATTR {
    QuantizeAlongRows<decltype(format)>(scaling, rows, num_rows, columns, out);
  });
}
template <class Rows>
inline void QuantizeColumnwise(const QuantizeFormat& how, const Rows& rows, int64_t num_rows,
                               int64_t columns, const QuantizedPiece& out) {
  with_quantize_format(how, [&](auto format, auto scaling) HWY_ATTR {
    QuantizeDownColumns<decltype(format)>(scaling, rows, num_rows, columns, out);
  });
}

// At most 128 columns of at most 128 rows as one tile: one scale for all of it.
template <class Rows>
inline void QuantizeTile(const QuantizeFormat& how, const Rows& rows, int64_t num_rows,
                         int64_t columns, const QuantizedPiece& out) {
  using Source = typename Rows::Format;
  with_fp8_format(how.element, [&](auto format) HWY_ATTR {
    using Format = decltype(format);
    const BlockScaling<Format> scaling{how.fractional};
    BitsOf<Source> amax = 0;
    float multiplier = 0;
    const auto store_scale = [&]() HWY_ATTR {
      return StoreScales<Source>(scaling, &amax, 1, static_cast<float*>(out.scales), &multiplier);
    };
    for (int64_t r = 0; r < num_rows; ++r) {
      amax = std::max(amax, RunAmax<Source, false>(rows.row(r), columns));
    }
    const BlockKind kind = store_scale();
    if (kind == BlockKind::kAny) {
      amax = 0;
      for (int64_t r = 0; r < num_rows; ++r) {
        amax = std::max(amax, RunAmax<Source, true>(rows.row(r), columns));
      }
      store_scale();
    }
    uint16_t subnormal = 0;
    FindLargestSubnormals<Format>(&multiplier, 1, &subnormal);
    const bool is_quick =
        kind == BlockKind::kQuick && !how.fractional && columns % MxScaling<Format>::kBlock == 0;
    for (int64_t r = 0; r < num_rows; ++r) {
      if (is_quick) {
        EncodeQuickRun<Format>(rows, r, 0, columns, subnormal, out);
      } else {
        EncodeRun<Format>(rows, r, 0, columns, multiplier, kind != BlockKind::kAny, out);
      }
    }
  });
}

// Floats in rows `pitch` apart, as one or both copies, each of which may be absent.
inline void QuantizeBlock(const QuantizeFormat& how, const float* values, int64_t pitch,
                          int64_t rows, int64_t columns, const QuantizedPiece& rowwise,
                          const QuantizedPiece& columnwise) {
  const PitchedRows<Fp32> source{values, pitch};
  if (rows == 0) return;
  if (rowwise.data != nullptr) QuantizeRowwise(how, source, rows, columns, rowwise);
  if (columnwise.data != nullptr) QuantizeColumnwise(how, source, rows, columns, columnwise);
}

}  // namespace moire::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
