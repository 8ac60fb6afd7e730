// The set of kernels of each target, and the choice among them.
#include "backend/cpu/gemm/kernels.h"

#include "backend/cpu/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/gemm/kernels.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "backend/cpu/convert-inl.h"
#include "backend/cpu/gemm/micro_kernel-inl.h"
#include "backend/cpu/gemm/pack-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moire::cpu::gemm::HWY_NAMESPACE {
namespace {

using MicroKernelFn = void (*)(const float* const*, const float*, int64_t, float*, int64_t, int64_t,
                               bool);

template <int... kIndex>
constexpr auto micro_kernel_table(std::integer_sequence<int, kIndex...>) {
  struct Table {
    MicroKernelFn entry[kMicroRows * kMicroVectors];
  };
  return Table{{MicroKernel<kIndex / kMicroVectors + 1, kIndex % kMicroVectors + 1>...}};
}

// [rows - 1][vectors - 1]
constexpr auto kMicroKernels =
    micro_kernel_table(std::make_integer_sequence<int, kMicroRows * kMicroVectors>());

void Multiply(const float* const* left, int64_t num_rows, const float* right, int64_t num_columns,
              int64_t kc, float* sum, int64_t pitch, bool accumulate) {
  const MicroKernelFn* kernels_of_rows = kMicroKernels.entry + (num_rows - 1) * kMicroVectors;
  int64_t column = 0;
  for (; column + kPanelWidth <= num_columns; column += kPanelWidth) {
    kernels_of_rows[kMicroVectors - 1](left, right + column * kc, kc, sum + column, pitch,
                                       kPanelWidth, accumulate);
  }
  if (const int64_t rest = num_columns - column; rest != 0) {
    const int64_t vectors = (rest + kLanes - 1) / kLanes;
    kernels_of_rows[vectors - 1](left, right + column * kc, kc, sum + column, pitch, rest,
                                 accumulate);
  }
}

void Decode(const void* source, DType dtype, int64_t n, float* target) {
  cpu::HWY_NAMESPACE::DecodeRow(source, dtype, static_cast<size_t>(n), target);
}

void Encode(const float* source, int64_t n, DType dtype, void* target) {
  cpu::HWY_NAMESPACE::EncodeRow(source, static_cast<size_t>(n), dtype, target);
}

void AddScaled(const float* values, float scale, int64_t n, float* sums) {
  const FloatTag d;
  const auto factor = hn::Set(d, scale);
  for (int64_t i = 0; i < n; i += kLanes) {
    const auto live = hn::FirstN(d, static_cast<size_t>(std::min(kLanes, n - i)));
    const auto value = hn::MaskedLoad(live, d, values + i);
    const auto sum = hn::MulAdd(factor, value, hn::MaskedLoad(live, d, sums + i));
    hn::BlendedStore(sum, live, d, sums + i);
  }
}

const Kernels* GetKernels() {
  static constexpr Kernels set = {kMicroRows, kPanelWidth, kLanes,       Decode,  Encode,
                                  AddScaled,  Transpose,   CopyToPanels, Multiply};
  return &set;
}

}  // namespace
}  // namespace moire::cpu::gemm::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace moire::cpu::gemm {

HWY_EXPORT(GetKernels);

const Kernels& kernels() { return *HWY_DYNAMIC_DISPATCH(GetKernels)(); }

}  // namespace moire::cpu::gemm
#endif
