// The FP32 multiply-add rate that the cores reach from registers: the roof of every CPU kernel.
// Enough independent chains to cover latency times issue width; the instruction set is the widest
// there is.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "harness.h"
#include "machine.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace moire::tool {
namespace {

constexpr double kSeconds = 0.05;
constexpr int kSteps =
    32768;  // between looks at the clock, about 0.1 ms: shorter than a time slice

// kSteps multiply-adds on each of several registers; returns FLOP done. The result goes to `sink`.
using Burst = double (*)(float* sink);

#if defined(__x86_64__)
__attribute__((target("avx512f"))) double burst_avx512(float* sink) {
  constexpr int kChains = 24;  // of 32 registers; 8 would cover latency 4 on two ports
  __m512 acc[kChains];
  const __m512 a = _mm512_set1_ps(0.999F), b = _mm512_set1_ps(0.001F);
  for (auto& v : acc) v = _mm512_set1_ps(*sink);
  for (int i = 0; i < kSteps; ++i) {
#pragma GCC unroll 24
    for (int c = 0; c < kChains; ++c) acc[c] = _mm512_fmadd_ps(acc[c], a, b);
  }
  for (const auto& v : acc) *sink += 1e-30F * _mm512_cvtss_f32(v);
  return 2.0 * 16 * kChains * kSteps;
}

__attribute__((target("avx2,fma"))) double burst_avx2(float* sink) {
  constexpr int kChains = 12;  // of 16 registers; 10 cover latency 5 on two ports
  __m256 acc[kChains];
  const __m256 a = _mm256_set1_ps(0.999F), b = _mm256_set1_ps(0.001F);
  for (auto& v : acc) v = _mm256_set1_ps(*sink);
  for (int i = 0; i < kSteps; ++i) {
#pragma GCC unroll 12
    for (int c = 0; c < kChains; ++c) acc[c] = _mm256_fmadd_ps(acc[c], a, b);
  }
  for (const auto& v : acc) *sink += 1e-30F * _mm256_cvtss_f32(v);
  return 2.0 * 8 * kChains * kSteps;
}
#endif

// What the compiler makes of it: NEON on 64-bit Arm.
double burst_portable(float* sink) {
  constexpr int kLanes = 64;
  float acc[kLanes];
  for (float& v : acc) v = *sink;
  for (int i = 0; i < kSteps; ++i) {
    for (float& v : acc) v = std::fma(v, 0.999F, 0.001F);
  }
  for (const float v : acc) *sink += 1e-30F * v;
  return 2.0 * kLanes * kSteps;
}

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
