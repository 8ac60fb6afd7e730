// The general way to FP8: floats times their block's multiplier, rounded to FP32 and then to FP8.
// Include after simd_targets.h, inside the foreach_target pattern.
#include "backend/cpu/quantize_values-inl.h"

#if defined(MOIRE_QUANTIZE_FLOATS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOIRE_QUANTIZE_FLOATS_INL_H_
#undef MOIRE_QUANTIZE_FLOATS_INL_H_
#else
#define MOIRE_QUANTIZE_FLOATS_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace moire::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Finite values of a block are never scaled past what rounds to the largest code.
template <class Format, bool kFinite, class Source, class D>
HWY_INLINE hn::Vec<hn::Rebind<uint8_t, D>> EncodeFloats(D d, const typename Source::Element* p,
                                                        hn::VFromD<D> factor) {
  const hn::Rebind<uint8_t, D> d8;
  if constexpr (kFinite) {
    const auto v = hn::Mul(Source::LoadNumbers(d, p), factor);
    return hn::TruncateTo(d8, Format::EncodeLowByte(d, v));
  } else {
    const auto v = hn::Mul(Source::Load(d, p), factor);
    return hn::TruncateTo(d8, Format::EncodeBits(d, v));
  }
}

// From element i of a row on; factor(d, i) is what elements from i on are multiplied by.
template <class Format, bool kFinite, class Rows, class Factor>
HWY_INLINE void EncodeFloatRow([[maybe_unused]] const Rows& rows,
                               const typename Rows::Format::Element* p, int64_t n,
                               [[maybe_unused]] bool bypasses_cache, uint8_t* codes,
                               Factor&& factor) {
  using Source = typename Rows::Format;
  const FloatTag d;
  const hn::CappedTag<float, 4> d4;
  const hn::CappedTag<float, 1> d1;
  const auto encode = [&](auto tag, int64_t i) HWY_ATTR {
    return EncodeFloats<Format, kFinite, Source>(tag, p + i, factor(tag, i));
  };
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
#if HWY_TARGET != HWY_SCALAR
  // Two vectors, so that there is enough to store past the cache.
  const hn::Twice<hn::Rebind<uint8_t, FloatTag>> d8;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    rows.prefetch(p + i, 2 * lanes);
    StoreCodes(d8, hn::Combine(d8, encode(d, i + lanes), encode(d, i)), bypasses_cache, codes + i);
  }
#endif
  const auto store = [&](auto tag) HWY_ATTR {
    hn::StoreU(encode(tag, i), hn::Rebind<uint8_t, decltype(tag)>(), codes + i);
  };
  for (; i + lanes <= n; i += lanes) store(d);
  for (; i + 4 <= n; i += 4) store(d4);
  for (; i < n; ++i) store(d1);
}

// Columns [first, first + n) of row r, one scale for all.
template <class Format, bool kFinite, class Rows>
HWY_INLINE void EncodeRun(const Rows& rows, int64_t r, int64_t first, int64_t n, float multiplier,
                          const QuantizedPiece& out) {
  const auto factor = [&](auto d, int64_t) HWY_ATTR { return hn::Set(d, multiplier); };
  EncodeFloatRow<Format, kFinite>(rows, rows.row(r) + first, n, out.bypasses_cache,
                                  out.data + r * out.stride + first, factor);
}
template <class Format, class Rows>
inline void EncodeRun(const Rows& rows, int64_t r, int64_t first, int64_t n, float multiplier,
                      bool is_finite, const QuantizedPiece& out) {
  if (is_finite) return EncodeRun<Format, true>(rows, r, first, n, multiplier, out);
  out.note_non_finite();
  EncodeRun<Format, false>(rows, r, first, n, multiplier, out);
}

// `columns` columns of some rows, each with its own scale.
template <class Format, class Rows>
HWY_INLINE void EncodeColumns(const Rows& read, int64_t num_rows, int64_t columns,
                              const float* multipliers, bool are_finite,
                              const QuantizedPiece& out) {
  const auto factor = [&](auto d, int64_t i) HWY_ATTR { return hn::LoadU(d, multipliers + i); };
  const auto rows = settled(read);
  if (!are_finite) out.note_non_finite();
  for (int64_t r = 0; r < num_rows; ++r) {
    uint8_t* const codes = out.data + r * out.stride;
    if (are_finite) {
      EncodeFloatRow<Format, true>(rows, rows.row(r), columns, out.bypasses_cache, codes, factor);
    } else {
      EncodeFloatRow<Format, false>(rows, rows.row(r), columns, out.bypasses_cache, codes, factor);
    }
  }
}

}  // namespace moire::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
