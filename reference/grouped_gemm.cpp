#include "reference/grouped_gemm.h"

#include <utility>

#include "reference/scaled.h"

namespace moire::reference {
namespace {

double scale_of(const std::vector<double>& scale, int64_t i) {
  return scale[static_cast<size_t>(i)];
}

Dot::Factors factors_of(int32_t accumulation, const moire_tensor& a_scales,
                        const moire_tensor& b_scales) {
  const bool any = is_present(a_scales) || is_present(b_scales);
  const bool both = is_present(a_scales) && is_present(b_scales);
  if (both && accumulation == MOIRE_ACCUMULATE_EMULATED) return Dot::Factors::kEmulated;
  return any ? Dot::Factors::kScaled : Dot::Factors::kFloats;
}

}  // namespace

Matrix multiply(const Matrix& a, const moire_weight& w, Pass pass, const moire_tensor& bias,
                const std::vector<double>& scale, const moire_groups& groups,
                const moire_tensor& w_scales, Dot::Factors factors) {
  const Weight weight = w;
  // Blocks lie along k: in memory the last dimension, or the one before it.
  const bool k_is_last = (weight.layout == MOIRE_OUT_IN) == (pass == Pass::kForward);
  const int32_t direction = k_is_last ? MOIRE_ROWWISE : MOIRE_COLUMNWISE;
  const int64_t n = pass == Pass::kForward ? weight.out_features() : weight.in_features();
  Matrix d(a.rows, n);
  for (int64_t g = 0; g < groups.num_groups; ++g) {
    if (groups.offsets[g] == groups.offsets[g + 1]) continue;
    // [n, k]: the products are of rows with rows.
    const Matrix stored = read_weight(w, w_scales, direction, g, factors);
    const Matrix b = pass == Pass::kForward ? stored : transposed(stored);
    for (int64_t i = groups.offsets[g]; i < groups.offsets[g + 1]; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        Dot dot(factors);
        for (int64_t k = 0; k < a.columns; ++k) dot.add(a.at(i, k), b.at(j, k));
        if (is_present(bias)) dot.add({scale_of(scale, i) * read_element(bias, g, j)});
        d.at(i, j) = dot.sum();
      }
    }
  }
  return d;
}

Weights multiply_rows(const Matrix& a, const Matrix& b, const moire_weight& d,
                      const Accumulation& accumulation, const moire_groups& groups,
                      Dot::Factors factors) {
  const Matrix at = transposed(a), bt = transposed(b);
  Weights out;
  for (int64_t g = 0; g < groups.num_groups; ++g) {
    const int64_t begin = groups.offsets[g], end = groups.offsets[g + 1];
    const bool accumulates = accumulation.of(g);
    out.push_back(accumulates ? read_stored(d, g) : Matrix(a.columns, b.columns));
    if (begin == end) continue;  // exact zeros, or untouched
    Matrix& result = out.back();
    for (int64_t i = 0; i < a.columns; ++i) {
      for (int64_t j = 0; j < b.columns; ++j) {
        Dot dot(factors);
        if (accumulates) dot.add(result.at(i, j));
        for (int64_t row = begin; row < end; ++row) dot.add(at.at(i, row), bt.at(j, row));
        result.at(i, j) = dot.sum();
      }
    }
  }
  return out;
}

Matrix sum_rows(const Matrix& a, const std::vector<double>& scale, const moire_tensor& d,
                const Accumulation& accumulation, const moire_groups& groups) {
  Matrix out(groups.num_groups, TensorView(d).columns());
  for (int64_t g = 0; g < groups.num_groups; ++g) {
    const int64_t begin = groups.offsets[g], end = groups.offsets[g + 1];
    for (int64_t j = 0; j < out.columns; ++j) {
      const Number before{accumulation.of(g) ? read_element(d, g, j) : 0};
      Dot dot;
      dot.add(before);
      for (int64_t i = begin; i < end; ++i) dot.add({scale_of(scale, i)}, a.at(i, j));
      out.at(g, j) = begin == end ? before : dot.sum();
    }
  }
  return out;
}

Matrix dot_with_bias(const Matrix& a, const moire_tensor& bias, const moire_groups& groups) {
  Matrix out(a.rows, 1);
  for (int64_t g = 0; g < groups.num_groups; ++g) {
    for (int64_t i = groups.offsets[g]; i < groups.offsets[g + 1]; ++i) {
      Dot dot;
      for (int64_t j = 0; j < a.columns; ++j) dot.add(a.at(i, j), {read_element(bias, g, j)});
      out.at(i, 0) = dot.sum();
    }
  }
  return out;
}

Weights weight_gradient(const Matrix& grad_y, const Matrix& x, const moire_weight& grad_w,
                        const Accumulation& accumulation, const moire_groups& groups,
                        Dot::Factors factors) {
  const bool out_in = grad_w.layout == MOIRE_OUT_IN;
  return multiply_rows(out_in ? grad_y : x, out_in ? x : grad_y, grad_w, accumulation, groups,
                       factors);
}

Matrix add(const Matrix& a, const Matrix& b) {
  Matrix sum(a.rows, a.columns);
  for (size_t i = 0; i < sum.values.size(); ++i) {
    Dot both;
    both.add(a.values[i]);
    both.add(b.values[i]);
    sum.values[i] = both.sum();
  }
  return sum;
}

Matrix grouped_gemm(const moire_grouped_gemm_args& args) {
  const int64_t rows = rows_in_use(args.groups);
  const Dot::Factors factors = factors_of(args.accumulation, args.a_scales, args.b_scales);
  return multiply(read_rowwise(args.a, args.a_scales, args.row_idx, rows, factors), args.b,
                  args.transpose_b != 0 ? Pass::kDgrad : Pass::kForward, args.bias,
                  read_vector(args.bias_scale, rows, 1), args.groups, args.b_scales, factors);
}

Weights grouped_gemm_wgrad(const moire_grouped_gemm_wgrad_args& args) {
  const Dot::Factors factors = factors_of(args.accumulation, args.a_scales, args.b_scales);
  return multiply_rows(read_columnwise(args.a, args.a_scales, args.a_row_idx, args.groups, factors),
                       read_columnwise(args.b, args.b_scales, args.b_row_idx, args.groups, factors),
                       args.d, {args.beta, args.beta_per_group}, args.groups, factors);
}

DType storage_of(const moire_grouped_gemm_glu_args& args) {
  if (is_present(args.act)) return TensorView(args.act).type();
  if (is_present(args.z)) return TensorView(args.z).type();
  return args.storage == 0 ? DType::kBF16 : static_cast<DType>(args.storage);
}

GemmGluResults grouped_gemm_glu(const moire_grouped_gemm_glu_args& args) {
  const int64_t rows = rows_in_use(args.groups);
  const Dot::Factors factors = factors_of(args.accumulation, args.a_scales, args.b_scales);
  const Matrix a = read_rowwise(args.a, args.a_scales, args.row_idx, rows, factors);
  Matrix z = round_to(storage_of(args), multiply(a, args.b, Pass::kForward, args.bias, ones(rows),
                                                 args.groups, args.b_scales, factors));
  Matrix act = glu(z, read_vector(args.probs, rows, 1), args.activation, args.layout);
  return {std::move(z), std::move(act)};
}

GemmGluBackwardResults grouped_gemm_glu_backward(const moire_grouped_gemm_glu_backward_args& args) {
  const int64_t rows = rows_in_use(args.groups);
  const DType storage = TensorView(args.z).type();
  const std::vector<double> probs = read_vector(args.probs, rows, 1);
  const Matrix z = read_rows(args.z, {}, rows);
  const Dot::Factors factors = factors_of(args.accumulation, args.grad_y_scales, args.w2_scales);
  const Matrix grad_y = read_rowwise(args.grad_y, args.grad_y_scales, args.row_idx, rows, factors);
  const Matrix grad_act = round_to(storage, multiply(grad_y, args.w2, Pass::kDgrad, {}, ones(rows),
                                                     args.groups, args.w2_scales, factors));
  GluBackward gradients = glu_backward(z, grad_act, probs, args.activation, args.layout);
  GemmGluBackwardResults out;
  out.grad_z = round_to(storage, std::move(gradients.grad_z));
  out.grad_probs = std::move(gradients.grad_probs);
  out.act = glu(z, probs, args.activation, args.layout);
  if (is_present(args.grad_bias)) {
    out.grad_bias = sum_rows(out.grad_z, ones(rows), args.grad_bias, {args.beta}, args.groups);
  }
  return out;
}

BiasBackwardResults bias_backward(const moire_bias_backward_args& args) {
  const int64_t rows = rows_in_use(args.groups);
  const Matrix grad_y = read_rows(args.grad_y, args.row_idx, rows);
  BiasBackwardResults out;
  if (is_present(args.grad_bias)) {
    out.grad_bias = sum_rows(grad_y, read_vector(args.scale, rows, 1), args.grad_bias,
                             {args.beta, args.beta_per_group}, args.groups);
  }
  if (is_present(args.grad_scale)) {
    out.grad_scale = dot_with_bias(grad_y, args.bias, args.groups);
    if (args.beta_scale != 0) {
      out.grad_scale = add(read_column(args.grad_scale, rows), out.grad_scale);
    }
  }
  return out;
}

}  // namespace moire::reference
