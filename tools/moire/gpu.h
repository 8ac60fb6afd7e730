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
  std::string bus_id() const;
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
  void launch(const Graph& graph) const;
  // Enqueues what reads twice the cache, and leaves nothing in it to be written back.
  void flush();
  // A point of what was enqueued, and what the GPU's clock says of two.
  using Mark = std::shared_ptr<void>;
  Mark mark() const;
  void wait(const Mark& mark) const;
  double seconds(const Mark& begin, const Mark& end) const;
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

}  // namespace moire::tool
