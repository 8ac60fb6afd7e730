// The protocol of steady state: a function alone, call behind call, for as long as a GPU takes to
// come to its power limit and then for as long as is timed. docs/performance.md says why each part
// is as it is; scripts/sustained.py is the same, and tests/tools/sustained.json holds both to it.
// The main path is take_turns, which calls stretch.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "power.h"
#include "statistics.h"

namespace moire::tool {

struct SustainedProtocol {
  double warm_seconds = 0.7;
  double timed_seconds = 1.0;
  int turns = 2;
  double chunk_seconds = 0.05;  // of calls that are enqueued at once; the host is two ahead

  double stretch_seconds() const { return warm_seconds + timed_seconds + 2 * chunk_seconds; }
};

// A GPU whose work is enqueued in host time and runs in its own; tests give a simulated one.
class TimedGpu {
 public:
  using Mark = std::shared_ptr<void>;  // a point of the GPU's work
  virtual ~TimedGpu() = default;
  virtual double now() = 0;  // of the host's clock
  virtual void flush() = 0;  // enqueues what leaves nothing of a call in the L2 cache
  virtual Mark mark() = 0;
  virtual void wait(const Mark& mark) = 0;
  virtual double seconds(const Mark& begin, const Mark& end) = 0;
};

// Enqueues a call; the number counts up and picks the operands.
using EnqueueCall = std::function<void(int64_t)>;

struct Stretch {
  std::vector<double> call_seconds;  // of the function alone, one per timed call
  double window_seconds = 0;         // GPU time of those calls, their flushes and the gaps
  Power power;

  // Of a call, with its flush.
  std::optional<double> millijoules() const;
};

// The GPU never waits for the host between its chunks.
Stretch stretch(TimedGpu& gpu, const EnqueueCall& call, const SustainedProtocol& protocol,
                Meter& meter);

// The stretches of each call, one per turn; every other turn goes backwards.
std::vector<std::vector<Stretch>> take_turns(TimedGpu& gpu, const std::vector<EnqueueCall>& calls,
                                             const SustainedProtocol& protocol, Meter& meter,
                                             const std::function<void()>& tick);

// What the turns of one function say.
struct Measured {
  std::string name;
  double flops = 0;  // of a call
  std::vector<Stretch> turns;
  std::optional<double> flush_millijoules;  // of an iteration in which nothing is called
  double host_seconds = 0;                  // of enqueueing a call

  Summary seconds() const;  // of all calls
  std::vector<double> turn_seconds() const;
  // Of a call, less the flush's; empty where power is not known.
  std::vector<double> turn_millijoules() const;
  std::optional<double> millijoules() const;
  std::optional<double> watts() const;
  std::optional<double> sm_mhz() const;
  double flops_rate() const;
};

// Their time over ours, and our FLOP/s over theirs, turn by turn.
Summary time_ratio(const Measured& ours, const Measured& theirs);
Summary rate_ratio(const Measured& ours, const Measured& theirs);

}  // namespace moire::tool
