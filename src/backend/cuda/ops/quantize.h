// What the ops on 8 bits share on the host.
#pragma once

#include <moire/context.h>
#include <moire/quantize.h>

#include "backend/cuda/runtime/launch.h"
#include "core/format.h"
#include "core/resolved_groups.h"
#include "core/scale_shapes.h"

namespace moire::cuda::ops {

// What is said of an element that is not finite: of `own`, unless the call is a step of another.
inline NonFiniteReporter non_finite_reporter(const Context& context, const Context::Origin& own,
                                             const TensorView& shape, bool is_decoded) {
  const Context::Origin origin = context.origin().over(own);
  const CudaState& state = cuda_state(context.state());
  uint32_t id = ++state.num_quantised;
  if (id == 0) id = ++state.num_quantised;  // 0 stands for no call
  return {state.non_finite,
          {.id = id,
           .op = origin.op.data(),
           .operand = origin.operand.data(),
           .op_length = static_cast<uint32_t>(origin.op.size()),
           .operand_length = static_cast<uint32_t>(origin.operand.size()),
           .matrix_rows = shape.rank == 3 ? shape.shape[1] : 0,
           .is_decoded = is_decoded}};
}

// What quantises a source, to be named by the caller, into these copies of a call's; none may be
// present.
QuantizeArgs quantize_args(const moire_quantized& rowwise, const moire_quantized& columnwise,
                           const auto& call) {
  QuantizeArgs args;
  if (!is_present(rowwise) && !is_present(columnwise)) return args;
  args.scaling = scaling_of(is_present(rowwise) ? rowwise : columnwise);
  args.fractional_scales = call.fractional_scales;
  args.rowwise = rowwise;
  args.columnwise = columnwise;
  args.groups = present_groups(call.groups);
  args.tail = call.tail;
  return args;
}

// Copies that lie transposed are read in units of 16 bytes, and stored in words.
inline std::optional<std::string> why_not_transposed(std::string_view name,
                                                     const moire_quantized& copy,
                                                     const moire_groups& groups) {
  if (!is_transposed(copy.data, copy.scales, groups)) return std::nullopt;
  if (reinterpret_cast<uintptr_t>(copy.data.data) % 16 == 0) return std::nullopt;
  return concat(name, " lies transposed at no multiple of 16 bytes");
}

// MXFP8 itself beside a folded copy: what its scales of no block are is not known tile by tile.
inline std::optional<std::string> why_not_mixed(const QuantizeArgs& args) {
  const bool is_mixed = args.scaling == MOIRE_SCALING_FP8_BLOCK && is_present(args.columnwise) &&
                        TensorView(args.columnwise.scales).type() == DType::kE8M0;
  if (!is_mixed || args.tail == MOIRE_TAIL_UNTOUCHED) return std::nullopt;
  return "columnwise is MXFP8 beside a folded copy, needs a tail that is left untouched";
}

// Tiles of so many rows and columns, of which a thread moves so many at once.
inline std::string tiles_policy(int rows, int columns, std::string_view at_once,
                                bool takes_vectors) {
  return concat("tiles of ", rows, " x ", columns, ", ", takes_vectors ? at_once : "single",
                " elements at once");
}

}  // namespace moire::cuda::ops
