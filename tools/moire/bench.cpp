// moire bench: times ops of a problem beside their baselines.
#include "bench.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <stdexcept>

#include "case_runner.h"
#include "machine.h"
#include "problem_source.h"
#include "terminal.h"
#include "text.h"

namespace moire::tool {
namespace {

constexpr int64_t kCachesSpanned = 3;
constexpr int64_t kMostSets = 512;

// One op in each dtype, its baselines among the variants. Each is checked first: a wrong result has
// no time worth knowing.
std::vector<BenchResult> run_group(Bench& bench, const Group& group, const Protocol& protocol,
                                   const std::function<void(double)>& tick) {
  std::vector<BenchResult> results(group.size());
  std::vector<BenchResult*> timed;
  // Of those, then their baselines: one for all, or each its own, where dtypes differ in bytes.
  std::vector<Variant> variants;
  for (size_t i = 0; i < group.size(); ++i) {
    results[i].problem = group[i];
    auto op = bench.op(results[i]);
    if (!op.has_value()) continue;
    timed.push_back(&results[i]);
    variants.push_back(std::move(*op));
  }
  if (timed.empty()) return results;
  for (const BenchResult* r : timed) {
    const bool has_one = variants.size() > timed.size() && !r->problem.op->moves_bytes();
    if (has_one) break;
    if (auto baseline = bench.baseline(*r)) variants.push_back(std::move(*baseline));
  }
  bench.begin();
  const std::vector<Samples> samples = measure(variants, protocol, tick);
  bench.end(timed);
  const Samples* own_fp32 = nullptr;
  for (size_t v = 0; v < timed.size(); ++v) {
    BenchResult& r = *timed[v];
    if (variants.size() > timed.size()) {
      const size_t b = std::min(timed.size() + v, variants.size() - 1);
      r.baseline = variants[b].name;
      r.ratio = ratio_span(samples[b].round_medians, samples[v].round_medians);
      r.baseline_samples = samples[b].seconds;
    }
    r.samples = samples[v];
    r.time = summarize(r.samples.seconds);
    if (r.problem.dtype == DType::kFP32) own_fp32 = &samples[v];
    add_quality(r, bench.machine());
  }
  for (BenchResult* r : timed) {
    if (r->problem.dtype == DType::kFP32 || own_fp32 == nullptr) continue;
    r->vs_fp32 = ratio_span(own_fp32->round_medians, r->samples.round_medians);
  }
  return results;
}

// Without what is there for FP8.
const Settings kInFp32 = {"dtype=fp32",        "b=same",      "x=same",       "x_columnwise=no",
                          "act_columnwise=no", "prepared=no", "element=e4m3", "fractional=no",
                          "emulated=no"};

// Before anything is measured: of the ops, and of the CPU's baselines, whose products are in FP32.
void require_memory_for(const Context& context, const Group& group) {
  for (const Problem& p : group) require_memory_for(context, p);
  if (!group[0].op->multiplies() || context.device() != Device::kCpu) return;
  require_memory_for(context, with_settings(group[0], kInFp32));
}

void write_svg(const std::string& path, const std::vector<BenchResult>& results,
               const MachineFacts& machine) {
  std::ofstream file(path);
  file << results_svg(results, machine);
  file.close();
  if (!file) throw UsageError("--svg: ", path, " could not be written to its end");
}

// A layer is timed as its products, its forward and all of it; in its own dtype, or BF16 where that
// is FP32; on a CPU in FP32 as well.
Unasked unasked_of(const Problem& p, bool on_cpu) {
  Unasked out;
  if (p.is("mlp")) {
    out.ops = {{"op=fc1"}, {"op=fc1_dgrad"},   {"op=fc1_wgrad"},
               {"op=fc2"}, {"op=mlp_forward"}, {"op=mlp"}};
  }
  out.dtypes.clear();
  if (on_cpu) out.dtypes.push_back(p.is_quantized() ? kInFp32 : Settings{"dtype=fp32"});
  out.dtypes.push_back(p.dtype == DType::kFP32 ? Settings{"dtype=bf16"} : Settings());
  return out;
}

// On a CPU the dtypes of an op are measured together, on a GPU each alone, its memory given back.
std::vector<Group> groups_of(const Options& options, bool on_cpu) {
  const std::vector<Problem> problems =
      collect_problems(options, [&](const Problem& p) { return unasked_of(p, on_cpu); });
  const size_t num_dtypes =
      options.dtypes.empty() ? unasked_of({}, on_cpu).dtypes.size() : options.dtypes.size();
  std::vector<Group> groups;
  for (size_t i = 0; i < problems.size(); ++i) {
    if (!on_cpu || i % num_dtypes == 0) groups.emplace_back();
    groups.back().push_back(problems[i]);
  }
  return groups;
}

// The same op and options, small enough that the scalar reference takes no time worth mention.
Problem smaller(const Problem& p) {
  constexpr int64_t kWidth = 192, kRows = 48, kGroups = 4;
  Problem small = p;
  small.groups = std::min(p.groups, kGroups);
  small.hidden = std::min(p.hidden, kWidth);
  small.out_hidden = std::min(p.out_hidden, kWidth);
  if (p.ffn > kWidth && !p.is("convert_glu")) {  // which may move whole tiles
    small.ffn = kWidth;
    if (p.layout.block > 1) small.layout.block = std::gcd(p.layout.block, kWidth);
  }
  small.rows = small.groups == 0 ? 0 : std::min(p.rows, kRows);
  small.topk = std::min(p.topk, std::max<int64_t>(1, small.groups));
  small.dropped = (small.topk - small.rows % small.topk) % small.topk;
  small.splits = Splits();
  small.splits.kind = Splits::Kind::kRagged;
  return small;
}

// A file of this name, which is not left behind where there was none; nothing of "".
void require_writable(const std::string& svg) {
  if (svg.empty()) return;
  const bool is_new = !std::filesystem::exists(svg);
  if (!std::ofstream(svg, std::ios::app)) {
    throw UsageError("--svg: found \"", svg, "\", needed a file that can be written");
  }
  if (is_new) std::filesystem::remove(svg);
}

}  // namespace

int64_t rotating_sets(int64_t cache_bytes, int64_t memory_bytes, int64_t set_bytes) {
  const int64_t bytes = std::max<int64_t>(1, set_bytes);
  const int64_t possible = std::clamp<int64_t>(memory_bytes / bytes, 1, kMostSets);
  return std::clamp<int64_t>(kCachesSpanned * cache_bytes / bytes + 1, 1, possible);
}

std::vector<size_t> prepare(const Context& context, BenchResult& r) {
  const Verdict verdict = judge(context, smaller(r.problem));
  if (verdict.kind == Verdict::Kind::kFailed) {
    const char* const device = context.device() == Device::kCpu ? "" : "--device cuda ";
    throw std::runtime_error(
        text("bench: the result is wrong, so its time means nothing; moire check ", device, "\"",
             to_line(smaller(r.problem)), "\" says how"));
  }
  r.max_error = verdict.max_error;
  r.unsupported = verdict.reason;
  std::vector<size_t> workspaces;
  if (!r.unsupported.empty()) return workspaces;
  Case what(r.problem, Operands::Content::kNone);
  r.set_bytes = what.operands.bytes();
  for (const Call& call : what.calls) {
    const Plan planned = plan(context, call, what.operands);
    if (!planned.status.ok()) r.unsupported = planned.status.message();
    const bool may_stay = context.device() == Device::kCpu || call.stage != nullptr;
    if (!may_stay) r.unsupported = "ranks are timed on the CPU alone; moire check runs on both";
    workspaces.push_back(planned.workspace_bytes);
    for (const Step& step : planned.steps) {
      r.bytes += static_cast<double>(step.bytes_read + step.bytes_written);
      r.implementation = step.implementation;
    }
    r.flops += call.flops;
  }
  return workspaces;
}

int run_bench(const Options& options) {
  Options common = options;
  const bool on_cpu = common.device == "cpu";
  if (options.sustained && on_cpu) {
    throw UsageError("bench: --sustained needs --device cuda, found cpu");
  }
  if (on_cpu && common.threads == 0) common.threads = available_cores();
  if (on_cpu && common.threads > available_cores()) {
    throw UsageError("bench: found --threads ", common.threads, ", needed at most ",
                     available_cores(), ", the cores that it may use: rates are of whole ones");
  }
  const Context context = open_context(common);
  const std::vector<Group> groups = groups_of(options, on_cpu);
  for (const Group& group : groups) require_memory_for(context, group);
  if (options.sustained) return run_sustained_bench(context, groups, options);
  const std::string& svg = options.svg;
  require_writable(svg);
  Protocol protocol;
  protocol.seconds = options.seconds;
  if (!on_cpu) protocol.pause_seconds = 0;  // nobody waits
  const std::unique_ptr<Bench> bench = on_cpu ? make_cpu_bench(context) : make_gpu_bench(context);
  std::vector<BenchResult> results;
  Progress progress("bench", static_cast<int64_t>(100 * groups.size()));
  for (size_t i = 0; i < groups.size(); ++i) {
    const std::string note = text(groups[i][0].name, " ", groups[i][0].op->name);
    const auto tick = [&](double done) {
      progress.show(static_cast<int64_t>(100 * (static_cast<double>(i) + done)), note);
    };
    tick(0);
    for (BenchResult& r : run_group(*bench, groups[i], protocol, tick)) {
      progress.clear();
      if (options.json) print_json(to_json(r, bench->machine(), protocol));
      results.push_back(std::move(r));
    }
  }
  if (!options.json) {
    std::printf("%s", results_text(results, bench->machine(), protocol, options.advice).c_str());
  }
  if (!svg.empty()) write_svg(svg, results, bench->machine());
  const bool has_any = std::any_of(results.begin(), results.end(),
                                   [](const BenchResult& r) { return r.unsupported.empty(); });
  return has_any ? kExitOk : fail_for_nothing(options, "bench", "timed");
}

}  // namespace moire::tool
