// TileCounters: the numbers that persistent kernels draw their tiles from. A counter is 0 whenever
// nobody uses it: the kernel leaves it so. Kernels on one stream use one, for they run in turn;
// each kernel of a captured graph has one of its own, for graphs may run beside each other and
// beside anything but themselves: two instances of one captured graph must not run at a time.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <mutex>
#include <unordered_map>

namespace moire::cuda {

class TileCounters {
 public:
  // Of a device, zeros, kCount of them; once, before anything else.
  void share_out(uint32_t* counters) { memory_ = counters; }
  static constexpr size_t kCount = 65536;

  // For one kernel that is launched on the stream now. Null when all are given away, after 65,536
  // streams and captured kernels: such a kernel shares out its tiles in turn.
  uint32_t* next(cudaStream_t stream);

 private:
  uint32_t* take();

  std::mutex mutex_;
  uint32_t* memory_ = nullptr;
  size_t num_taken_ = 0;
  std::unordered_map<unsigned long long, uint32_t*> of_stream_;  // by the stream's number
};

}  // namespace moire::cuda
