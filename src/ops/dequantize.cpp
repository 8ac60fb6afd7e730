// Validation and dispatch of dequantize and requantize.
#include <moire/quantize.h>

#include <algorithm>

#include "core/resolved_groups.h"
#include "core/scale_shapes.h"
#include "core/scales_check.h"
#include "ops/dispatch.h"

namespace moire {
namespace {

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
    if (!is_absent(groups)) check.groups(groups);
    check.require(resolved.get().capacity == data.shape[0], "groups.capacity is ", groups.capacity,
                  " but source.data is ", data);
  }
  const ScaledShape shape =
      is_weight ? ScaledShape(Weight(data)) : ScaledShape(resolved.get(), {"k", data.shape[1]});
  check_quantized(check, "source", source, scaling, direction, shape);
  if (target != nullptr) {
    check_quantized(check, "target", *target, scaling, 1 - direction, shape);
  }
}

void validate(ArgumentCheck& check, const DequantizeArgs& args) {
  const TensorView data(args.source.data), target(args.target);
  check.require(args.scaling >= MOIRE_SCALING_MXFP8 && args.scaling <= MOIRE_SCALING_FP8_TILE,
                "scaling is ", scaling_name(args.scaling),
                ", must be MXFP8 (1), FP8_BLOCK (2) or FP8_TILE (3)");
  if (args.scaling != MOIRE_SCALING_FP8_TILE) check.enumerator("direction", args.direction, 2);
  check.enumerator("tail", args.tail, 2);
  check_copies(check, args.source, nullptr, args.scaling, args.direction, args.groups);
  if (!check.ranked("target", target, kFloatTypes, data.rank)) return;
  check.require(std::equal(data.shape, data.shape + data.rank, target.shape), "target is ", target,
                " but source.data is ", data, ": the shapes must be equal");
}

void validate(ArgumentCheck& check, const RequantizeArgs& args) {
  check.require(args.scaling == MOIRE_SCALING_MXFP8 || args.scaling == MOIRE_SCALING_FP8_BLOCK,
                "scaling is ", scaling_name(args.scaling),
                ", must be MXFP8 (1) or FP8_BLOCK (2): a tile is the same in both directions");
  check.enumerator("direction", args.direction, 2);
  check_fractional(check, args.scaling, args.fractional_scales);
  check.enumerator("tail", args.tail, 2);
  check_copies(check, args.source, &args.target, args.scaling, args.direction, args.groups);
}

template <class A>
std::string source_text(const A& args) {
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

}  // namespace

MOIRE_DEFINE_OP(dequantize)
MOIRE_DEFINE_OP(requantize)

}  // namespace moire
