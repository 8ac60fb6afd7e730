// Products over groups of rows: ragged M (forward, dgrad), ragged K (wgrad), the gradients of a
// grouped bias, and the ops that fuse the gated activation.
//
// In/out tensors are read as they are: call these before the op under test overwrites them.
#pragma once

#include <moire.h>

#include <vector>

#include "reference/glu.h"
#include "reference/tensor.h"

namespace moire::reference {

enum class Pass { kForward, kDgrad };

// kForward: a_i W_g^T [rows, out] of a [rows, in]; kDgrad: a_i W_g [rows, in] of a [rows, out].
// Plus scale_i * bias_g where there is a bias. Row i belongs to group g. `w_scales` are those of an
// FP8 weight.
Matrix multiply(const Matrix& a, const moire_weight& w, Pass pass, const moire_tensor& bias,
                const std::vector<double>& scale, const moire_groups& groups,
                const moire_tensor& w_scales = {}, Dot::Factors factors = Dot::Factors::kFloats);

// Whether a result of group g is added to what its memory holds.
struct Accumulation {
  bool of(int64_t g) const { return per_group != nullptr ? per_group[g] != 0 : beta != 0; }
  int32_t beta = 0;
  const uint8_t* per_group = nullptr;
};

// d_g = beta_g d_g + sum over group g's rows i of a_i^T b_i, [m, n] as it lies in memory.
Weights multiply_rows(const Matrix& a, const Matrix& b, const moire_weight& d,
                      const Accumulation& accumulation, const moire_groups& groups,
                      Dot::Factors factors = Dot::Factors::kFloats);

// The gradient of a weight whose layer mapped `x` to `y`: [out, in] or [in, out], as grad_w says.
Weights weight_gradient(const Matrix& grad_y, const Matrix& x, const moire_weight& grad_w,
                        const Accumulation& accumulation, const moire_groups& groups,
                        Dot::Factors factors = Dot::Factors::kFloats);

// d_g = beta_g d_g + sum over group g's rows i of scale_i a_i; [G, n].
Matrix sum_rows(const Matrix& a, const std::vector<double>& scale, const moire_tensor& d,
                const Accumulation& accumulation, const moire_groups& groups);

// sum_j a_ij bias_gj; [rows, 1].
Matrix dot_with_bias(const Matrix& a, const moire_tensor& bias, const moire_groups& groups);

Matrix add(const Matrix& a, const Matrix& b);

// The ops: rows in use only; results that args do not ask for are empty.
Matrix grouped_gemm(const moire_grouped_gemm_args& args);
Weights grouped_gemm_wgrad(const moire_grouped_gemm_wgrad_args& args);

// What z is rounded to, and act stored in.
DType storage_of(const moire_grouped_gemm_glu_args& args);

struct GemmGluResults {
  Matrix z;    // rounded to its storage type
  Matrix act;  // not rounded
};
GemmGluResults grouped_gemm_glu(const moire_grouped_gemm_glu_args& args);

struct GemmGluBackwardResults {
  Matrix grad_z;  // rounded to its storage type
  Matrix act, grad_probs, grad_bias;
};
GemmGluBackwardResults grouped_gemm_glu_backward(const moire_grouped_gemm_glu_backward_args& args);

struct BiasBackwardResults {
  Matrix grad_bias, grad_scale;
};
BiasBackwardResults bias_backward(const moire_bias_backward_args& args);

}  // namespace moire::reference
