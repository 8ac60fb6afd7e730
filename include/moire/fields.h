// The fields of every argument struct, each said once: what the call does with it, and what it is
// sized by. visit_fields(args, visitor) names those of the struct alone, in the order of moire.h,
// then those that mean the same in every struct that has them:
//
//   visitor.field("z", args.z, Role::kIn, "CZ")      memory: tensors, weights, quantised copies,
//   visitor.value("tail", args.tail, 2)              what is no memory: 0 or 1; without a count,
//                                                    anything that its op takes
//
// From it follow which values are refused and which memory must lie apart (src/core/footprint.h),
// which bytes count as read and written (src/ops/traffic.h), which fields C calls outputs
// (moire_field_role), what tests stage (staging/) and what the fuzzer draws (tests/fuzz). A role
// that depends on others is a condition here. A new field is one line at most; tests ask for it.
//
// Sizes are a letter for each dimension; those of a weight are its MOIRE_OUT_IN ones:
//   C  capacity                     G  groups        K  columns that a product contracts
//   S  C, or T where gathered       O  G + 1         M, N  its other dimensions
//   T  tokens                       E  experts       H, F  hidden size, expert width
//   k  top-k entries of a token     ?  as the format of the scales says    Z  2F; F if ungated
//   R  ranks
// A size that the call does not relate to others is '*'.
#pragma once

#include <moire/roles.h>

#include <concepts>
#include <cstdint>

namespace moire {
namespace fields {

// Conditions of roles.
constexpr Role in_if(bool is_read) { return is_read ? Role::kIn : Role::kUnused; }
constexpr Role accumulated(int32_t beta, const uint8_t* beta_per_group = nullptr) {
  return beta != 0 || beta_per_group != nullptr ? Role::kInOut : Role::kOut;
}

// Whether a backward of an MLP has to compute grad_z: everything but grad_w2 and grad_b2 needs it.
inline bool needs_grad_z(const moire_grouped_mlp_backward_args& a) {
  return is_present(a.grad_z) || is_present(a.grad_z_columnwise) || is_present(a.grad_x) ||
         is_present(a.grad_w1) || is_present(a.grad_b1) || is_present(a.grad_probs);
}

// Whether what scales b2 of an MLP is probs.
bool probs_scale_b2(const auto& a) { return a.b2_unscaled == 0 && !is_present(a.b2_scale); }

// Whether a layer's backward reads row_idx, which gathers x and, if asked to, grad_y.
bool gathers(const auto& a, bool reads_x) {
  return reads_x || (a.gathered_grad_y != 0 && is_present(a.grad_y));
}

// What one struct alone has, or has with a meaning of its own.
void own(std::derived_from<moire_splits_to_offsets_args> auto& a, auto&& v) {
  v.field("splits", a.splits, Role::kIn, "*");
  v.value("kind", a.kind, 3);
  v.value("capacity", a.capacity);
  v.field("outputs", a.outputs, Role::kOut, a.num_outputs);
  v.value("num_outputs", a.num_outputs);
}

void own(std::derived_from<moire_quantize_args> auto& a, auto&& v) {
  v.field("source", a.source, Role::kIn, "SK");
  v.field("row_idx", a.row_idx, Role::kIn, "C");
  v.field("rowwise", a.rowwise, Role::kOut, "CK");
  v.field("columnwise", a.columnwise, Role::kOut, "CK");
  v.field("grad_bias", a.grad_bias, accumulated(a.beta, a.beta_per_group), "GK");
}

void own(std::derived_from<moire_quantize_weight_args> auto& a, auto&& v) {
  v.field("source", a.source, Role::kIn, "GNK");
  v.field("rowwise", a.rowwise, Role::kOut, "GNK");
  v.field("columnwise", a.columnwise, Role::kOut, "GNK");
}

void own(std::derived_from<moire_dequantize_args> auto& a, auto&& v) {
  v.field("source", a.source, Role::kIn, "CK");
  v.value("direction", a.direction, a.scaling == MOIRE_SCALING_FP8_TILE ? 0 : 2);
  v.field("target", a.target, Role::kOut, "CK");
}

void own(std::derived_from<moire_requantize_args> auto& a, auto&& v) {
  v.field("source", a.source, Role::kIn, "CK");
  v.value("direction", a.direction, 2);
  v.field("target", a.target, Role::kOut, "CK");
}

void own(std::derived_from<moire_convert_scales_args> auto& a, auto&& v) {
  v.field("source", a.source, Role::kIn, "??");
  v.field("target", a.target, Role::kOut, "??");
  v.value("from", a.from, 4);
  v.value("to", a.to, 4);
  v.value("direction", a.direction, 2);
  v.value("k", a.k);
}

void own(std::derived_from<moire_glu_args> auto& a, auto&& v) {
  v.field("z", a.z, Role::kIn, "CZ");
  v.field("probs", a.probs, Role::kIn, "C");
  v.field("act", a.act, Role::kOut, "CF");
}

void own(std::derived_from<moire_glu_backward_args> auto& a, auto&& v) {
  v.field("z", a.z, Role::kIn, "CZ");
  v.field("probs", a.probs, Role::kIn, "C");
  v.field("grad_act", a.grad_act, Role::kIn, "CF");
  v.field("grad_z", a.grad_z, Role::kOut, "CZ");
  v.field("act", a.act, Role::kOut, "CF");
  v.field("grad_probs", a.grad_probs, Role::kOut, "C");
}

void own(std::derived_from<moire_convert_glu_args> auto& a, auto&& v) {
  v.field("source", a.source, Role::kIn, "ZK");
  v.field("target", a.target, Role::kOut, "ZK");
  v.value("dim", a.dim, a.source.rank);
  v.value("from", a.from);
  v.value("to", a.to);
}

void own(std::derived_from<moire_grouped_gemm_args> auto& a, auto&& v) {
  v.field("a", a.a, Role::kIn, "SK");
  v.field("row_idx", a.row_idx, Role::kIn, "C");
  v.field("b", a.b, Role::kIn, a.transpose_b == 0 ? "GNK" : "GKN");
  v.value("transpose_b", a.transpose_b, 2);
  v.field("bias", a.bias, Role::kIn, "GN");
  v.field("bias_scale", a.bias_scale, Role::kIn, "C");
  v.field("d", a.d, Role::kOut, "CN");
  v.field("a_scales", a.a_scales, Role::kIn, "S?");
  v.field("b_scales", a.b_scales, Role::kIn, "G??");
}

void own(std::derived_from<moire_grouped_gemm_glu_args> auto& a, auto&& v) {
  v.field("a", a.a, Role::kIn, "SH");
  v.field("row_idx", a.row_idx, Role::kIn, "C");
  v.field("b", a.b, Role::kIn, "GZH");
  v.field("bias", a.bias, Role::kIn, "GZ");
  v.field("probs", a.probs, Role::kIn, "C");
  v.field("z", a.z, Role::kOut, "CZ");
  v.field("act", a.act, Role::kOut, "CF");
  v.field("a_scales", a.a_scales, Role::kIn, "S?");
  v.field("b_scales", a.b_scales, Role::kIn, "G??");
  v.value("storage", a.storage);
  v.field("act_rowwise", a.act_rowwise, Role::kOut, "CF");
  v.field("act_columnwise", a.act_columnwise, Role::kOut, "CF");
}

void own(std::derived_from<moire_grouped_gemm_glu_backward_args> auto& a, auto&& v) {
  v.field("grad_y", a.grad_y, Role::kIn, "SN");
  v.field("row_idx", a.row_idx, Role::kIn, "C");
  v.field("w2", a.w2, Role::kIn, "GNF");
  v.field("z", a.z, Role::kIn, "CZ");
  v.field("probs", a.probs, Role::kIn, "C");
  v.field("grad_z", a.grad_z, Role::kOut, "CZ");
  v.field("act", a.act, Role::kOut, "CF");
  v.field("grad_probs", a.grad_probs, Role::kOut, "C");
  v.field("grad_bias", a.grad_bias, accumulated(a.beta), "GZ");
  v.field("grad_y_scales", a.grad_y_scales, Role::kIn, "S?");
  v.field("w2_scales", a.w2_scales, Role::kIn, "G??");
  v.field("grad_z_rowwise", a.grad_z_rowwise, Role::kOut, "CZ");
  v.field("grad_z_columnwise", a.grad_z_columnwise, Role::kOut, "CZ");
  v.field("act_columnwise", a.act_columnwise, Role::kOut, "CF");
}

void own(std::derived_from<moire_grouped_gemm_wgrad_args> auto& a, auto&& v) {
  v.field("a", a.a, Role::kIn, "SM");
  v.field("a_row_idx", a.a_row_idx, Role::kIn, "C");
  v.field("b", a.b, Role::kIn, "SN");
  v.field("b_row_idx", a.b_row_idx, Role::kIn, "C");
  v.field("d", a.d, accumulated(a.beta, a.beta_per_group), "GMN");
  v.field("a_scales", a.a_scales, Role::kIn, "??");
  v.field("b_scales", a.b_scales, Role::kIn, "??");
}

void own(std::derived_from<moire_bias_backward_args> auto& a, auto&& v) {
  v.field("grad_y", a.grad_y, Role::kIn, "SN");
  v.field("row_idx", a.row_idx, Role::kIn, "C");
  v.field("scale", a.scale, Role::kIn, "C");
  v.field("bias", a.bias, in_if(is_present(a.grad_scale)), "GN");
  v.field("grad_bias", a.grad_bias, accumulated(a.beta, a.beta_per_group), "GN");
  v.field("grad_scale", a.grad_scale, accumulated(a.beta_scale), "C");
  v.value("beta_scale", a.beta_scale, 2);
}

void own(std::derived_from<moire_router_args> auto& a, auto&& v) {
  v.field("logits", a.logits, Role::kIn, "TE");
  v.field("expert_bias", a.expert_bias, Role::kIn, "E");
  v.value("kind", a.kind, 2);
  v.value("normalize", a.normalize, 2);
  v.value("scale", a.scale);
  v.field("topk_idx", a.topk_idx, Role::kOut, "Tk");
  v.field("topk_weights", a.topk_weights, Role::kOut, "Tk");
}

void own(std::derived_from<moire_router_backward_args> auto& a, auto&& v) {
  v.field("logits", a.logits, Role::kIn, "TE");
  v.field("topk_idx", a.topk_idx, Role::kIn, "Tk");
  v.field("grad_topk_weights", a.grad_topk_weights, Role::kIn, "Tk");
  v.value("kind", a.kind, 2);
  v.value("normalize", a.normalize, 2);
  v.value("scale", a.scale);
  v.field("grad_logits", a.grad_logits, Role::kOut, "TE");
}

void own(std::derived_from<moire_permute_plan_args> auto& a, auto&& v) {
  v.field("topk_idx", a.topk_idx, Role::kIn, "Tk");
  v.value("num_groups", a.num_groups);
  v.field("offsets", a.offsets, Role::kOut, "O");
  v.field("gather_idx", a.gather_idx, Role::kOut, "C");
  v.field("scatter_idx", a.scatter_idx, Role::kOut, "Tk");
}

void own(std::derived_from<moire_permute_args> auto& a, auto&& v) {
  const bool moves_rows = is_present(a.x) || is_present(a.rows);
  const bool moves_probs = is_present(a.topk_weights) || is_present(a.probs);
  v.field("x", a.x, Role::kIn, "TH");
  v.field("gather_idx", a.gather_idx, in_if(moves_rows), "C");
  v.field("rows", a.rows, Role::kOut, "CH");
  v.field("topk_weights", a.topk_weights, Role::kIn, "Tk");
  v.field("scatter_idx", a.scatter_idx, in_if(moves_probs), "Tk");
  v.field("probs", a.probs, Role::kOut, "C");
}

void own(std::derived_from<moire_unpermute_args> auto& a, auto&& v) {
  v.field("rows", a.rows, Role::kIn, "CH");
  v.field("scatter_idx", a.scatter_idx, Role::kIn, "Tk");
  v.field("weights", a.weights, Role::kIn, "Tk");
  v.field("y", a.y, Role::kOut, "TH");
  v.field("probs", a.probs, Role::kIn, "C");
  v.field("topk_weights", a.topk_weights, Role::kOut, "Tk");
}

void own(std::derived_from<moire_unpermute_backward_args> auto& a, auto&& v) {
  v.field("grad_y", a.grad_y, Role::kIn, "TH");
  v.field("rows", a.rows, in_if(is_present(a.grad_weights)), "CH");
  v.field("scatter_idx", a.scatter_idx, Role::kIn, "Tk");
  v.field("weights", a.weights, Role::kIn, "Tk");
  v.field("grad_rows", a.grad_rows, Role::kOut, "CH");
  v.field("grad_weights", a.grad_weights, Role::kOut, "Tk");
}

void own(std::derived_from<moire_dispatch_plan_args> auto& a, auto&& v) {
  v.field("topk_idx", a.topk_idx, Role::kIn, "Tk");
  v.value("capacity", a.capacity);
  v.field("places", a.places, Role::kOut, "TR");
  v.field("counts", a.counts, Role::kOut, "R");
}

void own(std::derived_from<moire_dispatch_args> auto& a, auto&& v) {
  v.field("x", a.x, Role::kIn, "TH");
  v.field("x_scales", a.x_scales, Role::kIn, "T?");
  v.field("places", a.places, Role::kIn, "TR");
  v.field("counts", a.counts, in_if(a.overflow == MOIRE_OVERFLOW_REFUSE), "R");
  v.value("overflow", a.overflow, 2);
  v.field("topk_idx", a.topk_idx, Role::kIn, "Tk");
  v.field("topk_weights", a.topk_weights, Role::kIn, "Tk");
  v.field("x_recv", a.x_recv, Role::kOut, "CH");
  v.field("x_scales_recv", a.x_scales_recv, Role::kOut, "C?");
  v.field("topk_idx_recv", a.topk_idx_recv, Role::kOut, "Ck");
  v.field("topk_weights_recv", a.topk_weights_recv, Role::kOut, "Ck");
}

void own(std::derived_from<moire_combine_args> auto& a, auto&& v) {
  v.field("rows", a.rows, Role::kIn, "CH");
  v.field("places", a.places, Role::kIn, "TR");
  v.field("y", a.y, Role::kOut, "TH");
  v.field("topk_weights_recv", a.topk_weights_recv, Role::kIn, "Ck");
  v.field("topk_idx", a.topk_idx, Role::kIn, "Tk");
  v.field("topk_weights", a.topk_weights, Role::kOut, "Tk");
}

void own(std::derived_from<moire_prepare_weight_args> auto& a, auto&& v) {
  v.field("w", a.w, Role::kIn, "GNK");
  v.value("recipe", a.recipe);
  v.value("dequantized", a.dequantized, 2);
  v.value("forward_only", a.forward_only, 2);
  v.field("prepared", a.prepared.memory, Role::kOut, "*?");
}

void own(std::derived_from<moire_grouped_linear_args> auto& a, auto&& v) {
  v.field("x", a.x, Role::kIn, "SK");
  v.field("row_idx", a.row_idx, Role::kIn, "C");
  v.field("w", a.w, Role::kIn, "GNK");
  v.field("bias", a.bias, Role::kIn, "GN");
  v.field("scale", a.scale, Role::kIn, "C");
  v.field("y", a.y, Role::kOut, "CN");
  v.field("x_scales", a.x_scales, Role::kIn, "S?");
  v.field("w_quantized", a.w_quantized, Role::kIn, "GNK");
  v.field("x_columnwise", a.x_columnwise, Role::kOut, "CK");
  v.field("w_prepared", a.w_prepared.memory, Role::kIn, "*?");
}

void own(std::derived_from<moire_grouped_linear_backward_args> auto& a, auto&& v) {
  const bool needs_w = is_present(a.grad_x), needs_x = is_present(a.grad_w);
  const bool reads_x = needs_x && !is_present(a.x_columnwise);
  v.field("x", a.x, in_if(reads_x), "SK");
  v.field("row_idx", a.row_idx, in_if(gathers(a, reads_x)), "C");
  v.field("w", a.w, in_if(needs_w), "GNK");
  v.field("bias", a.bias, in_if(is_present(a.grad_scale)), "GN");
  v.field("scale", a.scale, Role::kIn, "C");
  v.field("grad_y", a.grad_y, Role::kIn, a.gathered_grad_y == 0 ? "CN" : "SN");
  v.field("grad_x", a.grad_x, Role::kOut, "CK");
  v.field("grad_w", a.grad_w, accumulated(a.beta, a.beta_per_group), "GNK");
  v.field("grad_bias", a.grad_bias, accumulated(a.beta, a.beta_per_group), "GN");
  v.field("grad_scale", a.grad_scale, Role::kOut, "C");
  v.field("w_quantized", a.w_quantized, in_if(needs_w), "GNK");
  v.field("x_columnwise", a.x_columnwise, in_if(needs_x), "CK");
  v.field("grad_y_rowwise", a.grad_y_rowwise, Role::kIn, "CN");
  v.field("grad_y_columnwise", a.grad_y_columnwise, Role::kIn, "CN");
  v.field("w_prepared", a.w_prepared.memory, in_if(needs_w), "*?");
}

void own(std::derived_from<moire_grouped_mlp_args> auto& a, auto&& v) {
  v.field("x", a.x, Role::kIn, "SH");
  v.field("row_idx", a.row_idx, Role::kIn, "C");
  v.field("w1", a.w1, Role::kIn, "GZH");
  v.field("b1", a.b1, Role::kIn, "GZ");
  v.field("w2", a.w2, Role::kIn, "GNF");
  v.field("b2", a.b2, Role::kIn, "GN");
  v.field("probs", a.probs, Role::kIn, "C");
  v.field("z", a.z, Role::kOut, "CZ");
  v.field("act", a.act, Role::kOut, "CF");
  v.field("y", a.y, Role::kOut, "CN");
  v.field("x_scales", a.x_scales, Role::kIn, "S?");
  v.field("w1_quantized", a.w1_quantized, Role::kIn, "GZH");
  v.field("w2_quantized", a.w2_quantized, Role::kIn, "GNF");
  v.field("x_columnwise", a.x_columnwise, Role::kOut, "CH");
  v.field("act_columnwise", a.act_columnwise, Role::kOut, "CF");
  v.field("w1_prepared", a.w1_prepared.memory, Role::kIn, "*?");
  v.field("w2_prepared", a.w2_prepared.memory, Role::kIn, "*?");
  v.field("b2_scale", a.b2_scale, Role::kIn, "C");
}

void own(std::derived_from<moire_grouped_mlp_backward_args> auto& a, auto&& v) {
  const bool needs_w1 = is_present(a.grad_x), needs_w2 = needs_grad_z(a);
  const bool reads_x = is_present(a.grad_w1) && !is_present(a.x_columnwise);
  const bool needs_b2 = is_present(probs_scale_b2(a) ? a.grad_probs : a.grad_b2_scale);
  const Role act = a.act_is_saved != 0 ? Role::kIn : Role::kOut;
  v.field("x", a.x, in_if(reads_x), "SH");
  v.field("row_idx", a.row_idx, in_if(gathers(a, reads_x)), "C");
  v.field("w1", a.w1, in_if(needs_w1), "GZH");
  v.field("w2", a.w2, in_if(needs_w2), "GNF");
  v.field("b2", a.b2, in_if(needs_b2), "GN");
  v.field("probs", a.probs, Role::kIn, "C");
  v.field("z", a.z, Role::kIn, "CZ");
  v.field("act", a.act, act, "CF");
  v.value("act_is_saved", a.act_is_saved, 2);
  v.field("grad_y", a.grad_y, Role::kIn, a.gathered_grad_y == 0 ? "CN" : "SN");
  v.field("grad_z", a.grad_z, Role::kOut, "CZ");
  v.field("grad_x", a.grad_x, Role::kOut, "CH");
  v.field("grad_w1", a.grad_w1, accumulated(a.beta_w1, a.beta_w1_per_group), "GZH");
  v.field("grad_b1", a.grad_b1, accumulated(a.beta_bias), "GZ");
  v.field("grad_w2", a.grad_w2, accumulated(a.beta_w2, a.beta_w2_per_group), "GNF");
  v.field("grad_b2", a.grad_b2, accumulated(a.beta_bias), "GN");
  v.field("grad_probs", a.grad_probs, Role::kOut, "C");
  v.value("beta_w1", a.beta_w1, 2);
  v.value("beta_w2", a.beta_w2, 2);
  v.value("beta_bias", a.beta_bias, 2);
  v.field("beta_w1_per_group", a.beta_w1_per_group, Role::kIn, a.groups.num_groups);
  v.field("beta_w2_per_group", a.beta_w2_per_group, Role::kIn, a.groups.num_groups);
  v.field("w1_quantized", a.w1_quantized, in_if(needs_w1), "GZH");
  v.field("w2_quantized", a.w2_quantized, in_if(needs_w2), "GNF");
  v.field("x_columnwise", a.x_columnwise, in_if(is_present(a.grad_w1)), "CH");
  v.field("act_columnwise", a.act_columnwise, act, "CF");
  v.field("grad_y_rowwise", a.grad_y_rowwise, Role::kIn, "CN");
  v.field("grad_y_columnwise", a.grad_y_columnwise, Role::kIn, "CN");
  v.field("grad_z_columnwise", a.grad_z_columnwise, Role::kOut, "CZ");
  v.field("w1_prepared", a.w1_prepared.memory, in_if(needs_w1), "*?");
  v.field("w2_prepared", a.w2_prepared.memory, in_if(needs_w2), "*?");
  v.field("b2_scale", a.b2_scale, Role::kIn, "C");
  v.field("grad_b2_scale", a.grad_b2_scale, Role::kOut, "C");
}

// What means the same in every struct.
void shared(auto& a, auto&& v) {
  if constexpr (requires { a.groups; }) v.field("groups", a.groups);
  if constexpr (requires { a.workspace; }) v.field("workspace", a.workspace);
  if constexpr (requires { a.tail; }) v.value("tail", a.tail, 2);
  if constexpr (requires { a.activation; }) v.value("activation", a.activation);
  if constexpr (requires { a.layout; }) v.value("layout", a.layout);
  if constexpr (requires { a.beta; }) v.value("beta", a.beta, 2);
  if constexpr (requires { a.beta_per_group; }) {
    v.field("beta_per_group", a.beta_per_group, Role::kIn, a.groups.num_groups);
  }
  if constexpr (requires { a.scaling; }) v.value("scaling", a.scaling);
  if constexpr (requires { a.fractional_scales; }) {
    v.value("fractional_scales", a.fractional_scales, 3);
  }
  if constexpr (requires { a.accumulation; }) v.value("accumulation", a.accumulation, 3);
  if constexpr (requires { a.emulate_accumulation; }) {  // of layers
    v.value("recipe", a.recipe, 4);
    v.value("emulate_accumulation", a.emulate_accumulation, 2);
  }
  if constexpr (requires { a.gathered_grad_y; }) {  // of their backwards
    v.value("gathered_grad_y", a.gathered_grad_y, 2);
    v.value("gradient_dtype", a.gradient_dtype);
  }
  if constexpr (requires { a.b2_unscaled; }) v.value("b2_unscaled", a.b2_unscaled, 2);
  if constexpr (requires { a.num_experts; }) v.value("num_experts", a.num_experts);
}

}  // namespace fields

void visit_fields(auto& args, auto&& visitor) requires requires { fields::own(args, visitor); }
{
  fields::own(args, visitor);
  fields::shared(args, visitor);
}

}  // namespace moire
