// Runs a case once and judges it: the heart of `moire check`, and the proof that stands before
// every timing of `moire bench`.
#pragma once

#include <moire/context.h>

#include <string>
#include <vector>

#include "comparison.h"
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

  double max_error() const;  // 1 = the bound
  double rms_error() const;  // the largest of all outputs
};

Verdict judge(const Context& context, const Problem& problem);

}  // namespace moire::tool
