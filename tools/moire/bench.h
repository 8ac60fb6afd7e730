// A device that `moire bench` times ops on, and what is timed: an op on rotating sets of operands,
// and a baseline beside it. bench.cpp has the order of a measurement, harness.h its protocol.
#pragma once

#include <moire/context.h>

#include <memory>
#include <optional>
#include <vector>

#include "bench_result.h"
#include "commands.h"
#include "harness.h"

namespace moire::tool {

class Bench {
 public:
  virtual ~Bench() = default;
  const MachineFacts& machine() const { return machine_; }
  // The op of r.problem, which has run on every set, its rows judged. What explain says of it goes
  // to the result, as does the reason where there is none.
  virtual std::optional<Variant> op(BenchResult& r) = 0;
  // The same products through a BLAS, or a copy of as many bytes for what only moves them; none for
  // the others.
  virtual std::optional<Variant> baseline(const BenchResult& r) = 0;
  // Around a measurement; what took part of the machine meanwhile is a warning of its results.
  virtual void begin() = 0;
  virtual void end(const std::vector<BenchResult*>& timed) = 0;

 protected:
  MachineFacts machine_;
};

std::unique_ptr<Bench> make_cpu_bench(const Context& context);
std::unique_ptr<Bench> make_gpu_bench(const Context& context);

// All dtypes of one op of one problem; on a GPU one each.
using Group = std::vector<Problem>;
// On a GPU in steady state: time, clock, power and energy (sustained.h).
int run_sustained_bench(const Context& context, const std::vector<Group>& groups,
                        const Options& options);

// For a Bench. A smaller problem of the op is judged; then what explain says goes to the result,
// with the bytes of a set of operands without its workspaces, whose sizes are returned. A reason
// where something is unsupported; throws where a result is wrong.
std::vector<size_t> prepare(const Context& context, BenchResult& r);
// How many copies of `set_bytes` span three caches, in so much memory.
int64_t rotating_sets(int64_t cache_bytes, int64_t memory_bytes, int64_t set_bytes);

}  // namespace moire::tool
