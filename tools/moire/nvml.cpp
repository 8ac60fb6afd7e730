#include "nvml.h"

#include <dlfcn.h>

#include "harness.h"
#include "text.h"

namespace moire::tool {
namespace {

constexpr int kSmClock = 1, kMemoryClock = 2, kGpuTemperature = 0;  // of nvml.h

template <class Entry>
void find(void* library, const char* name, Entry& entry) {
  entry = reinterpret_cast<Entry>(dlsym(library, name));
}

}  // namespace

Result<Nvml> Nvml::open(const std::string& bus_id, const char* library) {
  const auto none = [](const std::string& why) {
    return Status(Code::kUnsupported, text("bench: NVML: ", why));
  };
  void* const opened = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (opened == nullptr) return none(dlerror());
  Nvml nvml;
  nvml.library_ = {opened, dlclose};
  int (*init)() = nullptr;
  int (*handle)(const char* bus_id, Device*) = nullptr;
  find(opened, "nvmlInit_v2", init);
  find(opened, "nvmlDeviceGetHandleByPciBusId_v2", handle);
  find(opened, "nvmlDeviceGetTotalEnergyConsumption", nvml.total_energy_);
  find(opened, "nvmlDeviceGetPowerUsage", nvml.power_usage_);
  find(opened, "nvmlDeviceGetClockInfo", nvml.clock_);
  find(opened, "nvmlDeviceGetTemperature", nvml.temperature_);
  if (init == nullptr || handle == nullptr) return none(text(library, " lacks nvmlInit_v2"));
  int status = init();
  if (status != 0) return none(text("nvmlInit_v2 returned ", status));
  status = handle(bus_id.c_str(), &nvml.device_);
  if (status != 0) return none(text("there is no GPU ", bus_id, ", status ", status));
  return nvml;
}

template <class Value>
std::optional<double> Nvml::ask(auto entry, auto... which) const {
  Value value = 0;
  if (entry == nullptr || entry(device_, which..., &value) != 0) return std::nullopt;
  return static_cast<double>(value);
}

std::optional<double> Nvml::watts() const {
  const std::optional<double> milliwatts = ask(power_usage_);
  return milliwatts.has_value() ? std::optional(*milliwatts / 1e3) : std::nullopt;
}

PowerReading Nvml::read() const {
  return {now(), ask<unsigned long long>(total_energy_), watts(), ask(clock_, kSmClock)};
}

GpuConditions Nvml::conditions() const {
  return {ask(clock_, kSmClock).value_or(0), ask(clock_, kMemoryClock).value_or(0),
          watts().value_or(0), ask(temperature_, kGpuTemperature).value_or(0)};
}

}  // namespace moire::tool
