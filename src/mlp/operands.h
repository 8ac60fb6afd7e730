// The operands of a linear layer's products, and how they become those of the grouped GEMM for
// either weight layout.
#pragma once

#include <moire/grouped_gemm.h>
#include <moire/quantize.h>
#include <moire/routing.h>

#include "core/arena.h"
#include "core/prepared_weight.h"
#include "mlp/steps.h"

namespace moire {

// One ragged operand, as it is or gathered.
struct RaggedOperand {
  TensorView tensor;
  TensorView row_idx = {};  // absent: rows are in expert order
  TensorView scales = {};   // of an FP8 tensor
};

// A copy in expert order as an operand.
inline RaggedOperand operand_of(const moire_quantized& copy) {
  return {copy.data, {}, copy.scales};
}

// `rows` for two products: the fastest of a GPU would each copy gathered rows into expert order, so
// one step does it for both. A CPU's gather them while they read them.
inline RaggedOperand gathered_once(Steps& steps, const RaggedOperand& rows,
                                   const moire_groups& groups) {
  if (steps.on_cpu() || !rows.row_idx.is_present()) return rows;
  PermuteArgs args;
  args.x = rows.tensor;
  args.gather_idx = rows.row_idx;
  args.rows = steps.arena.take(rows.tensor.type(), groups.capacity, rows.tensor.columns());
  args.groups = groups;
  args.tail = MOIRE_TAIL_UNTOUCHED;
  steps.run(permute, args);
  return {args.rows};
}

// d = a W_g^T: the product of a forward.
inline GroupedGemmArgs gemm_args(const RaggedOperand& a, const WeightOperand& w,
                                 const moire_tensor& d, const moire_groups& groups, int32_t tail,
                                 int32_t accumulation) {
  GroupedGemmArgs gemm;
  gemm.a = a.tensor;
  gemm.row_idx = a.row_idx;
  gemm.a_scales = a.scales;
  gemm.b = w.weight;
  gemm.b_scales = w.scales;
  gemm.accumulation = accumulation;
  gemm.d = d;
  gemm.groups = groups;
  gemm.tail = tail;
  return gemm;
}

// grad_x = grad_y W_g, in the order of the groups.
inline GroupedGemmArgs dgrad_args(const RaggedOperand& grad_y, const WeightOperand& w,
                                  const moire_tensor& grad_x, const moire_groups& groups,
                                  int32_t tail, int32_t accumulation) {
  GroupedGemmArgs gemm = gemm_args(grad_y, w, grad_x, groups, tail, accumulation);
  gemm.transpose_b = 1;
  return gemm;
}

// grad_W_g = beta_g * grad_W_g + grad_y_g^T x_g for [G, out, in], its transpose for [G, in, out].
inline GroupedGemmWgradArgs wgrad_args(const RaggedOperand& grad_y, const RaggedOperand& x,
                                       const moire_weight& grad_w, int32_t beta,
                                       const uint8_t* beta_per_group, const moire_groups& groups,
                                       int32_t accumulation) {
  const bool out_in = grad_w.layout == MOIRE_OUT_IN;
  const RaggedOperand& a = out_in ? grad_y : x;
  const RaggedOperand& b = out_in ? x : grad_y;
  GroupedGemmWgradArgs gemm;
  gemm.a = a.tensor;
  gemm.a_row_idx = a.row_idx;
  gemm.a_scales = a.scales;
  gemm.b = b.tensor;
  gemm.b_row_idx = b.row_idx;
  gemm.b_scales = b.scales;
  gemm.d = grad_w;
  gemm.beta = beta;
  gemm.beta_per_group = beta_per_group;
  gemm.groups = groups;
  gemm.accumulation = accumulation;
  return gemm;
}

}  // namespace moire
