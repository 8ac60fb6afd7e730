#include "reference/grouped_mlp.h"

#include <utility>

#include "reference/glu.h"
#include "reference/grouped_gemm.h"

namespace moire::reference {
namespace {

// What is left of an intermediate after it was stored.
class Storage {
 public:
  Storage(Rounding rounding, DType dtype)
      : dtype_(rounding == Rounding::kNone ? DType::kFP64 : dtype) {}
  Matrix operator()(Matrix m) const { return round_to(dtype_, std::move(m)); }

 private:
  DType dtype_;
};

// Whether any gradient that is asked for comes back through FC2, and so needs its weight.
bool is_through_fc2(const moire_grouped_mlp_backward_args& args) {
  return is_present(args.grad_z) || is_present(args.grad_x) || is_present(args.grad_w1) ||
         is_present(args.grad_b1) || is_present(args.grad_probs);
}

}  // namespace

Matrix grouped_linear(const moire_grouped_linear_args& args) {
  const int64_t rows = rows_in_use(args.groups);
  return multiply(read_rows(args.x, args.row_idx, rows), args.w, Pass::kForward, args.bias,
                  read_vector(args.scale, rows, 1), args.groups);
}

LinearGradients grouped_linear_backward(const moire_grouped_linear_backward_args& args) {
  const int64_t rows = rows_in_use(args.groups);
  const moire_tensor grad_y_idx = args.gathered_grad_y != 0 ? args.row_idx : moire_tensor{};
  const Matrix grad_y = read_rows(args.grad_y, grad_y_idx, rows);
  const Accumulation accumulation{args.beta, args.beta_per_group};
  LinearGradients out;
  if (is_present(args.grad_x)) {
    out.grad_x = multiply(grad_y, args.w, Pass::kDgrad, {}, ones(rows), args.groups);
  }
  if (is_present(args.grad_w)) {
    const Matrix x = read_rows(args.x, args.row_idx, rows);
    out.grad_w = weight_gradient(grad_y, x, args.grad_w, accumulation, args.groups);
  }
  if (is_present(args.grad_bias)) {
    out.grad_bias = sum_rows(grad_y, read_vector(args.scale, rows, 1), args.grad_bias, accumulation,
                             args.groups);
  }
  if (is_present(args.grad_scale)) out.grad_scale = dot_with_bias(grad_y, args.bias, args.groups);
  return out;
}

MlpResults grouped_mlp(const moire_grouped_mlp_args& args, Rounding rounding) {
  const int64_t rows = rows_in_use(args.groups);
  const moire_tensor& typed = is_present(args.z)     ? args.z
                              : is_present(args.act) ? args.act
                                                     : args.x;
  const Storage stored(rounding, TensorView(typed).type());
  const Matrix x = read_rows(args.x, args.row_idx, rows);
  const std::vector<double> probs = read_vector(args.probs, rows, 1);
  MlpResults out;
  out.z = stored(multiply(x, args.w1, Pass::kForward, args.b1, ones(rows), args.groups));
  out.act = stored(glu(out.z, probs, args.activation, args.layout));
  out.y = multiply(out.act, args.w2, Pass::kForward, args.b2, b2_scale(args, rows), args.groups);
  return out;
}

void add_b2_gradients(const moire_grouped_mlp_backward_args& args, const Matrix& grad_y,
                      MlpGradients& gradients) {
  if (is_present(args.grad_b2)) {
    gradients.grad_b2 = sum_rows(grad_y, b2_scale(args, rows_in_use(args.groups)), args.grad_b2,
                                 {args.beta_bias}, args.groups);
  }
  if (is_present(args.grad_b2_scale)) {
    gradients.grad_b2_scale = dot_with_bias(grad_y, args.b2, args.groups);
  } else if (args.b2_unscaled == 0 && !is_present(args.b2_scale) && is_present(args.grad_probs) &&
             is_present(args.b2)) {
    gradients.grad_probs = add(gradients.grad_probs, dot_with_bias(grad_y, args.b2, args.groups));
  }
}

MlpGradients grouped_mlp_backward(const moire_grouped_mlp_backward_args& args, Rounding rounding) {
  const int64_t rows = rows_in_use(args.groups);
  const Storage stored(rounding, TensorView(args.z).type());
  const moire_tensor grad_y_idx = args.gathered_grad_y != 0 ? args.row_idx : moire_tensor{};
  const Matrix grad_y = read_rows(args.grad_y, grad_y_idx, rows);
  const Matrix z = read_rows(args.z, {}, rows);
  const std::vector<double> probs = read_vector(args.probs, rows, 1);

  MlpGradients out;
  out.act = args.act_is_saved != 0 ? read_rows(args.act, {}, rows)
                                   : stored(glu(z, probs, args.activation, args.layout));
  if (is_through_fc2(args)) {
    const Matrix grad_act =
        stored(multiply(grad_y, args.w2, Pass::kDgrad, {}, ones(rows), args.groups));
    GluBackward gradients = glu_backward(z, grad_act, probs, args.activation, args.layout);
    out.grad_z = stored(std::move(gradients.grad_z));
    out.grad_probs = std::move(gradients.grad_probs);
  }
  if (is_present(args.grad_x)) {
    out.grad_x = multiply(out.grad_z, args.w1, Pass::kDgrad, {}, ones(rows), args.groups);
  }
  if (is_present(args.grad_w1)) {
    const Matrix x = read_rows(args.x, args.row_idx, rows);
    out.grad_w1 = weight_gradient(out.grad_z, x, args.grad_w1,
                                  {args.beta_w1, args.beta_w1_per_group}, args.groups);
  }
  if (is_present(args.grad_w2)) {
    out.grad_w2 = weight_gradient(grad_y, out.act, args.grad_w2,
                                  {args.beta_w2, args.beta_w2_per_group}, args.groups);
  }
  if (is_present(args.grad_b1)) {
    out.grad_b1 = sum_rows(out.grad_z, ones(rows), args.grad_b1, {args.beta_bias}, args.groups);
  }
  add_b2_gradients(args, grad_y, out);
  return out;
}

}  // namespace moire::reference
