// Gated activations on a segment (at most 64 columns of F) of one row, in FP32 buffers: what the
// glu ops and the GEMM epilogues share, so that fused and unfused results have the same bits.
//
// Buffers are float[kGluSegment] (or a larger multiple of 64, where said), 64-byte aligned. Inputs
// of n columns are zero-padded to the next multiple of 16 (LoadGluSegment and LoadSegment do it;
// PadSegment for others). z and grad_act must have been rounded to their storage type (loading does
// that; RoundRow for accumulators).
//
// Order of operations, with h, h' and l as core/activation.h has them and everything rounded to
// FP32 after each step:
//   glu       = h * l
//   act       = glu * prob
//   grad_prob = sum of grad_act * glu, as lane_sums-inl.h adds; segments in order, from zero
//   grad_up   = (grad_act * prob) * h
//   grad_gate = ((grad_act * prob) * l) * h', both zero where a clamp stops them
#include "backend/cpu/activation-inl.h"
#include "backend/cpu/convert-inl.h"
#include "backend/cpu/lane_sums-inl.h"

#if defined(MOIRE_GLU_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOIRE_GLU_ROWS_INL_H_
#undef MOIRE_GLU_ROWS_INL_H_
#else
#define MOIRE_GLU_ROWS_INL_H_
#endif

#include <algorithm>

#include "core/glu_layout.h"

HWY_BEFORE_NAMESPACE();
namespace moire::cpu::HWY_NAMESPACE {

inline constexpr size_t kGluSegment = kSegment;

// Calls run(offset in the segment, position of the first half, position of the second, length) for
// each piece of columns first ... first + n - 1 in which both halves are contiguous. Where there is
// no gate nothing is at the second position, and `up` below is neither written nor read.
template <class Run>
HWY_INLINE void for_each_run(const ResolvedGluLayout& layout, int64_t first, size_t n, Run&& run) {
  const auto count = static_cast<int64_t>(n);
  for (int64_t i = 0; i < count;) {
    const int64_t column = first + i;
    const int64_t length = std::min(layout.block - column % layout.block, count - i);
    run(i, layout.first(column), layout.second(column), static_cast<size_t>(length));
    i += length;
  }
}

template <class Format>
inline void LoadGluColumns(const typename Format::Element* row, const ResolvedGluLayout& layout,
                           int64_t first, size_t n, float* gate, float* up) {
  float* const one = layout.gate_first ? gate : up;
  float* const two = layout.gate_first ? up : gate;
  if (layout.block != 1 || !layout.is_gated) {
    for_each_run(layout, first, n, [&](int64_t i, int64_t p, int64_t q, size_t length) HWY_ATTR {
      DecodeRun<Format>(row + p, length, one + i);
      if (layout.is_gated) DecodeRun<Format>(row + q, length, two + i);
    });
    return;
  }
  const FloatTag d;
  const size_t lanes = hn::Lanes(d);
  const auto* pairs = row + 2 * first;
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    auto x = hn::Zero(d), y = hn::Zero(d);
    Format::LoadPairs(d, pairs + 2 * i, x, y);
    hn::Store(x, d, one + i);
    hn::Store(y, d, two + i);
  }
  for (; i < n; ++i) {
    one[i] = Format::decode(pairs[2 * i]);
    two[i] = Format::decode(pairs[2 * i + 1]);
  }
}

template <class Format>
inline void StoreGluColumns(const float* gate, const float* up, const ResolvedGluLayout& layout,
                            int64_t first, size_t n, typename Format::Element* row) {
  const float* const one = layout.gate_first ? gate : up;
  const float* const two = layout.gate_first ? up : gate;
  if (layout.block != 1 || !layout.is_gated) {
    for_each_run(layout, first, n, [&](int64_t i, int64_t p, int64_t q, size_t length) HWY_ATTR {
      EncodeRun<Format>(one + i, length, row + p);
      if (layout.is_gated) EncodeRun<Format>(two + i, length, row + q);
    });
    return;
  }
  const FloatTag d;
  const size_t lanes = hn::Lanes(d);
  auto* pairs = row + 2 * first;
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    Format::StorePairs(d, hn::Load(d, one + i), hn::Load(d, two + i), pairs + 2 * i);
  }
  for (; i < n; ++i) {
    pairs[2 * i] = Format::encode(one[i]);
    pairs[2 * i + 1] = Format::encode(two[i]);
  }
}

// Columns first ... first + n - 1 of F, of both halves of a row of 2F, zero-padded.
inline void LoadGluSegment(const void* z_row, DType dtype, const ResolvedGluLayout& layout,
                           int64_t first, size_t n, float* gate, float* up) {
  with_format(dtype, [&](auto format) HWY_ATTR {
    using Format = decltype(format);
    LoadGluColumns<Format>(static_cast<const typename Format::Element*>(z_row), layout, first, n,
                           gate, up);
  });
  PadSegment(gate, n);
  if (layout.is_gated) PadSegment(up, n);
}

// The inverse: writes n columns of both halves, and nothing else.
inline void StoreGluSegment(const float* gate, const float* up, DType dtype,
                            const ResolvedGluLayout& layout, int64_t first, size_t n, void* z_row) {
  with_format(dtype, [&](auto format) HWY_ATTR {
    using Format = decltype(format);
    StoreGluColumns<Format>(gate, up, layout, first, n,
                            static_cast<typename Format::Element*>(z_row));
  });
}

// Columns first ... first + n - 1 of a plain row (grad_act), zero-padded.
inline void LoadSegment(const void* row, DType dtype, int64_t first, size_t n, float* out) {
  const auto* bytes = static_cast<const char*>(row) + first * dtype_size(dtype);
  DecodeRow(bytes, dtype, n, out);
  PadSegment(out, n);
}

// Calls f with the activation, or, where there is no gate, with what is left of it.
template <class F>
HWY_INLINE void with_gating(const moire_activation& activation, bool is_gated, F&& f) {
  with_activation(activation, [&](const auto& gated) { is_gated ? f(gated) : f(Ungated(gated)); });
}

// act = glu(gate, up) * prob for n columns (the padding is computed as well), as many as the
// buffers have. An absent prob is 1; up is null where there is no gate.
inline void GluForwardSegment(const moire_activation& activation, const float* HWY_RESTRICT gate,
                              const float* HWY_RESTRICT up, float prob, float* HWY_RESTRICT act,
                              size_t n) {
  const float* const b = up != nullptr ? up : gate;
  with_gating(activation, up != nullptr, [&](auto kind) HWY_ATTR {
    const FloatTag d;
    const auto p = hn::Set(d, prob);
    for (size_t j = 0; j < PaddedColumns(n); j += hn::Lanes(d)) {
      const Floats glu = glu_value(kind, hn::Load(d, gate + j), hn::Load(d, b + j));
      hn::Store(hn::Mul(glu, p), d, act + j);
    }
  });
}

// Gradients of n columns and glu(gate, up), and act again unless it is null. n may be any size that
// the buffers have; grad_prob's part of each 64 columns is DotSegment(grad_act, glu).
inline void GluGradients(const moire_activation& activation, const float* HWY_RESTRICT gate,
                         const float* HWY_RESTRICT up, const float* HWY_RESTRICT grad_act,
                         float prob, float* HWY_RESTRICT grad_gate, float* HWY_RESTRICT grad_up,
                         float* HWY_RESTRICT glu, float* HWY_RESTRICT act, size_t n) {
  const float* const b = up != nullptr ? up : gate;
  with_gating(activation, up != nullptr, [&](auto kind) HWY_ATTR {
    const FloatTag d;
    const auto p = hn::Set(d, prob);
    for (size_t j = 0; j < PaddedColumns(n); j += hn::Lanes(d)) {
      const GluGradient g = glu_gradient(kind, hn::Load(d, gate + j), hn::Load(d, b + j),
                                         hn::Load(d, grad_act + j), p);
      hn::Store(g.glu, d, glu + j);
      if (up != nullptr) hn::Store(g.up, d, grad_up + j);
      hn::Store(g.gate, d, grad_gate + j);
      if (act != nullptr) hn::Store(hn::Mul(g.glu, p), d, act + j);
    }
  });
}

// The same for one segment; returns its part of grad_prob.
inline float GluBackwardSegment(const moire_activation& activation, const float* HWY_RESTRICT gate,
                                const float* HWY_RESTRICT up, const float* HWY_RESTRICT grad_act,
                                float prob, float* HWY_RESTRICT grad_gate,
                                float* HWY_RESTRICT grad_up, float* HWY_RESTRICT act, size_t n) {
  alignas(64) float glu[kGluSegment];
  GluGradients(activation, gate, up, grad_act, prob, grad_gate, grad_up, glu, act, n);
  return DotSegment(grad_act, glu, n);
}

}  // namespace moire::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
