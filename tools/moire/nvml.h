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
  static Result<std::unique_ptr<Nvml>> open(const std::string& bus_id,
                                            const char* library = "libnvidia-ml.so.1");
  ~Nvml();
  PowerReading read() const;
  GpuConditions conditions() const;

 private:
  struct Entries;
  explicit Nvml(std::unique_ptr<Entries> entries);
  std::unique_ptr<Entries> entries_;
};

}  // namespace moire::tool
