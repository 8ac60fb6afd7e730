// All outputs of a call against the reference, by the fields of its struct.
#pragma once

#include "reference/outputs.h"
#include "tests/support/expect.h"

namespace moire::test {

testing::AssertionResult all_match(const std::vector<reference::OutputErrors>& outputs);

// Each output that is there holds what the reference says, and its tail what the call asks for.
template <class A, class Want>
testing::AssertionResult outputs_match(const A& args, const Want& want) {
  return all_match(reference::compare_outputs(args, want));
}

}  // namespace moire::test
