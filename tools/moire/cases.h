// A case: the library calls that a problem's op makes, on operands, with what the reference says of
// their results. Explain, check and bench run the same cases.
#pragma once

#include <moire/context.h>
#include <moire/explain.h>

#include <any>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "operands.h"
#include "reference/comparison.h"
#include "staging/staged_call.h"

namespace moire::tool {

using reference::OutputErrors;

struct Call {
  std::string entry;  // "grouped_gemm"
  std::any args;      // its struct, without a workspace
  std::function<Status(const Context&, size_t* bytes)> workspace = [](auto&&...) {
    return Status();  // of an entry that takes none
  };
  std::function<Status(const Context&, Workspace)> run;
  // For operands that stay on a device: names them, and once they are uploaded makes the call on
  // them, which only enqueues.
  std::function<void(staging::StagedCall&, Workspace)> stage;
  std::function<std::function<Status(const Context&)>(staging::StagedCall&, Workspace)> on_device;
  // Asked before the call, because accumulating outputs are inputs too; what it returns judges
  // after.
  using Judge = std::function<std::vector<OutputErrors>()>;
  std::function<Judge(Device)> expect;
  // The same of one row only, at the full width; null where rows do not stand for themselves.
  std::function<Judge(Device, int64_t row, int64_t group)> expect_row;
  double flops = 0;          // of the rows in use
  int64_t window_bytes = 0;  // of a rank, that others reach
  double moved_bytes = 0;    // over all ranks, where operands have content
  using Kept = nlohmann::ordered_map<std::string, int64_t>;  // bytes by name
  Kept saved;  // for a later call, beside tensors that the caller has anyway
  // Prepared weights that it reads, once a context has told their forms.
  std::shared_ptr<Kept> prepared = std::make_shared<Kept>();
};

struct Case {
  Case(const Problem& problem, Operands::Content content);
  Case(const Case&) = delete;  // calls know where its operands are
  Operands operands;
  std::vector<Call> calls;
};

// Of ops that all ranks call together: threads of this process, on a context each (ranks.cpp).
std::vector<Call> make_rank_calls(Operands& operands);

// What a context says of a call without running it; operands get the call's workspace.
struct Plan {
  Status status;
  size_t workspace_bytes = 0;
  Explanation steps;
};
Plan plan(const Context& context, const Call& call, Operands& operands);

// UsageError where the operands and workspaces of a problem's case are more than the free memory;
// takes none to find out.
void require_memory_for(const Context& context, const Problem& problem);

}  // namespace moire::tool
