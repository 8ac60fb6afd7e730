// The set of kernels of each target, and the choice among them.
#include "backend/cpu/gemm/kernels.h"

#include "backend/cpu/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/gemm/kernels.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "backend/cpu/fp8-inl.h"
#include "backend/cpu/gemm/micro_kernel-inl.h"
#include "backend/cpu/gemm/pack-inl.h"
#include "backend/cpu/glu_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moire::cpu::gemm::HWY_NAMESPACE {
namespace {

constexpr int64_t kCacheLine = 64;

using MicroKernelFn = void (*)(const float* const*, const float*, int64_t, const Target&, int64_t);

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

// Lines [first, first + count) of each row of what comes next, into the second-level cache.
HWY_INLINE void Prefetch(const Upcoming& upcoming, int64_t first, int64_t count) {
  const int64_t begin = first * kCacheLine;
  const int64_t end = std::min(begin + count * kCacheLine, upcoming.bytes);
  for (int64_t r = 0; r < upcoming.num_rows; ++r) {
    const char* row = static_cast<const char*>(upcoming.rows[r]);
    for (int64_t at = begin; at < end; at += kCacheLine) __builtin_prefetch(row + at, 0, 2);
  }
}

void Multiply(const float* const* left, int64_t num_rows, const float* right, int64_t num_columns,
              int64_t kc, const Target& target, const Upcoming& upcoming) {
  const MicroKernelFn* kernels_of_rows = kMicroKernels.entry + (num_rows - 1) * kMicroVectors;
  const int64_t panels = (num_columns + kPanelWidth - 1) / kPanelWidth;
  const int64_t lines_per_panel =
      (upcoming.bytes + kCacheLine * panels - 1) / (kCacheLine * std::max<int64_t>(panels, 1));
  for (int64_t panel = 0; panel < panels; ++panel) {
    Prefetch(upcoming, panel * lines_per_panel, lines_per_panel);
    const int64_t column = panel * kPanelWidth, width = std::min(kPanelWidth, num_columns - column);
    const Target micro_tile{target.data + column, target.pitch, target.write};
    kernels_of_rows[(width - 1) / kLanes](left, right + column * kc, kc, micro_tile, width);
  }
}

void Decode(const void* source, DType dtype, int64_t n, float* target) {
  cpu::HWY_NAMESPACE::DecodeRow(source, dtype, static_cast<size_t>(n), target);
}

void Encode(const float* source, int64_t n, DType dtype, void* target) {
  cpu::HWY_NAMESPACE::EncodeRow(source, static_cast<size_t>(n), dtype, target);
}

void DecodePairs(const void* row, DType dtype, const ResolvedGluLayout& layout, int64_t first,
                 int64_t n, float* target) {
  namespace glu = cpu::HWY_NAMESPACE;
  alignas(64) float gate[glu::kGluSegment], up[glu::kGluSegment];
  const auto count = static_cast<size_t>(n);
  glu::LoadGluSegment(row, dtype, layout, first, count, gate, up);
  std::memcpy(target, gate, count * sizeof(float));
  std::memcpy(target + n, up, count * sizeof(float));
}

void DecodeFp8Rows(const Fp8Row& row, int64_t stride, int64_t num_rows, int64_t first, int64_t n,
                   float* target) {
  namespace fp8 = cpu::HWY_NAMESPACE;
  fp8::DecodeColumnwise(fp8::ColumnScaledRows{row.data, stride, num_rows}, row.dtype, row.scales,
                        row.scale_dtype, first, n, target);
}

void DecodeFp8(const Fp8Row& row, int64_t first, int64_t n, float* target) {
  namespace fp8 = cpu::HWY_NAMESPACE;
  if (row.scale_per_column) return DecodeFp8Rows(row, 0, 1, first, n, target);
  fp8::DecodeRowwise(row.data, row.dtype, row.scales, row.scale_dtype, first, n, target);
}

// Whole runs where the halves have some; else their elements lie together, and are parted after.
void DecodeFp8Pairs(const Fp8Row& row, const ResolvedGluLayout& layout, int64_t first, int64_t n,
                    float* target) {
  namespace glu = cpu::HWY_NAMESPACE;
  float* const one = layout.gate_first ? target : target + n;
  float* const two = layout.gate_first ? target + n : target;
  if (layout.block == 1) {
    alignas(64) float pairs[2 * glu::kGluSegment];
    DecodeFp8(row, 2 * first, 2 * n, pairs);
    DecodePairs(pairs, DType::kFP32, layout, 0, n, target);
    return;
  }
  glu::for_each_run(layout, first, static_cast<size_t>(n),
                    [&](int64_t i, int64_t p, int64_t q, size_t length) {
                      DecodeFp8(row, p, static_cast<int64_t>(length), one + i);
                      DecodeFp8(row, q, static_cast<int64_t>(length), two + i);
                    });
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
  static constexpr Kernels set = {
      kMicroRows,    kPanelWidth,    kLanes,    Decode,    Encode,       DecodePairs, DecodeFp8,
      DecodeFp8Rows, DecodeFp8Pairs, AddScaled, Transpose, CopyToPanels, Multiply};
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
