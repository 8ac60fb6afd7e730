// Activations, gated or not, their gradients and the layouts of their two halves, from the
// definitions in moire.h and docs/semantics.md.
#pragma once

#include <moire.h>

#include <cstddef>
#include <vector>

#include "reference/tensor.h"

namespace moire::reference {

// Where gate and up of activation column j lie among the 2F columns of z; kNoUp: it has F.
inline constexpr int64_t kNoUp = -1;
struct GluColumns {
  int64_t gate;
  int64_t up;
};
GluColumns glu_columns(const moire_glu_layout& layout, int64_t num_columns, int64_t j);

// glu(gate, up) * prob, one element; and of an ungated layout.
Number glu(const moire_activation& activation, Number gate, Number up, double prob);
Number ungated(const moire_activation& activation, Number gate, double prob);

struct GluGradient {
  Number gate;
  Number up;
};
// The gradient of glu(gate, up) * prob for an incoming gradient of 1, at exact gate and up.
GluGradient glu_gradient(const moire_activation& activation, double gate, double up, double prob);
Number ungated_gradient(const moire_activation& activation, double gate, double prob);

// act [rows, F] of z [rows, 2F], before it is rounded.
Matrix glu(const Matrix& z, const std::vector<double>& probs, const moire_activation& activation,
           const moire_glu_layout& layout);

struct GluBackward {
  Matrix grad_z;      // [rows, 2F], before it is rounded
  Matrix grad_probs;  // [rows, 1]
};
// z is what the forward stored, hence exact.
GluBackward glu_backward(const Matrix& z, const Matrix& grad_act, const std::vector<double>& probs,
                         const moire_activation& activation, const moire_glu_layout& layout);

// The ops: rows in use only.
Matrix glu(const moire_glu_args& args);
struct GluBackwardResults {
  Matrix grad_z, act, grad_probs;
};
GluBackwardResults glu_backward(const moire_glu_backward_args& args);

// The bytes of `target`, contiguous.
std::vector<std::byte> convert_glu(const moire_convert_glu_args& args);

}  // namespace moire::reference
