#include "backend/cuda/ops/quantized_product.h"

#include <algorithm>

#include "backend/cuda/ops/glu_apart.h"
#include "backend/cuda/ops/quantize.h"
#include "core/format.h"
#include "core/glu_layout.h"
#include "core/glu_storage.h"
#include "core/resolved_groups.h"
#include "core/scale_shapes.h"
#include "core/scales_check.h"

namespace moire::cuda::ops {
namespace {

// Rows have no groups where they are gathered from more or fewer.
Operand rows_of(const auto& args, const char* name, moire_tensor& data, moire_tensor& scales) {
  return {name, data, scales, MOIRE_ROWWISE,
          is_present(args.row_idx) ? moire_groups{} : present_groups(args.groups)};
}
Operand weight_of(const char* name, moire_weight& w, moire_tensor& scales, bool k_is_last) {
  return {name, w.tensor, scales, k_is_last ? MOIRE_ROWWISE : MOIRE_COLUMNWISE, {}};
}

// Whether an output becomes its copy where that lies: values, beside which the caller asks for
// nothing of it. What TMA stores lies in rows of multiples of 16 bytes, on any implementation, so
// that all need the same workspace, whichever of them the call's pointers leave.
bool is_copied_in_place(const moire_tensor& stored, DType storage, const moire_quantized& rowwise,
                        const moire_quantized& columnwise) {
  if (is_present(stored) || is_present(rowwise) == is_present(columnwise)) return false;
  const moire_quantized& copy = is_present(rowwise) ? rowwise : columnwise;
  return is_values(copy) && storage == DType::kBF16 && TensorView(copy.data).stride() % 8 == 0;
}

}  // namespace

void Around::operands(Decoding decoding, const Operand& a, const Operand& b) {
  const auto is_beside = [](const Operand& bf16, const Operand& mxfp8) {
    return bf16.data.dtype == MOIRE_BF16 && mxfp8.scales.dtype == MOIRE_E8M0;
  };
  if (decoding == Decoding::kMxfp8Rows) return decode(a);
  if (decoding == Decoding::kBesideBf16 && !is_beside(a, b) && !is_beside(b, a)) return;
  decode(a);
  decode(b);
}

void Around::decode(const Operand& operand) {
  const auto& [name, data, scales, direction, groups] = operand;
  if (!is_fp8(data) || reason_) return;
  if (TensorView(scales).type() != DType::kE8M0) {
    reason_ = concat(name, " has fp32 scales, with which decoded elements are no bf16 numbers");
    return;
  }
  const TensorView codes(data);
  TensorView target = arena_.take_aligned(DType::kBF16, codes.num_rows(), codes.columns());
  target.rank = codes.rank;
  std::copy_n(codes.shape, 3, target.shape);
  DequantizeArgs args;
  args.source = {data, scales};
  args.scaling = MOIRE_SCALING_MXFP8;
  args.direction = direction;
  args.target = target;
  args.groups = groups;
  args.tail = MOIRE_TAIL_UNTOUCHED;
  decoded_.add(name, args);
  data = target;
  scales = {};
}

void Around::output(const char* name, const auto& call, moire_tensor& stored, DType storage,
                    int64_t columns, moire_quantized& rowwise, moire_quantized& columnwise) {
  if (!is_present(rowwise) && !is_present(columnwise)) {
    rowwise = columnwise = {};  // whatever their scales' data says
    return;
  }
  const moire_quantized& copy = is_present(rowwise) ? rowwise : columnwise;
  if (is_copied_in_place(stored, storage, rowwise, columnwise)) stored = copy.data;
  if (!is_present(stored)) stored = arena_.take_aligned(storage, call.groups.capacity, columns);
  QuantizeArgs args = quantize_args(rowwise, columnwise, call);
  args.source = stored;
  copied_.add(name, args);
  rowwise = columnwise = {};
}

Around around(GroupedGemmArgs& args, const Workspace& memory, Decoding decoding, Copies) {
  Around steps("grouped_gemm", memory);
  const bool k_is_last = (args.b.layout == MOIRE_OUT_IN) == (args.transpose_b == 0);
  steps.operands(decoding, rows_of(args, "a", args.a, args.a_scales),
                 weight_of("b", args.b, args.b_scales, k_is_last));
  return steps;
}

Around around(GroupedGemmGluArgs& args, const Workspace& memory, Decoding decoding, Copies copies) {
  Around steps("grouped_gemm_glu", memory);
  const bool k_is_last = args.b.layout == MOIRE_OUT_IN;
  const bool stores_act = is_present(args.act);
  const DType storage = glu_storage(args);
  steps.operands(decoding, rows_of(args, "a", args.a, args.a_scales),
                 weight_of("b", args.b, args.b_scales, k_is_last));
  const int64_t f = Weight(args.b).out_features() / num_halves(args.layout);
  if (copies == Copies::kByActivation && leaves_copies(args)) {
    if (!is_copied_in_place(args.act, storage, args.act_rowwise, args.act_columnwise)) {
      steps.left_output(storage, f, args.groups);
    }
    return steps;
  }
  steps.output("act", args, args.act, storage, f, args.act_rowwise, args.act_columnwise);
  if (!stores_act) args.tail = MOIRE_TAIL_UNTOUCHED;
  return steps;
}

Around around(GroupedGemmGluBackwardArgs& args, const Workspace& memory, Decoding decoding,
              Copies copies) {
  Around steps("grouped_gemm_glu_backward", memory);
  const bool k_is_last = args.w2.layout == MOIRE_IN_OUT;
  const DType storage = TensorView(args.z).type();
  const int64_t f = Weight(args.w2).in_features();
  steps.operands(decoding, rows_of(args, "grad_y", args.grad_y, args.grad_y_scales),
                 weight_of("w2", args.w2, args.w2_scales, k_is_last));
  const int64_t columns_of_z = num_halves(args.layout) * f;
  if (copies == Copies::kByActivation && leaves_copies(args)) {
    steps.left_output(storage, columns_of_z, args.groups);
    if (is_present(args.act_columnwise) &&
        !is_copied_in_place(args.act, storage, {}, args.act_columnwise)) {
      steps.left_output(storage, f, args.groups);
    }
    return steps;
  }
  steps.output("grad_z", args, args.grad_z, storage, columns_of_z, args.grad_z_rowwise,
               args.grad_z_columnwise);
  moire_quantized no_rows{};
  steps.output("act", args, args.act, storage, f, no_rows, args.act_columnwise);
  return steps;
}

Around around(GroupedGemmWgradArgs& args, const Workspace& memory, Decoding decoding, Copies) {
  Around steps("grouped_gemm_wgrad", memory);
  const moire_groups groups = present_groups(args.groups);
  steps.operands(decoding, {"a", args.a, args.a_scales, MOIRE_COLUMNWISE, groups},
                 {"b", args.b, args.b_scales, MOIRE_COLUMNWISE, groups});
  return steps;
}

}  // namespace moire::cuda::ops
