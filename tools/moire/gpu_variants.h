// What a GPU's benchmarks time: an op on rotating sets of operands in the GPU's memory, and the
// baseline beside it, as captured graphs.
#pragma once

#include <moire/context.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "bench_result.h"
#include "gpu.h"
#include "gpu_blas.h"

namespace moire::tool {

// Functions that enqueue one call each, on operands of their own; timed as captured graphs.
class GraphVariant {
 public:
  GraphVariant(const Gpu& gpu, std::vector<std::function<Status()>> sets);

  double seconds(int64_t first, int64_t calls);
  // Enqueues a call; the host's time is that of one launch, whatever is in it.
  void launch(int64_t call) const { gpu_.launch(*graph_of(call)); }
  // The host's time of a call that no graph was captured of; the median of some.
  double host_seconds() const;
  int64_t num_sets() const { return static_cast<int64_t>(sets_.size()); }

 private:
  std::unique_ptr<Gpu::Graph> capture(const std::function<Status()>& enqueue) const;
  const std::unique_ptr<Gpu::Graph>& graph_of(int64_t call) const {
    return alone_[static_cast<size_t>(call % num_sets())];
  }
  const Gpu::Graph& graph_of_many(int64_t calls);

  const Gpu& gpu_;
  std::vector<std::function<Status()>> sets_;
  std::vector<std::unique_ptr<Gpu::Graph>> alone_;
  std::map<int64_t, std::unique_ptr<Gpu::Graph>> many_;
};

// One copy of an op's operands, on the device.
class DeviceSet;

// The op of a result, checked; what explain says of it goes to the result.
class OpOnGpu {
 public:
  OpOnGpu(const Context& context, const Gpu& gpu, BenchResult& r);
  ~OpOnGpu();
  GraphVariant* variant() const { return variant_.get(); }

 private:
  std::vector<std::unique_ptr<DeviceSet>> sets_;
  std::unique_ptr<GraphVariant> variant_;
};

// cuBLAS for products, a copy of as many bytes for what only moves them; neither for the others.
class GpuBaseline {
 public:
  GpuBaseline(const CuBlas* blas, Gpu& gpu, const BenchResult& r);
  GraphVariant* variant() const { return variant_.get(); }  // null where there is none
  const std::string& name() const { return name_; }

 private:
  std::string name_;
  std::vector<std::unique_ptr<CuBlasBaseline>> products_;
  std::unique_ptr<GraphVariant> variant_;
};

// Judges a smaller problem of the same op: throws where its result is wrong; what is unsupported
// the result says.
void check_smaller(const Context& on_host, BenchResult& r);

// What a status says, thrown.
void require(const Status& status);

MachineFacts measure_gpu(int index);

}  // namespace moire::tool
