#include "mlp/recipe.h"

#include "core/scale_shapes.h"

namespace moire {
namespace {

// Rowwise E8M0 scales keep 16-byte rows, which TMA asks for.
constexpr int64_t kScalePitch = 16;

TensorView take_scales(Arena& arena, int32_t scaling, int64_t matrices, const ScaleShape& shape,
                       bool is_weight) {
  const DType dtype = scale_dtype(scaling);
  const int64_t pitch =
      dtype == DType::kE8M0 ? round_up(shape.columns, kScalePitch) : shape.columns;
  void* const data = arena.take(product(product(matrices, shape.rows), pitch, dtype_size(dtype)));
  if (is_weight) return TensorView(data, dtype, {matrices, shape.rows, shape.columns}, pitch);
  return TensorView(data, dtype, {shape.rows, shape.columns}, pitch);
}

moire_quantized take_weight_copy(Arena& arena, const Recipe& recipe, int32_t direction,
                                 const TensorView& weight) {
  const int64_t num_groups = weight.shape[0], n = weight.shape[1], k = weight.shape[2];
  void* const data = arena.take(weight.num_elements());
  return {TensorView(data, DType::kE4M3, {num_groups, n, k}),
          take_scales(arena, recipe.weight_scaling, num_groups,
                      matrix_scales(recipe.weight_scaling, direction, n, k), true)};
}

}  // namespace

moire_quantized take_copy(Arena& arena, const Recipe& recipe, DType element, int32_t direction,
                          int64_t rows, int64_t columns, int64_t num_groups) {
  const TensorView data = arena.take(element, rows, columns);
  return {data,
          take_scales(arena, recipe.scaling, 1,
                      ragged_scales(recipe.scaling, direction, rows, num_groups, columns), false)};
}

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

}  // namespace

std::optional<QuantizeArgs> quantize_step(const Recipe& recipe, const RaggedOperand& source,
                                          const moire_groups& groups,
                                          const moire_quantized& rowwise,
                                          const moire_quantized& columnwise) {
  if (groups.num_groups == 0 || (!is_present(rowwise) && !is_present(columnwise))) return {};
  return quantize_args(recipe, source, groups, rowwise, columnwise);
}

void make_copies(const Recipe& recipe, DType element, const RaggedOperand& source,
                 const moire_groups& groups, moire_quantized* rowwise, moire_quantized* columnwise,
                 Arena& arena, std::optional<QuantizeArgs>& step) {
  const auto make = [&](moire_quantized* copy, int32_t direction) -> moire_quantized {
    if (copy == nullptr || is_present(*copy)) return {};
    *copy = take_copy(arena, recipe, element, direction, groups.capacity, source.tensor.columns(),
                      groups.num_groups);
    return *copy;
  };
  const moire_quantized made_rowwise = make(rowwise, MOIRE_ROWWISE);
  const moire_quantized made_columnwise = make(columnwise, MOIRE_COLUMNWISE);
  step = quantize_step(recipe, source, groups, made_rowwise, made_columnwise);
}

RaggedOperand forward_operand(const Recipe& recipe, const RaggedOperand& x,
                              const moire_groups& groups, const moire_quantized& columnwise,
                              Arena& arena, std::optional<QuantizeArgs>& step) {
  if (!recipe.is_quantized || x.scales.is_present()) return x;
  // Tokens are quantised once and gathered by the product, unless they are brought into the order
  // of the groups anyway.
  if (x.row_idx.is_present() && !is_present(columnwise)) {
    const moire_quantized tokens = take_copy(arena, recipe, DType::kE4M3, MOIRE_ROWWISE,
                                             x.tensor.num_rows(), x.tensor.columns(), 1);
    step = quantize_args(recipe, {x.tensor, {}, {}}, {}, tokens, {});
    return {tokens.data, x.row_idx, tokens.scales};
  }
  const moire_quantized rowwise = take_copy(arena, recipe, DType::kE4M3, MOIRE_ROWWISE,
                                            groups.capacity, x.tensor.columns(), groups.num_groups);
  step = quantize_step(recipe, x, groups, rowwise, columnwise);
  return operand_of(rowwise);
}

WeightOperand weight_operand(const Recipe& recipe, const Weight& weight,
                             const moire_quantized& given, bool along_in, Arena& arena,
                             std::optional<QuantizeWeightArgs>& step) {
  if (!recipe.is_quantized) return {weight, {}};
  moire_quantized copy = given;
  if (!is_present(copy)) {
    QuantizeWeightArgs& args = step.emplace();
    const int32_t direction = recipe.weight_direction(weight.layout, along_in);
    copy = take_weight_copy(arena, recipe, direction, weight.tensor);
    args.source = weight;
    args.scaling = recipe.weight_scaling;
    args.fractional_scales = recipe.fractional_scales;
    (direction == MOIRE_ROWWISE ? args.rowwise : args.columnwise) = copy;
  }
  return {Weight(copy.data, weight.layout), copy.scales};
}

}  // namespace moire
