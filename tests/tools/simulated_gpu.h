// A GPU, its sensors and its host in simulated time, for tools/moire/sustained.h; the same as
// tests/python/simulated_gpu.py.
#pragma once

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <vector>

#include "sustained.h"

namespace moire::tool {

class SimulatedGpu : public TimedGpu, public Meter {
 public:
  explicit SimulatedGpu(const nlohmann::json& given) : case_(given) {}

  double now() override { return host_; }
  void flush() override {
    host_ += kHostSeconds;
    work(case_["flush_seconds"], case_["flush_watts"]);
  }
  void call() {
    host_ += case_["call_host_seconds"].get<double>();
    work(case_["call_seconds"], case_["call_watts"]);
  }
  Mark mark() override { return std::make_shared<double>(std::max(host_, gpu_)); }
  void wait(const Mark& mark) override { host_ = std::max(host_, at(mark)); }
  double seconds(const Mark& begin, const Mark& end) override { return at(end) - at(begin); }

  void start() override { started_ = host_; }
  std::vector<PowerReading> stop() override {
    std::vector<PowerReading> out;
    if (!case_["sensor"].get<bool>()) return out;
    const auto count = static_cast<int>((host_ - started_) / kPeriod);
    for (int i = 0; i < count; ++i) out.push_back(reading(started_ + i * kPeriod));
    return out;
  }

 private:
  static constexpr double kHostSeconds = 1e-6;  // to enqueue a flush
  static constexpr double kPeriod = 0.005;      // of readings
  static constexpr double kAveraged = 0.1;      // seconds that a power sample looks back

  static double at(const Mark& mark) { return *static_cast<double*>(mark.get()); }

  PowerReading reading(double seconds) const {
    PowerReading out;
    out.seconds = seconds;
    if (!case_["tick_seconds"].is_null()) {
      const double tick = case_["tick_seconds"];
      out.millijoules = 1e3 * drawn(std::floor(seconds / tick) * tick);
    }
    out.watts = (drawn(seconds) - drawn(std::max(0.0, seconds - kAveraged))) / kAveraged;
    out.sm_mhz = 1400;
    return out;
  }
  void work(double seconds, double watts) {
    const double begin = std::max(host_, gpu_);
    draw(begin, case_["idle_watts"]);
    draw(begin + seconds, watts);
    gpu_ = begin + seconds;
  }
  void draw(double until, double watts) {
    joules_.push_back(joules_.back() + watts * (until - times_.back()));
    times_.push_back(until);
  }
  double drawn(double seconds) const {
    const auto found = std::lower_bound(times_.begin(), times_.end(), seconds) - times_.begin();
    const auto above = std::min(static_cast<size_t>(found), times_.size() - 1);
    if (above == 0) return joules_[0];
    const double begin = times_[above - 1], end = times_[above];
    const double share = end > begin ? std::min(1.0, (seconds - begin) / (end - begin)) : 1.0;
    return joules_[above - 1] + share * (joules_[above] - joules_[above - 1]);
  }

  nlohmann::json case_;
  double host_ = 0, gpu_ = 0, started_ = 0;
  std::vector<double> times_{0}, joules_{0};  // energy drawn until then
};

}  // namespace moire::tool
