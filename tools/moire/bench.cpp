// moire bench: times ops of a problem beside their baselines; harness.h has the protocol.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>

#include "bench_groups.h"
#include "bench_result.h"
#include "bench_variants.h"
#include "case_runner.h"
#include "commands.h"
#include "gpu_bench.h"
#include "problem_fields.h"
#include "problem_source.h"
#include "terminal.h"
#include "text.h"

namespace moire::tool {
namespace {

constexpr double kNotableShare = 0.05;  // of the cores' time
constexpr double kNotableClock = 0.03;

// Before anything is measured: of the ops, and of their baselines, whose products are in FP32.
void require_memory_for(const Context& context, const Group& group) {
  for (const Problem& p : group.problems) require_memory_for(context, p);
  if (!group.problems[0].op->multiplies()) return;
  const std::vector<std::string> fp32 = {"dtype=fp32", "b=same", "fractional=no", "emulated=no"};
  require_memory_for(context, usage(with_settings(group.problems[0], fp32)));
}

struct Conditions {
  CpuTimes before, after;
};

void add_conditions(const Conditions& c, int cores, std::vector<Warning>& warnings) {
  const double capacity = (c.after.wall - c.before.wall) * cores;
  const double others = (c.after.busy - c.before.busy) - (c.after.own - c.before.own);
  const double stolen = c.after.stolen - c.before.stolen;
  if (others > kNotableShare * capacity) {
    warnings.push_back({Warning::Kind::kOtherLoad,
                        text("other programs took ", std::lround(100 * others / capacity),
                             " % of the cores' time")});
  }
  if (stolen > kNotableShare * capacity) {
    warnings.push_back({Warning::Kind::kStolenTime,
                        text("the hypervisor took ", std::lround(100 * stolen / capacity),
                             " % of the cores' time")});
  }
}

// What is timed of a group; ops[i] belongs to the i-th result that is supported.
struct Prepared {
  std::vector<BenchResult> results;
  std::vector<std::unique_ptr<OpVariant>> ops;
  // One for all, or a copy for each op: dtypes differ in bytes.
  std::vector<std::unique_ptr<BaselineVariant>> baselines;
};

// Checks every result first: a wrong one has no time worth knowing.
Prepared prepare(const Context& context, const Group& group, Team& team) {
  Prepared out;
  for (const Problem& problem : group.problems) {
    BenchResult r;
    r.problem = problem;
    const Verdict verdict = judge(context, smaller(problem));
    if (verdict.kind == Verdict::Kind::kFailed) {
      throw std::runtime_error(
          text("bench: the result is wrong, so its time means nothing; moire check \"",
               to_line(smaller(problem)), "\" says how"));
    }
    r.max_error = verdict.max_error();
    r.unsupported = verdict.reason;
    if (r.unsupported.empty()) {
      Result<std::unique_ptr<OpVariant>> op = OpVariant::create(context, problem);
      if (!op.ok()) r.unsupported = op.status().message();
      if (op.ok()) out.ops.push_back(std::move(op).value());
    }
    out.results.push_back(std::move(r));
  }
  for (const auto& op : out.ops) {
    const Problem& first = group.problems[0];
    if (!first.op->moves_bytes && !out.baselines.empty()) break;
    auto baseline = BaselineVariant::create(first, op->bytes(), team);
    if (baseline != nullptr) out.baselines.push_back(std::move(baseline));
  }
  return out;
}

void fill_in(BenchResult& r, const OpVariant& op, const Samples* own_fp32) {
  r.time = summarize(r.samples.seconds);
  r.implementation = op.implementation();
  r.flops = op.flops();
  r.bytes = op.bytes();
  r.num_sets = op.num_sets();
  r.set_bytes = op.set_bytes();
  if (own_fp32 != nullptr && r.problem.dtype != DType::kFP32) {
    r.vs_fp32 = paired_ratio(*own_fp32, r.samples);
  }
}

void compare(BenchResult& r, const BaselineVariant& baseline, const Samples& samples) {
  r.baseline = baseline.name();
  r.ratio = paired_ratio(samples, r.samples);
  r.baseline_samples = samples.seconds;
}

// One op in each dtype, its baselines among the variants.
std::vector<BenchResult> run_group(const Context& context, const Group& group,
                                   const MachineFacts& machine, const Protocol& protocol,
                                   Team& team, const std::function<void(double)>& tick) {
  Prepared prepared = prepare(context, group, team);
  std::vector<Variant> variants;
  for (const auto& op : prepared.ops) {
    variants.push_back({"", [&op](int64_t call) { op->run(call); }});
  }
  if (variants.empty()) return prepared.results;
  for (const auto& b : prepared.baselines) {
    variants.push_back({b->name(), [&b](int64_t call) { b->run(call); }});
  }
  Conditions conditions{read_cpu_times(), {}};
  const std::vector<Samples> samples = measure(variants, protocol, tick);
  conditions.after = read_cpu_times();
  size_t v = 0;
  const Samples* own_fp32 = nullptr;
  for (BenchResult& r : prepared.results) {
    if (!r.unsupported.empty()) continue;
    if (r.problem.dtype == DType::kFP32) own_fp32 = &samples[v];
    r.samples = samples[v++];
  }
  v = 0;
  for (BenchResult& r : prepared.results) {
    if (!r.unsupported.empty()) continue;
    const OpVariant& op = *prepared.ops[v];
    fill_in(r, op, own_fp32);
    if (!prepared.baselines.empty()) {
      const size_t b = std::min(v, prepared.baselines.size() - 1);
      compare(r, *prepared.baselines[b], samples[prepared.ops.size() + b]);
    }
    ++v;
    add_conditions(conditions, available_cores(), r.warnings);
    add_quality(r, machine);
  }
  return prepared.results;
}

MachineFacts measure_machine(const Context& context, Team& team) {
  MachineFacts m;
  const Result<std::string> info = device_info(context.device(), context.options().index);
  m.name = info.ok() ? nlohmann::json::parse(info.value()).value("name", "") : "";
  m.threads = team.num_threads();
  m.cache_bytes = last_level_cache_bytes();
  double loads[1] = {0};
  if (getloadavg(loads, 1) == 1) m.load_average = loads[0];
  m.peak_flops = measure_peak_flops(team);
  m.bandwidth = measure_copy_bandwidth(team);
  if (openblas_name().empty()) m.no_baseline = "this build has no OpenBLAS";
  return m;
}

void warn_if_clock_moved(const MachineFacts& machine, Team& team,
                         std::vector<BenchResult>& results) {
  const double moved = std::fabs(measure_peak_flops(team) / machine.peak_flops - 1);
  if (moved < kNotableClock) return;
  for (BenchResult& r : results) {
    if (!r.unsupported.empty()) continue;
    r.warnings.push_back(
        {Warning::Kind::kClockMoved, text("the multiply-add rate is ", std::lround(100 * moved),
                                          " % from where it was at the start")});
  }
}

// Before anything is measured for it.
void require_writable(const std::string& path) {
  if (!std::ofstream(path, std::ios::app)) {
    throw UsageError(text("--svg: found \"", path, "\", needed a file that can be written"));
  }
}

void write_svg(const std::string& path, const std::vector<BenchResult>& results,
               const MachineFacts& machine) {
  std::ofstream file(path);
  file << results_svg(results, machine);
  file.close();
  if (!file) throw UsageError(text("--svg: ", path, " could not be written to its end"));
}

}  // namespace

int run_bench(const BenchOptions& options) {
  CommonOptions common = options.common;
  if (common.device != "cpu") return run_gpu_bench(options);
  if (options.sustained) throw UsageError("bench: --sustained needs --device cuda, found cpu");
  if (common.threads == 0) common.threads = available_cores();
  const Context context = open_context(common);
  const std::vector<Group> groups = collect_groups(options.problems, {"fp32", ""});
  for (const Group& group : groups) require_memory_for(context, group);
  if (!options.svg.empty()) require_writable(options.svg);
  Protocol protocol;
  protocol.seconds = options.seconds;
  set_openblas_threads(common.threads);
  Team team(common.threads);
  const MachineFacts machine = measure_machine(context, team);
  std::vector<BenchResult> results;
  Progress progress("bench", static_cast<int64_t>(100 * groups.size()));
  for (size_t i = 0; i < groups.size(); ++i) {
    const Problem& first = groups[i].problems[0];
    const std::string note = text(first.name, " ", first.op->name);
    const auto tick = [&](double done) {
      progress.show(static_cast<int64_t>(100 * (static_cast<double>(i) + done)), note);
    };
    tick(0);
    std::vector<BenchResult> done = run_group(context, groups[i], machine, protocol, team, tick);
    warn_if_clock_moved(machine, team, done);
    progress.clear();
    for (BenchResult& r : done) {
      if (options.common.json) {
        std::printf("%s\n", to_json(r, machine, protocol).dump().c_str());
        std::fflush(stdout);
      }
      results.push_back(std::move(r));
    }
  }
  if (!options.common.json) {
    std::printf("%s", results_text(results, machine, protocol, options.advice).c_str());
  }
  if (!options.svg.empty()) write_svg(options.svg, results, machine);
  return kExitOk;
}

}  // namespace moire::tool
