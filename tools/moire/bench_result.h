// What a benchmark found out: one result per op and dtype, and the machine it ran on. Reported as a
// table, as JSON lines, and as a chart.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "harness.h"
#include "power.h"
#include "problem.h"

namespace moire::tool {

// What can be wrong with a measurement, and what to do about it.
struct WarningKind {
  const char* code;
  const char* remedy;
  bool is_load = false;  // something else took part of the machine
};
inline constexpr WarningKind kOtherLoad = {"other_load",
                                           "stop other programs, or compare ratios only", true};
inline constexpr WarningKind kStolenTime = {
    "stolen_time", "use a machine of your own, or compare ratios only", true};
inline constexpr WarningKind kClockMoved = {
    "clock_moved", "fix the clock (cpupower frequency-set), or compare ratios only"};
inline constexpr WarningKind kOutliers = {"outliers", "run longer: --time 5"};
inline constexpr WarningKind kSpread = {"spread", "run longer (--time 5) on an idle machine"};
inline constexpr WarningKind kFewRounds = {"few_rounds", "run longer: --time 5"};
inline constexpr WarningKind kInCache = {"in_cache",
                                         "choose a larger problem, or free memory for more sets"};
inline constexpr WarningKind kNoOpenBlas = {"no_baseline",
                                            "install libopenblas-dev, run cmake again and build"};
inline constexpr WarningKind kNoCuBlas = {"no_baseline",
                                          "put the folder of libcublas.so on LD_LIBRARY_PATH"};
inline constexpr WarningKind kUndecided = {"undecided", "run longer: --time 5"};

struct Warning {
  const WarningKind* kind;
  std::string seen;  // with numbers
};

struct MachineFacts {
  std::string name;
  int threads = 0;
  double peak_flops = 0;  // FP32 multiply-adds of all threads, measured in this run
  double bandwidth = 0;   // copy, bytes read and written per second, measured in this run
  int64_t cache_bytes = 0;
  double load_average = 0;  // before the run
  bool is_gpu = false;      // then: dense product of cuBLAS, 0 without it; L2 cache
  std::string no_baseline;  // why products have none
};

struct BenchResult {
  Problem problem;
  std::string implementation;
  std::string unsupported;  // not empty: nothing was timed
  Samples samples;
  Summary time;
  double flops = 0;
  double bytes = 0;
  int64_t num_sets = 1;
  int64_t set_bytes = 0;
  std::string baseline;            // what `ratio` compares with; empty = none
  std::optional<Summary> ratio;    // baseline's time / ours, above 1 is faster
  std::optional<Summary> vs_fp32;  // our FP32 time / ours
  std::vector<double> baseline_samples;
  double max_error = 0;  // of the check before, 1 = the bound
  std::vector<Warning> warnings;
  GpuConditions before, after;  // of a GPU

  double flops_rate() const { return time.median > 0 ? flops / time.median : 0; }
  double bytes_rate() const { return time.median > 0 ? bytes / time.median : 0; }
  bool is_under_load() const;  // while it was measured something else took part of the machine
  // Time at the roof over the measured time.
  double roof_share(const MachineFacts& machine) const;
};

bool is_any_under_load(const std::vector<BenchResult>& results);

// Warnings about the samples themselves.
void add_quality(BenchResult& result, const MachineFacts& machine);

// Everything that is said of the results, the table last; `advice`: the protocol and the remedies.
std::string results_text(const std::vector<BenchResult>& results, const MachineFacts& machine,
                         const Protocol& protocol, bool advice);
// The problem, and why it is unsupported if it is: what every benchmark's line begins with.
nlohmann::ordered_json to_json(const BenchResult& result);
nlohmann::ordered_json to_json(const BenchResult& result, const MachineFacts& machine,
                               const Protocol& protocol);
// Bars of the rate that each op reached, with its baseline and the roof; self-contained SVG.
std::string results_svg(const std::vector<BenchResult>& results, const MachineFacts& machine);

}  // namespace moire::tool
