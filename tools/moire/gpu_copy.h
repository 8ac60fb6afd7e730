// A copy on the GPU at the memory's rate, which the driver's own between two buffers does not reach
// inside a graph (one H200: 2.7 of 4.2 TB/s).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace moire::tool {

// Enqueues a copy; both addresses are multiples of 16, as cudaMalloc's are.
cudaError_t enqueue_copy(void* to, const void* from, int64_t bytes, cudaStream_t stream);

}  // namespace moire::tool
