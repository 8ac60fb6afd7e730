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
  std::optional<double> number(NumberOf entry, int which) const {
    unsigned value = 0;
    if (entry == nullptr || entry(device, which, &value) != 0) return std::nullopt;
    return value;
  }
  std::optional<double> watts() const {
    unsigned milliwatts = 0;
    if (power_usage == nullptr || power_usage(device, &milliwatts) != 0) return std::nullopt;
    return milliwatts / 1e3;
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
  PowerReading out;
  unsigned long long millijoules = 0;
  if (entries_->total_energy != nullptr &&
      entries_->total_energy(entries_->device, &millijoules) == 0) {
    out.millijoules = static_cast<double>(millijoules);
  }
  out.seconds = now();
  out.watts = entries_->watts();
  out.sm_mhz = entries_->number(entries_->clock, kSmClock);
  return out;
}

GpuConditions Nvml::conditions() const {
  const Entries& e = *entries_;
  return {e.number(e.clock, kSmClock).value_or(0), e.number(e.clock, kMemoryClock).value_or(0),
          e.watts().value_or(0), e.number(e.temperature, kGpuTemperature).value_or(0)};
}

}  // namespace moire::tool
