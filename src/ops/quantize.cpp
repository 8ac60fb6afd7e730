// Validation and dispatch of quantize and quantize_weight.
#include <moire/quantize.h>

#include "core/resolved_groups.h"
#include "core/scale_shapes.h"
#include "core/scales_check.h"
#include "ops/dispatch.h"

namespace moire {
namespace {

// At least one of the two copies is there, and sound by `check_copy(name, copy, direction)`.
template <class CheckCopy>
void check_copies(ArgumentCheck& check, const moire_quantized& rowwise,
                  const moire_quantized& columnwise, CheckCopy&& check_copy) {
  check.require(is_given(rowwise) || is_given(columnwise),
                "rowwise and columnwise are both absent, needs at least one output");
  if (is_given(rowwise)) check_copy("rowwise", rowwise, MOIRE_ROWWISE);
  if (is_given(columnwise)) check_copy("columnwise", columnwise, MOIRE_COLUMNWISE);
}

std::string directions(const moire_quantized& rowwise, const moire_quantized& columnwise) {
  const std::string r = !is_present(rowwise) ? "" : dtype_name(TensorView(rowwise.data).type());
  const std::string c =
      !is_present(columnwise) ? "" : dtype_name(TensorView(columnwise.data).type());
  if (c.empty()) return concat("rowwise ", r);
  if (r.empty()) return concat("columnwise ", c);
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
  check_copies(
      check, args.rowwise, args.columnwise,
      [&](std::string_view name, const Quantized& copy, int32_t direction) {
        check_quantized(check, name, copy, args.scaling, direction, groups, {"k", source.shape[1]});
      });
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
  check_copies(check, args.rowwise, args.columnwise,
               [&](std::string_view name, const Quantized& copy, int32_t direction) {
                 check_quantized(check, name, copy, args.scaling, direction, source);
               });
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
