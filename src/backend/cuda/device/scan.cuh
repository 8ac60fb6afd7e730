// Sums over the threads of a block.
#pragma once

#include "backend/cuda/device/warp.cuh"

namespace moire::cuda {

// The sum of `value` over the threads before this one; `total` gets that over all. Every thread of
// a block of kThreads calls it.
template <int kThreads, class T>
__device__ inline T exclusive_sum(T value, T& total) {
  constexpr int kWarps = kThreads / kWarp;
  static_assert(kThreads % kWarp == 0 && kWarps <= kWarp);
  __shared__ T warp_sums[kWarps];
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  T inclusive = value;
#pragma unroll
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const T other = __shfl_up_sync(0xFFFFFFFFU, inclusive, distance);
    if (lane >= distance) inclusive += other;
  }
  __syncthreads();  // the last call's sums have been read
  if (lane == kWarp - 1) warp_sums[warp] = inclusive;
  __syncthreads();
  T before = 0;
  total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w == warp) before = total;
    total += warp_sums[w];
  }
  return before + inclusive - value;
}

}  // namespace moire::cuda
