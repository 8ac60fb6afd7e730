// The FP32 multiply-add rate that the cores reach from registers: the roof of every CPU kernel.
// Enough independent chains to cover latency times issue width; the instruction set is the widest
// there is.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "harness.h"
#include "machine.h"

namespace moire::tool {
namespace {

constexpr double kSeconds = 0.05;
constexpr int kSteps =
    32768;  // between looks at the clock, about 0.1 ms: shorter than a time slice

// kSteps multiply-adds on each of several registers; returns FLOP done. The result goes to `sink`.
using Burst = double (*)(float* sink);

// In the widest vectors of the function that it becomes a part of.
template <int kChains, int kLanes>
[[gnu::always_inline]] inline double burst(float* sink) {
  float acc[kChains][kLanes];
  for (auto& chain : acc) std::ranges::fill(chain, *sink);
  for (int i = 0; i < kSteps; ++i) {
#pragma GCC unroll 24
    for (int c = 0; c < kChains; ++c) {
      for (float& v : acc[c]) v = std::fma(v, 0.999F, 0.001F);
    }
  }
  for (const auto& chain : acc) *sink += 1e-30F * chain[0];
  return 2.0 * kChains * kLanes * kSteps;
}

#if defined(__x86_64__)
// 24 of 32 registers; 8 would cover latency 4 on two ports.
[[gnu::target("avx512f")]] double burst_avx512(float* sink) { return burst<24, 16>(sink); }
// 12 of 16 registers; 10 cover latency 5 on two ports.
[[gnu::target("avx2,fma")]] double burst_avx2(float* sink) { return burst<12, 8>(sink); }
#endif
// NEON on 64-bit Arm.
double burst_portable(float* sink) { return burst<16, 4>(sink); }

Burst widest() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") != 0) return burst_avx512;
  if (__builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0) return burst_avx2;
#endif
  return burst_portable;
}

}  // namespace

double measure_peak_flops(Team& team) {
  const Burst burst = widest();
  std::vector<double> best(static_cast<size_t>(team.num_threads()), 0);
  const double start = now();
  team.run([&](int thread) {
    float sink = 1.0F;
    double& rate = best[static_cast<size_t>(thread)];
    for (double before = now(); before - start < kSeconds;) {
      const double done = burst(&sink);
      const double after = now();
      if (sink != 0.125F) rate = std::max(rate, done / (after - before));  // keeps `sink` alive
      before = after;
    }
  });
  return std::accumulate(best.begin(), best.end(), 0.0);
}

}  // namespace moire::tool
