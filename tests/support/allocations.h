// Counts what a call takes from the heap: an op takes nothing (docs/architecture.md), neither
// memory for the work nor for its checks.
#pragma once

#include <cstdint>

namespace moire::test {

// By `operator new` on this thread, so far.
int64_t num_allocations();

}  // namespace moire::test
