#include "bench_result.h"

#include <algorithm>
#include <cmath>
#include <tuple>

#include "baseline.h"
#include "problem_fields.h"
#include "terminal.h"
#include "text.h"

namespace moire::tool {
namespace {

std::string ratio_text(const std::optional<Summary>& ratio, bool is_under_load) {
  if (!ratio.has_value()) return "-";
  const Colour colour = ratio->p10 > 1   ? Colour::kGreen
                        : ratio->p90 < 1 ? Colour::kRed
                                         : Colour::kNone;
  // Where one of the two was held up, digits behind the point would say nothing.
  const char* const format = ratio->median < 100 ? "%.2f%s [%.2f %.2f]" : "%.0f%s [%.0f %.0f]";
  return paint(colour,
               printed(format, ratio->median, is_under_load ? "*" : "", ratio->p10, ratio->p90));
}

Json to_json(const GpuConditions& c) {
  return {{"sm_mhz", c.sm_clock},
          {"memory_mhz", c.memory_clock},
          {"watts", c.power},
          {"celsius", c.temperature}};
}

Json to_json(const std::optional<Summary>& s) {
  if (!s.has_value()) return nullptr;
  return {{"median", s->median}, {"p10", s->p10}, {"p90", s->p90}};
}

// What the machine did in this run, and what ops are compared with.
std::string machine_text(const MachineFacts& m) {
  const std::string copy = text("copy ", human_number(m.bandwidth / 1e9), " GB/s read and written");
  if (m.is_gpu) {
    const std::string peak = m.peak_flops > 0 ? text(human_number(m.peak_flops / 1e12),
                                                     " TFLOP/s of an 8192^3 product by cuBLAS, ")
                                              : "";
    return text(
        "SHORT MODE: the GPU does not come to its power limit, so clocks and ratios are not those "
        "of steady state; --sustained measures there\nmachine: ",
        m.name, "; measured in this run: ", peak, copy, "; L2 cache ", human_bytes(m.cache_bytes));
  }
  return text(
      "machine: ", m.name, ", ", m.threads,
      " threads; measured in this run: ", human_number(m.peak_flops / 1e9),
      " GFLOP/s of FP32 multiply-adds, ", copy, "; last-level cache ", human_bytes(m.cache_bytes),
      "\nbaseline: ", m.no_baseline.empty() ? openblas_name() + ", sgemm per group," : "none",
      " for products, a copy of as many bytes for the others");
}

std::string protocol_text(const Protocol& p, const MachineFacts& m) {
  const std::string clock =
      m.is_gpu
          ? "; GPU time by events around captured graphs, behind one launch that is not timed; "
          : ", then ";
  const std::string apart = m.is_gpu ? "" : text(", ", human_seconds(p.pause_seconds), " apart");
  const std::string several =
      m.is_gpu
          ? text("; calls under ", human_seconds(p.smallest_sample_seconds),
                 " several to a graph; normal inputs; operand sets rotate over 3 x the L2 cache")
          : "; normal inputs; operand sets rotate over 3 x the last-level cache where memory "
            "allows";
  const char* const of_a_cpu =
      "\nroof: the larger of FLOP / multiply-add rate and bytes / copy rate, over the time; the "
      "same for every dtype, because products are FP32 multiply-adds\n"
      "x baseline: the baseline's time over the op's, both timed in turn; of ops that move bytes "
      "the baseline is a copy of as many, its median, which is slower than the roof's copy, the "
      "fastest of a large one: such an op may be at 38 % of the roof and at 0.6 of the copy";
  return text(
      "protocol: each op is checked against the reference, whole on a smaller copy and by rows on "
      "the timed operands",
      clock, human_seconds(p.warmup_seconds),
      " of warm-up per variant, then variants in turn, turns of ", human_seconds(p.turn_seconds),
      apart, ", until each has run ", human_seconds(p.seconds), " and ", p.min_rounds, " rounds",
      several, "; median [10th 90th percentile]; ratios are per round; padding is not counted",
      m.is_gpu ? "" : of_a_cpu);
}

Table results_table(const std::vector<BenchResult>& results, const MachineFacts& machine) {
  Table table({"problem", "op", "dtype", ">time", ">p10", ">p90", ">GFLOP/s", ">GB/s", ">roof",
               ">x baseline", ">x own fp32", "warnings"});
  table.may_leave_out({"warnings", "p10", "p90", "x own fp32", "GB/s", "roof"});
  for (const BenchResult& r : results) {
    const std::string op(r.problem.op->name);
    const std::string dtype = dtype_words(r.problem);
    if (!r.unsupported.empty()) {
      table.add({r.problem.name, op, dtype, paint(Colour::kYellow, "none")});
      continue;
    }
    const auto codes = words_of(r.warnings, [](const Warning& w) { return w.kind->code; });
    table.add({r.problem.name, op, dtype, human_seconds(r.time.median), human_seconds(r.time.p10),
               human_seconds(r.time.p90), r.flops > 0 ? human_number(r.flops_rate() / 1e9) : "-",
               human_number(r.bytes_rate() / 1e9),
               text(std::lround(100 * r.roof_share(machine)), " %"),
               ratio_text(r.ratio, r.is_under_load()), ratio_text(r.vs_fp32, r.is_under_load()),
               paint(Colour::kYellow, join(codes, ", "))});
  }
  return table;
}

// One line per kind: how often it was seen; with advice also where first, and the remedy.
std::string warnings_text(const std::vector<BenchResult>& results, bool advice) {
  std::vector<std::tuple<const WarningKind*, std::string, int>> kinds;
  for (const BenchResult& r : results) {
    for (const Warning& w : r.warnings) {
      auto found = std::find_if(kinds.begin(), kinds.end(),
                                [&](const auto& kind) { return std::get<0>(kind) == w.kind; });
      if (found == kinds.end()) {
        const std::string first = text(r.problem.op->name, " ", dtype_words(r.problem), ": ");
        found = kinds.insert(found, {w.kind, first + w.seen, 0});
      }
      ++std::get<2>(*found);
    }
  }
  std::string lines;
  std::vector<std::string> counts;
  for (const auto& [kind, first, times] : kinds) {
    const std::string code = paint(Colour::kYellow, kind->code);
    counts.push_back(text(code, " ", times, " x"));
    lines += wrap(text(code, " (", times, " x; ", first, "): ", kind->remedy), 4) + "\n";
  }
  if (counts.empty() || advice) return lines;
  return wrap(text("warnings: ", join(counts, ", "), "; --advice says what to do"), 4) + "\n";
}

}  // namespace

void add_quality(BenchResult& r, const MachineFacts& machine) {
  constexpr double kNotableSpread = 0.03;  // (p90 - p10) / median
  constexpr double kNotableOutliers = 0.05;
  constexpr size_t kFewRoundsAtMost = 5;
  const Summary& t = r.time;
  const auto warn = [&](bool is_notable, const WarningKind& kind, const auto&... seen) {
    if (is_notable) r.warnings.push_back({&kind, text(seen...)});
  };
  const double spread = (t.p90 - t.p10) / t.median, outliers = outlier_share(r.samples.seconds);
  const size_t rounds = r.samples.round_medians.size();
  const int64_t rotated = r.num_sets * r.set_bytes;
  warn(spread > kNotableSpread, kSpread, "10th to 90th percentile span ", std::lround(100 * spread),
       " % of the median");
  warn(outliers > kNotableOutliers, kOutliers, std::lround(100 * outliers),
       " % of the samples are outliers");
  warn(rounds <= kFewRoundsAtMost, kFewRounds, rounds, " rounds");
  warn(rotated < 3 * machine.cache_bytes, kInCache, "operands rotate over ", human_bytes(rotated),
       " only");
  // Where there is a BLAS, products without a row have no baseline, and nothing to be told of it.
  warn(r.problem.op->multiplies() && !machine.no_baseline.empty(),
       machine.is_gpu ? kNoCuBlas : kNoOpenBlas, machine.no_baseline);
  warn(r.ratio.has_value() && r.ratio->p10 < 1 && r.ratio->p90 > 1, kUndecided,
       "the ratio's percentiles lie around 1");
}

bool BenchResult::is_under_load() const {
  return std::ranges::any_of(warnings, [](const Warning& w) { return w.kind->is_load; });
}

bool is_any_under_load(const std::vector<BenchResult>& results) {
  return std::ranges::any_of(results, &BenchResult::is_under_load);
}

double BenchResult::roof_share(const MachineFacts& machine) const {
  if (time.median <= 0) return 0;
  // A peak that could not be measured limits nothing.
  const double compute = machine.peak_flops > 0 ? flops / machine.peak_flops : 0;
  return std::max(compute, bytes / machine.bandwidth) / time.median;
}

std::string results_text(const std::vector<BenchResult>& results, const MachineFacts& machine,
                         const Protocol& protocol, bool advice) {
  std::string out;
  const auto say = [&](const std::string& lines, size_t indent = 4) {
    for (const std::string& line : split(lines, '\n')) out += wrap(line, indent) + "\n";
  };
  say(machine_text(machine));
  if (advice) say(protocol_text(protocol, machine));
  out += warnings_text(results, advice);
  if (is_any_under_load(results)) {
    say("* measured while something else took part of the machine", 2);
  }
  for (const BenchResult& r : results) {
    if (!r.unsupported.empty()) say(text(r.problem.op->name, ": ", r.unsupported));
  }
  const Table table = results_table(results, machine);
  if (const auto left_out = table.left_out(); !left_out.empty()) {
    say(text("left out to fit: ", join(left_out, ", "), " (--json has them)"));
  }
  return out + "\n" + table.to_string();
}

Json to_json(const BenchResult& r) {
  Json out = {{"problem", to_line(r.problem)},
              {"name", r.problem.name},
              {"op", r.problem.op->name},
              {"dtype", dtype_words(r.problem)},
              {"implementation", r.implementation}};
  if (!r.unsupported.empty()) out["unsupported"] = r.unsupported;
  return out;
}

Json to_json(const BenchResult& r, const MachineFacts& m, const Protocol& p) {
  Json out = to_json(r);
  if (!r.unsupported.empty()) return out;
  Json warnings = Json::array();
  for (const Warning& w : r.warnings) {
    warnings.push_back({{"code", w.kind->code}, {"seen", w.seen}, {"remedy", w.kind->remedy}});
  }
  out["seconds"] = to_json(std::optional(r.time));
  out["seconds"]["least"] = r.time.least;
  out["gflops_per_second"] = r.flops_rate() / 1e9;
  out["gbytes_per_second"] = r.bytes_rate() / 1e9;
  out["roof_share"] = r.roof_share(m);
  out["baseline"] = r.baseline.empty() ? Json(nullptr) : Json(r.baseline);
  out["ratio"] = to_json(r.ratio);
  // On a busy machine the fastest samples disturb each other least.
  const double least = summarize(r.baseline_samples).least;
  out["ratio_of_least"] = least > 0 ? Json(least / r.time.least) : Json(nullptr);
  out["ratio_own_fp32"] = to_json(r.vs_fp32);
  out["check_max_error"] = r.max_error;
  out["flops"] = r.flops;
  out["bytes"] = r.bytes;
  out["operand_sets"] = r.num_sets;
  out["operand_set_bytes"] = r.set_bytes;
  out["warnings"] = warnings;
  if (m.is_gpu) out["gpu"] = {{"before", to_json(r.before)}, {"after", to_json(r.after)}};
  out["machine"] = {{"name", m.name},
                    {"threads", m.threads},
                    {"peak_flops", m.peak_flops},
                    {"copy_bytes_per_second", m.bandwidth},
                    {"last_level_cache_bytes", m.cache_bytes},
                    {"load_average", m.load_average}};
  out["protocol"] = {{"is_short", m.is_gpu},
                     {"warmup_seconds", p.warmup_seconds},
                     {"seconds", p.seconds},
                     {"turn_seconds", p.turn_seconds},
                     {"pause_seconds", p.pause_seconds},
                     {"min_rounds", p.min_rounds},
                     {"calls_per_sample", r.samples.calls_per_sample},
                     {"rounds", r.samples.round_medians.size()}};
  out["samples_seconds"] = r.samples.seconds;
  out["baseline_samples_seconds"] = r.baseline_samples;
  return out;
}

}  // namespace moire::tool
