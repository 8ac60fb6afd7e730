// Values to FP8 codes and scales, a piece of a matrix at a time: the one place that does it, so
// that quantising in an epilogue and quantising the stored tensor give the same bytes. The values
// of an epilogue are floats that were rounded to the stored tensor's type. Include after
// simd_targets.h, inside the foreach_target pattern.
#include "backend/cpu/quantize_columns-inl.h"
#include "backend/cpu/quantize_rows-inl.h"

#if defined(MOIRE_QUANTIZE_BLOCK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOIRE_QUANTIZE_BLOCK_INL_H_
#undef MOIRE_QUANTIZE_BLOCK_INL_H_
#else
#define MOIRE_QUANTIZE_BLOCK_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace moire::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

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
    const BlockKinds kinds = store_scale();
    if (!kinds.are_finite) {
      amax = 0;
      for (int64_t r = 0; r < num_rows; ++r) {
        amax = std::max(amax, RunAmax<Source, true>(rows.row(r), columns));
      }
      store_scale();
    }
    uint16_t subnormal = 0;
    FindLargestSubnormals<Format>(&multiplier, 1, &subnormal);
    const bool is_quick =
        kinds.are_quick && !how.fractional && columns % MxScaling<Format>::kBlock == 0;
    for (int64_t r = 0; r < num_rows; ++r) {
      if (is_quick) {
        EncodeQuickRun<Format>(rows, r, 0, columns, subnormal, out);
      } else {
        EncodeRun<Format>(rows, r, 0, columns, multiplier, kinds.are_finite, out);
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
