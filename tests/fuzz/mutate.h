// Mutations of a drawn call: wrong fields, and right ones that are rare. The memory that a call
// names is always there: what no library can find out, a shape past its memory, is left out.
#pragma once

#include <string>

#include "tests/fuzz/call.h"

namespace moire::fuzz {

struct Mutation {
  std::string what;  // empty: nothing was changed
  bool must_fail = false;
};

// `workspace_bytes`: what the call needs as it was drawn.
Mutation mutate(Call& call, size_t workspace_bytes);

}  // namespace moire::fuzz
