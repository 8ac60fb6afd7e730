// FP8 tensors and their scales: quantising, decoding, and the layouts of scales.
#pragma once

#include <moire/context.h>
#include <moire/groups.h>
#include <moire/tensor.h>

namespace moire {

// One quantised copy, for one direction: see moire_quantized. Absent where data is.
struct Quantized : moire_quantized {
  Quantized() : moire_quantized{} {}
  Quantized(const moire_quantized& q) : moire_quantized(q) {}
  Quantized(const TensorView& data_, const TensorView& scales_) : moire_quantized{data_, scales_} {}

  bool is_present() const { return data.rank != 0; }
};
static_assert(sizeof(Quantized) == sizeof(moire_quantized));

// A ragged matrix, or the weights of all groups, into FP8: one direction or both, in one pass.
MOIRE_DECLARE_OP_WITH_WORKSPACE(quantize, QuantizeArgs)
MOIRE_DECLARE_OP(quantize_weight, QuantizeWeightArgs)
// FP8 back into floats, and one direction into the other.
MOIRE_DECLARE_OP(dequantize, DequantizeArgs)
MOIRE_DECLARE_OP(requantize, RequantizeArgs)
// MXFP8 scales from one layout in memory to another, exactly.
MOIRE_DECLARE_OP(convert_scales, ConvertScalesArgs)

// shape[0] and shape[1] of the scales of a ragged [rows, k]; see moire_scales_shape.
MOIRE_API Status scales_shape(int32_t scaling, int32_t direction, int32_t layout, int64_t rows,
                              int64_t k, int64_t num_groups, int64_t* shape);

// A weight in the form that products read, and what that will be: see moire_prepared_weight.
MOIRE_DECLARE_OP_WITH_WORKSPACE(prepare_weight, PrepareWeightArgs)
MOIRE_API Status prepare_weight_form(const Context& context, const PrepareWeightArgs& args,
                                     moire_prepared_weight* form);

}  // namespace moire
