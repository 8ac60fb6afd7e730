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

// Judges what calls that have run left in their outputs, by a row of the largest group and the last
// row in use. "" if they are right, or if rows of this op do not stand for themselves.
std::string judge_rows(Device device, const Operands& operands, const std::vector<Call>& calls);

}  // namespace moire::tool
