// One token's row from several, y = sum of weight * row, in FP32, rounded once: the entries of a
// token in the order that they have. What they are (top-k entries, ranks) is an object with `count`
// entries, next(j), weight(j) and row<Element>(j).
#include <cmath>

#include "backend/cpu/convert-inl.h"
#include "backend/cpu/rows.h"

#if defined(MOIRE_SUM_ENTRIES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOIRE_SUM_ENTRIES_INL_H_
#undef MOIRE_SUM_ENTRIES_INL_H_
#else
#define MOIRE_SUM_ENTRIES_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace moire::cpu::HWY_NAMESPACE {

// Vectors of a row that one step keeps in registers.
constexpr size_t kVectors = 4;

// kVectors vectors of y from column c on. The first entry starts the sum, so that a single entry of
// weight 1 keeps the sign of its zeros.
template <class From, class To, class Entries>
HWY_INLINE void SumStep(const Entries& entries, size_t c, typename To::Element* y) {
  using Element = typename From::Element;
  const FloatTag d;
  const size_t lanes = hn::Lanes(d);
  hn::VFromD<FloatTag> s0 = hn::Zero(d), s1 = s0, s2 = s0, s3 = s0;
  int64_t j = entries.next(0);
  if (j < entries.count) {
    const Element* row = entries.template row<Element>(j) + c;
    const auto w = hn::Set(d, entries.weight(j));
    s0 = hn::Mul(w, From::Load(d, row));
    s1 = hn::Mul(w, From::Load(d, row + lanes));
    s2 = hn::Mul(w, From::Load(d, row + 2 * lanes));
    s3 = hn::Mul(w, From::Load(d, row + 3 * lanes));
  }
  for (j = entries.next(j + 1); j < entries.count; j = entries.next(j + 1)) {
    const Element* row = entries.template row<Element>(j) + c;
    const auto w = hn::Set(d, entries.weight(j));
    s0 = hn::MulAdd(w, From::Load(d, row), s0);
    s1 = hn::MulAdd(w, From::Load(d, row + lanes), s1);
    s2 = hn::MulAdd(w, From::Load(d, row + 2 * lanes), s2);
    s3 = hn::MulAdd(w, From::Load(d, row + 3 * lanes), s3);
  }
  To::Store(d, s0, y + c);
  To::Store(d, s1, y + c + lanes);
  To::Store(d, s2, y + c + 2 * lanes);
  To::Store(d, s3, y + c + 3 * lanes);
}

// The same sum for one column, for those that do not fill a step.
template <class From, class To, class Entries>
HWY_INLINE void SumColumn(const Entries& entries, size_t c, typename To::Element* y) {
  using Element = typename From::Element;
  const auto value = [&](int64_t j) { return From::decode(entries.template row<Element>(j)[c]); };
  float sum = 0.0F;
  int64_t j = entries.next(0);
  if (j < entries.count) sum = entries.weight(j) * value(j);
  for (j = entries.next(j + 1); j < entries.count; j = entries.next(j + 1)) {
    sum = std::fma(entries.weight(j), value(j), sum);
  }
  y[c] = To::encode(sum);
}

template <class From, class To, class Entries>
void SumInto(const Entries& entries, size_t columns, typename To::Element* y) {
  const size_t step = kVectors * hn::Lanes(FloatTag());
  size_t c = 0;
  for (; c + step <= columns; c += step) SumStep<From, To>(entries, c, y);
  for (; c < columns; ++c) SumColumn<From, To>(entries, c, y);
}

// Row `token` of y, whose dtype is From's or FP32.
template <class From, class Entries>
void SumEntries(const Entries& entries, const TensorView& y, int64_t token) {
  const auto columns = static_cast<size_t>(y.columns());
  if (y.type() == From::kDType) {
    SumInto<From, From>(entries, columns, row_of<typename From::Element>(y, token));
  } else {
    SumInto<From, Fp32>(entries, columns, row_of<float>(y, token));
  }
}

}  // namespace moire::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
