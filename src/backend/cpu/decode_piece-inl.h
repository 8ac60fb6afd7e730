// Pieces of a strip of FP8 as floats. Include after simd_targets.h, inside the foreach_target
// pattern.
#include "backend/cpu/fp8_rows-inl.h"

#if defined(MOIRE_DECODE_PIECE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOIRE_DECODE_PIECE_INL_H_
#undef MOIRE_DECODE_PIECE_INL_H_
#else
#define MOIRE_DECODE_PIECE_INL_H_
#endif

#include "backend/cpu/quantize.h"

HWY_BEFORE_NAMESPACE();
namespace moire::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Columns [c, c + n) of `rows` rows from r on, which are n floats apart in dst.
inline void DecodePiece(const Strip& strip, int64_t r, int64_t rows, int64_t c, int64_t n,
                        float* dst) {
  const StripSource& from = strip.source;
  const auto codes = [&](int64_t row) { return static_cast<const uint8_t*>(from.rows[row]); };
  if (from.direction == MOIRE_COLUMNWISE) {
    const ColumnScaledRows of{codes(r), rows > 1 ? codes(r + 1) - codes(r) : 0, rows};
    DecodeColumnwiseRows(of, from.dtype, from.scales[r], from.scale_dtype, c, n, dst);
    return;
  }
  with_fp8_format(from.dtype, [&](auto format) HWY_ATTR {
    with_scale_format(from.scale_dtype, [&](auto scale) HWY_ATTR {
      using Scale = decltype(scale);
      constexpr int64_t kBlock = scale_block(Scale::kDType);
      for (int64_t i = 0; i < rows; ++i) {
        const auto* const scales = static_cast<const typename Scale::Element*>(from.scales[r + i]);
        DecodeBlocks<decltype(format), Scale, kBlock>(codes(r + i), scales, c, n, dst + i * n);
      }
    });
  });
}

}  // namespace moire::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
