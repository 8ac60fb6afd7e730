// A GPU as a benchmark sees it: rotating operands in its memory, beside cuBLAS or a plain copy;
// time is the GPU's, of captured graphs.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "bench.h"
#include "gpu.h"
#include "gpu_blas.h"
#include "power.h"

namespace moire::tool {

// Functions that enqueue one call each, on operands of their own.
class GraphVariant {
 public:
  GraphVariant(Gpu& gpu, std::string name, std::vector<std::function<Status()>> sets);

  const std::string& name() const { return name_; }
  double seconds(int64_t first, int64_t calls);
  // Enqueues a call; the host's time is that of one launch, whatever is in it.
  void launch(int64_t call) const { gpu_.launch(graph_of(call)); }
  // The host's time of a call that no graph was captured of; the median of some.
  double host_seconds() const;
  int64_t num_sets() const { return static_cast<int64_t>(sets_.size()); }

 private:
  const Gpu::Graph& graph_of(int64_t call) const {
    return alone_[static_cast<size_t>(call % num_sets())];
  }

  Gpu& gpu_;
  std::string name_;
  std::vector<std::function<Status()>> sets_;
  std::vector<Gpu::Graph> alone_;
  std::map<int64_t, Gpu::Graph> many_;  // of so many calls
};

class GpuBench : public Bench {
 public:
  enum class Facts { kNone, kMeasured };
  GpuBench(const Context& on_host, Facts facts);

  std::optional<Variant> op(BenchResult& r) override;
  std::optional<Variant> baseline(const BenchResult& r) override;
  void begin() override { before_ = conditions(); }
  void end(const std::vector<BenchResult*>& timed) override;

  // An op gives the memory of the one before back. Null where there is none.
  std::shared_ptr<GraphVariant> op_graphs(BenchResult& r);
  std::shared_ptr<GraphVariant> baseline_graphs(const BenchResult& r);
  std::shared_ptr<GraphVariant> dense_graphs();
  Gpu& gpu() { return *gpu_; }
  const Context& context() const { return context_; }

 private:
  void open();
  GpuConditions conditions() const;
  int64_t sets_of(int64_t bytes) const;

  Context on_host_;
  std::unique_ptr<Gpu> gpu_;
  std::unique_ptr<CuBlas> blas_;
  Context context_;  // on the stream of gpu_, which outlives it
  GpuConditions before_;
};

}  // namespace moire::tool
