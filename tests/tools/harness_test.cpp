// The benchmark harness: statistics, and turns that are fair.
#include "harness.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "bench_result.h"
#include "terminal.h"
#include "text.h"

namespace moire::tool {
namespace {

TEST(Harness, SummarizesByInterpolatedPercentiles) {
  const Summary s = summarize({5, 1, 4, 2, 3});
  EXPECT_DOUBLE_EQ(s.median, 3);
  EXPECT_DOUBLE_EQ(s.p10, 1.4);
  EXPECT_DOUBLE_EQ(s.p90, 4.6);
  EXPECT_DOUBLE_EQ(summarize({}).median, 0);
  EXPECT_DOUBLE_EQ(summarize({7}).p90, 7);
}

TEST(Harness, CountsOutliersByTheirDistanceFromTheMedian) {
  std::vector<double> values;
  for (int i = 0; i < 99; ++i) values.push_back(1.0 + 0.001 * (i % 10));
  EXPECT_DOUBLE_EQ(outlier_share(values), 0);
  values.push_back(2);
  EXPECT_DOUBLE_EQ(outlier_share(values), 0.01);
}

TEST(Harness, PairsRatiosByRound) {
  const Summary ratio = ratio_span({2, 4, 6}, {1, 2, 3});
  EXPECT_DOUBLE_EQ(ratio.p10, 2);
  EXPECT_DOUBLE_EQ(ratio.p90, 2);
}

TEST(Harness, GivesEveryVariantEveryRoundAndCountsCalls) {
  std::vector<int64_t> calls(2, 0);
  std::string order;
  const auto variant = [&](size_t v) {
    return Variant{"", [&calls, &order, v](int64_t call) {
                     EXPECT_EQ(call, calls[v]++);
                     order += v == 0 ? 'a' : 'b';
                     std::this_thread::sleep_for(std::chrono::milliseconds(1));
                   }};
  };
  Protocol protocol;
  protocol.warmup_seconds = 0.001;
  protocol.seconds = 0.001;
  protocol.turn_seconds = 0.0005;
  protocol.pause_seconds = 0;
  protocol.min_rounds = 3;
  double last = -1;
  const auto samples = measure({variant(0), variant(1)}, protocol, [&](double done) {
    EXPECT_GE(done, last);
    last = done;
  });
  EXPECT_EQ(last, 1);
  ASSERT_EQ(samples.size(), 2U);
  EXPECT_EQ(samples[0].round_medians.size(), 3U);
  EXPECT_EQ(samples[1].round_medians.size(), 3U);
  EXPECT_EQ(order.substr(order.size() - 6), "ababab");
  for (const double s : samples[0].seconds) EXPECT_GE(s, 0.001);
}

TEST(BenchResult, TakesTheLowerRoof) {
  MachineFacts machine;
  machine.peak_flops = 100e9;
  machine.bandwidth = 10e9;
  BenchResult r;
  r.time.median = 1;
  r.flops = 50e9;
  r.bytes = 1e9;
  EXPECT_DOUBLE_EQ(r.roof_share(machine), 0.5);
  r.bytes = 8e9;
  EXPECT_DOUBLE_EQ(r.roof_share(machine), 0.8);
}

TEST(BenchResult, MarksWhatWasMeasuredUnderLoadInTableAndChart) {
  MachineFacts machine;
  machine.peak_flops = 100e9;
  machine.bandwidth = 10e9;
  BenchResult r;
  r.time.median = 1;
  r.flops = 50e9;
  r.ratio = Summary{};
  r.ratio->median = r.ratio->p10 = r.ratio->p90 = 1.25;
  r.warnings = {{&kSpread, "wide"}};
  const auto has = [](const std::string& text, const char* part) {
    return text.find(part) != std::string::npos;
  };
  EXPECT_TRUE(has(results_text({r}, machine, {}, false), "1.25 [1.25 1.25]"));
  EXPECT_FALSE(has(results_svg({r}, machine), "*"));
  r.warnings.push_back({&kStolenTime, "half of it"});
  EXPECT_TRUE(has(results_text({r}, machine, {}, false), "1.25* [1.25 1.25]"));
  EXPECT_TRUE(has(results_text({r}, machine, {}, false), "* measured while something else"));
  EXPECT_TRUE(has(results_svg({r}, machine), "1.25 x baseline *</text>"));
  EXPECT_TRUE(has(results_svg({r}, machine), "* measured while something else"));
  *r.ratio = {4754.51, 99.994, 7657.03};
  EXPECT_TRUE(has(results_text({r}, machine, {}, false), "4755* [100 7657]"));
}

TEST(Text, TheNearestWordIsOneThatWasMeant) {
  const std::vector<std::string> words = {"explain", "check", "bench", "fc1_dgrad"};
  EXPECT_EQ(did_you_mean("explian", words), "; did you mean explain?");
  EXPECT_EQ(did_you_mean("exp", words), "; did you mean explain?");
  EXPECT_EQ(did_you_mean("fc1_dgard", words), "; did you mean fc1_dgrad?");
  EXPECT_EQ(did_you_mean("zpif", {"uniform", "zipf:1"}), "; did you mean zipf:1?");
  EXPECT_EQ(did_you_mean("foo", words), "");
  EXPECT_EQ(did_you_mean("", words), "");
}

TEST(Table, LeavesOutWhatItMayThenBreaksText) {
  Table table({"name", ">a", "what", ">b"});
  table.add({"row", "1", "several words of text", "2"});
  table.may_leave_out({"b", "a"});
  EXPECT_EQ(table.to_string(0),
            "name  a  what                   b\nrow   1  several words of text  2\n");
  EXPECT_EQ(table.to_string(31), "name  a  what\nrow   1  several words of text\n");
  EXPECT_EQ(table.left_out(31), std::vector<std::string>{"b"});
  EXPECT_EQ(table.to_string(20), "name  what\nrow   several words\n      of text\n");
}

}  // namespace
}  // namespace moire::tool
