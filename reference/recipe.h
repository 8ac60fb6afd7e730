// The layers in an FP8 recipe: every product reads copies quantised by reference/quantize.h.
// Copies that args give are not looked at: they have to be what the recipe makes.
//
// An intermediate that an implementation rounds may lawfully fall to either side of a boundary, and
// its copy then differs in a whole code. So z, act and grad_z, which are BF16, are *observed*: the
// functions for the MLP run after the op and judge each stage from what the op stored before it.
#pragma once

#include <moire.h>

#include "reference/grouped_mlp.h"

namespace moire::reference {

// Rows in use only; results that args do not ask for are empty. In/out tensors are read as they
// are.
Matrix quantized(const moire_grouped_linear_args& args);
LinearGradients quantized(const moire_grouped_linear_backward_args& args);

// z and act are present and hold what the op stored.
MlpResults quantized(const moire_grouped_mlp_args& args);
// z is the forward's; act and grad_z are present and hold what the op stored; in/out gradients hold
// what they held before it.
MlpGradients quantized(const moire_grouped_mlp_backward_args& args);

}  // namespace moire::reference
