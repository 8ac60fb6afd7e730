#include "gpu_bench.h"

#include <cmath>
#include <cstdio>
#include <fstream>

#include "bench_groups.h"
#include "cases.h"
#include "gpu_variants.h"
#include "nvml.h"
#include "terminal.h"
#include "text.h"

namespace moire::tool {
namespace {

constexpr double kNotableClock = 0.03;

void warn_if_clock_moved(BenchResult& r) {
  if (r.before.sm_clock == 0 || r.after.sm_clock == 0) return;
  const double moved = std::fabs(r.after.sm_clock / r.before.sm_clock - 1);
  if (moved < kNotableClock) return;
  r.warnings.push_back(
      {Warning::Kind::kClockMoved, text("the SM clock went from ", r.before.sm_clock, " to ",
                                        r.after.sm_clock, " MHz at ", r.after.power, " W")});
}

// `index` is the GPU's. The baseline's memory is given back with `gpu`.
BenchResult run_problem(const Context& on_host, int index, const Problem& problem,
                        const MachineFacts& machine, const Protocol& protocol,
                        const std::function<void(double)>& tick) {
  BenchResult r;
  r.problem = problem;
  check_smaller(on_host, r);
  if (!r.unsupported.empty()) return r;
  const std::unique_ptr<Gpu> gpu = usage(Gpu::open(index));
  const std::unique_ptr<CuBlas> blas = CuBlas::open(*gpu);
  ContextOptions options = on_host.options();
  options.stream = gpu->stream();
  const Context context = usage(on_host.sharing(options));
  const OpOnGpu op(context, *gpu, r);
  const GpuBaseline baseline(blas.get(), *gpu, r);
  std::vector<Variant> variants;
  for (GraphVariant* v : {op.variant(), baseline.variant()}) {
    if (v == nullptr) continue;
    variants.push_back(
        {"", nullptr, [v](int64_t first, int64_t calls) { return v->seconds(first, calls); }});
  }
  const auto nvml = Nvml::open(gpu->bus_id());
  if (nvml.ok()) r.before = nvml.value()->conditions();
  std::vector<Samples> samples = measure(variants, protocol, tick);
  if (nvml.ok()) r.after = nvml.value()->conditions();
  require(context.check());
  r.samples = std::move(samples[0]);
  r.time = summarize(r.samples.seconds);
  if (baseline.variant() != nullptr) {
    r.baseline = baseline.name();
    r.ratio = paired_ratio(samples[1], r.samples);
    r.baseline_samples = samples[1].seconds;
  }
  warn_if_clock_moved(r);
  add_quality(r, machine);
  return r;
}

Protocol gpu_protocol(const BenchOptions& options) {
  Protocol protocol;
  protocol.seconds = options.seconds;
  protocol.pause_seconds = 0;  // nobody waits
  return protocol;
}

}  // namespace

int run_gpu_bench(const BenchOptions& options) {
  if (options.sustained) return run_sustained_bench(options);
  const Context context = open_context(options.common);
  const std::vector<Group> groups = collect_groups(options.problems, {""});
  for (const Group& group : groups) {
    for (const Problem& p : group.problems) require_memory_for(context, p);
  }
  const Protocol protocol = gpu_protocol(options);
  const int index = context.options().index;
  const MachineFacts machine = measure_gpu(index);
  std::vector<BenchResult> results;
  Progress progress("bench", static_cast<int64_t>(groups.size()));
  for (size_t i = 0; i < groups.size(); ++i) {
    for (const Problem& problem : groups[i].problems) {
      const std::string note = text(problem.name, " ", problem.op->name);
      const auto tick = [&](double) { progress.show(static_cast<int64_t>(i), note); };
      tick(0);
      results.push_back(run_problem(context, index, problem, machine, protocol, tick));
      progress.clear();
      if (!options.common.json) continue;
      std::printf("%s\n", to_json(results.back(), machine, protocol).dump().c_str());
      std::fflush(stdout);
    }
  }
  if (!options.common.json) {
    std::printf("%s", results_text(results, machine, protocol, options.advice).c_str());
  }
  if (!options.svg.empty()) {
    std::ofstream file(options.svg);
    file << results_svg(results, machine);
    if (!file) throw UsageError(text("--svg: ", options.svg, " could not be written"));
  }
  return kExitOk;
}

}  // namespace moire::tool
