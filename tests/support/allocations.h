// Counts what a call takes from the heap: an op takes nothing (docs/architecture.md), neither
// memory for the work nor for its checks. And lets the heap fail, for calls that do.
#pragma once

#include <cstdint>
#include <functional>

namespace moire::test {

// By `operator new` on this thread, so far.
int64_t num_allocations();

// Runs `call` with a heap that has n allocations left for this thread, and none after those.
// Returns whether it asked for more.
bool runs_out_of_memory(int64_t n, const std::function<void()>& call);

}  // namespace moire::test
