// FP8: quantising activations and weights, decoding, the other direction, the layouts of scales.
#include "cases.h"
#include "reference/quantize.h"

namespace moire::tool {
namespace {

int64_t block_of(const Problem& p) { return p.scaling == MOIRE_SCALING_MXFP8 ? 32 : 128; }
int64_t blocks(int64_t n, int64_t block) { return (n + block - 1) / block; }
DType scale_dtype(const Problem& p) {
  return p.scaling == MOIRE_SCALING_MXFP8 ? DType::kE8M0 : DType::kFP32;
}
bool has(const Problem& p, int32_t direction) {
  return p.directions == Directions::kBoth ||
         (p.directions == Directions::kRowwise) == (direction == MOIRE_ROWWISE);
}
int32_t direction_of(const Problem& p) {
  return p.directions == Directions::kColumnwise ? MOIRE_COLUMNWISE : MOIRE_ROWWISE;
}
const char* name_of(int32_t direction) {
  return direction == MOIRE_ROWWISE ? "rowwise" : "columnwise";
}

using Shape = std::vector<int64_t>;

// Of the scales of a ragged [capacity, columns], and of weights [groups, n, columns].
Shape ragged_scales(const Problem& p, int32_t direction, int64_t columns) {
  const int64_t b = block_of(p);
  if (direction == MOIRE_ROWWISE) return {p.capacity(), blocks(columns, b)};
  return {p.capacity() / b + p.groups, columns};
}
Shape weight_scales(const Problem& p, int32_t direction, int64_t n, int64_t columns) {
  const int64_t b = block_of(p);
  const bool tile = p.scaling == MOIRE_SCALING_FP8_TILE;
  return {p.groups, tile || direction == MOIRE_COLUMNWISE ? blocks(n, b) : n,
          tile || direction == MOIRE_ROWWISE ? blocks(columns, b) : columns};
}

moire_quantized output(Operands& o, int32_t direction, const Shape& data, const Shape& scales) {
  const Problem& p = o.problem();
  const std::string name = name_of(direction);
  return {o.output(name + ".data", p.element, data),
          o.output(name + ".scales", scale_dtype(p), scales)};
}

// Random codes and scales, where there are any to be read.
moire_quantized ragged_input(Operands& o, int32_t direction) {
  const Problem& p = o.problem();
  moire_quantized q{};
  q.data = o.codes("x.data", p.element, {p.capacity(), p.hidden});
  q.scales = o.scales("x.scales", scale_dtype(p), ragged_scales(p, direction, p.hidden),
                      direction == MOIRE_ROWWISE ? 1 : block_of(p));
  return q;
}

void compare(Comparison& c, const std::string& name, const moire_quantized& got,
             const reference::QuantizedBytes& want, Comparison::TailRule tail) {
  if (!is_present(got)) return;
  c.bytes(name + ".data", got.data, want.data, tail);
  c.bytes(name + ".scales", got.scales, want.scales, tail);
}

Call quantize_call(Operands& o) {
  const Problem& p = o.problem();
  auto args = args_of<QuantizeArgs>(o);
  args.source = o.gathered("x", p.hidden);
  args.row_idx = o.row_idx();
  const Shape data{p.capacity(), p.hidden};
  for (const int32_t direction : {MOIRE_ROWWISE, MOIRE_COLUMNWISE}) {
    if (!has(p, direction)) continue;
    (direction == MOIRE_ROWWISE ? args.rowwise : args.columnwise) =
        output(o, direction, data, ragged_scales(p, direction, p.hidden));
  }
  return make_call(args, reference::quantize,
                   [](Comparison& c, const QuantizeArgs& a, const auto& want) {
                     compare(c, "rowwise", a.rowwise, want.rowwise, c.tail_rule());
                     compare(c, "columnwise", a.columnwise, want.columnwise, c.tail_rule());
                   });
}

Call quantize_weight_call(Operands& o) {
  const Problem& p = o.problem();
  auto args = args_of<QuantizeWeightArgs>(o);
  args.source = o.weight("w1", 2 * p.ffn, p.hidden);
  const int64_t n = args.source.tensor.shape[1], k = args.source.tensor.shape[2];
  const bool tile = p.scaling == MOIRE_SCALING_FP8_TILE;
  for (const int32_t direction : {MOIRE_ROWWISE, MOIRE_COLUMNWISE}) {
    if (tile ? direction != MOIRE_ROWWISE : !has(p, direction)) continue;
    (direction == MOIRE_ROWWISE ? args.rowwise : args.columnwise) =
        output(o, direction, {p.groups, n, k}, weight_scales(p, direction, n, k));
  }
  return make_call(args, reference::quantize_weight,
                   [](Comparison& c, const QuantizeWeightArgs& a, const auto& want) {
                     compare(c, "rowwise", a.rowwise, want.rowwise, Comparison::TailRule::kZero);
                     compare(c, "columnwise", a.columnwise, want.columnwise,
                             Comparison::TailRule::kZero);
                   });
}

Call dequantize_call(Operands& o) {
  const Problem& p = o.problem();
  const bool tile = p.scaling == MOIRE_SCALING_FP8_TILE;
  auto args = args_of<DequantizeArgs>(o);
  args.direction = direction_of(p);
  if (tile) {
    const Shape shape{p.groups, 2 * p.ffn, p.hidden};
    args.source.data = o.codes("w1.data", p.element, shape);
    args.source.scales =
        o.scales("w1.scales", DType::kFP32, weight_scales(p, MOIRE_ROWWISE, shape[1], shape[2]), 0);
    args.target = o.output("decoded", o.out_dtype(), shape);
    args.groups = {};
  } else {
    args.source = ragged_input(o, args.direction);
    args.target = o.output("decoded", o.out_dtype(), {p.capacity(), p.hidden});
  }
  return make_call(args, reference::dequantize,
                   [](Comparison& c, const DequantizeArgs& a, const auto& want) {
                     if (a.target.rank == 3) {
                       c.plain("decoded", a.target, want);
                     } else {
                       c.ragged("decoded", a.target, want, c.tail_rule());
                     }
                   });
}

Call requantize_call(Operands& o) {
  const Problem& p = o.problem();
  auto args = args_of<RequantizeArgs>(o);
  args.direction = direction_of(p);
  args.source = ragged_input(o, args.direction);
  const int32_t other = args.direction == MOIRE_ROWWISE ? MOIRE_COLUMNWISE : MOIRE_ROWWISE;
  args.target = output(o, other, {p.capacity(), p.hidden}, ragged_scales(p, other, p.hidden));
  return make_call(args, reference::requantize,
                   [](Comparison& c, const RequantizeArgs& a, const auto& want) {
                     compare(c, "target", a.target, want, c.tail_rule());
                   });
}

Call convert_scales_call(Operands& o, const TensorView& source, const TensorView& target,
                         int32_t from, int32_t to) {
  const Problem& p = o.problem();
  auto args = args_of<ConvertScalesArgs>(o);
  args.source = source;
  args.target = target;
  args.from = from;
  args.to = to;
  args.direction = direction_of(p);
  args.k = p.hidden;
  return make_call(args, reference::convert_scales,
                   [](Comparison& c, const ConvertScalesArgs& a, const auto& want) {
                     c.bytes("converted", a.target, want, Comparison::TailRule::kZero);
                   });
}

// To the layout of interchange, and back from what the first call wrote.
Case convert_scales_case(Operands& o) {
  const Problem& p = o.problem();
  const int32_t direction = direction_of(p);
  const Shape canonical = ragged_scales(p, direction, p.hidden);
  int64_t shape[2] = {0, 0};
  const Status sized = scales_shape(MOIRE_SCALING_MXFP8, direction, p.scale_layout, p.capacity(),
                                    p.hidden, p.groups, shape);
  if (!sized.ok()) return {};
  const TensorView source =
      o.scales("scales", DType::kE8M0, canonical, direction == MOIRE_ROWWISE ? 1 : block_of(p));
  const TensorView there = o.output("there", DType::kE8M0, {shape[0], shape[1]});
  const TensorView back = o.output("back", DType::kE8M0, canonical);
  return {{convert_scales_call(o, source, there, MOIRE_SCALES_CANONICAL, p.scale_layout),
           convert_scales_call(o, there, back, p.scale_layout, MOIRE_SCALES_CANONICAL)}};
}

}  // namespace

Case make_quantize_case(Operands& operands) {
  switch (operands.problem().op) {
    case Op::kQuantize:
      return {{quantize_call(operands)}};
    case Op::kQuantizeWeight:
      return {{quantize_weight_call(operands)}};
    case Op::kDequantize:
      return {{dequantize_call(operands)}};
    case Op::kRequantize:
      return {{requantize_call(operands)}};
    default:
      return convert_scales_case(operands);
  }
}

}  // namespace moire::tool
