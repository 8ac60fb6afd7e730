#include "gpu_bench.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <map>
#include <stdexcept>

#include "bench_groups.h"
#include "bench_result.h"
#include "bench_variants.h"
#include "case_runner.h"
#include "gpu_blas.h"
#include "terminal.h"
#include "text.h"

namespace moire::tool {
namespace {

constexpr int64_t kCachesSpanned = 3;
constexpr int64_t kMostSets = 256;
constexpr int64_t kMemoryShare = 3;  // of what is free
constexpr double kNotableClock = 0.03;

void require(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.message());
}

int64_t rotating_sets(const Gpu& gpu, int64_t set_bytes) {
  const int64_t bytes = std::max<int64_t>(1, set_bytes);
  const int64_t possible =
      std::clamp<int64_t>(gpu.free_bytes() / kMemoryShare / bytes, 1, kMostSets);
  return std::clamp<int64_t>(kCachesSpanned * gpu.cache_bytes() / bytes + 1, 1, possible);
}

// Functions that enqueue one call each, on operands of their own; timed as captured graphs.
class GraphVariant {
 public:
  GraphVariant(const Gpu& gpu, std::vector<std::function<Status()>> sets)
      : gpu_(gpu), sets_(std::move(sets)) {
    for (const auto& set : sets_) alone_.push_back(capture(set));
  }

  double seconds(int64_t first, int64_t calls) {
    if (calls == 1) return gpu_.seconds(*graph_of(first + num_sets() - 1), *graph_of(first));
    const Gpu::Graph& graph = graph_of_many(calls);
    return gpu_.seconds(graph, graph);
  }
  int64_t num_sets() const { return static_cast<int64_t>(sets_.size()); }

 private:
  std::unique_ptr<Gpu::Graph> capture(const std::function<Status()>& enqueue) const {
    auto graph = gpu_.capture(enqueue);
    require(graph.status());
    return std::move(graph).value();
  }
  const std::unique_ptr<Gpu::Graph>& graph_of(int64_t call) const {
    return alone_[static_cast<size_t>(call % num_sets())];
  }
  const Gpu::Graph& graph_of_many(int64_t calls) {
    std::unique_ptr<Gpu::Graph>& graph = many_[calls];
    if (graph == nullptr) {
      graph = capture([&]() -> Status {
        for (int64_t i = 0; i < calls; ++i) {
          Status status = sets_[static_cast<size_t>(i % num_sets())]();
          if (!status.ok()) return status;
        }
        return {};
      });
    }
    return *graph;
  }

  const Gpu& gpu_;
  std::vector<std::function<Status()>> sets_;
  std::vector<std::unique_ptr<Gpu::Graph>> alone_;
  std::map<int64_t, std::unique_ptr<Gpu::Graph>> many_;
};

// One copy of an op's operands, on the device.
class DeviceSet {
 public:
  DeviceSet(const Context& context, const Problem& problem)
      : operands_(problem, Operands::Content::kNormal), what_(make_case(operands_)) {
    std::vector<Workspace> workspaces;
    for (const Call& call : what_.calls) {
      size_t bytes = 0;
      if (call.workspace != nullptr) require(call.workspace(context, &bytes));
      workspaces.push_back(operands_.workspace(bytes));
      call.stage(staged_, workspaces.back());
    }
    require(staged_.upload());
    for (size_t i = 0; i < what_.calls.size(); ++i) {
      calls_.push_back(what_.calls[i].on_device(staged_, workspaces[i]));
    }
    require(enqueue(context));
    require(context.check());
  }

  Status enqueue(const Context& context) const {
    for (const auto& call : calls_) {
      Status status = call(context);
      if (!status.ok()) return status;
    }
    return {};
  }
  // What a wrong row says; "" if what the first run left is right.
  std::string judge() {
    require(staged_.download());
    return judge_rows(operands_, what_);
  }
  int64_t bytes() const { return operands_.bytes(); }

 private:
  Operands operands_;
  Case what_;
  staging::StagedCall staged_;
  std::vector<std::function<Status(const Context&)>> calls_;
};

// The op of a result: what explain says of it, and its time.
struct OpOnGpu {
  std::vector<std::unique_ptr<DeviceSet>> sets;
  std::unique_ptr<GraphVariant> variant;
};

void explain(const Context& context, BenchResult& r) {
  Operands shapes(r.problem, Operands::Content::kNone);
  const Context explaining = context.explaining();
  for (const Call& call : make_case(shapes).calls) {
    size_t bytes = 0;
    if (call.workspace != nullptr) require(call.workspace(context, &bytes));
    require(call.run(explaining, shapes.workspace(bytes)));
    r.flops += call.flops;
  }
  for (const Step& step : explaining.explanation()) {
    r.bytes += static_cast<double>(step.bytes_read + step.bytes_written);
    r.implementation = step.implementation;
  }
  r.set_bytes = shapes.bytes();
}

OpOnGpu make_op(const Context& context, const Gpu& gpu, BenchResult& r) {
  explain(context, r);
  OpOnGpu op;
  r.num_sets = rotating_sets(gpu, r.set_bytes);
  std::vector<std::function<Status()>> calls;
  for (int64_t i = 0; i < r.num_sets; ++i) {
    op.sets.push_back(std::make_unique<DeviceSet>(context, r.problem));
    calls.emplace_back([&context, set = op.sets.back().get()] { return set->enqueue(context); });
  }
  const std::string wrong = op.sets[0]->judge();
  if (!wrong.empty()) {
    throw std::runtime_error(text("bench: the result of ", to_line(r.problem),
                                  " is wrong, so its time means nothing: ", wrong));
  }
  op.variant = std::make_unique<GraphVariant>(gpu, std::move(calls));
  return op;
}

// cuBLAS for products, a copy of as many bytes for what only moves them; neither for the others.
class Baseline {
 public:
  Baseline(const CuBlas* blas, Gpu& gpu, const BenchResult& r) {
    std::vector<std::function<Status()>> calls;
    if (is_product(r.problem.op)) {
      if (blas == nullptr || r.problem.quantization != Quantization::kNone) return;
      for (int64_t i = 0; i < r.num_sets; ++i) {
        products_.push_back(CuBlasBaseline::create(*blas, gpu, r.problem));
        if (products_.back() == nullptr) return;
        calls.emplace_back([set = products_.back().get()] { return set->enqueue(); });
      }
      name_ = text("cuBLAS, one call per group, ", dtype_name(r.problem.dtype));
    } else if (is_bandwidth(r.problem.op) && r.bytes >= 2) {
      const auto bytes = static_cast<int64_t>(r.bytes / 2);
      for (int64_t i = 0; i < rotating_sets(gpu, 2 * bytes); ++i) {
        void *from = gpu.take(bytes), *to = gpu.take(bytes);
        calls.emplace_back([&gpu, from, to, bytes] { return gpu.copy(to, from, bytes); });
      }
      name_ = "copy of as many bytes";
    }
    if (!calls.empty()) variant_ = std::make_unique<GraphVariant>(gpu, std::move(calls));
  }
  GraphVariant* variant() const { return variant_.get(); }
  const std::string& name() const { return name_; }

 private:
  std::string name_;
  std::vector<std::unique_ptr<CuBlasBaseline>> products_;
  std::unique_ptr<GraphVariant> variant_;
};

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
  const Verdict verdict = judge(on_host, smaller(problem));
  if (verdict.kind == Verdict::Kind::kFailed) {
    throw std::runtime_error(
        text("bench: the result is wrong, so its time means nothing; moire check --device cuda \"",
             to_line(smaller(problem)), "\" says how"));
  }
  r.max_error = verdict.max_error();
  r.unsupported = verdict.reason;
  if (!r.unsupported.empty()) return r;
  const std::unique_ptr<Gpu> gpu = usage(Gpu::open(index));
  const std::unique_ptr<CuBlas> blas = CuBlas::open(*gpu);
  ContextOptions options = on_host.options();
  options.stream = gpu->stream();
  const Context context = usage(on_host.sharing(options));
  const OpOnGpu op = make_op(context, *gpu, r);
  const Baseline baseline(blas.get(), *gpu, r);
  std::vector<Variant> variants;
  for (GraphVariant* v : {op.variant.get(), baseline.variant()}) {
    if (v == nullptr) continue;
    variants.push_back(
        {"", nullptr, [v](int64_t first, int64_t calls) { return v->seconds(first, calls); }});
  }
  r.before = read_gpu_conditions(index);
  std::vector<Samples> samples = measure(variants, protocol, tick);
  r.after = read_gpu_conditions(index);
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

MachineFacts measure_machine(int index) {
  const std::unique_ptr<Gpu> gpu = usage(Gpu::open(index));
  const std::unique_ptr<CuBlas> blas = CuBlas::open(*gpu);
  MachineFacts m;
  m.is_gpu = true;
  m.name = nlohmann::json::parse(usage(device_info(Device::kCuda, index))).value("name", "");
  m.cache_bytes = gpu->cache_bytes();
  m.bandwidth = gpu->copy_bandwidth();
  if (blas == nullptr) {
    m.no_baseline = "libcublas could not be loaded";
  } else {
    m.peak_flops = blas->dense_rate(*gpu, DType::kBF16);
  }
  return m;
}

Protocol gpu_protocol(const BenchOptions& options) {
  Protocol protocol;
  protocol.seconds = options.seconds;
  protocol.pause_seconds = 0;  // nobody waits
  return protocol;
}

}  // namespace

int run_gpu_bench(const BenchOptions& options) {
  const Context context = open_context(options.common);
  const std::vector<Group> groups = collect_groups(options.problems, {""});
  for (const Group& group : groups) {
    for (const Problem& p : group.problems) require_memory_for(context, p);
  }
  const Protocol protocol = gpu_protocol(options);
  const int index = context.options().index;
  const MachineFacts machine = measure_machine(index);
  std::vector<BenchResult> results;
  Progress progress("bench", static_cast<int64_t>(groups.size()));
  for (size_t i = 0; i < groups.size(); ++i) {
    for (const Problem& problem : groups[i].problems) {
      const std::string note = text(problem.name, " ", info_of(problem.op).name);
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
    std::printf("%s\n%s\n%s", protocol_text(protocol, machine).c_str(),
                results_table(results, machine).c_str(), warnings_text(results).c_str());
  }
  if (!options.svg.empty()) {
    std::ofstream file(options.svg);
    file << results_svg(results, machine);
    if (!file) throw UsageError(text("--svg: ", options.svg, " could not be written"));
  }
  return kExitOk;
}

}  // namespace moire::tool
