// What a benchmark runs: the ops and dtypes of its problems, in groups that are measured together.
#pragma once

#include <string>
#include <vector>

#include "commands.h"
#include "problem.h"

namespace moire::tool {

// All dtypes of one op of one problem, measured together.
struct Group {
  std::vector<Problem> problems;
};

// `dtypes` where the options name none; "" stands for the problem's own 16-bit type.
std::vector<Group> collect_groups(const ProblemOptions& options,
                                  const std::vector<std::string>& dtypes);

// The same op and options, small enough that the scalar reference takes no time worth mention.
Problem smaller(const Problem& p);

}  // namespace moire::tool
