// One micro-tile: kRows rows of scalars times kVectors vectors, all sums in registers.
// Highway per-target inline header: included once for each target.
#if defined(MOIRE_BACKEND_CPU_GEMM_MICRO_KERNEL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOIRE_BACKEND_CPU_GEMM_MICRO_KERNEL_INL_H_
#undef MOIRE_BACKEND_CPU_GEMM_MICRO_KERNEL_INL_H_
#else
#define MOIRE_BACKEND_CPU_GEMM_MICRO_KERNEL_INL_H_
#endif

#include <hwy/highway.h>

#include <cstdint>

#include "backend/cpu/gemm/kernels.h"

HWY_BEFORE_NAMESPACE();
namespace moire::cpu::gemm::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using FloatTag = hn::ScalableTag<float>;
using FloatVector = hn::Vec<FloatTag>;
inline constexpr int64_t kLanes = static_cast<int64_t>(hn::MaxLanes(FloatTag()));

// 12 sums, 2 vectors and 1 broadcast of 16 registers; 24 sums of 32, where the broadcast is part of
// the multiply-add.
#if HWY_TARGET <= HWY_AVX3 || HWY_ARCH_ARM_A64
inline constexpr int kMicroRows = 8, kMicroVectors = 3;
#else
inline constexpr int kMicroRows = 6, kMicroVectors = 2;
#endif
inline constexpr int64_t kPanelWidth = kMicroVectors * kLanes;

// The first `columns` columns of the micro-tile; all but the last vector are full.
template <int kRows, int kVectors>
HWY_INLINE void WriteSums(const FloatVector (&sums)[kRows][kVectors], const Target& target,
                          int64_t columns) {
  const FloatTag d;
  const auto last = hn::FirstN(d, static_cast<size_t>(columns - (kVectors - 1) * kLanes));
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    float* const row = target.data + r * target.pitch;
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      FloatVector sum = sums[r][v];
      if (v + 1 < kVectors || columns == kVectors * kLanes) {
        if (target.write == Write::kAdd) sum = hn::Add(hn::LoadU(d, row + v * kLanes), sum);
        hn::StoreU(sum, d, row + v * kLanes);
      } else {
        if (target.write == Write::kAdd) {
          sum = hn::Add(hn::MaskedLoad(last, d, row + v * kLanes), sum);
        }
        hn::BlendedStore(sum, last, d, row + v * kLanes);
      }
    }
  }
}

template <int kRows, int kVectors>
HWY_NOINLINE void MicroKernel(const float* const* left, const float* HWY_RESTRICT right, int64_t kc,
                              const Target& target, int64_t columns) {
  const FloatTag d;
  FloatVector sums[kRows][kVectors];
  const float* rows[kRows];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    rows[r] = left[r];
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) sums[r][v] = hn::Zero(d);
  }
#pragma GCC unroll 2
  for (int64_t k = 0; k < kc; ++k) {
    FloatVector columns_k[kVectors];
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) columns_k[v] = hn::Load(d, right + v * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const FloatVector scalar = hn::Set(d, rows[r][k]);
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        sums[r][v] = hn::MulAdd(scalar, columns_k[v], sums[r][v]);
      }
    }
    right += kVectors * kLanes;
  }
  WriteSums(sums, target, columns);
}

}  // namespace moire::cpu::gemm::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggle
