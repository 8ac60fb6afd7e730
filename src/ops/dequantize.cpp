// Validation and dispatch of dequantize and requantize.
#include <moire/quantize.h>

#include "core/resolved_groups.h"
#include "core/scale_shapes.h"
#include "core/scales_check.h"
#include "ops/dispatch.h"

namespace moire {
namespace {

// What both ops ask of a source: its shape decides whether it is ragged or weights.
struct Source {
  const moire_quantized& source;
  int32_t scaling, direction;
  const moire_groups& groups;

  bool is_weight() const { return source.data.rank == 3; }
  std::string problem() const {
    return concat(TensorView(source.data), ", ", scaling_word(scaling),
                  scaling == MOIRE_SCALING_FP8_TILE ? ""
                  : direction == MOIRE_ROWWISE      ? " rowwise"
                                                    : " columnwise");
  }
};

// Calls check_copies(of), `of` being what check_quantized() takes of the source's shape.
template <class CheckCopies>
void with_shape(ArgumentCheck& check, const Source& s, CheckCopies&& check_copies) {
  const TensorView data(s.source.data);
  check.require(data.is_present(), "source.data is absent, needs e4m3 or e5m2 of rank 2 or 3");
  check.require(data.rank == 2 || data.rank == 3, "source.data has rank ", data.rank,
                ", needs rank 2 [capacity, k] or 3 [G, n, k]");
  if (!check.ok() || !check.ranked("source.data", data, kFp8Types, data.rank)) return;
  if (s.is_weight()) {
    check.require(is_absent(s.groups), "groups are given but source.data is ", data,
                  ": only a ragged [capacity, k] has them");
    check_copies([&](std::string_view name, const moire_quantized& q, int32_t direction) {
      check_quantized(check, name, q, s.scaling, direction, Weight(data));
    });
    return;
  }
  check.require(s.scaling != MOIRE_SCALING_FP8_TILE, "scaling is FP8_TILE (3) but source.data is ",
                data, ": tiles are of weights [G, n, k]");
  const ResolvedGroups resolved(s.groups, data.shape[0]);
  if (!is_absent(s.groups)) {
    check.groups(s.groups);
    check.require(s.groups.capacity == data.shape[0], "groups.capacity is ", s.groups.capacity,
                  " but source.data is ", data);
  }
  check_copies([&](std::string_view name, const moire_quantized& q, int32_t direction) {
    check_quantized(check, name, q, s.scaling, direction, resolved.get(), {"k", data.shape[1]});
  });
}

void validate(ArgumentCheck& check, const DequantizeArgs& args) {
  const TensorView data(args.source.data), target(args.target);
  const Source source{args.source, args.scaling, args.direction, args.groups};
  check.require(args.scaling >= MOIRE_SCALING_MXFP8 && args.scaling <= MOIRE_SCALING_FP8_TILE,
                "scaling is ", scaling_name(args.scaling),
                ", must be MXFP8 (1), FP8_BLOCK (2) or FP8_TILE (3)");
  if (args.scaling != MOIRE_SCALING_FP8_TILE) check.enumerator("direction", args.direction, 2);
  check.enumerator("tail", args.tail, 2);
  with_shape(check, source,
             [&](auto&& check_copy) { check_copy("source", args.source, args.direction); });
  if (!check.ok() || !check.ranked("target", target, kFloatTypes, data.rank)) {
    return;
  }
  bool equal = true;
  for (int32_t i = 0; i < data.rank; ++i) equal = equal && target.shape[i] == data.shape[i];
  check.require(equal, "target is ", target, " but source.data is ", data,
                ": the shapes must be equal");
}

void validate(ArgumentCheck& check, const RequantizeArgs& args) {
  const Source source{args.source, args.scaling, args.direction, args.groups};
  check.require(args.scaling == MOIRE_SCALING_MXFP8 || args.scaling == MOIRE_SCALING_FP8_BLOCK,
                "scaling is ", scaling_name(args.scaling),
                ", must be MXFP8 (1) or FP8_BLOCK (2): a tile is the same in both directions");
  check.enumerator("direction", args.direction, 2);
  check_fractional(check, args.scaling, args.fractional_scales);
  check.enumerator("tail", args.tail, 2);
  with_shape(check, source, [&](auto&& check_copy) {
    check_copy("source", args.source, args.direction);
    check_copy("target", args.target, 1 - args.direction);
  });
}

std::string problem_of(const DequantizeArgs& args) {
  const Source source{args.source, args.scaling, args.direction, args.groups};
  return concat(source.problem(), " to ", TensorView(args.target).type());
}

std::string problem_of(const RequantizeArgs& args) {
  const Source source{args.source, args.scaling, args.direction, args.groups};
  return concat(source.problem(),
                args.direction == MOIRE_ROWWISE ? " to columnwise" : " to rowwise", " ",
                TensorView(args.target.data).type());
}

}  // namespace

MOIRE_DEFINE_OP(dequantize)
MOIRE_DEFINE_OP(requantize)

}  // namespace moire
