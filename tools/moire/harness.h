// The benchmark harness: warm-up by time, then variants turn by turn, round by round, so that drift
// of the machine falls on all of them alike. Protocol values are printed with every result.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "statistics.h"

namespace moire::tool {

// Seconds of a steady clock.
double now();

struct Protocol {
  double warmup_seconds = 0.1;   // per variant
  double seconds = 1.0;          // of measuring, per variant
  double turn_seconds = 0.01;    // a variant runs at least this long before the next one's turn
  double pause_seconds = 0.005;  // between turns, so that the other's waiting threads fall asleep
  double smallest_sample_seconds = 1e-4;  // shorter calls are timed several at once
  int64_t min_rounds = 5;
};

// One thing to time. run(i) is one call; i counts up and picks the operands.
struct Variant {
  std::string name;
  std::function<void(int64_t)> run;
  // Null, or how long `calls` calls from `first` take by another clock than the host's.
  std::function<double(int64_t first, int64_t calls)> seconds = nullptr;
};

struct Samples {
  std::vector<double> seconds;        // one per timed batch, per call
  std::vector<double> round_medians;  // one per round
  int64_t calls_per_sample = 1;
};

// `tick` hears of every finished round: fraction done.
std::vector<Samples> measure(const std::vector<Variant>& variants, const Protocol& protocol,
                             const std::function<void(double)>& tick);

}  // namespace moire::tool
