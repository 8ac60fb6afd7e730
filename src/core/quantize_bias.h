// The bias gradient that a call of quantize asks for, as the call of bias_backward whose bits it
// has.
#pragma once

#include <moire/grouped_gemm.h>
#include <moire/quantize.h>

namespace moire {

inline BiasBackwardArgs bias_backward_of(const QuantizeArgs& args) {
  BiasBackwardArgs bias;
  bias.grad_y = args.source;
  bias.row_idx = args.row_idx;
  bias.grad_bias = args.grad_bias;
  bias.beta = args.beta;
  bias.beta_per_group = args.beta_per_group;
  bias.groups = args.groups;
  bias.workspace = args.workspace;
  return bias;
}

}  // namespace moire
