// Sums over columns that do not depend on the vector width: column j of a segment goes to lane
// j mod 16, one FMA chain per lane from zero, and the 16 lanes are added as a fixed tree (i + 8,
// then i + 4, i + 2, i + 1). A row is cut into segments of 64 columns from its first one; the
// segments' sums are added in order, from zero.
#include "backend/cpu/convert-inl.h"

#if defined(MOIRE_LANE_SUMS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOIRE_LANE_SUMS_INL_H_
#undef MOIRE_LANE_SUMS_INL_H_
#else
#define MOIRE_LANE_SUMS_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace moire::cpu::HWY_NAMESPACE {

inline constexpr size_t kSegment = 64;  // columns
inline constexpr size_t kSumLanes = 16;

inline constexpr size_t PaddedColumns(size_t n) {
  return (n + kSumLanes - 1) / kSumLanes * kSumLanes;
}

// Zeroes the columns from n to the next multiple of 16, which sums and activations read.
HWY_INLINE void PadSegment(float* segment, size_t n) {
  for (size_t j = n; j < PaddedColumns(n); ++j) segment[j] = 0.0F;
}

// The fixed tree over the 16 lanes, in place; returns their sum.
HWY_INLINE float FoldLanes(float* sums) {
  for (size_t half = kSumLanes / 2; half != 0; half /= 2) {
    for (size_t i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
  return sums[0];
}

// sum_j a_j * b_j over `columns` columns, a multiple of 16, of two formats.
template <class A, class B>
HWY_INLINE float DotLanes(const typename A::Element* a, const typename B::Element* b,
                          size_t columns) {
  const FloatTag d;
  const size_t lanes = hn::Lanes(d);
  alignas(64) float sums[kSumLanes];
  for (size_t lane = 0; lane < kSumLanes; lane += lanes) {
    auto sum = hn::Zero(d);
    for (size_t j = lane; j < columns; j += kSumLanes) {
      sum = hn::MulAdd(A::Load(d, a + j), B::Load(d, b + j), sum);
    }
    hn::Store(sum, d, sums + lane);
  }
  return FoldLanes(sums);
}

// sum_j a_j * b_j over one segment of n <= 64 columns, both 64-byte aligned and zero-padded.
inline float DotSegment(const float* HWY_RESTRICT a, const float* HWY_RESTRICT b, size_t n) {
  return DotLanes<Fp32, Fp32>(a, b, PaddedColumns(n));
}

// The same for a segment in memory, of any format, and a zero-padded one in FP32.
template <class Format>
HWY_INLINE float DotStoredSegment(const typename Format::Element* a, const float* HWY_RESTRICT b,
                                  size_t n) {
  if (n == kSegment) return DotLanes<Format, Fp32>(a, b, kSegment);
  alignas(64) float rest[kSegment];
  DecodeRun<Format>(a, n, rest);
  PadSegment(rest, n);
  return DotSegment(rest, b, n);
}

}  // namespace moire::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
