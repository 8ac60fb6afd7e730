// What is quantised: rows of floats or of a storage type, and the magnitudes of their elements.
// Include after simd_targets.h, inside the foreach_target pattern.
#include "backend/cpu/quantize_scales-inl.h"

#if defined(MOIRE_QUANTIZE_VALUES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOIRE_QUANTIZE_VALUES_INL_H_
#undef MOIRE_QUANTIZE_VALUES_INL_H_
#else
#define MOIRE_QUANTIZE_VALUES_INL_H_
#endif

#include <hwy/cache_control.h>

HWY_BEFORE_NAMESPACE();
namespace moire::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// The rows of a piece, each from its first column on.
template <class Source>
struct PitchedRows {
  using Format = Source;
  const typename Source::Element* first;
  int64_t pitch;

  const typename Source::Element* row(int64_t r) const { return first + r * pitch; }
  HWY_INLINE void prefetch(const typename Source::Element*, int64_t) const {}
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
};

// The same rows from `column` on.
template <class Source>
PitchedRows<Source> advanced(const PitchedRows<Source>& rows, int64_t column) {
  return {rows.first + column, rows.pitch};
}
template <class Source>
ListedRows<Source> advanced(const ListedRows<Source>& rows, int64_t column) {
  return {rows.rows, rows.column + column, rows.ahead};
}
// The same rows, read before.
template <class Source>
PitchedRows<Source> settled(const PitchedRows<Source>& rows) {
  return rows;
}
template <class Source>
ListedRows<Source> settled(const ListedRows<Source>& rows) {
  return {rows.rows, rows.column, 0};
}

// Past the cache only where p is aligned.
template <class D>
HWY_INLINE void StoreCodes(D d, hn::VFromD<D> codes, bool bypasses_cache, uint8_t* p) {
  if (bypasses_cache && hn::MaxLanes(d) >= 16) {
    hn::Stream(codes, d, p);
  } else {
    hn::StoreU(codes, d, p);
  }
}

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

}  // namespace moire::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
