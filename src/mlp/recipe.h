// The operands of a layer's products: what a recipe has them read, the steps that make what the
// caller did not give, and how they become those of the grouped GEMM for either weight layout.
#pragma once

#include <moire/fields.h>
#include <moire/grouped_gemm.h>
#include <moire/quantize.h>
#include <moire/routing.h>

#include <span>
#include <string_view>

#include "core/argument_check.h"
#include "core/prepared_weight.h"
#include "mlp/composite.h"

namespace moire {

struct Recipe {
  // `Args` is one of the composites' structs.
  template <class Args>
  explicit Recipe(const Args& args, bool on_gpu = false)
      : id(args.recipe),
        is_quantized(args.recipe != MOIRE_RECIPE_AS_STORED),
        passes_values(on_gpu && args.recipe == MOIRE_RECIPE_MXFP8),
        weight_scaling(weight_scaling_of(args.recipe)),
        accumulation(args.recipe == MOIRE_RECIPE_AS_STORED || args.recipe == MOIRE_RECIPE_MXFP8
                         ? MOIRE_ACCUMULATE_EXACT
                     : args.emulate_accumulation != 0 ? MOIRE_ACCUMULATE_EMULATED
                                                      : MOIRE_ACCUMULATE_FAST),
        fractional_scales(args.fractional_scales) {
    if (args.recipe == MOIRE_RECIPE_FP8_BLOCK) scaling = MOIRE_SCALING_FP8_BLOCK;
    if constexpr (requires { args.gradient_dtype; }) {
      if (args.gradient_dtype != 0) gradient_dtype = static_cast<DType>(args.gradient_dtype);
    }
  }

  // What z, act and their gradients are rounded to, kept or not: in FP8 recipes BF16, whatever x
  // is, so that a recipe trains alike from any type; else the type of x and y.
  DType between(DType as_stored) const { return is_quantized ? DType::kBF16 : as_stored; }
  std::span<const DType> types_between() const {
    return is_quantized ? std::span<const DType>(kBF16Only) : std::span<const DType>(kFloatTypes);
  }

  int32_t id;                        // moire_recipe
  bool is_quantized, passes_values;  // values: where products alone read a copy, on a GPU
  int32_t weight_scaling;
  int32_t scaling = MOIRE_SCALING_MXFP8;  // of activations and gradients
  int32_t accumulation;
  int32_t fractional_scales;
  DType gradient_dtype = DType::kE4M3;
};

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

// Memory for a copy of a ragged [rows, columns] that products of this composite read.
moire_quantized take_copy(Arena& arena, const Recipe& recipe, DType element, int32_t direction,
                          int64_t rows, int64_t columns, int64_t num_groups);

// Makes copies, present or absent, of `source` in the order of the groups; nothing if there are no
// groups. `operand` is what the composite calls the source. A grad_bias of `bias`, sums of the
// source, is made in the same read and taken from it, where that is a read less.
void quantize_operand(Steps& steps, const Recipe& recipe, const RaggedOperand& source,
                      const moire_groups& groups, const moire_quantized& rowwise,
                      const moire_quantized& columnwise, std::string_view operand,
                      BiasBackwardArgs* bias = nullptr);

// The ragged operand of a forward product: x as it is if the recipe does not quantise or x is FP8
// already, else its rowwise copy. `columnwise`, where it is present, is made along with it.
RaggedOperand forward_operand(Steps& steps, const Recipe& recipe, const RaggedOperand& x,
                              const moire_groups& groups, const moire_quantized& columnwise);

// A weight of a composite by its name, and what may stand in for it.
struct GivenWeight {
  std::string_view name;
  const moire_weight& weight;
  const moire_quantized& copy;  // for the one product that the call makes with it
  const moire_prepared_weight& prepared;

  // The sizes of whichever is there.
  int64_t out_features() const { return known().out_features(); }
  int64_t in_features() const { return known().in_features(); }

 private:
  Weight known() const;
};

// The weight of a product along `in` (forward) or along `out` (dgrad): as it is, prepared, its
// copy, or a copy that is made.
WeightOperand weight_operand(Steps& steps, const Recipe& recipe, const GivenWeight& given,
                             bool along_in);

// grad_y as the products of a backward read it: rows for a dgrad, columns for a wgrad, itself for
// sums; those that are needed. `bias` keeps what is left to sum.
struct GradY {
  RaggedOperand itself, rows, columns;
};
template <class A>
RaggedOperand given_grad_y(const A& args) {
  return {args.grad_y, args.gathered_grad_y != 0 ? args.row_idx : moire_tensor{}};
}
GradY grad_y_operands(Steps& steps, const Recipe& recipe, const RaggedOperand& grad_y,
                      const moire_groups& groups, const moire_quantized& rowwise,
                      const moire_quantized& columnwise, bool needs_rows, bool needs_columns,
                      BiasBackwardArgs& bias);

// What a backward's wgrad reads of x: x, or a columnwise copy, `given` or made.
RaggedOperand wgrad_operand(Steps& steps, const Recipe& recipe, const RaggedOperand& x,
                            const moire_groups& groups, const moire_quantized& given);

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

// The gradient of a bias, the sum of grad_y's rows times `scale`; sum_bias() says of which grad_y.
inline BiasBackwardArgs bias_args(const moire_tensor& scale, const moire_tensor& grad_bias,
                                  int32_t beta, const moire_groups& groups, int32_t tail) {
  BiasBackwardArgs bias;
  bias.scale = scale;
  bias.grad_bias = grad_bias;
  bias.beta = beta;
  bias.groups = groups;
  bias.tail = tail;
  return bias;
}
// What of it is left when grad_y's operands are there.
inline void sum_bias(Steps& steps, const GradY& grad_y, BiasBackwardArgs bias) {
  if (!is_present(bias.grad_bias) && !is_present(bias.grad_scale)) return;
  bias.grad_y = grad_y.itself.tensor;
  bias.row_idx = grad_y.itself.row_idx;
  steps.run(bias_backward, bias_backward_workspace, bias);
}

}  // namespace moire
