// Validation and dispatch of convert_scales; the shapes of scales.
#include <moire/quantize.h>

#include "core/scale_layouts.h"
#include "core/scales_check.h"
#include "ops/dispatch.h"

namespace moire {
namespace {

constexpr std::string_view kLayoutNames[] = {"canonical", "dense", "padded", "swizzled"};

// Rows that the groups' scales take up.
int64_t rows_needed(const ConvertScalesArgs& args, int32_t layout) {
  int64_t rows = 0;
  for (int64_t g = 0; g < args.groups.num_groups; ++g) {
    rows += scale_layout_rows(args.direction, layout,
                              args.groups.offsets[g + 1] - args.groups.offsets[g]);
  }
  return rows;
}

// A tensor in a layout of interchange: contiguous, as wide as the layout says, with rows enough.
void check_container(ArgumentCheck& check, std::string_view name, const TensorView& t,
                     int32_t layout, const ConvertScalesArgs& args) {
  constexpr DType kE8M0Only[] = {DType::kE8M0};
  if (!check.ranked(name, t, kE8M0Only, 2)) return;
  const int64_t width = scale_layout_width(args.direction, layout, args.k);
  check.require(t.columns() == width, name, " is ", t, ", needs ", width, " columns (",
                kLayoutNames[layout], ", k = ", args.k, ")");
  check.require(t.is_contiguous(), name, " is ", t, ", needs contiguous rows");
  if (!check.ok() || !check.reads_values()) return;
  const int64_t needed = rows_needed(args, layout);
  check.require(t.num_rows() >= needed, name, " is ", t, ", needs at least ", needed,
                " rows for these groups (", kLayoutNames[layout], ")");
}

void check_side(ArgumentCheck& check, const NamedTensor& side, int32_t layout,
                const ConvertScalesArgs& args) {
  if (layout != MOIRE_SCALES_CANONICAL) {
    return check_container(check, side.name, side.tensor, layout, args);
  }
  check_scales(check, side, MOIRE_SCALING_MXFP8, args.direction, {args.groups, {"k", args.k}});
}

void validate(ArgumentCheck& check, const ConvertScalesArgs& args) {
  check.enumerator("from", args.from, 4);
  check.enumerator("to", args.to, 4);
  check.enumerator("direction", args.direction, 2);
  check.require(args.from == MOIRE_SCALES_CANONICAL || args.to == MOIRE_SCALES_CANONICAL,
                "from is ", args.from, " and to is ", args.to,
                ": one of them must be canonical (0)");
  check.require(args.k >= 0 && args.k <= int64_t{1} << 40, "k is ", args.k, ", must be 0 to 2^40");
  if (!check.ok() || !check.groups(args.groups)) return;
  check_side(check, {"source", args.source}, args.from, args);
  check_side(check, {"target", args.target}, args.to, args);
}

std::string problem_of(const ConvertScalesArgs& args) {
  return concat(TensorView(args.source), " ", kLayoutNames[args.from], " to ",
                kLayoutNames[args.to],
                args.direction == MOIRE_ROWWISE ? ", rowwise" : ", columnwise");
}

}  // namespace

MOIRE_DEFINE_OP(convert_scales)

Status scales_shape(int32_t scaling, int32_t direction, int32_t layout, int64_t rows, int64_t k,
                    int64_t num_groups, int64_t* shape) {
  const auto refuse = [](const std::string& text) {
    return Status(Code::kInvalidArgument, concat("scales_shape: ", text));
  };
  if (scaling < MOIRE_SCALING_MXFP8 || scaling > MOIRE_SCALING_FP8_TILE) {
    return refuse(concat("scaling is ", scaling_name(scaling),
                         ", must be MXFP8 (1), FP8_BLOCK (2) or FP8_TILE (3)"));
  }
  if (direction != MOIRE_ROWWISE && direction != MOIRE_COLUMNWISE) {
    return refuse(concat("direction is ", direction, ", must be 0 or 1"));
  }
  if (layout < MOIRE_SCALES_CANONICAL || layout > MOIRE_SCALES_SWIZZLED) {
    return refuse(concat("layout is ", layout, ", must be 0 to 3"));
  }
  if (layout != MOIRE_SCALES_CANONICAL && scaling != MOIRE_SCALING_MXFP8) {
    return refuse(concat("layout is ", kLayoutNames[layout], ", but ", scaling_name(scaling),
                         " has the canonical one only"));
  }
  if (rows < 0 || k < 0 || num_groups < 0) {
    return refuse(concat("rows, k and num_groups are ", rows, ", ", k, " and ", num_groups,
                         ", must not be negative"));
  }
  constexpr int64_t kMost = int64_t{1} << 40;  // of each: their padded sums stay in 63 bits
  if (rows > kMost || k > kMost || num_groups > kMost) {
    return refuse(concat("rows, k and num_groups are ", rows, ", ", k, " and ", num_groups,
                         ", must be at most 2^40"));
  }
  if (shape == nullptr) return refuse("shape is null");
  const ScaleShape found = scaling == MOIRE_SCALING_FP8_TILE
                               ? matrix_scales(scaling, direction, rows, k)
                           : layout == MOIRE_SCALES_CANONICAL
                               ? ragged_scales(scaling, direction, rows, num_groups, k)
                               : scale_layout_bound(direction, layout, rows, num_groups, k);
  shape[0] = found.rows;
  shape[1] = found.columns;
  return {};
}

}  // namespace moire
