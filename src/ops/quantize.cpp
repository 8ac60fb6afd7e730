// Validation and dispatch of quantize and quantize_weight.
#include <moire/quantize.h>

#include "core/resolved_groups.h"
#include "core/scale_shapes.h"
#include "core/scales_check.h"
#include "ops/dispatch.h"

namespace moire {
namespace {

// At least one of the two copies is there, and sound.
template <class A>
void check_copies(ArgumentCheck& check, const A& args, const ScaledShape& shape) {
  check.require(is_given(args.rowwise) || is_given(args.columnwise),
                "rowwise and columnwise are both absent, needs at least one output");
  if (is_given(args.rowwise)) {
    check_quantized(check, "rowwise", args.rowwise, args.scaling, MOIRE_ROWWISE, shape);
  }
  if (is_given(args.columnwise)) {
    check_quantized(check, "columnwise", args.columnwise, args.scaling, MOIRE_COLUMNWISE, shape);
  }
}

std::string directions(const moire_quantized& rowwise, const moire_quantized& columnwise) {
  const DType r = TensorView(rowwise.data).type(), c = TensorView(columnwise.data).type();
  if (!is_present(columnwise)) return concat("rowwise ", r);
  if (!is_present(rowwise)) return concat("columnwise ", c);
  return concat("rowwise ", r, " and columnwise ", c);
}

void validate(ArgumentCheck& check, const QuantizeArgs& args) {
  const TensorView source(args.source), row_idx(args.row_idx);
  check.require(args.scaling == MOIRE_SCALING_MXFP8 || args.scaling == MOIRE_SCALING_FP8_BLOCK,
                "scaling is ", scaling_name(args.scaling), ", must be MXFP8 (1) or FP8_BLOCK (2)");
  check_fractional(check, args.scaling, args.fractional_scales);
  check.enumerator("tail", args.tail, 2);
  if (!check.ok() || !check.ranked("source", source, kFloatTypes, 2)) return;
  const TensorView& rows_like = row_idx.is_present() ? row_idx : source;
  const ResolvedGroups resolved(args.groups, rows_like.shape[0]);
  const Groups groups = resolved.get();
  if (!is_absent(args.groups)) check.groups(groups);
  check.ragged("source", source, "row_idx", row_idx, groups, {"k", source.shape[1]});
  check_copies(check, args, {groups, {"k", source.shape[1]}});
}

void validate(ArgumentCheck& check, const QuantizeWeightArgs& args) {
  const Weight source = args.source;
  const bool is_tiled = args.scaling == MOIRE_SCALING_FP8_TILE;
  check.require(args.scaling >= MOIRE_SCALING_MXFP8 && args.scaling <= MOIRE_SCALING_FP8_TILE,
                "scaling is ", scaling_name(args.scaling),
                ", must be MXFP8 (1), FP8_BLOCK (2) or FP8_TILE (3)");
  check_fractional(check, args.scaling, args.fractional_scales);
  check.require(!is_tiled || !is_given(args.columnwise),
                "columnwise is present, but one copy in tiles serves both directions: needs "
                "rowwise alone");
  check.require(source.is_present(), "source is absent, needs fp32, bf16 or fp16 [G, n, k]");
  check.require(source.tensor.rank == 3, "source has rank ", source.tensor.rank,
                ", needs rank 3 [G, n, k]");
  if (!check.ok()) return;
  const int64_t* s = source.tensor.shape;
  check.weight("source", source, kFloatTypes, {"G", s[0]}, {"out", source.out_features()},
               {"in", source.in_features()});
  check_copies(check, args, ScaledShape(source));
}

std::string problem_of(const QuantizeArgs& args) {
  return concat(TensorView(args.source), is_present(args.row_idx) ? ", gathered" : "", ", ",
                scaling_word(args.scaling), " ", directions(args.rowwise, args.columnwise));
}

std::string problem_of(const QuantizeWeightArgs& args) {
  return concat(TensorView(args.source.tensor), args.source.list == nullptr ? "" : ", listed", ", ",
                scaling_word(args.scaling), " ",
                args.scaling == MOIRE_SCALING_FP8_TILE
                    ? dtype_name(TensorView(args.rowwise.data).type())
                    : directions(args.rowwise, args.columnwise));
}

}  // namespace

MOIRE_DEFINE_OP(quantize)
MOIRE_DEFINE_OP(quantize_weight)

}  // namespace moire
