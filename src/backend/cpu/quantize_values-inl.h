// What is quantised: rows of floats or of a storage type, their magnitudes, and the encoding of a
// vector of them. Include after simd_targets.h, inside the foreach_target pattern.
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

template <class D>
using SignedOf = hn::VFromD<hn::RebindToSigned<D>>;

// The rows of a piece, each from its first column on.
template <class Source>
struct PitchedRows {
  using Format = Source;
  const typename Source::Element* first;
  int64_t pitch;

  const typename Source::Element* row(int64_t r) const { return first + r * pitch; }
  HWY_INLINE void prefetch(const typename Source::Element*) const {}
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
  HWY_INLINE void prefetch(const typename Source::Element* p) const {
    if (ahead != 0) hwy::Prefetch(p + ahead);
  }
};

inline constexpr int32_t kInfinityBits = 0x7F800000;

// Blocks along rows whose scales are computed together.
inline constexpr int64_t kScaleBatch = 16;
// Columns whose scales are computed together: rows are read and written that far at a time.
inline constexpr int64_t kColumnBatch = 1024;
// Rows that a pass over the columns' largest values so far takes together.
inline constexpr int64_t kRowsPerPass = 4;

// The bits of |x|, which order as the values do; NaN counts as zero where kSkipsNan.
template <class Source, bool kSkipsNan, class D>
HWY_INLINE SignedOf<D> Magnitude(D d, const typename Source::Element* p) {
  const hn::RebindToSigned<D> di;
  const auto bits = hn::And(hn::BitCast(di, Source::Load(d, p)), hn::Set(di, 0x7FFFFFFF));
  if constexpr (!kSkipsNan) return bits;
  return hn::IfThenZeroElse(hn::Gt(bits, hn::Set(di, kInfinityBits)), bits);
}

// Finite values of a block are never scaled past what rounds to the largest code.
template <class Format, bool kFinite, class D>
HWY_INLINE void EncodeVector(D d, hn::VFromD<D> v, uint8_t* code) {
  if constexpr (kFinite) {
    Format::StoreLowByte(d, v, code);
  } else {
    Format::Store(d, v, code);
  }
}

// The same rows from `column` on.
template <class Source>
PitchedRows<Source> advanced(const PitchedRows<Source>& rows, int64_t column) {
  return {rows.first + column, rows.pitch};
}
template <class Source>
ListedRows<Source> advanced(const ListedRows<Source>& rows, int64_t column) {
  return {rows.rows, rows.column + column, rows.ahead};
}

}  // namespace moire::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
