#include "power.h"

#include <chrono>
#include <stop_token>
#include <thread>
#include <utility>

#include "statistics.h"

namespace moire::tool {
namespace {

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
