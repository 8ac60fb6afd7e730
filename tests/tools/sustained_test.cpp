// The protocol of steady state on simulated GPUs, and statistics, by the tables that
// tests/python/test_sustained.py reads as well.
#include "sustained.h"

#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "power.h"
#include "simulated_gpu.h"
#include "sustained_bench.h"

namespace moire::tool {
namespace {

using Json = nlohmann::json;

Json table(const char* name) {
  std::ifstream file(std::string(MOIRE_TEST_FOLDER) + "/tools/" + name);
  return Json::parse(file);
}

void expect_optional(const std::optional<double>& found, const Json& wanted, double share) {
  ASSERT_EQ(found.has_value(), !wanted.is_null());
  if (!found.has_value()) return;
  EXPECT_NEAR(*found, wanted.get<double>(), share * wanted.get<double>());
}

TEST(Statistics, AreThoseOfTheTable) {
  const Json all = table("statistics.json");
  for (const Json& one : all["summaries"]) {
    const Summary found = summarize(one["values"].get<std::vector<double>>());
    EXPECT_DOUBLE_EQ(found.median, one["median"].get<double>()) << one;
    EXPECT_DOUBLE_EQ(found.p10, one["p10"].get<double>()) << one;
    EXPECT_DOUBLE_EQ(found.p90, one["p90"].get<double>()) << one;
  }
  for (const Json& one : all["ratio_spans"]) {
    const Summary found = ratio_span(one["numerators"].get<std::vector<double>>(),
                                     one["denominators"].get<std::vector<double>>());
    EXPECT_DOUBLE_EQ(found.median, one["median"].get<double>()) << one;
    EXPECT_DOUBLE_EQ(found.least, one["least"].get<double>()) << one;
    EXPECT_DOUBLE_EQ(found.most, one["most"].get<double>()) << one;
  }
  for (const Json& one : all["slopes"]) {
    const auto points = one["points"].get<std::vector<std::pair<double, double>>>();
    EXPECT_DOUBLE_EQ(slope(points), one["slope"].get<double>()) << one;
  }
}

TEST(Sustained, MeasuresSimulatedCalls) {
  const SustainedProtocol protocol;
  const Json all = table("sustained.json");
  for (const Json& one : all["cases"]) {
    SCOPED_TRACE(one["name"].get<std::string>());
    SimulatedGpu gpu(one);
    Measured found;
    found.flops = 1e9;
    found.flush_millijoules = stretch(
                                  gpu, [](int64_t) {}, protocol, gpu)
                                  .millijoules();
    int ticks = 0;
    const EnqueueCall call = [&](int64_t) { gpu.call(); };
    found.turns = take_turns(gpu, {call}, protocol, gpu, [&] { ++ticks; })[0];
    EXPECT_EQ(ticks, 2);
    ASSERT_EQ(found.turns.size(), 2U);
    const double ms = one["ms"];
    EXPECT_NEAR(1e3 * found.seconds().median, ms, 1e-3 * ms);
    EXPECT_NEAR(found.flops_rate(), 1e12 / ms, 1e9 / ms);
    expect_optional(found.millijoules(), one["mj"], 0.01);
    expect_optional(found.sm_mhz(), one["sm_mhz"], 1e-9);
    const char* const source = found.turns[0].power.source;
    EXPECT_EQ(source == nullptr ? Json(nullptr) : Json(source), one["energy"]);
    for (const Stretch& turn : found.turns) {
      EXPECT_GE(turn.window_seconds, protocol.timed_seconds);
    }
  }
}

TEST(Sustained, WarmsUpAndTurnsBothWays) {
  SimulatedGpu gpu(table("sustained.json")["cases"][0]);
  std::string order;
  std::vector<double> times;
  const auto named = [&](char name) {
    return [&gpu, &order, &times, name](int64_t) {
      if (order.empty() || order.back() != name) order += name;
      if (name == 'b') times.push_back(gpu.now());
      gpu.call();
    };
  };
  const SustainedProtocol protocol;
  take_turns(gpu, {named('a'), named('b')}, protocol, gpu, [] {});
  EXPECT_EQ(order, "aba");  // a, b, then b, a
  const double alone = times.back() - times.front();
  EXPECT_GT(alone, 2 * (protocol.warm_seconds + protocol.timed_seconds));
  EXPECT_LT(alone, 2 * protocol.stretch_seconds() + 0.2);
}

TEST(Sustained, TakesRatiosWithinATurn) {
  const auto measured = [](double first, double second, double flops) {
    Measured out;
    out.flops = flops;
    for (const double seconds : {first, second}) out.turns.push_back({{seconds}, 1, {}});
    return out;
  };
  const Measured slow = measured(2, 6, 8), fast = measured(1, 2, 4);
  const Summary times = time_ratio(fast, slow), rates = rate_ratio(fast, slow);
  EXPECT_EQ((std::vector{times.median, times.least, times.most}), (std::vector{2.5, 2.0, 3.0}));
  EXPECT_EQ((std::vector{rates.median, rates.least, rates.most}), (std::vector{1.25, 1.0, 1.5}));
  EXPECT_FALSE(slow.millijoules().has_value());
}

TEST(Sustained, ReportsWhatIsKnownAndLeavesGaps) {
  Measured ours{"moire", 4e9, {{{0.01}, 1, {}}}, {}, 1e-5};
  Measured dense{"dense", 8e9, {{{0.01}, 1, {}}}, {}, 1e-5};
  SustainedResult r;
  r.peers = {ours, dense};
  Json json = to_json(r, SustainedProtocol());
  EXPECT_TRUE(json["peers"]["moire"]["mj"].is_null());
  EXPECT_DOUBLE_EQ(json["of_dense"]["moire"]["median"].get<double>(), 0.5);
  EXPECT_NE(sustained_table({r}).find("0.500 [0.500 0.500]"), std::string::npos);
  for (Measured& m : r.peers) {
    m.turns[0].power = {700, 1400, "energy counter"};
    m.flush_millijoules = 200000;
  }
  json = to_json(r, SustainedProtocol());
  EXPECT_DOUBLE_EQ(json["peers"]["moire"]["mj"].get<double>(), 500000);
  EXPECT_EQ(json["peers"]["moire"]["energy"], "energy counter");
  const std::string plan = sustained_plan(SustainedProtocol(), 10, 6);
  EXPECT_EQ(plan,
            "plan: 10 stretches of 1.8 s = 18 s, and some 6 s to make operands and check: "
            "24 s\n");
}

TEST(Nvml, ReadsAGpusSensors) {
  const auto nvml = Nvml::open("0000:01:00.0", MOIRE_FAKE_NVML);
  ASSERT_TRUE(nvml.ok()) << nvml.status().message();
  const PowerReading reading = nvml.value().read();
  EXPECT_EQ(reading.millijoules, 123456789012.0);
  EXPECT_EQ(reading.watts, 691.5);
  EXPECT_EQ(reading.sm_mhz, 1410.0);
  const GpuConditions now = nvml.value().conditions();
  EXPECT_EQ(now.memory_clock, 3201);
  EXPECT_EQ(now.temperature, 0);  // the fake has no such entry
}

TEST(Nvml, SaysWhyThereIsNone) {
  const auto missing = Nvml::open("0000:01:00.0", "libno-such-library.so.1");
  ASSERT_FALSE(missing.ok());
  EXPECT_NE(missing.status().message().find("bench: NVML: libno-such-library.so.1"),
            std::string::npos);
  const auto other = Nvml::open("0000:02:00.0", MOIRE_FAKE_NVML);
  ASSERT_FALSE(other.ok());
  EXPECT_EQ(other.status().message(), "bench: NVML: there is no GPU 0000:02:00.0, status 6");
}

TEST(Meter, ReadsWhileItRuns) {
  double seconds = 0;
  const auto meter = make_meter([&] { return PowerReading{seconds += 1, {}, 700.0, {}}; });
  meter->start();
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  const std::vector<PowerReading> readings = meter->stop();
  ASSERT_GE(readings.size(), 2U);
  EXPECT_EQ(mean_power(readings).watts, 700);
  EXPECT_TRUE(meter->stop().empty());
  const auto none = make_meter(nullptr);
  none->start();
  EXPECT_TRUE(none->stop().empty());
}

}  // namespace
}  // namespace moire::tool
