// The GPU as a benchmark sees it: a stream, graphs of what was enqueued on it, and time by events.
// Without a CUDA build open() says so.
#pragma once

#include <moire/status.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "sustained.h"

namespace moire::tool {

// Its flush reads twice the cache, and leaves nothing in it to be written back.
class Gpu : public TimedGpu {
 public:
  // UsageError where there is none.
  static std::unique_ptr<Gpu> open(int index);

  virtual void* stream() const = 0;  // cudaStream_t
  virtual std::string bus_id() const = 0;
  virtual int64_t cache_bytes() const = 0;
  virtual int64_t free_bytes() const = 0;

  // A CUDA graph of what `enqueue` puts on the stream; throws what it says. A type of its own, as a
  // Mark is a pointer, too.
  struct Graph {
    std::shared_ptr<void> executable;  // cudaGraphExec_t
  };
  virtual Graph capture(const std::function<Status()>& enqueue) = 0;
  virtual void launch(const Graph& graph) = 0;
  // Device memory that lives as long as this; throws where there is too little.
  virtual void* take(int64_t bytes) = 0;
  // Enqueues a copy.
  virtual Status copy(void* to, const void* from, int64_t bytes) = 0;

  using TimedGpu::seconds;
  // GPU time that `timed` takes behind `before`, which keeps the GPU busy while the host enqueues;
  // throws what a launch that fails says.
  double seconds(const Graph& before, const Graph& timed) {
    launch(before);
    const Mark begin = mark();
    launch(timed);
    const Mark end = mark();
    wait(end);
    return seconds(begin, end);
  }
};

}  // namespace moire::tool
