// A prepared weight: what lies in its memory, form by form, and the operands that products find
// there. A form is copies of the weight that grouped GEMMs take as they are. Nothing of it is read
// on the host but moire_prepared_weight, so that no call waits for a device.
//
// A new form is a WeightForm, its memory in take_copies(), the product that reads each copy in
// prepared_operand(), and the backend's implementation of prepare_weight, which chooses and writes.
#pragma once

#include <moire/grouped_gemm.h>
#include <moire/quantize.h>

#include <string_view>

#include "core/arena.h"
#include "core/argument_check.h"
#include "core/scale_shapes.h"

namespace moire {

// The weight of a product: floats, or FP8 with its scales.
struct WeightOperand {
  Weight weight;
  TensorView scales;
};

enum class WeightForm : int32_t {
  kCodes = 1,        // the canonical copies
  kDequantized = 2,  // what MXFP8 copies decode to, in BF16, rows at multiples of 16 bytes
  kCores = 3,        // what FP8 tensor cores read: tiles, and the contracted dimension last
};

// The layout of a weight that is turned over.
constexpr int32_t turned(int32_t layout) {
  return layout == MOIRE_OUT_IN ? MOIRE_IN_OUT : MOIRE_OUT_IN;
}

// How a recipe quantises weights.
constexpr int32_t weight_scaling_of(int32_t recipe) {
  return recipe == MOIRE_RECIPE_FP8_BLOCK ? MOIRE_SCALING_FP8_TILE : MOIRE_SCALING_MXFP8;
}

// The direction of the blocks of a weight that a product contracts along `in` (forward), else along
// `out` (dgrad); tiles have none and count as rowwise.
constexpr int32_t weight_direction(int32_t scaling, int32_t layout, bool along_in) {
  if (scaling == MOIRE_SCALING_FP8_TILE) return MOIRE_ROWWISE;
  return (layout == MOIRE_OUT_IN) == along_in ? MOIRE_ROWWISE : MOIRE_COLUMNWISE;
}

// Rows of E8M0 scales that a product reads lie a multiple of this apart, which TMA asks for.
inline constexpr int64_t kScalePitch = 16;

// Memory for a quantised copy of a ragged [rows, k], or of [G, n, k], `shape`; rows of E8M0 scales,
// and rows of elements, lie a multiple of these pitches apart.
inline moire_quantized take_copy(Arena& arena, DType element, int32_t scaling, int32_t direction,
                                 const TensorView& shape, int64_t num_groups,
                                 int64_t scale_pitch = 1, int64_t pitch = 1) {
  const bool is_ragged = shape.rank == 2;
  const int64_t rows = shape.dim(-2), columns = shape.dim(-1);
  const int64_t matrices = is_ragged ? 1 : shape.shape[0];
  const auto take = [&](DType dtype, const ScaleShape& s, int64_t stride) {
    void* const data = arena.take(dtype, product(matrices, s.rows), stride).data;
    if (is_ragged) return TensorView(data, dtype, {s.rows, s.columns}, stride);
    return TensorView(data, dtype, {matrices, s.rows, s.columns}, stride);
  };
  const ScaleShape s = is_ragged ? ragged_scales(scaling, direction, rows, num_groups, columns)
                                 : matrix_scales(scaling, direction, rows, columns);
  const bool is_e8m0 = scale_dtype(scaling) == DType::kE8M0;
  const TensorView data = take(element, {rows, columns}, round_up(columns, pitch));
  return {data,
          take(scale_dtype(scaling), s, is_e8m0 ? round_up(s.columns, scale_pitch) : s.columns)};
}

// The copies that products read; floats have no scales.
struct WeightCopies {
  moire_quantized rowwise = {}, columnwise = {};
};
// Memory for those of `p` in this form, and those in the memory of `p`.
WeightCopies take_copies(Arena& arena, const moire_prepared_weight& p, WeightForm form);
WeightCopies copies_of(const moire_prepared_weight& p);

// Memory for a weight like `codes`, [G, n, k], as FP8 tensor cores read it: as it is, or turned
// over to [G, k, n], in rows of a multiple of 128; with the scales of its tiles.
moire_quantized take_core_weight(Arena& arena, const TensorView& codes, bool is_turned);

// What a call on this context needs of a prepared weight, but for its form and memory.
moire_prepared_weight prepared_for(const Context& context, const Weight& like, int32_t recipe,
                                   int32_t fractional_scales, int32_t forward_only);
// `found`, which is called `name`, is that, in a form that its recipe has.
bool check_prepared(ArgumentCheck& check, std::string_view name, const moire_prepared_weight& found,
                    const moire_prepared_weight& needed);

// What a product along `in` (forward), else along `out` (dgrad), reads.
WeightOperand prepared_operand(const moire_prepared_weight& p, bool along_in);

// The step that quantises the weight of a call into these copies.
QuantizeWeightArgs quantize_step(const PrepareWeightArgs& args, const WeightCopies& copies);

}  // namespace moire
