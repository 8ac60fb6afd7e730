// The operations of GroupedTensor and QuantizedWeight, as calls of ops.
#include <moire/grouped_tensor.h>

#include <algorithm>
#include <utility>

#include "core/format.h"
#include "core/glu_layout.h"
#include "core/scale_shapes.h"
#include "core/status_macros.h"

namespace moire {
namespace {

// A uniform weight as an argument of quantize_weight, whatever it is stored in.
bool has_shape_of(const TensorView& t, const GroupedTensorView& v) {
  const TensorView d = v.data();
  return t.rank == d.rank && t.shape[0] == d.shape[0] && t.shape[1] == d.shape[1] &&
         t.shape[2] == d.shape[2];
}

int32_t direction_of(const GroupedTensorView& v) {
  return v.has_rowwise() ? MOIRE_ROWWISE : MOIRE_COLUMNWISE;
}

// Whether two copies have the same groups; values are looked at where the host can.
bool same_groups(const Context& context, const Groups& a, const Groups& b) {
  if (a.num_groups != b.num_groups || a.capacity != b.capacity) return false;
  if (a.offsets == b.offsets || context.device() != Device::kCpu || context.is_explaining()) {
    return true;
  }
  if (a.offsets == nullptr || b.offsets == nullptr) return false;
  return std::equal(a.offsets, a.offsets + a.num_groups + 1, b.offsets);
}

Status convert_rows(const Context& context, const moire_tensor& source, const moire_tensor& target,
                    const GluLayout& from, const GluLayout& to) {
  ConvertGluArgs args;
  args.source = source;
  args.target = target;
  args.dim = 1;
  args.from = from;
  args.to = to;
  return convert_glu(context, args);
}

// The layout of scales that have one row for `block` rows of elements.
Result<GluLayout> layout_of_scales(const GluLayout& layout, int64_t f, int64_t block) {
  const int64_t rows = resolve_glu_layout(layout, f).block;
  if (rows % block != 0) {
    return invalid("convert_glu",
                   concat("gate and up lie in blocks of ", rows, " rows, needs a multiple of ",
                          block, ": scales of columnwise copies and tiles are of ", block,
                          " rows, and nothing is requantised"));
  }
  return GluLayout(moire_glu_layout{rows / block, layout.order});
}

}  // namespace

Status quantize(const Context& context, const TensorView& source, const GroupedTensorView& target,
                const TensorView& row_idx) {
  if (!target.is_ragged()) {
    if (row_idx.is_present()) {
      return invalid("quantize", "row_idx is present, but the target is uniform");
    }
    return quantize(context, Weight(source), target);
  }
  QuantizeArgs args;
  args.source = source;
  args.row_idx = row_idx;
  args.scaling = target.scaling;
  args.fractional_scales = target.fractional_scales ? 1 : 0;
  args.rowwise = target.rowwise;
  args.columnwise = target.columnwise;
  args.groups = target.groups;
  return quantize(context, args);
}

Status quantize(const Context& context, const Weight& source, const GroupedTensorView& target) {
  if (target.is_ragged() || !has_shape_of(source.tensor, target)) {
    return invalid("quantize", concat("source is ", source.tensor,
                                      ", needs the shape of the target, ", target.data()));
  }
  QuantizeWeightArgs args;
  args.source = source;
  args.scaling = target.scaling;
  args.fractional_scales = target.fractional_scales ? 1 : 0;
  args.rowwise = target.rowwise;
  args.columnwise = target.columnwise;
  return quantize_weight(context, args);
}

Status dequantize(const Context& context, const GroupedTensorView& source,
                  const TensorView& target) {
  DequantizeArgs args;
  args.source = source.has_rowwise() ? source.rowwise : source.columnwise;
  args.scaling = source.scaling;
  args.direction = direction_of(source);
  args.target = target;
  args.groups = source.groups;
  return dequantize(context, args);
}

Status requantize(const Context& context, const GroupedTensorView& source,
                  const GroupedTensorView& target) {
  const int32_t direction = direction_of(source);
  if (source.scaling != target.scaling) {
    return invalid("requantize", concat("source is ", scaling_name(source.scaling), ", target ",
                                        scaling_name(target.scaling), ", must be alike"));
  }
  const Quantized& other = direction == MOIRE_ROWWISE ? target.columnwise : target.rowwise;
  if (!other.is_present()) {
    return invalid("requantize",
                   concat("source is ", direction == MOIRE_ROWWISE ? "row" : "column",
                          "wise, but target has no ", direction == MOIRE_ROWWISE ? "column" : "row",
                          "wise copy to write"));
  }
  if (!same_groups(context, source.groups, target.groups)) {
    return invalid("requantize", "source and target have different groups, must have the same");
  }
  RequantizeArgs args;
  args.source = direction == MOIRE_ROWWISE ? source.rowwise : source.columnwise;
  args.scaling = source.scaling;
  args.direction = direction;
  args.fractional_scales = target.fractional_scales ? 1 : 0;
  args.target = other;
  args.groups = source.groups;
  return requantize(context, args);
}

Status convert_glu(const Context& context, const GroupedTensorView& source,
                   const GroupedTensorView& target) {
  if (!source.has_layout || !target.has_layout) {
    return invalid("convert_glu", concat(source.has_layout ? "target" : "source",
                                         " has no layout, needs one on both sides"));
  }
  const bool same_copies = source.has_rowwise() == target.has_rowwise() &&
                           source.has_columnwise() == target.has_columnwise();
  if (source.is_ragged() || source.scaling != target.scaling || !same_copies ||
      !has_shape_of(source.data(), target)) {
    return invalid("convert_glu", concat("source is ", source.data(), ", target ", target.data(),
                                         ": needs [G, 2F, k] of equal shape, scaling and "
                                         "directions"));
  }
  const int64_t f = source.data().shape[1] / 2, block = scale_block(source.scaling);
  GluLayout from = source.layout, to = target.layout;
  const bool is_tiled = source.scaling == MOIRE_SCALING_FP8_TILE;
  GluLayout from_blocks, to_blocks;
  if (is_tiled || source.has_columnwise()) {
    const Result<GluLayout> a = layout_of_scales(from, f, block),
                            b = layout_of_scales(to, f, block);
    if (!a.ok()) return a.status();
    if (!b.ok()) return b.status();
    from_blocks = a.value();
    to_blocks = b.value();
  }
  const auto convert = [&](const Context& c) -> Status {
    if (source.has_rowwise()) {
      MOIRE_RETURN_IF_ERROR(convert_rows(c, source.rowwise.data, target.rowwise.data, from, to));
      MOIRE_RETURN_IF_ERROR(convert_rows(c, source.rowwise.scales, target.rowwise.scales,
                                         is_tiled ? from_blocks : from, is_tiled ? to_blocks : to));
    }
    if (!source.has_columnwise()) return {};
    MOIRE_RETURN_IF_ERROR(
        convert_rows(c, source.columnwise.data, target.columnwise.data, from, to));
    return convert_rows(c, source.columnwise.scales, target.columnwise.scales, from_blocks,
                        to_blocks);
  };
  MOIRE_RETURN_IF_ERROR(convert(context.explaining()));  // all is checked before anything runs
  return convert(context);
}

Result<QuantizedWeight> QuantizedWeight::create(int64_t num_groups, int64_t n, int64_t k,
                                                int32_t scaling, bool fractional_scales) {
  if (scaling == MOIRE_SCALING_FP8_BLOCK) {
    return invalid(
        "QuantizedWeight::create",
        "scaling is FP8_BLOCK (2), needs MXFP8 (1) or FP8_TILE (3), which products take");
  }
  GroupedTensorOptions options;
  options.scaling = scaling;
  options.fractional_scales = fractional_scales;
  options.columnwise = scaling != MOIRE_SCALING_FP8_TILE;
  Result<GroupedTensor> copies = GroupedTensor::uniform(num_groups, n, k, options);
  if (!copies.ok()) return copies.status();
  QuantizedWeight weight;
  weight.copies_ = std::move(copies).value();
  return weight;
}

Status QuantizedWeight::update(const Context& context, const Weight& weight, uint64_t version) {
  if (is_filled_ && version == version_ && has_shape_of(weight.tensor, copies_.view())) return {};
  is_filled_ = false;
  MOIRE_RETURN_IF_ERROR(quantize(context, weight, copies_.view()));
  version_ = version;
  is_filled_ = !context.is_explaining();
  return {};
}

}  // namespace moire
