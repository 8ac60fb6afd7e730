// Sums over the threads of a block.
#pragma once

#include <cub/block/block_scan.cuh>

namespace moire::cuda {

// The sum of `value` over the threads before this one; `total` gets that over all. Every thread of
// a block of kThreads calls it.
template <int kThreads, class T>
__device__ inline T exclusive_sum(T value, T& total) {
  using Scan = cub::BlockScan<T, kThreads, cub::BLOCK_SCAN_WARP_SCANS>;
  __shared__ typename Scan::TempStorage memory;
  __syncthreads();  // the last call's sums have been read
  T before;
  Scan(memory).ExclusiveSum(value, before, total);
  return before;
}

}  // namespace moire::cuda
