#include "backend/cpu/gemm/glu_epilogue.h"

#include "backend/cpu/row_blocks.h"
#include "backend/cpu/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/gemm/glu_epilogue.cpp"
#include <hwy/foreach_target.h>
// The inline headers come after foreach_target.h.
#include "backend/cpu/glu_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moire::cpu::HWY_NAMESPACE {
namespace {

using gemm::Sums;

inline float prob_of(const TensorView& probs, int64_t row) {
  return probs.is_present() ? static_cast<const float*>(probs.data)[row] : 1.0F;
}

// target[j] = a[j] + b[j] for n columns, zero-padded to whole segments of 16.
void add_padded(const float* a, const float* b, size_t n, float* target) {
  std::memcpy(target, a, n * sizeof(float));
  PadSegment(target, n);
  const FloatTag d;
  for (size_t j = 0; j < PaddedColumns(n); j += hn::Lanes(d)) {
    hn::Store(hn::Add(hn::Load(d, target + j), hn::Load(d, b + j)), d, target + j);
  }
}

void copy_padded(const float* source, size_t n, float* target) {
  std::memcpy(target, source, n * sizeof(float));
  PadSegment(target, n);
}

void glu_forward(const gemm::GluEpilogue& e, const Sums& s) {
  const auto n = static_cast<size_t>(s.columns);
  const DType dtype = e.act.type();
  alignas(64) float gate[kGluSegment], up[kGluSegment], act[kGluSegment];
  alignas(64) float bias_gate[kGluSegment], bias_up[kGluSegment];
  if (e.bias.is_present()) {
    LoadGluSegment(gemm::element(e.bias, s.group, 0), e.bias.type(), e.layout, s.first_column, n,
                   bias_gate, bias_up);
  }
  for (int64_t r = 0; r < s.rows; ++r) {
    const float* const sums = s.data + r * s.pitch;
    if (e.bias.is_present()) {
      add_padded(sums, bias_gate, n, gate);
      add_padded(sums + n, bias_up, n, up);
    } else {
      copy_padded(sums, n, gate);
      copy_padded(sums + n, n, up);
    }
    RoundRow(gate, n, dtype);
    RoundRow(up, n, dtype);
    const int64_t row = s.first_row + r;
    if (e.z.is_present()) {
      StoreGluSegment(gate, up, dtype, e.layout, s.first_column, n, gemm::element(e.z, row, 0));
    }
    GluForwardSegment(e.activation, gate, up, prob_of(e.probs, row), act, n);
    EncodeRow(act, n, dtype, gemm::element(e.act, row, s.first_column));
  }
}

// partial += grad for the columns of both halves, in the layout's places.
void add_to_partial(const ResolvedGluLayout& layout, int64_t first, size_t n,
                    const float* grad_gate, const float* grad_up, float* partial) {
  alignas(64) float gate[kGluSegment], up[kGluSegment];
  LoadGluSegment(partial, DType::kFP32, layout, first, n, gate, up);
  const FloatTag d;
  for (size_t j = 0; j < PaddedColumns(n); j += hn::Lanes(d)) {
    hn::Store(hn::Add(hn::Load(d, gate + j), hn::Load(d, grad_gate + j)), d, gate + j);
    hn::Store(hn::Add(hn::Load(d, up + j), hn::Load(d, grad_up + j)), d, up + j);
  }
  StoreGluSegment(gate, up, DType::kFP32, layout, first, n, partial);
}

void add_to_bias(const gemm::GluBackwardEpilogue& e, const Sums& s, int64_t row, float* grad_gate,
                 float* grad_up) {
  const auto n = static_cast<size_t>(s.columns);
  const int64_t row_in_group = row - e.groups.offsets[s.group];
  const int64_t block = RowBlocks(e.groups).first_of(s.group) + row_in_group / kBlockRows;
  float* const partial = e.bias_partials + block * 2 * e.layout.f;
  if (row_in_group % kBlockRows == 0) {
    alignas(64) const float zeros[kGluSegment] = {};
    StoreGluSegment(zeros, zeros, DType::kFP32, e.layout, s.first_column, n, partial);
  }
  RoundRow(grad_gate, n, e.z.type());
  RoundRow(grad_up, n, e.z.type());
  add_to_partial(e.layout, s.first_column, n, grad_gate, grad_up, partial);
}

void glu_backward(const gemm::GluBackwardEpilogue& e, const Sums& s) {
  const auto n = static_cast<size_t>(s.columns);
  const DType dtype = e.z.type();
  const int64_t segments = (e.layout.f + gemm::kGluChunk - 1) / gemm::kGluChunk;
  alignas(64) float gate[kGluSegment], up[kGluSegment], grad_act[kGluSegment];
  alignas(64) float grad_gate[kGluSegment], grad_up[kGluSegment], act[kGluSegment];
  for (int64_t r = 0; r < s.rows; ++r) {
    const int64_t row = s.first_row + r;
    copy_padded(s.data + r * s.pitch, n, grad_act);
    RoundRow(grad_act, n, dtype);
    LoadGluSegment(gemm::element(e.z, row, 0), dtype, e.layout, s.first_column, n, gate, up);
    const float grad_prob =
        GluBackwardSegment(e.activation, gate, up, grad_act, prob_of(e.probs, row), grad_gate,
                           grad_up, e.act.is_present() ? act : nullptr, n);
    StoreGluSegment(grad_gate, grad_up, dtype, e.layout, s.first_column, n,
                    gemm::element(e.grad_z, row, 0));
    if (e.act.is_present()) {
      EncodeRow(act, n, dtype, gemm::element(e.act, row, s.first_column));
    }
    if (e.prob_partials != nullptr) {
      e.prob_partials[row * segments + s.first_column / gemm::kGluChunk] = grad_prob;
    }
    if (e.bias_partials != nullptr) add_to_bias(e, s, row, grad_gate, grad_up);
  }
}

}  // namespace
}  // namespace moire::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace moire::cpu {
namespace {
HWY_EXPORT(glu_forward);
HWY_EXPORT(glu_backward);
}  // namespace

void gemm::GluEpilogue::apply(const Sums& sums) const {
  HWY_DYNAMIC_DISPATCH(glu_forward)(*this, sums);
}

void gemm::GluBackwardEpilogue::apply(const Sums& sums) const {
  HWY_DYNAMIC_DISPATCH(glu_backward)(*this, sums);
}

}  // namespace moire::cpu
#endif
