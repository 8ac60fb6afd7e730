// The grouped GEMMs, with and without an activation in their epilogue, and the gradient of a
// grouped bias: validation and dispatch.
#include <moire/grouped_gemm.h>

#include "core/scale_shapes.h"
#include "core/scales_check.h"
#include "ops/dispatch.h"

namespace moire {
namespace {

// How products are summed. The model of a tensor core is one of FP8 operands.
void check_accumulation(ArgumentCheck& check, int32_t accumulation, const NamedTensor& a,
                        const NamedTensor& b) {
  if (accumulation != MOIRE_ACCUMULATE_EMULATED) return;
  for (const NamedTensor& operand : {a, b}) {
    check.require(is_fp8(operand.tensor), "accumulation is 2 (emulated) but ", operand.name, " is ",
                  operand.tensor, ", needs e4m3 or e5m2 operands");
  }
}

// The operands of a product over ragged M: rows `a`, [capacity, k] or gathered [T, k], and weights
// `w`, of which k is `in` or, transposed, `out`.
void check_product(ArgumentCheck& check, const auto& args, const ScaledTensor& a, const Weight& w,
                   const ScaledTensor& b, NamedSize out, NamedSize in, bool is_transposed) {
  const Groups groups(args.groups);
  const NamedSize k{"k", is_transposed ? out.size : in.size};
  const bool k_is_last = (w.layout == MOIRE_OUT_IN) != is_transposed;
  check.weight(b.data.name, w, kOperandTypes, {"G", groups.num_groups}, out, in);
  check.require(a.data.tensor.rank != 2 || a.data.tensor.columns() == k.size, a.data.name, " is ",
                a.data.tensor, " but ", b.data.name, " has k = ", k.size);
  check.ragged(a.data.name, a.data.tensor, "row_idx", args.row_idx, groups, k, kOperandTypes);
  check_operand_scales(check, a, MOIRE_ROWWISE, groups, k);
  check_weight_scales(check, w, b, k_is_last ? MOIRE_ROWWISE : MOIRE_COLUMNWISE);
  check_accumulation(check, args.accumulation, a.data, b.data);
}

void validate(ArgumentCheck& check, const GroupedGemmArgs& args) {
  const Weight b(args.b);
  const bool is_transposed = args.transpose_b != 0;
  const NamedSize out{"out", b.out_features()}, in{"in", b.in_features()};
  const NamedSize n{"n", is_transposed ? in.size : out.size};
  const auto [capacity, num_groups] = sizes_of(args.groups);
  check_product(check, args, {{"a", args.a}, {"a_scales", args.a_scales}}, b,
                {{"b", b.tensor}, {"b_scales", args.b_scales}}, out, in, is_transposed);
  check.optional_tensor("bias", args.bias, kFloatTypes, {num_groups, n});
  check.require(!is_present(args.bias_scale) || is_present(args.bias),
                "bias_scale is present but bias is absent");
  check.optional_tensor("bias_scale", args.bias_scale, kFP32Only, {capacity});
  check.tensor("d", args.d, kFloatTypes, {capacity, n});
}

void validate(ArgumentCheck& check, const GroupedGemmGluArgs& args) {
  const Weight b(args.b);
  const int64_t halves = num_halves(args.layout);
  const NamedSize f{"F", b.out_features() / halves}, two_f = z_columns(args.layout, f.size);
  const auto [capacity, num_groups] = sizes_of(args.groups);
  check.require(b.tensor.rank != 3 || b.out_features() % halves == 0, "b has ", b.out_features(),
                " out features, must be even: a gate and an up for each column");
  check_product(check, args, {{"a", args.a}, {"a_scales", args.a_scales}}, b,
                {{"b", b.tensor}, {"b_scales", args.b_scales}}, two_f, {"k", b.in_features()},
                false);
  check.gated(args.activation, args.layout, f.size);
  check.optional_tensor("bias", args.bias, kFloatTypes, {num_groups, two_f});
  check.optional_tensor("probs", args.probs, kFP32Only, {capacity});
  // act is wanted as it is, quantised, or both.
  const bool is_copied = is_present(args.act_rowwise) || is_present(args.act_columnwise);
  if (is_present(args.act) || !is_copied) {
    check.tensor("act", args.act, kFloatTypes, {capacity, f});
  }
  check.optional_tensor("z", args.z, kFloatTypes, {capacity, two_f});
  check.same_dtype("z", args.z, "act", args.act);
  check_quantized_copies(check, "act", args.act_rowwise, args.act_columnwise,
                         args.fractional_scales, args.groups, f);
  const bool has_storage = is_present(args.act) || is_present(args.z);
  check.require(has_storage || (args.storage >= 0 && args.storage <= 3), "storage is ",
                static_cast<DType>(args.storage), ", must be fp32, bf16, fp16 or 0 (bf16)");
}

void validate(ArgumentCheck& check, const GroupedGemmGluBackwardArgs& args) {
  const Weight w2(args.w2);
  const NamedSize k{"k", w2.out_features()}, f{"F", w2.in_features()};
  const NamedSize two_f = z_columns(args.layout, f.size);
  const auto [capacity, num_groups] = sizes_of(args.groups);
  check_product(check, args, {{"grad_y", args.grad_y}, {"grad_y_scales", args.grad_y_scales}}, w2,
                {{"w2", w2.tensor}, {"w2_scales", args.w2_scales}}, k, f, true);
  check.gated(args.activation, args.layout, f.size);
  check.tensor("z", args.z, kFloatTypes, {capacity, two_f});
  check.optional_tensor("probs", args.probs, kFP32Only, {capacity});
  // grad_z is wanted as it is, quantised, or both.
  const bool is_copied = is_present(args.grad_z_rowwise) || is_present(args.grad_z_columnwise);
  if (is_present(args.grad_z) || !is_copied) {
    check.tensor("grad_z", args.grad_z, kFloatTypes, {capacity, two_f});
  }
  check.same_dtype("grad_z", args.grad_z, "z", args.z);
  check.optional_tensor("act", args.act, kFloatTypes, {capacity, f});
  check.same_dtype("act", args.act, "z", args.z);
  check.optional_tensor("grad_probs", args.grad_probs, kFP32Only, {capacity});
  check.optional_tensor("grad_bias", args.grad_bias, kFloatTypes, {num_groups, two_f});
  check_quantized_copies(check, "grad_z", args.grad_z_rowwise, args.grad_z_columnwise,
                         args.fractional_scales, args.groups, two_f);
  check_quantized_copies(check, "act", {}, args.act_columnwise, args.fractional_scales, args.groups,
                         f);
}

// An operand of a product over ragged K. Columnwise scales are in the order of the groups, so that
// an FP8 one cannot be gathered.
void check_ragged_k(ArgumentCheck& check, const ScaledTensor& t, const NamedTensor& row_idx,
                    const Groups& groups, NamedSize columns) {
  const ScaledShape shape(groups, columns);
  if (is_transposed(t.data.tensor, t.scales.tensor, shape.groups()) &&
      !row_idx.tensor.is_present()) {
    check_transposed(check, t, shape);
    return;
  }
  check.ragged(t.data.name, t.data.tensor, row_idx.name, row_idx.tensor, groups, columns,
               kOperandTypes);
  check.require(
      !is_fp8(t.data.tensor) || !t.scales.tensor.is_present() || !row_idx.tensor.is_present(),
      row_idx.name, " is present but ", t.data.name, " is ", t.data.tensor,
      ", whose columnwise scales are in the order of the groups: gather before quantising");
  check_operand_scales(check, t, MOIRE_COLUMNWISE, groups, columns);
}

void validate(ArgumentCheck& check, const GroupedGemmWgradArgs& args) {
  const ScaledTensor a{{"a", args.a}, {"a_scales", args.a_scales}};
  const ScaledTensor b{{"b", args.b}, {"b_scales", args.b_scales}};
  const NamedSize m{"m", as_rows(args.a, args.a_scales, args.groups).columns()};
  const NamedSize n{"n", as_rows(args.b, args.b_scales, args.groups).columns()};
  Weight d(args.d);
  d.layout = MOIRE_OUT_IN;  // which of m and n is `out` does not matter here
  check_ragged_k(check, a, {"a_row_idx", args.a_row_idx}, args.groups, m);
  check_ragged_k(check, b, {"b_row_idx", args.b_row_idx}, args.groups, n);
  check_accumulation(check, args.accumulation, a.data, b.data);
  check.weight("d", d, kFloatTypes, {"G", args.groups.num_groups}, m, n);
}

// "128 groups, capacity 512, [512, 2048] x [128, 1536, 2048] bf16", "... e4m3 x bf16" where the
// dtypes differ.
std::string problem_text(const Groups& groups, const TensorView& a, const TensorView& b) {
  return concat(groups.num_groups, " groups, capacity ", groups.capacity, ", ", shape_text(a),
                " x ", shape_text(b), " ",
                a.dtype == b.dtype ? "" : concat(dtype_name(a.type()), " x "),
                dtype_name(b.type()));
}

// Of forward and dgrad.
std::string problem_of(const auto& args) {
  return problem_text(args.groups, args.a, args.b.tensor);
}
std::string problem_of(const GroupedGemmGluBackwardArgs& args) {
  return problem_text(args.groups, args.grad_y, args.w2.tensor);
}
std::string problem_of(const GroupedGemmWgradArgs& args) {
  return problem_text(args.groups, as_rows(args.a, args.a_scales, args.groups),
                      as_rows(args.b, args.b_scales, args.groups));
}

int64_t wgrad_bytes_read(const GroupedGemmWgradArgs& args) {
  GroupedGemmWgradArgs rows = args;
  rows.a = as_rows(args.a, args.a_scales, args.groups);
  rows.b = as_rows(args.b, args.b_scales, args.groups);
  return bytes_read(rows);
}

void validate(ArgumentCheck& check, const BiasBackwardArgs& args) {
  const TensorView grad_y(args.grad_y), row_idx(args.row_idx);
  const auto [capacity, num_groups] = sizes_of(args.groups);
  if (!check.ranked("grad_y", grad_y, kFloatTypes, 2)) return;
  const NamedSize n{"n", grad_y.columns()};
  if (row_idx.is_present()) {
    check.tensor("row_idx", row_idx, kIndexTypes, {capacity});
  } else {
    check.require(grad_y.num_rows() == capacity.size, "grad_y is ", grad_y,
                  " but groups.capacity is ", capacity.size);
  }
  check.optional_tensor("scale", args.scale, kFP32Only, {capacity});
  check.optional_tensor("grad_bias", args.grad_bias, kFloatTypes, {num_groups, n});
  check.optional_tensor("grad_scale", args.grad_scale, kFP32Only, {capacity});
  if (is_present(args.grad_scale)) check.tensor("bias", args.bias, kFloatTypes, {num_groups, n});
  check.indices("row_idx", row_idx, check.rows_in_use(args.groups), 0, grad_y.num_rows());
}

std::string problem_of(const BiasBackwardArgs& args) {
  return concat(args.groups.num_groups, " groups, capacity ", args.groups.capacity, ", ",
                TensorView(args.grad_y));
}

}  // namespace

MOIRE_DEFINE_OP_WITH_WORKSPACE(grouped_gemm)
MOIRE_DEFINE_OP_WITH_WORKSPACE(grouped_gemm_glu)
MOIRE_DEFINE_OP_WITH_WORKSPACE(grouped_gemm_glu_backward)
MOIRE_DEFINE_OP_WITH_WORKSPACE(grouped_gemm_wgrad, wgrad_bytes_read)
MOIRE_DEFINE_OP_WITH_WORKSPACE(bias_backward)

}  // namespace moire
