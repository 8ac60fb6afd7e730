// The sensors of a GPU through NVML, which is opened when it is wanted and is no part of the build.
#pragma once

#include <moire/status.h>

#include <memory>
#include <string>

#include "power.h"

namespace moire::tool {

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

}  // namespace moire::tool
