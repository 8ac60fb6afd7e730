#include "power.h"

#include <dlfcn.h>

#include <chrono>
#include <stop_token>
#include <thread>
#include <utility>

#include "harness.h"
#include "text.h"

namespace moire::tool {
namespace {

constexpr int kSmClock = 1, kMemoryClock = 2, kGpuTemperature = 0;  // of nvml.h

template <class Entry>
void find(void* library, const char* name, Entry& entry) {
  entry = reinterpret_cast<Entry>(dlsym(library, name));
}

constexpr size_t kFewestTicks = 3;
constexpr auto kPeriod = std::chrono::milliseconds(5);

std::optional<double> mean(const std::vector<PowerReading>& readings,
                           std::optional<double> PowerReading::*member) {
  double sum = 0, count = 0;
  for (const PowerReading& r : readings) {
    if (!(r.*member).has_value()) continue;
    sum += *(r.*member);
    ++count;
  }
  return count == 0 ? std::nullopt : std::optional(sum / count);
}

// (seconds, millijoules) at the readings that found the counter moved.
std::vector<std::pair<double, double>> ticks_of(const std::vector<PowerReading>& readings) {
  std::vector<std::pair<double, double>> ticks;
  std::optional<double> last;
  for (const PowerReading& r : readings) {
    if (!r.millijoules.has_value()) continue;
    if (last.has_value() && *last != *r.millijoules) ticks.emplace_back(r.seconds, *r.millijoules);
    last = r.millijoules;
  }
  return ticks;
}

class ThreadMeter : public Meter {
 public:
  explicit ThreadMeter(std::function<PowerReading()> read) : read_(std::move(read)) {}

  void start() override {
    if (read_ == nullptr) return;
    thread_ = std::jthread([this](const std::stop_token& stop) {
      while (!stop.stop_requested()) {
        readings_.push_back(read_());
        std::this_thread::sleep_for(kPeriod);
      }
    });
  }
  std::vector<PowerReading> stop() override {
    thread_ = std::jthread();  // waits for the one that reads
    return std::exchange(readings_, {});
  }

 private:
  std::function<PowerReading()> read_;
  std::vector<PowerReading> readings_;
  std::jthread thread_;  // which goes first
};

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

Power mean_power(const std::vector<PowerReading>& readings) {
  Power out;
  out.sm_mhz = mean(readings, &PowerReading::sm_mhz);
  const auto ticks = ticks_of(readings);
  if (ticks.size() >= kFewestTicks) {
    out.watts = slope(ticks) / 1e3;
    out.source = "energy counter";
    return out;
  }
  out.watts = mean(readings, &PowerReading::watts);
  if (out.watts.has_value()) out.source = "power samples";
  return out;
}

std::unique_ptr<Meter> make_meter(std::function<PowerReading()> read) {
  return std::make_unique<ThreadMeter>(std::move(read));
}

}  // namespace moire::tool
