// The operands of a layer's products: what a recipe has them read, the steps that make what the
// caller did not give, and how they become those of the grouped GEMM for either weight layout.
#pragma once

#include <moire/grouped_gemm.h>
#include <moire/quantize.h>
#include <moire/routing.h>

#include <optional>
#include <span>
#include <string_view>

#include "core/argument_check.h"
#include "core/prepared_weight.h"
#include "mlp/composite.h"

namespace moire {

// What a backward asks its gradients to be quantised to; 0 of a forward, and by default.
int32_t gradient_dtype_of(const auto& args) {
  if constexpr (requires { args.gradient_dtype; }) return args.gradient_dtype;
  return 0;
}

struct Recipe {
  // Of one of the composites' structs.
  explicit Recipe(const auto& args, bool on_gpu = false)
      : id(args.recipe),
        is_quantized(args.recipe != MOIRE_RECIPE_AS_STORED),
        passes_values(on_gpu && args.recipe == MOIRE_RECIPE_MXFP8),
        weight_scaling(weight_scaling_of(args.recipe)),
        scaling(args.recipe == MOIRE_RECIPE_FP8_BLOCK ? MOIRE_SCALING_FP8_BLOCK
                                                      : MOIRE_SCALING_MXFP8),
        accumulation(args.recipe == MOIRE_RECIPE_AS_STORED || args.recipe == MOIRE_RECIPE_MXFP8
                         ? MOIRE_ACCUMULATE_EXACT
                     : args.emulate_accumulation != 0 ? MOIRE_ACCUMULATE_EMULATED
                                                      : MOIRE_ACCUMULATE_FAST),
        fractional_scales(args.fractional_scales),
        ragged_scales(on_gpu && args.recipe == MOIRE_RECIPE_MXFP8_FAST ? kFoldedScales
                                                                       : args.fractional_scales),
        gradient_dtype(gradient_dtype_of(args) == 0 ? DType::kE4M3
                                                    : static_cast<DType>(gradient_dtype_of(args))) {
  }

  // What z, act and their gradients are rounded to, kept or not: in FP8 recipes BF16, whatever x
  // is, so that a recipe trains alike from any type; else the type of x and y.
  DType between(DType as_stored) const { return is_quantized ? DType::kBF16 : as_stored; }
  std::span<const DType> types_between() const {
    return is_quantized ? std::span<const DType>(kBF16Only) : std::span<const DType>(kFloatTypes);
  }

  int32_t id;                        // moire_recipe
  bool is_quantized, passes_values;  // values: where products alone read a copy, on a GPU
  int32_t weight_scaling, scaling;   // scaling: of activations and gradients
  int32_t accumulation, fractional_scales, ragged_scales;  // ragged: of activations, gradients
  DType gradient_dtype;
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
GivenWeight given_w(const auto& a) { return {"w", a.w, a.w_quantized, a.w_prepared}; }
GivenWeight given_w1(const auto& a) { return {"w1", a.w1, a.w1_quantized, a.w1_prepared}; }
GivenWeight given_w2(const auto& a) { return {"w2", a.w2, a.w2_quantized, a.w2_prepared}; }

// The grad_y of a backward, and the copies of it that the caller gave.
struct GivenGradY {
  // Of the struct of a backward.
  explicit GivenGradY(const auto& args)
      : itself{args.grad_y, args.gathered_grad_y != 0 ? args.row_idx : moire_tensor{}},
        rowwise(args.grad_y_rowwise),
        columnwise(args.grad_y_columnwise) {}
  RaggedOperand itself;
  moire_quantized rowwise, columnwise;
};

// grad_y as the products of a backward read it: rows for a dgrad, columns for a wgrad, itself for
// sums; those that are needed.
struct GradY {
  RaggedOperand itself, rows, columns;
};

// What a step with an activation has as its MLP has it.
void share_activation(auto& step, const auto& mlp) {
  step.z = mlp.z;
  step.probs = mlp.probs;
  step.groups = mlp.groups;
  step.activation = mlp.activation;
  step.layout = mlp.layout;
}

// The steps of one call of a layer, all by its recipe and over its groups.
struct LayerSteps {
  LayerSteps(Steps& steps_of_call, const auto& args)
      : steps(steps_of_call), recipe(args, !steps.on_cpu()), groups(args.groups), tail(args.tail) {}

  // Memory for a copy of a ragged [capacity, columns] that products of this layer read; as FP8
  // tensor cores read it (core/scale_shapes.h) where they do.
  moire_quantized take_copy(DType element, int32_t direction, int64_t columns, bool for_cores);

  // Whether FP8 tensor cores would make a weight gradient, or a product of rows with `w` into `d`,
  // or there is none: what of their operands is not given had better be quantised for them then.
  bool cores_make_wgrad(const moire_weight& grad_w, const moire_quantized& given_grad,
                        const moire_quantized& given_x) const;
  bool cores_multiply(const WeightOperand& w, bool along_in, const TensorView& d) const;

  // Makes copies, present or absent, of `source` in the order of the groups; nothing if there are
  // no groups. `operand` is what the composite calls the source. A grad_bias of `bias`, sums of the
  // source, is made in the same read and taken from it, where that is a read less.
  void quantize_operand(const RaggedOperand& source, const moire_quantized& rowwise,
                        const moire_quantized& columnwise, std::string_view operand,
                        BiasBackwardArgs* bias = nullptr);

  // The ragged operand of a forward product: x as it is if the recipe does not quantise or x is FP8
  // already, else its rowwise copy for a product with `w` into `d`. `columnwise`, where it is
  // present, is made along with it.
  RaggedOperand forward_operand(const RaggedOperand& x, const moire_quantized& columnwise,
                                const WeightOperand& w, const TensorView& d);

  // The weight of a product along `in` (forward) or along `out` (dgrad) into `d`: as it is,
  // prepared, its copy, or a copy that is made. `rows` of the product are given in 8 bits, or
  // absent.
  WeightOperand weight_operand(const GivenWeight& given, bool along_in, const TensorView& d,
                               const RaggedOperand& rows = {});

  // `bias` keeps what is left to sum.
  GradY grad_y_operands(const GivenGradY& given, bool needs_rows, bool needs_columns,
                        bool for_cores, BiasBackwardArgs& bias);

  // What a backward's wgrad reads of x: x, or a columnwise copy, `given` or made.
  RaggedOperand wgrad_operand(const RaggedOperand& x, const moire_quantized& given, bool for_cores);

  // What one product leaves to another: as stored, or the copy that a recipe's products read.
  RaggedOperand operand_between(const TensorView& stored, const moire_quantized& copy) const {
    return recipe.is_quantized ? operand_of(copy) : RaggedOperand{stored};
  }

  // A product of rows `a` with the weights, but for what becomes of it.
  template <class Gemm>
  Gemm product_of(const RaggedOperand& a, const WeightOperand& w) const {
    Gemm gemm;
    gemm.a = a.tensor;
    gemm.row_idx = a.row_idx;
    gemm.a_scales = a.scales;
    gemm.b = w.weight;
    gemm.b_scales = w.scales;
    gemm.accumulation = recipe.accumulation;
    gemm.groups = groups;
    return gemm;
  }

  // y_i = x_i W_g^T (+ scale_i * bias_g).
  void run_forward(const RaggedOperand& x, const WeightOperand& w, const moire_tensor& bias,
                   const moire_tensor& scale, const moire_tensor& y);
  // grad_x = grad_y W_g, in the order of the groups.
  void run_dgrad(const RaggedOperand& grad_y, const WeightOperand& w, const moire_tensor& grad_x);
  // grad_W_g = beta_g * grad_W_g + grad_y_g^T x_g for [G, out, in], its transpose for [G, in, out].
  void run_wgrad(const RaggedOperand& grad_y, const RaggedOperand& x, const moire_weight& grad_w,
                 int32_t beta, const uint8_t* beta_per_group);
  // The gradients of a bias and its scale that are left when grad_y's operands are there.
  void run_bias(const GradY& grad_y, BiasBackwardArgs bias);

  Steps& steps;
  const Recipe recipe;
  const moire_groups groups;
  const int32_t tail;  // of the layer's result

 private:
  bool may_use_cores() const {
    return !steps.on_cpu() && recipe.accumulation == MOIRE_ACCUMULATE_FAST;
  }
  moire_quantized core_copy(Arena& arena, DType element, int32_t direction, int64_t columns) const;
  // The weight as FP8 tensor cores read it for the one product, and the step that makes it; nothing
  // where they do not make the product.
  std::optional<WeightOperand> core_weight(const GivenWeight& given, bool along_in,
                                           const TensorView& d);
  RaggedOperand gathered_once(const RaggedOperand& rows);
  GroupedGemmWgradArgs wgrad_args(const RaggedOperand& grad_y, const RaggedOperand& x,
                                  const moire_weight& grad_w) const;
};

}  // namespace moire
