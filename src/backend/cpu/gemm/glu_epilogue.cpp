#include "backend/cpu/gemm/glu_epilogue.h"

#include "backend/cpu/row_blocks.h"
#include "backend/cpu/rows.h"
#include "backend/cpu/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/gemm/glu_epilogue.cpp"
#include <hwy/foreach_target.h>
// The inline headers come after foreach_target.h.
#include "backend/cpu/gemm/quantize_sums-inl.h"
#include "backend/cpu/glu_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moire::cpu::HWY_NAMESPACE {
namespace {

using gemm::Sums;

// target += added, for n columns of padded segments.
void add_segment(const float* added, size_t n, float* target) {
  const FloatTag d;
  for (size_t j = 0; j < PaddedColumns(n); j += hn::Lanes(d)) {
    hn::Store(hn::Add(hn::Load(d, target + j), hn::Load(d, added + j)), d, target + j);
  }
}

void copy_padded(const float* source, size_t n, float* target) {
  std::memcpy(target, source, n * sizeof(float));
  PadSegment(target, n);
}

// The sums of one row with their bias as z has them.
void load_z(const gemm::GluEpilogue& e, const float* sums, size_t n, const float* bias_gate,
            const float* bias_up, float* gate, float* up) {
  const auto load = [&](const float* half, const float* bias, float* target) HWY_ATTR {
    copy_padded(half, n, target);
    if (e.bias.is_present()) add_segment(bias, n, target);
    RoundRow(target, n, e.storage);
  };
  load(sums, bias_gate, gate);
  if (e.layout.is_gated) load(sums + n, bias_up, up);
}

void glu_forward(const gemm::GluEpilogue& e, const Sums& s) {
  const auto n = static_cast<size_t>(s.columns);
  const bool quantizes = e.quantized_act.is_fused();
  alignas(64) float gate[kGluSegment], up[kGluSegment];
  alignas(64) float bias_gate[kGluSegment], bias_up[kGluSegment];
  ValueBlock<kGluSegment> acts;
  if (e.bias.is_present()) {
    LoadGluSegment(gemm::element(e.bias, s.group, 0), e.bias.type(), e.layout, s.first_column, n,
                   bias_gate, bias_up);
  }
  for_each_row_block(s, e.groups, [&](const BlockRows& rows) HWY_ATTR {
    for (int64_t r = 0; r < rows.count; ++r) {
      const int64_t row = rows.first + r;
      float* const act = acts.row(quantizes ? r : 0);
      load_z(e, s.data + (row - s.first_row) * s.pitch, n, bias_gate, bias_up, gate, up);
      if (e.z.is_present()) {
        StoreGluSegment(gate, up, e.storage, e.layout, s.first_column, n,
                        gemm::element(e.z, row, 0));
      }
      GluForwardSegment(e.activation, gate, e.layout.is_gated ? up : nullptr, prob_of(e.probs, row),
                        act, n);
      if (e.act.is_present()) {
        EncodeRow(act, n, e.storage, gemm::element(e.act, row, s.first_column));
      }
      if (quantizes) RoundRow(act, n, e.storage);
    }
    if (quantizes) {
      QuantizeRows(e.quantized_act, e.groups, rows, acts.values, kGluSegment, s.first_column,
                   s.columns);
    }
  });
}

// Gradients of both halves' columns, or their sums.
struct GradSegments {
  alignas(64) float gate[kGluSegment], up[kGluSegment];

  void add(const GradSegments& other, size_t n, bool is_gated) {
    add_segment(other.gate, n, gate);
    if (is_gated) add_segment(other.up, n, up);
  }
};

// A row into the sum of its run (core/row_sums.h), and that, with the run's last row, into its
// block's partial sums, in the layout's places. Rows come in order, in whole runs.
void add_to_bias(const gemm::GluBackwardEpilogue& e, const Sums& s, int64_t row,
                 const GradSegments& grads, GradSegments& run) {
  const auto n = static_cast<size_t>(s.columns);
  const int64_t begin = e.groups.offsets[s.group], end = e.groups.offsets[s.group + 1];
  const int64_t row_in_group = row - begin;
  if (row_in_group % kRunRows == 0) run = {};
  run.add(grads, n, e.layout.is_gated);
  if (row_in_group % kRunRows != kRunRows - 1 && row + 1 != end) return;
  const int64_t block = RowBlocks(e.groups).first_of(s.group) + row_in_group / kBlockRows;
  float* const partial = e.bias_partials + block * e.layout.columns();
  GradSegments sum = {};
  if (row_in_group % kBlockRows >= kRunRows) {
    LoadGluSegment(partial, DType::kFP32, e.layout, s.first_column, n, sum.gate, sum.up);
  }
  sum.add(run, n, e.layout.is_gated);
  StoreGluSegment(sum.gate, sum.up, DType::kFP32, e.layout, s.first_column, n, partial);
}

// Values of grad_z on their way to its quantised copies: in the places of z where a chunk's places
// lie together, else the first halves and, kGluSegment further, the second ones.
void place_grad_z(const ResolvedGluLayout& layout, const float* grad_gate, const float* grad_up,
                  size_t n, float* target) {
  if (gemm::kGluChunk % layout.block == 0) {
    const ResolvedGluLayout chunk{static_cast<int64_t>(n), layout.block, layout.gate_first,
                                  layout.is_gated};
    return StoreGluSegment(grad_gate, grad_up, DType::kFP32, chunk, 0, n, target);
  }
  std::memcpy(target, layout.gate_first ? grad_gate : grad_up, n * sizeof(float));
  if (!layout.is_gated) return;
  std::memcpy(target + kGluSegment, layout.gate_first ? grad_up : grad_gate, n * sizeof(float));
}

void quantize_grad_z(const gemm::GluBackwardEpilogue& e, const Sums& s, const BlockRows& rows,
                     const float* values) {
  constexpr int64_t kPitch = 2 * kGluSegment;
  const auto quantize_at = [&](int64_t at, int64_t column, int64_t n) HWY_ATTR {
    QuantizeRows(e.quantized_grad_z, e.groups, rows, values + at, kPitch, column, n);
  };
  if (gemm::kGluChunk % e.layout.block == 0) {
    const int64_t halves = e.layout.is_gated ? 2 : 1;
    return quantize_at(0, halves * s.first_column, halves * s.columns);
  }
  for_each_run(e.layout, s.first_column, static_cast<size_t>(s.columns),
               [&](int64_t i, int64_t p, int64_t q, size_t length) HWY_ATTR {
                 quantize_at(i, p, static_cast<int64_t>(length));
                 if (!e.layout.is_gated) return;
                 quantize_at(static_cast<int64_t>(kGluSegment) + i, q,
                             static_cast<int64_t>(length));
               });
}

struct BackwardRow {
  alignas(64) float gate[kGluSegment], up[kGluSegment], grad_act[kGluSegment];
  GradSegments grads, run;
};

// One row: everything but the quantised copies. `act` may be null.
void backward_row(const gemm::GluBackwardEpilogue& e, const Sums& s, int64_t row, BackwardRow& b,
                  float* act) {
  const auto n = static_cast<size_t>(s.columns);
  const DType storage = e.z.type();
  copy_padded(s.data + (row - s.first_row) * s.pitch, n, b.grad_act);
  RoundRow(b.grad_act, n, storage);
  LoadGluSegment(gemm::element(e.z, row, 0), storage, e.layout, s.first_column, n, b.gate, b.up);
  const float grad_prob =
      GluBackwardSegment(e.activation, b.gate, e.layout.is_gated ? b.up : nullptr, b.grad_act,
                         prob_of(e.probs, row), b.grads.gate, b.grads.up, act, n);
  if (e.grad_z.is_present()) {
    StoreGluSegment(b.grads.gate, b.grads.up, storage, e.layout, s.first_column, n,
                    gemm::element(e.grad_z, row, 0));
  }
  if (e.act.is_present()) {
    EncodeRow(act, n, storage, gemm::element(e.act, row, s.first_column));
  }
  if (e.prob_partials != nullptr) {
    const int64_t segments = ceil_div(e.layout.f, gemm::kGluChunk);
    e.prob_partials[row * segments + s.first_column / gemm::kGluChunk] = grad_prob;
  }
  if (e.bias_partials == nullptr && !e.quantized_grad_z.is_fused()) return;
  RoundRow(b.grads.gate, n, storage);
  if (e.layout.is_gated) RoundRow(b.grads.up, n, storage);
  if (e.bias_partials != nullptr) add_to_bias(e, s, row, b.grads, b.run);
}

void glu_backward(const gemm::GluBackwardEpilogue& e, const Sums& s) {
  const auto n = static_cast<size_t>(s.columns);
  const bool quantizes_act = e.quantized_act.is_fused();
  const bool quantizes_grad_z = e.quantized_grad_z.is_fused();
  const bool needs_act = e.act.is_present() || quantizes_act;
  BackwardRow row_buffers;
  ValueBlock<kGluSegment> acts;
  ValueBlock<2 * kGluSegment> grad_zs;
  for_each_row_block(s, e.groups, [&](const BlockRows& rows) HWY_ATTR {
    for (int64_t r = 0; r < rows.count; ++r) {
      float* const act = needs_act ? acts.row(quantizes_act ? r : 0) : nullptr;
      backward_row(e, s, rows.first + r, row_buffers, act);
      if (quantizes_act) RoundRow(act, n, e.z.type());
      if (quantizes_grad_z) {
        place_grad_z(e.layout, row_buffers.grads.gate, row_buffers.grads.up, n, grad_zs.row(r));
      }
    }
    if (quantizes_act) {
      QuantizeRows(e.quantized_act, e.groups, rows, acts.values, kGluSegment, s.first_column,
                   s.columns);
    }
    if (quantizes_grad_z) quantize_grad_z(e, s, rows, grad_zs.values);
  });
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
