#include "reference/recipe.h"

#include <utility>

#include "reference/glu.h"
#include "reference/grouped_gemm.h"
#include "reference/quantize.h"
#include "reference/scaled.h"

namespace moire::reference {
namespace {

// What lies between the products, whatever x and y are.
constexpr DType kBetween = DType::kBF16;

// Memory of one copy, laid out as moire.h has it.
class Copy {
 public:
  Copy(moire_tensor data, moire_tensor scales, const QuantizedBytes& bytes)
      : data_(bytes.data.bytes),
        scales_(bytes.scales.bytes),
        data_view_(data),
        scales_view_(scales) {
    data_view_.data = data_.data();
    scales_view_.data = scales_.data();
  }
  Copy(const Copy&) = delete;
  Copy& operator=(const Copy&) = delete;

  const moire_tensor& data() const { return data_view_; }
  const moire_tensor& scales() const { return scales_view_; }

 private:
  std::vector<uint8_t> data_, scales_;
  moire_tensor data_view_, scales_view_;
};

// What the products of one call read.
class Copies {
 public:
  // `Args` is one of the layers' structs.
  template <class Args>
  explicit Copies(const Args& args)
      : is_block_(args.recipe == MOIRE_RECIPE_FP8_BLOCK),
        fractional_(args.fractional_scales),
        factors_(args.emulate_accumulation != 0 ? Dot::Factors::kEmulated : Dot::Factors::kScaled),
        groups_(args.groups) {}

  // A ragged operand, gathered first, whose blocks lie along its rows or down its groups.
  Matrix rowwise(const moire_tensor& t, const moire_tensor& row_idx, int32_t element) const {
    const int64_t columns = TensorView(t).columns();
    const Copy copy = ragged(t, row_idx, element, MOIRE_ROWWISE,
                             {groups_.capacity, (columns + block() - 1) / block()});
    return read_rowwise(copy.data(), copy.scales(), {}, rows_in_use(groups_), factors_);
  }
  Matrix columnwise(const moire_tensor& t, const moire_tensor& row_idx, int32_t element) const {
    const Copy copy =
        ragged(t, row_idx, element, MOIRE_COLUMNWISE,
               {groups_.capacity / block() + groups_.num_groups, TensorView(t).columns()});
    return read_columnwise(copy.data(), copy.scales(), {}, groups_, factors_);
  }

  // a_i op(W_g), of the weight quantised along what the pass contracts.
  Matrix times_weight(const Matrix& a, const moire_weight& w, Pass pass, const moire_tensor& bias,
                      const std::vector<double>& scale) const {
    const int64_t* shape = w.tensor.shape;
    const bool rowwise = (w.layout == MOIRE_OUT_IN) == (pass == Pass::kForward);
    const int64_t b = block();
    const int64_t rows = is_block_ || !rowwise ? (shape[1] + b - 1) / b : shape[1];
    const int64_t columns = is_block_ || rowwise ? (shape[2] + b - 1) / b : shape[2];
    moire_quantize_weight_args args{};
    args.source = w;
    args.scaling = is_block_ ? MOIRE_SCALING_FP8_TILE : MOIRE_SCALING_MXFP8;
    args.fractional_scales = fractional_;
    moire_quantized& out = is_block_ || rowwise ? args.rowwise : args.columnwise;
    out.data = TensorView(nullptr, DType::kE4M3, {shape[0], shape[1], shape[2]});
    out.scales = TensorView(nullptr, scale_dtype(), {shape[0], rows, columns});
    const QuantizeResults bytes = quantize_weight(args);
    const Copy copy(out.data, out.scales, is_block_ || rowwise ? bytes.rowwise : bytes.columnwise);
    const moire_weight quantized{copy.data(), nullptr, w.layout};
    return multiply(a, quantized, pass, bias, scale, groups_, copy.scales(), factors_);
  }

  Weights weight_gradient(const Matrix& grad_y, const Matrix& x, const moire_weight& grad_w,
                          const Accumulation& accumulation) const {
    return reference::weight_gradient(grad_y, x, grad_w, accumulation, groups_, factors_);
  }

 private:
  struct Shape {
    int64_t rows, columns;
  };

  int64_t block() const { return is_block_ ? 128 : 32; }
  DType scale_dtype() const { return is_block_ ? DType::kFP32 : DType::kE8M0; }

  Copy ragged(const moire_tensor& t, const moire_tensor& row_idx, int32_t element,
              int32_t direction, Shape scales) const {
    moire_quantize_args args{};
    args.source = t;
    args.row_idx = row_idx;
    args.scaling = is_block_ ? MOIRE_SCALING_FP8_BLOCK : MOIRE_SCALING_MXFP8;
    args.fractional_scales = fractional_;
    args.groups = groups_;
    moire_quantized& out = direction == MOIRE_ROWWISE ? args.rowwise : args.columnwise;
    out.data = TensorView(nullptr, static_cast<DType>(element),
                          {groups_.capacity, TensorView(t).columns()});
    out.scales = TensorView(nullptr, scale_dtype(), {scales.rows, scales.columns});
    const QuantizeResults bytes = quantize(args);
    return {out.data, out.scales, direction == MOIRE_ROWWISE ? bytes.rowwise : bytes.columnwise};
  }

  bool is_block_;
  int32_t fractional_;
  Dot::Factors factors_;
  moire_groups groups_;
};

int32_t element_of(int32_t gradient_dtype) {
  return gradient_dtype == 0 ? MOIRE_E4M3 : gradient_dtype;
}

}  // namespace

Matrix quantized(const moire_grouped_linear_args& args) {
  const Copies copies(args);
  return copies.times_weight(copies.rowwise(args.x, args.row_idx, MOIRE_E4M3), args.w,
                             Pass::kForward, args.bias,
                             read_vector(args.scale, rows_in_use(args.groups), 1));
}

LinearGradients quantized(const moire_grouped_linear_backward_args& args) {
  const Copies copies(args);
  const int32_t gradient = element_of(args.gradient_dtype);
  const moire_tensor grad_y_idx = args.gathered_grad_y != 0 ? args.row_idx : moire_tensor{};
  // The gradients of bias and scale are sums of grad_y itself.
  moire_grouped_linear_backward_args of_bias = args;
  of_bias.grad_x = {};
  of_bias.grad_w = {};
  LinearGradients out = grouped_linear_backward(of_bias);
  if (is_present(args.grad_x)) {
    out.grad_x = copies.times_weight(copies.rowwise(args.grad_y, grad_y_idx, gradient), args.w,
                                     Pass::kDgrad, {}, ones(rows_in_use(args.groups)));
  }
  if (is_present(args.grad_w)) {
    out.grad_w = copies.weight_gradient(copies.columnwise(args.grad_y, grad_y_idx, gradient),
                                        copies.columnwise(args.x, args.row_idx, MOIRE_E4M3),
                                        args.grad_w, {args.beta, args.beta_per_group});
  }
  return out;
}

MlpResults quantized(const moire_grouped_mlp_args& args) {
  const Copies copies(args);
  const int64_t rows = rows_in_use(args.groups);
  const std::vector<double> probs = read_vector(args.probs, rows, 1);
  MlpResults out;
  out.z = round_to(kBetween, copies.times_weight(copies.rowwise(args.x, args.row_idx, MOIRE_E4M3),
                                                 args.w1, Pass::kForward, args.b1, ones(rows)));
  const Matrix z = read_rows(args.z, {}, rows);
  out.act = round_to(kBetween, glu(z, probs, args.activation, args.layout));
  out.y = copies.times_weight(copies.rowwise(args.act, {}, MOIRE_E4M3), args.w2, Pass::kForward,
                              args.b2, b2_scale(args, rows));
  return out;
}

MlpGradients quantized(const moire_grouped_mlp_backward_args& args) {
  const Copies copies(args);
  const int64_t rows = rows_in_use(args.groups);
  const int32_t gradient = element_of(args.gradient_dtype);
  const moire_tensor grad_y_idx = args.gathered_grad_y != 0 ? args.row_idx : moire_tensor{};
  const std::vector<double> probs = read_vector(args.probs, rows, 1);
  const Matrix z = read_rows(args.z, {}, rows), grad_y = read_rows(args.grad_y, grad_y_idx, rows);

  MlpGradients out;
  out.act = round_to(kBetween, glu(z, probs, args.activation, args.layout));
  const Matrix grad_act =
      round_to(kBetween, copies.times_weight(copies.rowwise(args.grad_y, grad_y_idx, gradient),
                                             args.w2, Pass::kDgrad, {}, ones(rows)));
  GluBackward gradients = glu_backward(z, grad_act, probs, args.activation, args.layout);
  out.grad_z = round_to(kBetween, std::move(gradients.grad_z));
  out.grad_probs = std::move(gradients.grad_probs);
  if (is_present(args.grad_x)) {
    out.grad_x = copies.times_weight(copies.rowwise(args.grad_z, {}, gradient), args.w1,
                                     Pass::kDgrad, {}, ones(rows));
  }
  if (is_present(args.grad_w1)) {
    out.grad_w1 = copies.weight_gradient(copies.columnwise(args.grad_z, {}, gradient),
                                         copies.columnwise(args.x, args.row_idx, MOIRE_E4M3),
                                         args.grad_w1, {args.beta_w1, args.beta_w1_per_group});
  }
  if (is_present(args.grad_w2)) {
    out.grad_w2 = copies.weight_gradient(copies.columnwise(args.grad_y, grad_y_idx, gradient),
                                         copies.columnwise(args.act, {}, MOIRE_E4M3), args.grad_w2,
                                         {args.beta_w2, args.beta_w2_per_group});
  }
  if (is_present(args.grad_b1)) {
    out.grad_b1 = sum_rows(read_rows(args.grad_z, {}, rows), ones(rows), args.grad_b1,
                           {args.beta_bias}, args.groups);
  }
  add_b2_gradients(args, grad_y, out);
  return out;
}

}  // namespace moire::reference
