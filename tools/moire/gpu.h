// The GPU as a benchmark sees it: a stream, graphs of what was enqueued on it, and time by events.
// Without a CUDA build open() says so.
#pragma once

#include <moire/status.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace moire::tool {

class Gpu {
 public:
  static Result<std::unique_ptr<Gpu>> open(int index);
  ~Gpu();
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  void* stream() const;  // cudaStream_t
  int64_t cache_bytes() const;
  int64_t free_bytes() const;

  // A CUDA graph of what `enqueue` puts on the stream.
  class Graph {
   public:
    virtual ~Graph() = default;
  };
  Result<std::unique_ptr<Graph>> capture(const std::function<Status()>& enqueue) const;
  // Seconds of GPU time that `timed` takes behind `before`, which keeps the GPU busy while the host
  // enqueues; throws what a launch that fails says.
  double seconds(const Graph& before, const Graph& timed) const;
  // Bytes read and written per second by a copy much larger than the cache.
  double copy_bandwidth() const;
  // Device memory that lives as long as this; throws where there is too little.
  void* take(int64_t bytes);
  // Enqueues a copy.
  Status copy(void* to, const void* from, int64_t bytes) const;

 private:
  struct State;
  explicit Gpu(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

// Clocks (MHz), power (W) and temperature as nvidia-smi reports them; zeros without it.
struct GpuConditions {
  double sm_clock = 0, memory_clock = 0, power = 0, temperature = 0;
};
GpuConditions read_gpu_conditions(int index);

}  // namespace moire::tool
