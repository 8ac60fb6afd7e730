// FP8 and its scales, there and back, and prepared weights: validation and dispatch; the shapes of
// scales and the forms of weights.
#include <moire/quantize.h>

#include <algorithm>

#include "core/prepared_weight.h"
#include "core/resolved_groups.h"
#include "core/scale_layouts.h"
#include "core/scale_shapes.h"
#include "core/scales_check.h"
#include "ops/dispatch.h"

namespace moire {
namespace {

// At least one of the two copies is there, and sound.
void check_copies(ArgumentCheck& check, const auto& args, const ScaledShape& shape) {
  check.require(is_given(args.rowwise) || is_given(args.columnwise),
                "rowwise and columnwise are both absent, needs at least one output");
  // Beside a folded copy MXFP8 itself may be.
  const bool is_mx = args.fractional_scales == kFoldedScales && is_given(args.rowwise) &&
                     TensorView(args.columnwise.scales).type() == DType::kE8M0;
  check_copy(check, "rowwise", args.rowwise, args.scaling, MOIRE_ROWWISE, shape);
  check_copy(check, "columnwise", args.columnwise, is_mx ? MOIRE_SCALING_MXFP8 : args.scaling,
             MOIRE_COLUMNWISE, shape);
}

// Weights of whatever sizes.
bool check_matrices(ArgumentCheck& check, std::string_view name, const Weight& w) {
  check.require(w.is_present(), name, " is absent, needs fp32, bf16 or fp16 [G, n, k]");
  const TensorView t(w.tensor);
  if (!check.require(t.rank == 3, name, " has rank ", t.rank, ", needs rank 3 [G, n, k]")) {
    return false;
  }
  return check.weight(name, w, kFloatTypes, {"G", t.shape[0]}, {"out", w.out_features()},
                      {"in", w.in_features()});
}

std::string directions(const moire_quantized& rowwise, const moire_quantized& columnwise) {
  const DType r = TensorView(rowwise.data).type(), c = TensorView(columnwise.data).type();
  if (!is_present(columnwise)) return concat("rowwise ", r);
  if (!is_present(rowwise)) return concat("columnwise ", c);
  return concat("rowwise ", r, " and columnwise ", c);
}

void validate(ArgumentCheck& check, const QuantizeArgs& args) {
  const TensorView source(args.source), row_idx(args.row_idx);
  check_scaling(check, args.scaling, false);
  check_fractional(check, args.scaling, args.fractional_scales,
                   args.scaling == MOIRE_SCALING_FP8_BLOCK);
  if (!check.ok() || !check.ranked("source", source, kFloatTypes, 2)) return;
  const TensorView& rows_like = row_idx.is_present() ? row_idx : source;
  const ResolvedGroups resolved(args.groups, rows_like.shape[0]);
  const Groups groups = resolved.get();
  check.ragged("source", source, "row_idx", row_idx, groups, {"k", source.shape[1]});
  check_copies(check, args, {groups, {"k", source.shape[1]}});
  check.require(!is_present(args.grad_bias) || !is_absent(args.groups),
                "grad_bias is present but groups are absent, needs groups, whose rows are summed");
  check.optional_tensor("grad_bias", args.grad_bias, kFloatTypes,
                        {{"G", groups.num_groups}, {"k", source.shape[1]}});
}

void validate(ArgumentCheck& check, const QuantizeWeightArgs& args) {
  const Weight source = args.source;
  const bool is_tiled = args.scaling == MOIRE_SCALING_FP8_TILE;
  check_scaling(check, args.scaling, true);
  check_fractional(check, args.scaling, args.fractional_scales);
  check.require(!is_tiled || !is_given(args.columnwise),
                "columnwise is present, but one copy in tiles serves both directions: needs "
                "rowwise alone");
  if (check_matrices(check, "source", source)) check_copies(check, args, ScaledShape(source));
}

std::string problem_of(const QuantizeArgs& args) {
  return concat(TensorView(args.source), is_present(args.row_idx) ? ", gathered" : "", ", ",
                scaling_word(args.scaling), " ", directions(args.rowwise, args.columnwise),
                is_present(args.grad_bias) ? ", bias gradient" : "");
}

std::string problem_of(const QuantizeWeightArgs& args) {
  return concat(TensorView(args.source.tensor), args.source.list == nullptr ? "" : ", listed", ", ",
                scaling_word(args.scaling), " ",
                args.scaling == MOIRE_SCALING_FP8_TILE
                    ? dtype_name(TensorView(args.rowwise.data).type())
                    : directions(args.rowwise, args.columnwise));
}

// The shape decides whether a source is ragged or weights; what both ops ask of it, and of a target
// of the other direction.
void check_copies(ArgumentCheck& check, const moire_quantized& source,
                  const moire_quantized* target, int32_t scaling, int32_t direction,
                  const moire_groups& groups) {
  const TensorView data(source.data);
  check.require(data.is_present(), "source.data is absent, needs e4m3 or e5m2 of rank 2 or 3");
  check.require(data.rank == 2 || data.rank == 3, "source.data has rank ", data.rank,
                ", needs rank 2 [capacity, k] or 3 [G, n, k]");
  if (!check.ranked("source.data", data, kFp8Types, data.rank)) return;
  const bool is_weight = data.rank == 3;
  const ResolvedGroups resolved(groups, data.shape[0]);
  if (is_weight) {
    check.require(is_absent(groups), "groups are given but source.data is ", data,
                  ": only a ragged [capacity, k] has them");
  } else {
    check.require(scaling != MOIRE_SCALING_FP8_TILE, "scaling is FP8_TILE (3) but source.data is ",
                  data, ": tiles are of weights [G, n, k]");
    check.require(resolved.get().capacity == data.shape[0], "groups.capacity is ", groups.capacity,
                  " but source.data is ", data);
  }
  const ScaledShape shape =
      is_weight ? ScaledShape(Weight(data)) : ScaledShape(resolved.get(), {"k", data.shape[1]});
  check_quantized(check, "source", source, scaling, direction, shape);
  if (target != nullptr) check_quantized(check, "target", *target, scaling, 1 - direction, shape);
}

void validate(ArgumentCheck& check, const DequantizeArgs& args) {
  const TensorView data(args.source.data), target(args.target);
  check_scaling(check, args.scaling, true);
  check_copies(check, args.source, nullptr, args.scaling, args.direction, args.groups);
  if (!check.ranked("target", target, kFloatTypes, data.rank)) return;
  check.require(std::equal(data.shape, data.shape + data.rank, target.shape), "target is ", target,
                " but source.data is ", data, ": the shapes must be equal");
}

void validate(ArgumentCheck& check, const RequantizeArgs& args) {
  check_scaling(check, args.scaling, false, ": a tile is the same in both directions");
  check_fractional(check, args.scaling, args.fractional_scales);
  check_copies(check, args.source, &args.target, args.scaling, args.direction, args.groups);
}

std::string source_text(const auto& args) {
  return concat(TensorView(args.source.data), ", ", scaling_word(args.scaling),
                args.scaling == MOIRE_SCALING_FP8_TILE ? ""
                : args.direction == MOIRE_ROWWISE      ? " rowwise"
                                                       : " columnwise");
}

std::string problem_of(const DequantizeArgs& args) {
  return concat(source_text(args), " to ", TensorView(args.target).type());
}

std::string problem_of(const RequantizeArgs& args) {
  return concat(source_text(args),
                args.direction == MOIRE_ROWWISE ? " to columnwise " : " to rowwise ",
                TensorView(args.target.data).type());
}

constexpr std::string_view kLayoutNames[] = {"canonical", "dense", "padded", "swizzled"};

// Scales in one of the layouts; those of interchange are contiguous, as wide as the layout says,
// with rows enough.
void check_side(ArgumentCheck& check, const NamedTensor& side, int32_t layout,
                const ConvertScalesArgs& args) {
  if (layout == MOIRE_SCALES_CANONICAL) {
    check_scales(check, side, MOIRE_SCALING_MXFP8, args.direction, {args.groups, {"k", args.k}});
    return;
  }
  constexpr DType kE8M0Only[] = {DType::kE8M0};
  const auto& [name, t] = side;
  if (!check.ranked(name, t, kE8M0Only, 2)) return;
  const int64_t width = scale_layout_width(args.direction, layout, args.k);
  check.require(t.columns() == width, name, " is ", t, ", needs ", width, " columns (",
                kLayoutNames[layout], ", k = ", args.k, ")");
  check.require(t.is_contiguous(), name, " is ", t, ", needs contiguous rows");
  if (!check.reads_values()) return;
  int64_t needed = 0;
  const int64_t* const offsets = args.groups.offsets;
  for (int64_t g = 0; g < args.groups.num_groups; ++g) {
    needed += scale_layout_rows(args.direction, layout, offsets[g + 1] - offsets[g]);
  }
  check.require(t.num_rows() >= needed, name, " is ", t, ", needs at least ", needed,
                " rows for these groups (", kLayoutNames[layout], ")");
}

void validate(ArgumentCheck& check, const ConvertScalesArgs& args) {
  check.require(args.from == MOIRE_SCALES_CANONICAL || args.to == MOIRE_SCALES_CANONICAL,
                "from is ", args.from, " and to is ", args.to,
                ": one of them must be canonical (0)");
  check.require(args.k >= 0 && args.k <= int64_t{1} << 40, "k is ", args.k, ", must be 0 to 2^40");
  if (!check.ok()) return;
  check_side(check, {"source", args.source}, args.from, args);
  check_side(check, {"target", args.target}, args.to, args);
}

std::string problem_of(const ConvertScalesArgs& args) {
  return concat(TensorView(args.source), " ", kLayoutNames[args.from], " to ",
                kLayoutNames[args.to],
                args.direction == MOIRE_ROWWISE ? ", rowwise" : ", columnwise");
}

// All but what comes out.
bool check_inputs(ArgumentCheck& check, const PrepareWeightArgs& args) {
  check.require(args.recipe >= MOIRE_RECIPE_MXFP8 && args.recipe <= MOIRE_RECIPE_FP8_BLOCK,
                "recipe is ", args.recipe,
                ", needs 1 to 3: the products of others read weights as they are");
  check_fractional(check, weight_scaling_of(args.recipe), args.fractional_scales);
  check.require(args.dequantized == 0 || args.recipe == MOIRE_RECIPE_MXFP8,
                "dequantized is 1 but recipe is ", args.recipe,
                ", needs 1 (mxfp8), whose products may be of decoded numbers");
  return check_matrices(check, "w", args.w);
}

moire_prepared_weight prepared_of(const Context& context, const PrepareWeightArgs& args) {
  return prepared_for(context, args.w, args.recipe, args.fractional_scales, args.forward_only);
}

void validate(ArgumentCheck& check, const PrepareWeightArgs& args) {
  if (!check_inputs(check, args)) return;
  check_prepared(check, "prepared", args.prepared, prepared_of(check.context(), args));
}

std::string problem_of(const PrepareWeightArgs& args) {
  return concat(TensorView(args.w.tensor), args.w.list == nullptr ? "" : ", listed", ", ",
                scaling_word(weight_scaling_of(args.recipe)));
}

}  // namespace

MOIRE_DEFINE_OP_WITH_WORKSPACE(quantize)
MOIRE_DEFINE_OP(quantize_weight)
MOIRE_DEFINE_OP(dequantize)
MOIRE_DEFINE_OP(requantize)
MOIRE_DEFINE_OP(convert_scales)

Status scales_shape(int32_t scaling, int32_t direction, int32_t layout, int64_t rows, int64_t k,
                    int64_t num_groups, int64_t* shape) {
  ArgumentCheck check("scales_shape");
  check_scaling(check, scaling, true);
  check.require(direction == MOIRE_ROWWISE || direction == MOIRE_COLUMNWISE, "direction is ",
                direction, ", must be 0 or 1");
  check.enumerator("layout", layout, 4);
  if (!check.ok()) return check.status();
  check.require(layout == MOIRE_SCALES_CANONICAL || scaling == MOIRE_SCALING_MXFP8, "layout is ",
                kLayoutNames[layout], ", but ", scaling_name(scaling),
                " has the canonical one only");
  constexpr int64_t kMost = int64_t{1} << 40;  // of each: their padded sums stay in 63 bits
  const auto [least, largest] = std::minmax({rows, k, num_groups});
  check.require(least >= 0 && largest <= kMost, "rows, k and num_groups are ", rows, ", ", k,
                " and ", num_groups, ", must be 0 to 2^40");
  if (!check.require(shape != nullptr, "shape is null")) return check.status();
  const ScaleShape found = scaling == MOIRE_SCALING_FP8_TILE
                               ? matrix_scales(scaling, direction, rows, k)
                           : layout == MOIRE_SCALES_CANONICAL
                               ? ragged_scales(scaling, direction, rows, num_groups, k)
                               : scale_layout_bound(direction, layout, rows, num_groups, k);
  shape[0] = found.rows;
  shape[1] = found.columns;
  return {};
}

MOIRE_DEFINE_OP_WITH_WORKSPACE(prepare_weight)

Status prepare_weight_form(const Context& context, const PrepareWeightArgs& args,
                           moire_prepared_weight* form) {
  ArgumentCheck check("prepare_weight_form", context, ArgumentCheck::Purpose::kSizeWorkspace);
  check.require(form != nullptr, "form is null, needs an address");
  visit_fields(args, Values(check));
  if (!check_inputs(check, args)) return check.status();
  // Other forms than codes are for the fastest products, which a context may rule out.
  const std::string_view fastest = implementations<GroupedGemmArgs>().front().name;
  const bool is_plain = is_ruled_out(context.options().implementation, fastest);
  const WeightForm chosen = is_plain ? WeightForm::kCodes : prepared_form(context.state(), args);
  moire_prepared_weight p = prepared_of(context, args);
  p.form = static_cast<int32_t>(chosen);
  Arena arena;
  take_copies(arena, p, chosen);
  p.memory = TensorView(nullptr, DType::kUint8, {static_cast<int64_t>(arena.used())});
  *form = p;
  return {};
}

}  // namespace moire
