#include "nvml.h"

#include <dlfcn.h>

#include "terminal.h"
#include "text.h"

namespace moire::tool {
namespace {

// Of nvml.h.
using Device = void*;
using Init = int (*)();
using HandleByBus = int (*)(const char*, Device*);
using TotalEnergy = int (*)(Device, unsigned long long*);
using Number = int (*)(Device, unsigned*);
using NumberOf = int (*)(Device, int, unsigned*);
constexpr int kSmClock = 1, kMemoryClock = 2, kGpuTemperature = 0;

template <class Entry>
void find(void* library, const char* name, Entry& entry) {
  entry = reinterpret_cast<Entry>(dlsym(library, name));
}

}  // namespace

struct Nvml::Entries {
  void* library = nullptr;
  Device device = nullptr;
  TotalEnergy total_energy = nullptr;
  Number power_usage = nullptr;
  NumberOf clock = nullptr, temperature = nullptr;

  ~Entries() {
    if (library != nullptr) dlclose(library);
  }
  // What an entry says of the device; nothing where it is missing or fails.
  template <class Value = unsigned>
  std::optional<double> ask(auto entry, auto... which) const {
    Value value = 0;
    if (entry == nullptr || entry(device, which..., &value) != 0) return std::nullopt;
    return static_cast<double>(value);
  }
  std::optional<double> watts() const {
    const std::optional<double> milliwatts = ask(power_usage);
    return milliwatts.has_value() ? std::optional(*milliwatts / 1e3) : std::nullopt;
  }
};

Nvml::Nvml(std::unique_ptr<Entries> entries) : entries_(std::move(entries)) {}
Nvml::~Nvml() = default;

Result<std::unique_ptr<Nvml>> Nvml::open(const std::string& bus_id, const char* library) {
  const auto none = [](const std::string& why) {
    return Status(Code::kUnsupported, text("bench: NVML: ", why));
  };
  auto e = std::make_unique<Entries>();
  e->library = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (e->library == nullptr) return none(dlerror());
  Init init = nullptr;
  HandleByBus handle = nullptr;
  find(e->library, "nvmlInit_v2", init);
  find(e->library, "nvmlDeviceGetHandleByPciBusId_v2", handle);
  find(e->library, "nvmlDeviceGetTotalEnergyConsumption", e->total_energy);
  find(e->library, "nvmlDeviceGetPowerUsage", e->power_usage);
  find(e->library, "nvmlDeviceGetClockInfo", e->clock);
  find(e->library, "nvmlDeviceGetTemperature", e->temperature);
  if (init == nullptr || handle == nullptr) return none(text(library, " lacks nvmlInit_v2"));
  int status = init();
  if (status != 0) return none(text("nvmlInit_v2 returned ", status));
  status = handle(bus_id.c_str(), &e->device);
  if (status != 0) return none(text("there is no GPU ", bus_id, ", status ", status));
  return std::unique_ptr<Nvml>(new Nvml(std::move(e)));
}

PowerReading Nvml::read() const {
  const Entries& e = *entries_;
  const std::optional<double> millijoules = e.ask<unsigned long long>(e.total_energy);
  return {now(), millijoules, e.watts(), e.ask(e.clock, kSmClock)};
}

GpuConditions Nvml::conditions() const {
  const Entries& e = *entries_;
  return {e.ask(e.clock, kSmClock).value_or(0), e.ask(e.clock, kMemoryClock).value_or(0),
          e.watts().value_or(0), e.ask(e.temperature, kGpuTemperature).value_or(0)};
}

}  // namespace moire::tool
