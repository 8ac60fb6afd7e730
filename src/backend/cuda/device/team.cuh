// The threads that work on one token: a warp, or a block of eight. Sums and choices of a team have
// one order, whatever its block holds besides.
#pragma once

#include <cstdint>

namespace moire::cuda {

class WarpTeam {
 public:
  static constexpr int kThreads = 32;

  __device__ static int index() { return static_cast<int>(threadIdx.x) % kThreads; }
  __device__ static float sum(float v) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) v += __shfl_xor_sync(kAll, v, distance);
    return v;
  }
  // Of ordinary numbers; NaN is left out.
  __device__ static float max(float v) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      v = fmaxf(v, __shfl_xor_sync(kAll, v, distance));
    }
    return v;
  }
  __device__ static uint32_t max(uint32_t v) { return __reduce_max_sync(kAll, v); }
  __device__ static uint32_t min(uint32_t v) { return __reduce_min_sync(kAll, v); }
  // What thread `from` has.
  __device__ static float of(float v, int from) { return __shfl_sync(kAll, v, from); }

 private:
  static constexpr uint32_t kAll = 0xFFFFFFFFU;
};

class BlockTeam {
 public:
  static constexpr int kThreads = 256;

  __device__ static int index() { return static_cast<int>(threadIdx.x); }
  __device__ static float sum(float v) {
    return over_warps(WarpTeam::sum(v), [](float a, float b) { return a + b; });
  }
  __device__ static float max(float v) {
    return over_warps(WarpTeam::max(v), [](float a, float b) { return fmaxf(a, b); });
  }
  __device__ static uint32_t max(uint32_t v) {
    return over_warps(WarpTeam::max(v), [](uint32_t a, uint32_t b) { return a > b ? a : b; });
  }
  __device__ static uint32_t min(uint32_t v) {
    return over_warps(WarpTeam::min(v), [](uint32_t a, uint32_t b) { return a < b ? a : b; });
  }
  __device__ static float of(float v, int from) {
    __shared__ float shared;
    __syncthreads();
    if (index() == from) shared = v;
    __syncthreads();
    return shared;
  }

 private:
  // The warps' values joined in order.
  template <class T, class Join>
  __device__ static T over_warps(T of_warp, Join join) {
    constexpr int kWarps = kThreads / WarpTeam::kThreads;
    __shared__ T values[kWarps];
    __syncthreads();
    if (WarpTeam::index() == 0) values[index() / WarpTeam::kThreads] = of_warp;
    __syncthreads();
    T all = values[0];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) all = join(all, values[w]);
    return all;
  }
};

}  // namespace moire::cuda
