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
  args.scaling = scaling_of(is_present(rowwise) ? rowwise : columnwise);
  if (args.scaling == MOIRE_SCALING_FP8_BLOCK) args.fractional_scales = recipe.ragged_scales;
  args.rowwise = rowwise;
  args.columnwise = columnwise;
  args.groups = groups;
  args.tail = MOIRE_TAIL_UNTOUCHED;
  return args;
}

}  // namespace

Weight GivenWeight::known() const {
  if (is_present(weight)) return weight;
  if (!is_present(prepared)) return Weight(copy.data, weight.layout);
  const int64_t* s = prepared.shape;
  return Weight(TensorView(nullptr, DType::kE4M3, {s[0], s[1], s[2]}), weight.layout);
}

moire_quantized LayerSteps::take_copy(DType element, int32_t direction, int64_t columns,
                                      bool for_cores) {
  if (recipe.passes_values && element == DType::kE4M3)
    return {steps.arena.take_aligned(DType::kBF16, groups.capacity, columns), {}};
  if (for_cores) return core_copy(steps.arena, element, direction, columns);
  return moire::take_copy(steps.arena, element, recipe.scaling, direction,
                          {nullptr, element, {groups.capacity, columns}}, groups.num_groups,
                          kScalePitch);
}

moire_quantized LayerSteps::core_copy(Arena& arena, DType element, int32_t direction,
                                      int64_t columns) const {
  const int64_t rows = transposed_rows(groups.capacity, groups.num_groups);
  if (direction == MOIRE_ROWWISE) {
    return {arena.take(element, groups.capacity, columns),
            arena.take(DType::kFP32, ceil_div(columns, 128), rows)};
  }
  return {arena.take(element, columns, rows), arena.take(DType::kFP32, rows / 128, columns)};
}

bool LayerSteps::cores_make_wgrad(const moire_weight& grad_w, const moire_quantized& given_grad,
                                  const moire_quantized& given_x) const {
  if (!may_use_cores() || !is_present(grad_w)) return may_use_cores();
  Arena nowhere{Workspace()};
  const auto operand = [&](const moire_quantized& given, DType element, int64_t columns) {
    return operand_of(is_present(given) ? given
                                        : core_copy(nowhere, element, MOIRE_COLUMNWISE, columns));
  };
  const Weight w(grad_w);
  const RaggedOperand grad = operand(given_grad, recipe.gradient_dtype, w.out_features());
  const RaggedOperand x = operand(given_x, DType::kE4M3, w.in_features());
  return steps.takes(grouped_gemm_wgrad_workspace, wgrad_args(grad, x, grad_w));
}

bool LayerSteps::cores_multiply(const WeightOperand& w, bool along_in, const TensorView& d) const {
  if (!may_use_cores() || !d.is_present()) return may_use_cores();
  Arena nowhere{Workspace()};
  const int64_t k = along_in ? w.weight.in_features() : w.weight.out_features();
  const DType rows = along_in ? DType::kE4M3 : recipe.gradient_dtype;
  auto gemm =
      product_of<GroupedGemmArgs>(operand_of(core_copy(nowhere, rows, MOIRE_ROWWISE, k)), w);
  gemm.transpose_b = along_in ? 0 : 1;
  gemm.d = d;
  return steps.takes(grouped_gemm_workspace, gemm);
}

void LayerSteps::quantize_operand(const RaggedOperand& source, const moire_quantized& rowwise,
                                  const moire_quantized& columnwise, std::string_view operand,
                                  BiasBackwardArgs* bias) {
  if (groups.num_groups == 0 || (!is_present(rowwise) && !is_present(columnwise))) return;
  QuantizeArgs args = quantize_args(recipe, source, groups, rowwise, columnwise);
  // Rows that are scaled, or of which there are sums along them too, are bias_backward's.
  if (bias == nullptr || !is_present(bias->grad_bias) || is_present(bias->scale) ||
      is_present(bias->grad_scale)) {
    return steps.run(quantize, args, operand);
  }
  args.grad_bias = std::exchange(bias->grad_bias, {});
  args.beta = bias->beta;
  args.beta_per_group = bias->beta_per_group;
  steps.run(quantize, quantize_workspace, args, operand);
}

RaggedOperand LayerSteps::forward_operand(const RaggedOperand& x, const moire_quantized& columnwise,
                                          const WeightOperand& w, const TensorView& d) {
  if (!recipe.is_quantized || x.scales.is_present()) return x;
  const bool for_cores = cores_multiply(w, true, d);
  // Tokens are quantised once and gathered by the product, unless they are brought into the order
  // of the groups anyway, as the fastest products of a GPU would.
  if (x.row_idx.is_present() && !is_present(columnwise) && !recipe.passes_values) {
    const moire_quantized tokens = moire::take_copy(
        steps.arena, DType::kE4M3, for_cores ? MOIRE_SCALING_FP8_BLOCK : recipe.scaling,
        MOIRE_ROWWISE, x.tensor, 1, kScalePitch);
    steps.run(quantize, quantize_args(recipe, {x.tensor}, {}, tokens, {}), "x");
    return {tokens.data, x.row_idx, tokens.scales};
  }
  const moire_quantized rowwise =
      take_copy(DType::kE4M3, MOIRE_ROWWISE, x.tensor.columns(), for_cores);
  // Folded columns are made beside folded rows, or alone.
  const bool are_alike =
      !is_present(columnwise) || for_cores || scaling_of(columnwise) == recipe.scaling;
  quantize_operand(x, rowwise, are_alike ? columnwise : moire_quantized{}, "x");
  if (!are_alike) quantize_operand(x, {}, columnwise, "x");
  return operand_of(rowwise);
}

std::optional<WeightOperand> LayerSteps::core_weight(const GivenWeight& given, bool along_in,
                                                     const TensorView& d) {
  if (!may_use_cores()) return std::nullopt;
  // Of a forward alone a prepared weight has one copy; dgrad's is the forward's of the other
  // layout.
  const auto for_forward = [&](int32_t layout) { return along_in ? layout : turned(layout); };
  PrepareWeightArgs args;
  args.w = given.weight;
  args.w.layout = for_forward(args.w.layout);
  args.recipe = recipe.id;
  args.fractional_scales = recipe.fractional_scales;
  args.forward_only = 1;
  if (!prepare_weight_form(steps.context(), args, &args.prepared).ok()) return std::nullopt;
  if (args.prepared.form != static_cast<int32_t>(WeightForm::kCores)) return std::nullopt;
  const auto operand = [&] {
    WeightOperand made = prepared_operand(args.prepared, true);
    made.weight.layout = for_forward(made.weight.layout);
    return made;
  };
  if (!cores_multiply(operand(), along_in, d)) return std::nullopt;
  args.prepared.memory.data = steps.arena.take(args.prepared.memory.shape[0]);
  steps.run(prepare_weight, prepare_weight_workspace, args, given.name);
  return operand();
}

WeightOperand LayerSteps::weight_operand(const GivenWeight& given, bool along_in,
                                         const TensorView& d, const RaggedOperand& rows) {
  const Weight weight = given.weight;
  if (!recipe.is_quantized) return {weight, {}};
  if (is_present(given.prepared)) return prepared_operand(given.prepared, along_in);
  // Tensor cores may not take rows that are given, and what is folded is exact for nobody else.
  const bool are_theirs = !rows.scales.is_present() || recipe.scaling != MOIRE_SCALING_MXFP8;
  if (!is_present(given.copy) && are_theirs) {
    if (const auto made = core_weight(given, along_in, d)) return *made;
  }
  moire_quantized copy = given.copy;
  if (!is_present(copy)) {
    const int32_t direction = weight_direction(recipe.weight_scaling, weight.layout, along_in);
    copy = moire::take_copy(steps.arena, DType::kE4M3, recipe.weight_scaling, direction,
                            weight.tensor, 0, kScalePitch);
    QuantizeWeightArgs args;
    args.source = weight;
    args.scaling = recipe.weight_scaling;
    args.fractional_scales = recipe.fractional_scales;
    (direction == MOIRE_ROWWISE ? args.rowwise : args.columnwise) = copy;
    steps.run(quantize_weight, args, given.name);
  }
  return {Weight(copy.data, weight.layout), copy.scales};
}

// `rows` for two products: the fastest of a GPU would each copy gathered rows into expert order, so
// one step does it for both. A CPU's gather them while they read them.
RaggedOperand LayerSteps::gathered_once(const RaggedOperand& rows) {
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

GradY LayerSteps::grad_y_operands(const GivenGradY& given, bool needs_rows, bool needs_columns,
                                  bool for_cores, BiasBackwardArgs& bias) {
  if (!recipe.is_quantized) {
    const RaggedOperand one =
        needs_rows && needs_columns ? gathered_once(given.itself) : given.itself;
    return {one, one, one};
  }
  moire_quantized rows = given.rowwise, columns = given.columnwise, made_rows{}, made_columns{};
  const int64_t n = given.itself.tensor.columns();
  if (needs_rows && !is_present(rows)) {
    rows = made_rows = take_copy(recipe.gradient_dtype, MOIRE_ROWWISE, n, for_cores);
  }
  if (needs_columns && !is_present(columns)) {
    columns = made_columns = take_copy(recipe.gradient_dtype, MOIRE_COLUMNWISE, n, for_cores);
  }
  quantize_operand(given.itself, made_rows, made_columns, "grad_y", &bias);
  return {given.itself, operand_of(rows), operand_of(columns)};
}

RaggedOperand LayerSteps::wgrad_operand(const RaggedOperand& x, const moire_quantized& given,
                                        bool for_cores) {
  if (!recipe.is_quantized) return x;
  if (is_present(given)) return operand_of(given);
  const moire_quantized columns =
      take_copy(DType::kE4M3, MOIRE_COLUMNWISE, x.tensor.columns(), for_cores);
  quantize_operand(x, {}, columns, "x");
  return operand_of(columns);
}

void LayerSteps::run_forward(const RaggedOperand& x, const WeightOperand& w,
                             const moire_tensor& bias, const moire_tensor& scale,
                             const moire_tensor& y) {
  auto gemm = product_of<GroupedGemmArgs>(x, w);
  gemm.bias = bias;
  if (is_present(bias)) gemm.bias_scale = scale;
  gemm.d = y;
  gemm.tail = tail;
  steps.run(grouped_gemm, grouped_gemm_workspace, gemm);
}

void LayerSteps::run_dgrad(const RaggedOperand& grad_y, const WeightOperand& w,
                           const moire_tensor& grad_x) {
  auto gemm = product_of<GroupedGemmArgs>(grad_y, w);
  gemm.transpose_b = 1;
  gemm.d = grad_x;
  gemm.tail = tail;
  steps.run(grouped_gemm, grouped_gemm_workspace, gemm);
}

GroupedGemmWgradArgs LayerSteps::wgrad_args(const RaggedOperand& grad_y, const RaggedOperand& x,
                                            const moire_weight& grad_w) const {
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
  gemm.groups = groups;
  gemm.accumulation = recipe.accumulation;
  return gemm;
}

void LayerSteps::run_wgrad(const RaggedOperand& grad_y, const RaggedOperand& x,
                           const moire_weight& grad_w, int32_t beta,
                           const uint8_t* beta_per_group) {
  GroupedGemmWgradArgs gemm = wgrad_args(grad_y, x, grad_w);
  gemm.beta = beta;
  gemm.beta_per_group = beta_per_group;
  steps.run(grouped_gemm_wgrad, grouped_gemm_wgrad_workspace, gemm);
}

void LayerSteps::run_bias(const GradY& grad_y, BiasBackwardArgs bias) {
  if (!is_present(bias.grad_bias) && !is_present(bias.grad_scale)) return;
  bias.grad_y = grad_y.itself.tensor;
  bias.row_idx = grad_y.itself.row_idx;
  bias.groups = groups;
  bias.tail = tail;
  steps.run(bias_backward, bias_backward_workspace, bias);
}

}  // namespace moire
