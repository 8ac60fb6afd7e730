// What a GPU draws while a benchmark runs, through NVML, which is opened when it is wanted and is
// no part of the build; the same as scripts/power.py, and tests/tools/sustained.json holds both to
// it. mean_power is where energy starts: the slope of the GPU's total energy counter between the
// moments at which it was seen to move, because it moves a few tens of times a second only.
#pragma once

#include <moire/status.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace moire::tool {

struct PowerReading {
  double seconds = 0;                 // of the host's clock
  std::optional<double> millijoules;  // since the driver was loaded
  std::optional<double> watts;
  std::optional<double> sm_mhz;
};

// Zeros where there is no such sensor.
struct GpuConditions {
  double sm_clock = 0, memory_clock = 0;  // MHz
  double power = 0;                       // W
  double temperature = 0;                 // degrees Celsius
};

class Nvml {
 public:
  // `bus_id` as CUDA gives it; NVML counts devices that CUDA_VISIBLE_DEVICES hides. The status says
  // why there is none.
  static Result<Nvml> open(const std::string& bus_id, const char* library = "libnvidia-ml.so.1");
  PowerReading read() const;
  GpuConditions conditions() const;

 private:
  // Of nvml.h.
  using Device = void*;
  using TotalEnergy = int (*)(Device, unsigned long long*);
  using Number = int (*)(Device, unsigned*);
  using NumberOf = int (*)(Device, int, unsigned*);

  // What an entry says of the device; nothing where it is missing or fails.
  template <class Value = unsigned>
  std::optional<double> ask(auto entry, auto... which) const;
  std::optional<double> watts() const;

  std::shared_ptr<void> library_;
  Device device_ = nullptr;
  TotalEnergy total_energy_ = nullptr;
  Number power_usage_ = nullptr;
  NumberOf clock_ = nullptr, temperature_ = nullptr;
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
