// Runs a case once and judges it: the heart of `moire check`, and the proof that stands before
// every timing of `moire bench`.
#pragma once

#include <moire/context.h>

#include <string>
#include <vector>

#include "cases.h"
#include "problem.h"

namespace moire::tool {

struct CallVerdict {
  std::string entry;
  std::vector<OutputErrors> outputs;
};

struct Verdict {
  enum class Kind { kPassed, kFailed, kUnsupported };
  Kind kind = Kind::kPassed;
  std::string reason;  // of a failure without numbers, or why it is unsupported
  std::vector<CallVerdict> calls;
  double max_error = 0, rms_error = 0;  // the largest of all outputs; 1 = the bound
};

Verdict judge(const Context& context, const Problem& problem);

// Throws where what calls that have run left in their outputs is wrong in a row of the largest
// group or in the last row in use; asks nothing of an op whose rows do not stand for themselves.
void require_right_rows(Device device, const Operands& operands, const std::vector<Call>& calls);

}  // namespace moire::tool
