// Sums over the columns of a row in the one order that the contract has (docs/numerics.md): of each
// 64 columns, column j goes to lane j mod 16, one FMA chain per lane from zero; the 16 lanes are
// added as a fixed tree (i + 8, then i + 4, i + 2, i + 1); the segments' sums are added in order,
// from zero. Here `lane` is that of a sum, held in a register; a segment's 16 lanes lie in 16 / N
// neighbouring threads of a warp, N lanes each.
#pragma once

#include <algorithm>

#include "core/divide.h"

namespace moire::cuda {

inline constexpr int kSegment = 64;
inline constexpr int kSumLanes = 16;
// Steps of a lane through its segment.
inline constexpr int kSegmentSteps = kSegment / kSumLanes;

// The sum of a segment, in all of its threads; the whole warp calls it.
template <int N>
__device__ inline float fold_lanes(float (&sums)[N]) {
#pragma unroll
  for (int distance = kSumLanes / 2; distance >= N; distance /= 2) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      sums[i] += __shfl_xor_sync(0xFFFFFFFFU, sums[i], distance / N);
    }
  }
#pragma unroll
  for (int distance = N / 2; distance > 0; distance /= 2) {
#pragma unroll
    for (int i = 0; i < distance; ++i) sums[i] += sums[i + distance];
  }
  return sums[0];
}

// How a block's threads share the segments of its rows: as many rows as fit, `most_rows` at most,
// one segment of each to every group of 16 / N threads; a row that is too long for that goes in
// parts.
inline constexpr int kSegmentThreads = 128;
template <int N>
struct SegmentTiling {
  static constexpr int kThreadsPerSegment = kSumLanes / N;
  static constexpr int kSegmentsAtOnce = kSegmentThreads / kThreadsPerSegment;

  explicit SegmentTiling(int64_t columns, uint32_t most_rows = kSegmentsAtOnce)
      : segments(static_cast<uint32_t>(ceil_div(columns, kSegment))),
        per_part(std::clamp<uint32_t>(segments, 1, kSegmentsAtOnce)),
        rows(std::min(kSegmentsAtOnce / per_part, most_rows)) {}

  uint32_t segments;  // of a row
  uint32_t per_part;
  uint32_t rows;  // of a block
};

}  // namespace moire::cuda
