#include "mlp/recipe.h"

#include <utility>

namespace moire {
namespace {

// Absent groups: every row of the source.
QuantizeArgs quantize_args(const Recipe& recipe, const RaggedOperand& source,
                           const moire_groups& groups, const moire_quantized& rowwise,
                           const moire_quantized& columnwise) {
  QuantizeArgs args;
  args.source = source.tensor;
  args.row_idx = source.row_idx;
  args.scaling = recipe.scaling;
  args.fractional_scales = recipe.fractional_scales;
  args.rowwise = rowwise;
  args.columnwise = columnwise;
  args.groups = groups;
  args.tail = MOIRE_TAIL_UNTOUCHED;
  return args;
}

// Copies of `source` in the order of the groups, where they are asked for (not null) and not there
// yet.
void make_copies(Steps& steps, const Recipe& recipe, DType element, const RaggedOperand& source,
                 const moire_groups& groups, moire_quantized* rowwise, moire_quantized* columnwise,
                 std::string_view operand, BiasBackwardArgs* bias = nullptr) {
  const auto make = [&](moire_quantized* copy, int32_t direction) -> moire_quantized {
    if (copy == nullptr || is_present(*copy)) return {};
    *copy = take_copy(steps.arena, recipe, element, direction, groups.capacity,
                      source.tensor.columns(), groups.num_groups);
    return *copy;
  };
  const moire_quantized made = make(rowwise, MOIRE_ROWWISE);
  quantize_operand(steps, recipe, source, groups, made, make(columnwise, MOIRE_COLUMNWISE), operand,
                   bias);
}

// `rows` for two products: the fastest of a GPU would each copy gathered rows into expert order, so
// one step does it for both. A CPU's gather them while they read them.
RaggedOperand gathered_once(Steps& steps, const RaggedOperand& rows, const moire_groups& groups) {
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

}  // namespace

moire_quantized take_copy(Arena& arena, const Recipe& recipe, DType element, int32_t direction,
                          int64_t rows, int64_t columns, int64_t num_groups) {
  if (recipe.passes_values && element == DType::kE4M3)
    return {arena.take_aligned(DType::kBF16, rows, columns), {}};
  return take_copy(arena, element, recipe.scaling, direction, {nullptr, element, {rows, columns}},
                   num_groups, kScalePitch);
}

void quantize_operand(Steps& steps, const Recipe& recipe, const RaggedOperand& source,
                      const moire_groups& groups, const moire_quantized& rowwise,
                      const moire_quantized& columnwise, std::string_view operand,
                      BiasBackwardArgs* bias) {
  if (groups.num_groups == 0 || (!is_present(rowwise) && !is_present(columnwise))) return;
  QuantizeArgs args = quantize_args(recipe, source, groups, rowwise, columnwise);
  // A GPU reads the rows once more for the sums, and those that are scaled, or of which there are
  // sums along the rows too, are bias_backward's.
  if (bias == nullptr || !steps.on_cpu() || !is_present(bias->grad_bias) ||
      is_present(bias->scale) || is_present(bias->grad_scale)) {
    return steps.run(quantize, args, operand);
  }
  args.grad_bias = std::exchange(bias->grad_bias, {});
  args.beta = bias->beta;
  args.beta_per_group = bias->beta_per_group;
  steps.run(quantize, quantize_workspace, args, operand);
}

RaggedOperand forward_operand(Steps& steps, const Recipe& recipe, const RaggedOperand& x,
                              const moire_groups& groups, const moire_quantized& columnwise) {
  if (!recipe.is_quantized || x.scales.is_present()) return x;
  // Tokens are quantised once and gathered by the product, unless they are brought into the order
  // of the groups anyway, as the fastest products of a GPU would.
  if (x.row_idx.is_present() && !is_present(columnwise) && !recipe.passes_values) {
    const moire_quantized tokens = take_copy(steps.arena, recipe, DType::kE4M3, MOIRE_ROWWISE,
                                             x.tensor.num_rows(), x.tensor.columns(), 1);
    steps.run(quantize, quantize_args(recipe, {x.tensor}, {}, tokens, {}), "x");
    return {tokens.data, x.row_idx, tokens.scales};
  }
  const moire_quantized rowwise = take_copy(steps.arena, recipe, DType::kE4M3, MOIRE_ROWWISE,
                                            groups.capacity, x.tensor.columns(), groups.num_groups);
  quantize_operand(steps, recipe, x, groups, rowwise, columnwise, "x");
  return operand_of(rowwise);
}

Weight GivenWeight::known() const {
  if (is_present(weight)) return weight;
  if (!is_present(prepared)) return Weight(copy.data, weight.layout);
  const int64_t* s = prepared.shape;
  return Weight(TensorView(nullptr, DType::kE4M3, {s[0], s[1], s[2]}), weight.layout);
}

WeightOperand weight_operand(Steps& steps, const Recipe& recipe, const GivenWeight& given,
                             bool along_in) {
  const Weight weight = given.weight;
  if (!recipe.is_quantized) return {weight, {}};
  if (is_present(given.prepared)) return prepared_operand(given.prepared, along_in);
  moire_quantized copy = given.copy;
  if (!is_present(copy)) {
    const int32_t direction = weight_direction(recipe.weight_scaling, weight.layout, along_in);
    copy = take_copy(steps.arena, DType::kE4M3, recipe.weight_scaling, direction, weight.tensor, 0,
                     kScalePitch);
    QuantizeWeightArgs args;
    args.source = weight;
    args.scaling = recipe.weight_scaling;
    args.fractional_scales = recipe.fractional_scales;
    (direction == MOIRE_ROWWISE ? args.rowwise : args.columnwise) = copy;
    steps.run(quantize_weight, args, given.name);
  }
  return {Weight(copy.data, weight.layout), copy.scales};
}

GradY grad_y_operands(Steps& steps, const Recipe& recipe, const RaggedOperand& grad_y,
                      const moire_groups& groups, const moire_quantized& rowwise,
                      const moire_quantized& columnwise, bool needs_rows, bool needs_columns,
                      BiasBackwardArgs& bias) {
  if (!recipe.is_quantized) {
    const RaggedOperand one =
        needs_rows && needs_columns ? gathered_once(steps, grad_y, groups) : grad_y;
    return {one, one, one};
  }
  moire_quantized rows = rowwise, columns = columnwise;
  make_copies(steps, recipe, recipe.gradient_dtype, grad_y, groups, needs_rows ? &rows : nullptr,
              needs_columns ? &columns : nullptr, "grad_y", &bias);
  return {grad_y, operand_of(rows), operand_of(columns)};
}

RaggedOperand wgrad_operand(Steps& steps, const Recipe& recipe, const RaggedOperand& x,
                            const moire_groups& groups, const moire_quantized& given) {
  if (!recipe.is_quantized) return x;
  moire_quantized columns = given;
  make_copies(steps, recipe, DType::kE4M3, x, groups, nullptr, &columns, "x");
  return operand_of(columns);
}

}  // namespace moire
