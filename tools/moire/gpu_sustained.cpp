// `moire bench --device cuda --sustained`: each op beside cuBLAS and a dense product, in steady
// state.
#include <cstdio>

#include "bench_groups.h"
#include "cases.h"
#include "gpu_bench.h"
#include "gpu_variants.h"
#include "nvml.h"
#include "sustained_report.h"
#include "terminal.h"
#include "text.h"

namespace moire::tool {
namespace {

constexpr int kVariants = 3;              // the op, its baseline, the dense product
constexpr double kSecondsPerProblem = 8;  // to make operands, and to check

class StreamOfGpu : public TimedGpu {
 public:
  explicit StreamOfGpu(Gpu& gpu) : gpu_(gpu) {}
  double now() override { return tool::now(); }
  void flush() override { gpu_.flush(); }
  Mark mark() override { return gpu_.mark(); }
  void wait(const Mark& mark) override { gpu_.wait(mark); }
  double seconds(const Mark& begin, const Mark& end) override { return gpu_.seconds(begin, end); }

 private:
  Gpu& gpu_;
};

std::unique_ptr<Meter> meter_of(const Result<std::unique_ptr<Nvml>>& nvml) {
  if (!nvml.ok()) return make_meter(nullptr);
  return make_meter([sensors = nvml.value().get()] { return sensors->read(); });
}

// What one problem's turns need, alive as long as they last.
struct Peers {
  std::vector<Measured> measured;  // names and FLOP; turns come later
  std::vector<EnqueueCall> calls;

  void add(const std::string& name, double flops, const GraphVariant* variant) {
    if (variant == nullptr) return;
    measured.push_back({name, flops, {}, {}, variant->host_seconds()});
    calls.emplace_back([variant](int64_t call) { variant->launch(call); });
  }
};

SustainedResult run_problem(const Context& on_host, int index, const Problem& problem,
                            const SustainedProtocol& protocol, const std::function<void()>& tick) {
  SustainedResult out;
  out.facts.problem = problem;
  check_smaller(on_host, out.facts);
  if (!out.facts.unsupported.empty()) return out;
  const std::unique_ptr<Gpu> gpu = usage(Gpu::open(index));
  const std::unique_ptr<CuBlas> blas = CuBlas::open(*gpu);
  ContextOptions options = on_host.options();
  options.stream = gpu->stream();
  const Context context = usage(on_host.sharing(options));
  const OpOnGpu op(context, *gpu, out.facts);
  const GpuBaseline baseline(blas.get(), *gpu, out.facts);
  std::unique_ptr<GraphVariant> dense;
  if (blas != nullptr) {
    dense = std::make_unique<GraphVariant>(*gpu, std::vector{blas->dense(*gpu, DType::kBF16)});
  }
  Peers peers;
  peers.add("moire", out.facts.flops, op.variant());
  peers.add(baseline.name(), out.facts.flops, baseline.variant());
  peers.add("dense", CuBlas::kDenseFlops, dense.get());
  StreamOfGpu stream(*gpu);
  const auto nvml = Nvml::open(gpu->bus_id());
  const std::unique_ptr<Meter> meter = meter_of(nvml);
  const Stretch flush = stretch(
      stream, [](int64_t) {}, protocol, *meter);
  tick();
  auto turns = take_turns(stream, peers.calls, protocol, *meter, tick);
  require(context.check());
  for (size_t i = 0; i < turns.size(); ++i) {
    peers.measured[i].turns = std::move(turns[i]);
    peers.measured[i].flush_millijoules = flush.millijoules();
  }
  out.peers = std::move(peers.measured);
  return out;
}

}  // namespace

int run_sustained_bench(const BenchOptions& options) {
  const Context context = open_context(options.common);
  std::vector<Problem> problems;
  for (const Group& group : collect_groups(options.problems, {""})) {
    for (const Problem& p : group.problems) {
      require_memory_for(context, p);
      problems.push_back(p);
    }
  }
  const SustainedProtocol protocol;
  const int index = context.options().index;
  const std::unique_ptr<Gpu> gpu = usage(Gpu::open(index));
  const auto nvml = Nvml::open(gpu->bus_id());
  const auto num_stretches =
      static_cast<int64_t>(problems.size()) * (kVariants * protocol.turns + 1);
  const double setup = kSecondsPerProblem * static_cast<double>(problems.size());
  std::fputs(sustained_plan(protocol, num_stretches, setup).c_str(), stderr);
  if (!nvml.ok()) {
    const std::string why = nvml.status().message();
    std::fprintf(stderr, "no power, clock or energy: %s\n", why.c_str());
  }
  std::vector<SustainedResult> results;
  Progress progress("bench", num_stretches);
  int64_t done = 0;
  for (const Problem& problem : problems) {
    const std::string note = text(problem.name, " ", problem.op->name);
    progress.show(done, note);
    results.push_back(
        run_problem(context, index, problem, protocol, [&] { progress.show(++done, note); }));
    if (!options.common.json) continue;
    progress.clear();
    std::printf("%s\n", to_json(results.back(), protocol).dump().c_str());
    std::fflush(stdout);
  }
  if (!options.common.json) std::fputs(sustained_table(results).c_str(), stdout);
  return kExitOk;
}

}  // namespace moire::tool
