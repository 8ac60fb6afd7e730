// What the GEMMs with a gated activation do with finished sums. The arithmetic on a row is that of
// glu_rows-inl.h, which the standalone ops use as well: fused and unfused results have equal bits.
#pragma once

#include <moire/glu.h>

#include "backend/cpu/gemm/engine.h"
#include "core/glu_layout.h"

namespace moire::cpu::gemm {

// z = round(sum + bias), kept or not; act = round(glu(z) * prob). Sums of a paired product.
struct GluEpilogue {
  moire_activation activation;
  ResolvedGluLayout layout;
  TensorView bias, probs, z, act;

  void apply(const Sums& sums) const;
};

// grad_act = round(sum); then grad_z, act, and partial sums of grad_probs and grad_bias.
struct GluBackwardEpilogue {
  moire_activation activation;
  ResolvedGluLayout layout;
  const int64_t* offsets;
  TensorView z, probs, grad_z, act;
  float* prob_partials;  // [capacity][ceil(F / 64)], or null
  float* bias_partials;  // [bias_partial_rows][2F] as grad_z lies, or null

  void apply(const Sums& sums) const;
};

// Rows of the batch that one partial sum of a bias gradient covers, from the group's first row on.
inline constexpr int64_t kBiasPartialRows = 64;

// Group g's partial sums start at row offsets[g] / 64 + g: regions never overlap, since
// ceil(m / 64) <= (o + m) / 64 - o / 64 + 1.
inline int64_t bias_partial_row(const int64_t* offsets, int64_t group, int64_t row_in_group) {
  return offsets[group] / kBiasPartialRows + group + row_in_group / kBiasPartialRows;
}
inline int64_t bias_partial_rows(const Groups& groups) {
  return groups.capacity / kBiasPartialRows + groups.num_groups;
}

}  // namespace moire::cpu::gemm
