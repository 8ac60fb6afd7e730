// The whole grouped linear layer and the whole grouped MLP, forward and backward: the formulas of
// moire.h, one line each. In/out tensors are read as they are: call these before the op under test.
#pragma once

#include <moire.h>

#include "reference/tensor.h"

namespace moire::reference {

enum class Rounding {
  kAsSpecified,  // z, act, grad_act and grad_z are rounded to the storage type of z
  kNone,         // the mathematical function, for finite differences and for errors of a recipe
};

// Rows in use only; results that args do not ask for are empty.
Matrix grouped_linear(const moire_grouped_linear_args& args);

struct LinearGradients {
  Matrix grad_x;
  Weights grad_w;  // as they lie in memory
  Matrix grad_bias;
  Matrix grad_scale;
};
LinearGradients grouped_linear_backward(const moire_grouped_linear_backward_args& args);

struct MlpResults {
  Matrix z;
  Matrix act;
  Matrix y;
};
// The storage type is that of args.z if it is present, else of args.act, else of args.x.
MlpResults grouped_mlp(const moire_grouped_mlp_args& args,
                       Rounding rounding = Rounding::kAsSpecified);

struct MlpGradients {
  Matrix act;
  Matrix grad_z;
  Matrix grad_x;
  Weights grad_w1;  // as they lie in memory
  Matrix grad_b1;
  Weights grad_w2;
  Matrix grad_b2;
  Matrix grad_probs;
  Matrix grad_b2_scale;
};
MlpGradients grouped_mlp_backward(const moire_grouped_mlp_backward_args& args,
                                  Rounding rounding = Rounding::kAsSpecified);

// What the recipes of recipe.h share: the factor of b2 in each of the first `rows` rows, and the
// gradients of b2 and of what scales it, which are sums of grad_y itself.
template <class Args>
std::vector<double> b2_scale(const Args& args, int64_t rows) {
  if (args.b2_unscaled != 0) return read_vector({}, rows, 1);
  return read_vector(is_present(args.b2_scale) ? args.b2_scale : args.probs, rows, 1);
}
void add_b2_gradients(const moire_grouped_mlp_backward_args& args, const Matrix& grad_y,
                      MlpGradients& gradients);

}  // namespace moire::reference
