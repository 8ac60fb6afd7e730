// Rows of a strip of FP8 as floats. Include after simd_targets.h, inside the foreach_target
// pattern.
#include "backend/cpu/fp8-inl.h"

#if defined(MOIRE_STRIP_DECODER_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOIRE_STRIP_DECODER_INL_H_
#undef MOIRE_STRIP_DECODER_INL_H_
#else
#define MOIRE_STRIP_DECODER_INL_H_
#endif

#include <hwy/cache_control.h>

#include "backend/cpu/quantize.h"

HWY_BEFORE_NAMESPACE();
namespace moire::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

class RowDecoder {
 public:
  // All rows of a columnwise strip have the same scales: they become floats once, in
  // `column_scales`, of which there are kMaxStripColumns.
  RowDecoder(const Strip& strip, float* column_scales)
      : from_(strip.source), scales_(column_scales), first_(strip.first) {
    if (!is_columnwise()) return;
    with_scale_format(from_.scale_dtype, [&](auto format) HWY_ATTR {
      using Scale = decltype(format);
      const auto* const scales = static_cast<const typename Scale::Element*>(from_.scales[0]);
      DecodeRun<Scale>(scales + strip.first, static_cast<size_t>(strip.end - strip.first),
                       column_scales);
    });
  }

  // Columns [c, c + n) of row r.
  void operator()(int64_t r, int64_t c, int64_t n, float* dst) const {
    if (is_columnwise()) {
      const uint8_t* const codes = static_cast<const uint8_t*>(from_.rows[r]) + c;
      DecodeColumnwise(codes, from_.dtype, scales_ + (c - first_), DType::kFP32, 0, n, dst);
    } else {
      DecodeRowwise(from_.rows[r], from_.dtype, from_.scales[r], from_.scale_dtype, c, n, dst);
    }
  }

 private:
  bool is_columnwise() const { return from_.direction == MOIRE_COLUMNWISE; }

  const StripSource& from_;
  const float* scales_;
  int64_t first_;
};

}  // namespace moire::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
