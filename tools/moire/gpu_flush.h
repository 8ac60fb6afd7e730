// The kernel that empties a GPU's L2 cache of what a call left there.
#pragma once

#include <cstdint>

namespace moire::tool {

// Enqueues reads of all of `zeros` on a cudaStream_t; cudaGetLastError() has what went wrong. Lines
// that are only read need no writing back, which a call behind the flush would have to wait for.
void launch_flush(void* stream, void* zeros, int64_t bytes);

}  // namespace moire::tool
