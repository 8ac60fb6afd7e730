// The activation, or its backward, and the FP8 copies of what that would store, in one pass: where
// a call asks for copies alone, in which case nothing is stored between. Their bytes are those of
// quantize on what glu and glu_backward store.
#pragma once

#include <moire/grouped_gemm.h>
#include <moire/quantize.h>
#include <moire/routing.h>

#include "backend/implementation.h"

namespace moire::cuda::ops {

struct GluCopies {
  GluArgs glu;       // its act is absent
  QuantizeArgs act;  // its source is absent, as in those below

  // Why it cannot run; nothing if it can.
  Reason supports() const;
  Status run(const Context& context) const;
};

struct GluBackwardCopies {
  GluBackwardArgs glu;                // its grad_z and act are absent
  QuantizeArgs grad_z, act;           // act: columnwise, or absent
  float* grad_probs_parts = nullptr;  // [capacity, parts], where grad_probs is present
  Reason supports() const;
  Status run(const Context& context) const;
  int64_t launches() const { return is_present(glu.grad_probs) ? 2 : 1; }
};

// Whether a call is one of these.
bool leaves_copies(const GroupedGemmGluArgs& args);
bool leaves_copies(const GroupedGemmGluBackwardArgs& args);

// Sums of grad_probs that a row has parts of: one for each 64 columns of F.
int64_t num_grad_probs_parts(int64_t f);

}  // namespace moire::cuda::ops
