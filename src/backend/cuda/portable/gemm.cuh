// What the plain grouped products share, whichever engine multiplies: tiles of 64 x 64 sums in FP32
// by 256 threads. An engine (fma.cuh, mma.cuh) fetches steps of k of both operands into shared
// memory, one round ahead, and adds up products in ascending order of k from zero; an element's sum
// depends on nothing but its operands. Finished sums go through shared memory to the epilogue, in
// which four threads share a row.
//
// An engine has
//   kSliceBytes       of shared memory per operand
//   kTakesLists       whether weights may be lists
//   Fetching          which elements of a step a thread fetches
//   AlongK            an operand whose elements are contiguous along k: of its line(), which is
//                     `row` of the matrix; negative: zeros
//   AcrossK<RowOf>    one whose elements are contiguous across the tile: from first_column() on,
//                     which are `columns` of the matrix; negative: zeros. RowOf gives the matrix's
//                     row of a k
//   multiply          by the whole block: the sums of a tile into the first planes of shared memory
#pragma once

#include "backend/cuda/device/shared.cuh"

namespace moire::cuda::portable::gemm {

inline constexpr int kTile = 64;
inline constexpr int kThreads = 256;

// Rows of sums, which start on 16 bytes.
using Lines = float[kTile + 4];

// What a thread fetches of kDepth steps of k, kColumns elements: of line() from first_step() on
// where an operand is contiguous along k; else of step() from first_column() on.
template <int kOfDepth, int kOfColumns>
struct Fetching {
  static constexpr int kDepth = kOfDepth, kColumns = kOfColumns;
  static_assert(kDepth * kTile == kColumns * kThreads);

  __device__ static int line() { return static_cast<int>(threadIdx.x) / (kDepth / kColumns); }
  __device__ static int first_step() {
    return static_cast<int>(threadIdx.x) % (kDepth / kColumns) * kColumns;
  }
  __device__ static int step() { return static_cast<int>(threadIdx.x) / (kTile / kColumns); }
  __device__ static int first_column() {
    return static_cast<int>(threadIdx.x) % (kTile / kColumns) * kColumns;
  }
};

// Shared memory: slices of the operands while an engine multiplies, then planes of sums.
template <class Engine, int kHalves, int kPlanes>
struct Shared {
  static constexpr size_t kSlices = size_t{1 + kHalves} * Engine::kSliceBytes;
  static constexpr size_t kSums = size_t{kPlanes} * kTile * sizeof(Lines);
  static constexpr size_t kBytes = kSlices > kSums ? kSlices : kSums;

  __device__ static unsigned char* slice(int i) {
    return dynamic_shared<unsigned char>() + i * Engine::kSliceBytes;
  }
  __device__ static Lines* plane(int i) { return dynamic_shared<Lines>() + i * kTile; }
};

// Who does what in an epilogue: four threads share a row, as lane_sums.cuh wants them; calls
// visit(column of the tile, lane) for this thread's columns.
inline constexpr int kEpilogueLanes = 4;
__device__ inline int epilogue_row() { return static_cast<int>(threadIdx.x) / 4; }
template <class Visit>
__device__ inline void for_own_columns(Visit&& visit) {
  const int first = static_cast<int>(threadIdx.x) % 4 * kEpilogueLanes;
#pragma unroll
  for (int step = 0; step < kTile / 16; ++step) {
#pragma unroll
    for (int i = 0; i < kEpilogueLanes; ++i) visit(16 * step + first + i, i);
  }
}

}  // namespace moire::cuda::portable::gemm
