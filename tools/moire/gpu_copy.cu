#include "gpu_copy.h"

namespace moire::tool {
namespace {

constexpr int kThreads = 256, kAhead = 4;  // 16 KiB a block, four loads under way in each thread

__global__ void copy_pieces(uint4* to, const uint4* from, int64_t count) {
  const int64_t first = int64_t{blockIdx.x} * kThreads * kAhead + threadIdx.x;
  uint4 pieces[kAhead];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    if (first + i * kThreads < count) pieces[i] = from[first + i * kThreads];
  }
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    if (first + i * kThreads < count) to[first + i * kThreads] = pieces[i];
  }
}

}  // namespace

cudaError_t enqueue_copy(void* to, const void* from, int64_t bytes, cudaStream_t stream) {
  constexpr int64_t kPiece = sizeof(uint4), kPerBlock = int64_t{kThreads} * kAhead;
  const int64_t count = bytes / kPiece, whole = count * kPiece;
  if (count > 0) {
    const auto blocks = static_cast<unsigned>((count + kPerBlock - 1) / kPerBlock);
    copy_pieces<<<blocks, kThreads, 0, stream>>>(static_cast<uint4*>(to),
                                                 static_cast<const uint4*>(from), count);
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) return error;
  }
  if (whole == bytes) return cudaSuccess;
  return cudaMemcpyAsync(static_cast<char*>(to) + whole, static_cast<const char*>(from) + whole,
                         static_cast<size_t>(bytes - whole), cudaMemcpyDeviceToDevice, stream);
}

}  // namespace moire::tool
