// `moire bench --device cuda --sustained`: each op beside cuBLAS and a dense product, in steady
// state.
#include <cstdio>

#include "cases.h"
#include "gpu_bench.h"
#include "sustained_report.h"
#include "terminal.h"
#include "text.h"

namespace moire::tool {
namespace {

constexpr int kVariants = 3;              // the op, its baseline, the dense product
constexpr double kSecondsPerProblem = 8;  // to make operands, and to check

SustainedResult run_problem(GpuBench& bench, const Problem& problem,
                            const SustainedProtocol& protocol, Meter& meter,
                            const std::function<void()>& tick) {
  SustainedResult out;
  out.facts.problem = problem;
  const auto op = bench.op_graphs(out.facts);
  if (op == nullptr) return out;
  const auto baseline = bench.baseline_graphs(out.facts);
  const auto dense = bench.dense_graphs();
  std::vector<EnqueueCall> calls;
  const auto add = [&](double flops, const GraphVariant* variant) {
    if (variant == nullptr) return;
    out.peers.push_back({variant->name(), flops, {}, {}, variant->host_seconds()});
    calls.emplace_back([variant](int64_t call) { variant->launch(call); });
  };
  add(out.facts.flops, op.get());
  add(out.facts.flops, baseline.get());
  add(CuBlas::kDenseFlops, dense.get());
  Gpu& gpu = bench.gpu();
  const Stretch flush = stretch(
      gpu, [](int64_t) {}, protocol, meter);
  tick();
  auto turns = take_turns(gpu, calls, protocol, meter, tick);
  require(bench.context().check());
  for (size_t i = 0; i < turns.size(); ++i) {
    out.peers[i].turns = std::move(turns[i]);
    out.peers[i].flush_millijoules = flush.millijoules();
  }
  return out;
}

}  // namespace

int run_sustained_bench(const Context& context, const std::vector<Group>& groups, bool json) {
  const SustainedProtocol protocol;
  GpuBench bench(context, GpuBench::Facts::kNone);
  const auto nvml = Nvml::open(bench.gpu().bus_id());
  const auto num_stretches = static_cast<int64_t>(groups.size()) * (kVariants * protocol.turns + 1);
  const double setup = kSecondsPerProblem * static_cast<double>(groups.size());
  std::fputs(sustained_plan(protocol, num_stretches, setup).c_str(), stderr);
  std::function<PowerReading()> read;
  if (nvml.ok()) {
    read = [&] { return nvml.value().read(); };
  } else {
    const std::string why = nvml.status().message();
    std::fprintf(stderr, "no power, clock or energy: %s\n", why.c_str());
  }
  const std::unique_ptr<Meter> meter = make_meter(read);
  std::vector<SustainedResult> results;
  Progress progress("bench", num_stretches);
  int64_t done = 0;
  for (const Group& group : groups) {
    const Problem& problem = group.front();
    const std::string note = text(problem.name, " ", problem.op->name);
    progress.show(done, note);
    results.push_back(
        run_problem(bench, problem, protocol, *meter, [&] { progress.show(++done, note); }));
    if (!json) continue;
    progress.clear();
    print_json(to_json(results.back(), protocol));
  }
  if (!json) std::fputs(sustained_table(results).c_str(), stdout);
  return kExitOk;
}

}  // namespace moire::tool
