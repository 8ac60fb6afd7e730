// The activation, or its backward, and the FP8 copies of what that would store, in one pass: where
// a call asks for copies alone, in which case nothing is stored between. Their bytes are those of
// quantize on what glu and glu_backward store.
#pragma once

#include "backend/implementation.h"
#include "core/arena.h"

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
  moire_tensor grad_bias = {};        // the sums of each group's rows of grad_z, or absent
  int32_t beta = 0;                   // of grad_bias
  float* grad_probs_parts = nullptr;  // [capacity, parts], where grad_probs is present
  float* grad_bias_parts = nullptr;   // [blocks of 32 rows, 2F], where grad_bias is
  // Takes the memory of both; glu and grad_bias are complete.
  void take_parts(Arena& arena);
  Reason supports() const;
  Status run(const Context& context) const;
  int64_t launches() const { return 1 + is_present(glu.grad_probs) + is_present(grad_bias); }
};

// Whether a call is one of these.
bool leaves_copies(const GroupedGemmGluArgs& args);
bool leaves_copies(const GroupedGemmGluBackwardArgs& args);

}  // namespace moire::cuda::ops
