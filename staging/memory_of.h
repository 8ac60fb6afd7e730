// Which memory a call reads and writes, argument struct by argument struct: memory_of(args,
// visitor) names each piece to visitor.in(...) or visitor.out(...) (in/out counts as out), and the
// visitor may replace its pointer. What a new field of moire.h needs to be staged is a word here.
#pragma once

#include <moire.h>

namespace moire::staging {

template <class V>
void memory_of(moire_splits_to_offsets_args& a, V& v) {
  v.in(a.splits);
  v.out(a.outputs, a.num_outputs);
  v.scratch(a.workspace);
}

template <class V>
void memory_of(moire_quantize_args& a, V& v) {
  v.in(a.source, a.row_idx, a.groups);
  v.out(a.rowwise, a.columnwise);
}

template <class V>
void memory_of(moire_quantize_weight_args& a, V& v) {
  v.in(a.source);
  v.out(a.rowwise, a.columnwise);
}

template <class V>
void memory_of(moire_dequantize_args& a, V& v) {
  v.in(a.source, a.groups);
  v.out(a.target);
}

template <class V>
void memory_of(moire_requantize_args& a, V& v) {
  v.in(a.source, a.groups);
  v.out(a.target);
}

template <class V>
void memory_of(moire_convert_scales_args& a, V& v) {
  v.in(a.source, a.groups);
  v.out(a.target);
}

template <class V>
void memory_of(moire_glu_args& a, V& v) {
  v.in(a.z, a.probs, a.groups);
  v.out(a.act);
}

template <class V>
void memory_of(moire_glu_backward_args& a, V& v) {
  v.in(a.z, a.probs, a.grad_act, a.groups);
  v.out(a.grad_z, a.act, a.grad_probs);
}

template <class V>
void memory_of(moire_convert_glu_args& a, V& v) {
  v.in(a.source);
  v.out(a.target);
}

template <class V>
void memory_of(moire_grouped_gemm_args& a, V& v) {
  v.in(a.a, a.row_idx, a.b, a.bias, a.bias_scale, a.groups, a.a_scales, a.b_scales);
  v.out(a.d);
  v.scratch(a.workspace);
}

template <class V>
void memory_of(moire_grouped_gemm_glu_args& a, V& v) {
  v.in(a.a, a.row_idx, a.b, a.bias, a.probs, a.groups, a.a_scales, a.b_scales);
  v.out(a.z, a.act, a.act_rowwise, a.act_columnwise);
  v.scratch(a.workspace);
}

template <class V>
void memory_of(moire_grouped_gemm_glu_backward_args& a, V& v) {
  v.in(a.grad_y, a.row_idx, a.w2, a.z, a.probs, a.groups, a.grad_y_scales, a.w2_scales);
  v.out(a.grad_z, a.act, a.grad_probs, a.grad_bias);
  v.out(a.grad_z_rowwise, a.grad_z_columnwise, a.act_columnwise);
  v.scratch(a.workspace);
}

template <class V>
void memory_of(moire_grouped_gemm_wgrad_args& a, V& v) {
  v.in(a.a, a.a_row_idx, a.b, a.b_row_idx, a.groups, a.a_scales, a.b_scales);
  v.in(a.beta_per_group, a.groups.num_groups);
  v.out(a.d);
  v.scratch(a.workspace);
}

template <class V>
void memory_of(moire_bias_backward_args& a, V& v) {
  v.in(a.grad_y, a.row_idx, a.scale, a.bias, a.groups);
  v.in(a.beta_per_group, a.groups.num_groups);
  v.out(a.grad_bias, a.grad_scale);
  v.scratch(a.workspace);
}

template <class V>
void memory_of(moire_router_args& a, V& v) {
  v.in(a.logits, a.expert_bias);
  v.out(a.topk_idx, a.topk_weights);
}

template <class V>
void memory_of(moire_router_backward_args& a, V& v) {
  v.in(a.logits, a.topk_idx, a.grad_topk_weights);
  v.out(a.grad_logits);
}

template <class V>
void memory_of(moire_permute_plan_args& a, V& v) {
  v.in(a.topk_idx);
  v.out(a.offsets, a.gather_idx, a.scatter_idx);
  v.scratch(a.workspace);
}

template <class V>
void memory_of(moire_permute_args& a, V& v) {
  v.in(a.x, a.gather_idx, a.topk_weights, a.scatter_idx, a.groups);
  v.out(a.rows, a.probs);
}

template <class V>
void memory_of(moire_unpermute_args& a, V& v) {
  v.in(a.rows, a.scatter_idx, a.weights, a.probs);
  v.out(a.y, a.topk_weights);
}

template <class V>
void memory_of(moire_unpermute_backward_args& a, V& v) {
  v.in(a.grad_y, a.rows, a.scatter_idx, a.weights, a.groups);
  v.out(a.grad_rows, a.grad_weights);
}

template <class V>
void memory_of(moire_grouped_linear_args& a, V& v) {
  v.in(a.x, a.row_idx, a.w, a.bias, a.scale, a.groups, a.x_scales, a.w_quantized);
  v.out(a.y, a.x_columnwise);
  v.scratch(a.workspace);
}

template <class V>
void memory_of(moire_grouped_linear_backward_args& a, V& v) {
  v.in(a.x, a.row_idx, a.w, a.bias, a.scale, a.grad_y, a.groups);
  v.in(a.w_quantized, a.x_columnwise, a.grad_y_rowwise, a.grad_y_columnwise);
  v.in(a.beta_per_group, a.groups.num_groups);
  v.out(a.grad_x, a.grad_w, a.grad_bias, a.grad_scale);
  v.scratch(a.workspace);
}

template <class V>
void memory_of(moire_grouped_mlp_args& a, V& v) {
  v.in(a.x, a.row_idx, a.w1, a.b1, a.w2, a.b2, a.probs, a.groups);
  v.in(a.x_scales, a.w1_quantized, a.w2_quantized);
  v.out(a.z, a.act, a.y, a.x_columnwise, a.act_columnwise);
  v.scratch(a.workspace);
}

template <class V>
void memory_of(moire_grouped_mlp_backward_args& a, V& v) {
  v.in(a.x, a.row_idx, a.w1, a.w2, a.b2, a.probs, a.groups, a.z, a.grad_y);
  v.in(a.w1_quantized, a.w2_quantized, a.x_columnwise, a.grad_y_rowwise, a.grad_y_columnwise);
  v.in(a.beta_w1_per_group, a.groups.num_groups);
  v.in(a.beta_w2_per_group, a.groups.num_groups);
  v.out(a.act, a.grad_z, a.grad_x, a.grad_w1, a.grad_b1, a.grad_w2, a.grad_b2, a.grad_probs);
  v.out(a.act_columnwise, a.grad_z_columnwise);
  v.scratch(a.workspace);
}

}  // namespace moire::staging
