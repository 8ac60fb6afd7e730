#include "harness.h"

#include <algorithm>
#include <chrono>
#include <thread>

namespace moire::tool {
namespace {

constexpr int64_t kMostRounds = 2000;

struct Running : Samples {
  int64_t call = 0;
  double measured = 0;
};

double timed(const Variant& variant, int64_t first, int64_t calls) {
  if (variant.seconds != nullptr) return variant.seconds(first, calls);
  const double start = now();
  for (int64_t i = 0; i < calls; ++i) variant.run(first + i);
  return now() - start;
}

// Runs for the warm-up time and finds how many calls make a sample.
void warm_up(const Variant& variant, const Protocol& protocol, Running& running) {
  double elapsed = 0;
  do {
    elapsed += timed(variant, running.call++, 1);
  } while (elapsed < protocol.warmup_seconds);
  const double per_call = elapsed / static_cast<double>(running.call);
  running.calls_per_sample =
      std::max<int64_t>(1, static_cast<int64_t>(protocol.smallest_sample_seconds / per_call));
}

void take_turn(const Variant& variant, const Protocol& protocol, Running& running) {
  std::this_thread::sleep_for(std::chrono::duration<double>(protocol.pause_seconds));
  std::vector<double> turn;
  for (double spent = 0; spent < protocol.turn_seconds;) {
    const int64_t calls = running.calls_per_sample;
    const double elapsed = timed(variant, running.call, calls);
    running.call += calls;
    spent += elapsed;
    turn.push_back(elapsed / static_cast<double>(calls));
    running.measured += elapsed;
  }
  running.seconds.insert(running.seconds.end(), turn.begin(), turn.end());
  running.round_medians.push_back(summarize(turn).median);
}

}  // namespace

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::vector<Samples> measure(const std::vector<Variant>& variants, const Protocol& protocol,
                             const std::function<void(double)>& tick) {
  std::vector<Running> running(variants.size());
  for (size_t v = 0; v < variants.size(); ++v) warm_up(variants[v], protocol, running[v]);
  for (int64_t round = 0; round < kMostRounds; ++round) {
    double least = protocol.seconds;
    for (const Running& r : running) least = std::min(least, r.measured);
    const double by_time = protocol.seconds > 0 ? least / protocol.seconds : 1;
    const double by_rounds = static_cast<double>(round) / static_cast<double>(protocol.min_rounds);
    tick(std::min({1.0, by_time, by_rounds}));
    if (by_time >= 1 && by_rounds >= 1) break;
    for (size_t v = 0; v < variants.size(); ++v) take_turn(variants[v], protocol, running[v]);
  }
  return {running.begin(), running.end()};
}

}  // namespace moire::tool
