// What a GPU draws while a benchmark runs; the same as scripts/power.py, and
// tests/tools/sustained.json holds both to it. mean_power is where energy starts: the slope of the
// GPU's total energy counter between the moments at which it was seen to move, because it moves a
// few tens of times a second only.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace moire::tool {

struct PowerReading {
  double seconds = 0;                 // of the host's clock
  std::optional<double> millijoules;  // since the driver was loaded
  std::optional<double> watts;
  std::optional<double> sm_mhz;
};

struct Power {
  std::optional<double> watts;
  std::optional<double> sm_mhz;
  const char* source = nullptr;  // of the watts: "energy counter" or "power samples"
};
// Over readings in the order of their time.
Power mean_power(const std::vector<PowerReading>& readings);

// Readings from start() to stop().
class Meter {
 public:
  virtual ~Meter() = default;
  virtual void start() = 0;
  virtual std::vector<PowerReading> stop() = 0;
};

// A meter that calls `read` every 5 ms, in a thread of its own; one without `read` reads nothing.
std::unique_ptr<Meter> make_meter(std::function<PowerReading()> read);

}  // namespace moire::tool
