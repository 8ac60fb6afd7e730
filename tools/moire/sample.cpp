#include "sample.h"

#include <algorithm>

namespace moire::tool {
namespace {

// Rows `first` to `first + count` of a ragged tensor, or entries of a vector; absent stays absent.
TensorView rows_of(const moire_tensor& t, int64_t first, int64_t count) {
  TensorView out(t);
  if (!out.is_present()) return out;
  const int64_t stride = out.rank == 1 ? 1 : out.stride();
  out.data = static_cast<char*>(t.data) + first * stride * dtype_size(out.type());
  out.shape[0] = count;
  return out;
}

TensorView row_of(const moire_tensor& t, int64_t row) { return rows_of(t, row, 1); }

moire_weight group_of(const moire_weight& w, int64_t group) {
  moire_weight out = w;
  if (w.tensor.rank == 0) return out;
  out.tensor.shape[0] = 1;
  if (w.list != nullptr) {
    out.list = w.list + group;
  } else {
    out.tensor.data = Weight(w).matrix(group).data;
  }
  return out;
}

// A gathered operand keeps its tokens and loses the other indices.
void cut_rows(moire_tensor& tensor, moire_tensor& row_idx, int64_t first, int64_t count) {
  if (row_idx.rank == 0) {
    tensor = rows_of(tensor, first, count);
  } else {
    row_idx = rows_of(row_idx, first, count);
  }
}

void cut_rows(moire_tensor& tensor, moire_tensor& scales, moire_tensor& row_idx, int64_t first,
              int64_t count) {
  if (row_idx.rank == 0) scales = rows_of(scales, first, count);
  cut_rows(tensor, row_idx, first, count);
}

// The scales of one group's weights.
moire_tensor scales_of(const moire_tensor& scales, int64_t group) {
  if (scales.rank == 0) return scales;
  return group_of(moire_weight{scales, nullptr, MOIRE_OUT_IN}, group).tensor;
}

// Columnwise scales of one group's rows, which become the first of one group.
moire_tensor group_scales_of(const moire_tensor& scales, const moire_groups& groups,
                             int64_t group) {
  if (scales.rank == 0) return scales;
  const int64_t block = scales.dtype == MOIRE_E8M0 ? 32 : 128;
  const int64_t first = groups.offsets[group], rows = groups.offsets[group + 1] - first;
  return rows_of(scales, first / block + group, rows / block + 1);
}

// Arguments with one group of `rows` rows.
template <class A>
Sample<A> one_group(const A& args, int64_t rows) {
  Sample<A> out{args, std::shared_ptr<int64_t[]>(new int64_t[2]{0, rows})};
  out.args.groups = Groups(out.offsets.get(), 1, rows);
  return out;
}

}  // namespace

Sample<GroupedGemmArgs> one_row(const GroupedGemmArgs& args, int64_t row, int64_t group) {
  Sample<GroupedGemmArgs> out = one_group(args, 1);
  cut_rows(out.args.a, out.args.a_scales, out.args.row_idx, row, 1);
  out.args.b = group_of(args.b, group);
  out.args.b_scales = scales_of(args.b_scales, group);
  out.args.bias = row_of(args.bias, group);
  out.args.bias_scale = row_of(args.bias_scale, row);
  out.args.d = row_of(args.d, row);
  return out;
}

Sample<GroupedGemmGluArgs> one_row(const GroupedGemmGluArgs& args, int64_t row, int64_t group) {
  Sample<GroupedGemmGluArgs> out = one_group(args, 1);
  cut_rows(out.args.a, out.args.a_scales, out.args.row_idx, row, 1);
  out.args.b = group_of(args.b, group);
  out.args.b_scales = scales_of(args.b_scales, group);
  out.args.bias = row_of(args.bias, group);
  out.args.probs = row_of(args.probs, row);
  out.args.z = row_of(args.z, row);
  out.args.act = row_of(args.act, row);
  out.args.act_rowwise = out.args.act_columnwise = {};  // of many rows
  return out;
}

Sample<GroupedGemmGluBackwardArgs> one_row(const GroupedGemmGluBackwardArgs& args, int64_t row,
                                           int64_t group) {
  Sample<GroupedGemmGluBackwardArgs> out = one_group(args, 1);
  cut_rows(out.args.grad_y, out.args.grad_y_scales, out.args.row_idx, row, 1);
  out.args.w2 = group_of(args.w2, group);
  out.args.w2_scales = scales_of(args.w2_scales, group);
  out.args.z = row_of(args.z, row);
  out.args.probs = row_of(args.probs, row);
  out.args.grad_z = row_of(args.grad_z, row);
  out.args.act = row_of(args.act, row);
  out.args.grad_probs = row_of(args.grad_probs, row);
  out.args.grad_bias = TensorView();
  out.args.grad_z_rowwise = out.args.grad_z_columnwise = out.args.act_columnwise = {};
  return out;
}

Sample<GroupedGemmWgradArgs> one_row(const GroupedGemmWgradArgs& args, int64_t row, int64_t group) {
  constexpr int64_t kCornerRows = 2, kCornerColumns = 64;
  const int64_t* offsets = args.groups.offsets;
  const int64_t first = offsets[group], count = offsets[group + 1] - first;
  static_cast<void>(row);
  Sample<GroupedGemmWgradArgs> out = one_group(args, count);
  const auto narrow = [](moire_tensor& t, int64_t columns) {
    const TensorView view(t);
    t.row_stride = view.stride();
    t.shape[t.rank - 1] = std::min(columns, view.columns());
  };
  cut_rows(out.args.a, out.args.a_row_idx, first, count);
  cut_rows(out.args.b, out.args.b_row_idx, first, count);
  out.args.a_scales = group_scales_of(args.a_scales, args.groups, group);
  out.args.b_scales = group_scales_of(args.b_scales, args.groups, group);
  narrow(out.args.a, kCornerRows);
  narrow(out.args.b, kCornerColumns);
  if (out.args.a_scales.rank != 0) narrow(out.args.a_scales, kCornerRows);
  if (out.args.b_scales.rank != 0) narrow(out.args.b_scales, kCornerColumns);
  out.args.d = group_of(args.d, group);
  out.args.d.tensor.data = Weight(args.d).matrix(group).data;
  out.args.d.list = nullptr;
  narrow(out.args.d.tensor, kCornerColumns);
  out.args.d.tensor.shape[1] = std::min(kCornerRows, args.d.tensor.shape[1]);
  return out;
}

Sample<BiasBackwardArgs> one_row(const BiasBackwardArgs& args, int64_t row, int64_t group) {
  Sample<BiasBackwardArgs> out = one_group(args, 1);
  cut_rows(out.args.grad_y, out.args.row_idx, row, 1);
  out.args.scale = row_of(args.scale, row);
  out.args.bias = row_of(args.bias, group);
  out.args.grad_bias = TensorView();
  out.args.grad_scale = row_of(args.grad_scale, row);
  return out;
}

Sample<GluArgs> one_row(const GluArgs& args, int64_t row, int64_t) {
  Sample<GluArgs> out = one_group(args, 1);
  out.args.z = row_of(args.z, row);
  out.args.probs = row_of(args.probs, row);
  out.args.act = row_of(args.act, row);
  return out;
}

Sample<GluBackwardArgs> one_row(const GluBackwardArgs& args, int64_t row, int64_t) {
  Sample<GluBackwardArgs> out = one_group(args, 1);
  for (moire_tensor GluBackwardArgs::*member :
       {&GluBackwardArgs::z, &GluBackwardArgs::probs, &GluBackwardArgs::grad_act,
        &GluBackwardArgs::grad_z, &GluBackwardArgs::act, &GluBackwardArgs::grad_probs}) {
    out.args.*member = row_of(args.*member, row);
  }
  return out;
}

Sample<GroupedLinearArgs> one_row(const GroupedLinearArgs& args, int64_t row, int64_t group) {
  Sample<GroupedLinearArgs> out = one_group(args, 1);
  cut_rows(out.args.x, out.args.row_idx, row, 1);
  out.args.w = group_of(args.w, group);
  out.args.bias = row_of(args.bias, group);
  out.args.scale = row_of(args.scale, row);
  out.args.y = row_of(args.y, row);
  out.args.x_columnwise = {};  // of many rows
  return out;
}

Sample<GroupedLinearBackwardArgs> one_row(const GroupedLinearBackwardArgs& args, int64_t row,
                                          int64_t group) {
  Sample<GroupedLinearBackwardArgs> out = one_group(args, 1);
  if (args.gathered_grad_y == 0) out.args.grad_y = row_of(args.grad_y, row);
  cut_rows(out.args.x, out.args.row_idx, row, 1);
  out.args.w = group_of(args.w, group);
  out.args.bias = row_of(args.bias, group);
  out.args.scale = row_of(args.scale, row);
  out.args.grad_x = row_of(args.grad_x, row);
  out.args.grad_scale = row_of(args.grad_scale, row);
  out.args.grad_w = Weight();
  out.args.grad_bias = TensorView();
  return out;
}

Sample<GroupedMlpArgs> one_row(const GroupedMlpArgs& args, int64_t row, int64_t group) {
  Sample<GroupedMlpArgs> out = one_group(args, 1);
  cut_rows(out.args.x, out.args.row_idx, row, 1);
  out.args.w1 = group_of(args.w1, group);
  out.args.b1 = row_of(args.b1, group);
  out.args.w2 = group_of(args.w2, group);
  out.args.b2 = row_of(args.b2, group);
  out.args.probs = row_of(args.probs, row);
  out.args.z = row_of(args.z, row);
  out.args.act = row_of(args.act, row);
  out.args.y = row_of(args.y, row);
  return out;
}

Sample<GroupedMlpBackwardArgs> one_row(const GroupedMlpBackwardArgs& args, int64_t row,
                                       int64_t group) {
  Sample<GroupedMlpBackwardArgs> out = one_group(args, 1);
  GroupedMlpBackwardArgs& a = out.args;
  if (args.gathered_grad_y == 0) a.grad_y = row_of(args.grad_y, row);
  cut_rows(a.x, a.row_idx, row, 1);
  a.w1 = group_of(args.w1, group);
  a.w2 = group_of(args.w2, group);
  a.b2 = row_of(args.b2, group);
  a.probs = row_of(args.probs, row);
  a.z = row_of(args.z, row);
  a.act = row_of(args.act, row);
  a.grad_z = row_of(args.grad_z, row);
  a.grad_x = row_of(args.grad_x, row);
  a.grad_probs = row_of(args.grad_probs, row);
  a.grad_w1 = a.grad_w2 = Weight();
  a.grad_b1 = a.grad_b2 = TensorView();
  return out;
}

}  // namespace moire::tool
