// Dot products whose bits do not depend on the vector width, threads or tiles. Include after
// simd_targets.h, inside the foreach_target pattern.
//
// A partial sum covers 64 columns: 16 running sums, column c going to sum c % 16 by fused
// multiply-add, then folded in halves (sum l takes sum l + 8, then + 4, + 2, + 1). The partial sums
// are added in order.
#include <hwy/highway.h>

#if defined(MOIRE_LANE_SUM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOIRE_LANE_SUM_INL_H_
#undef MOIRE_LANE_SUM_INL_H_
#else
#define MOIRE_LANE_SUM_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "backend/cpu/convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moire::cpu::HWY_NAMESPACE {

inline constexpr size_t kSumLanes = 16;
inline constexpr size_t kPartialColumns = 64;

HWY_INLINE float FoldLanes(float* sums) {
  for (size_t half = kSumLanes / 2; half != 0; half /= 2) {
    for (size_t l = 0; l < half; ++l) sums[l] += sums[l + half];
  }
  return sums[0];
}

// One partial sum, of 64 columns.
template <class A, class B>
HWY_INLINE float DotPartial(const typename A::Element* a, const typename B::Element* b) {
  const FloatTag d;
  const size_t lanes = hn::Lanes(d);
  HWY_ALIGN float sums[kSumLanes];
  for (size_t first = 0; first < kSumLanes; first += lanes) {
    auto sum = hn::Mul(A::Load(d, a + first), B::Load(d, b + first));
    for (size_t c = first + kSumLanes; c < kPartialColumns; c += kSumLanes) {
      sum = hn::MulAdd(A::Load(d, a + c), B::Load(d, b + c), sum);
    }
    hn::Store(sum, d, sums + first);
  }
  return FoldLanes(sums);
}

// Sum of a[c] * b[c]; the last partial sum is filled up with zeros.
template <class A, class B>
HWY_INLINE float Dot(const typename A::Element* a, const typename B::Element* b, size_t n) {
  float total = 0.0F;
  size_t c = 0;
  for (; c + kPartialColumns <= n; c += kPartialColumns) total += DotPartial<A, B>(a + c, b + c);
  if (c == n) return total;
  float a_rest[kPartialColumns] = {}, b_rest[kPartialColumns] = {};
  DecodeRun<A>(a + c, n - c, a_rest);
  DecodeRun<B>(b + c, n - c, b_rest);
  return total + DotPartial<Fp32, Fp32>(a_rest, b_rest);
}

}  // namespace moire::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
