// The plain grouped product: tiles of 64 x 64 sums in FP32, one fused multiply-add per product in
// ascending order of k from zero, so that an element's sum depends on nothing but its operands. Any
// sizes, strides and alignment; FP32, BF16 and FP16 operands.
//
// 256 threads: they fetch 16 steps of k of both operands as floats into shared memory, one round
// ahead, and hold 4 x 4 sums each (of each half, where gate and up are made together). Finished
// sums go through shared memory to the epilogue, in which four threads share a row.
#pragma once

#include <cstdint>

#include "backend/cuda/device/any_floats.cuh"
#include "backend/cuda/device/shared.cuh"

namespace moire::cuda::portable::gemm {

inline constexpr int kTile = 64;
inline constexpr int kDepth = 16;
inline constexpr int kThreads = 256;
inline constexpr int kPerThread = 4;
inline constexpr int kPitch = kTile + 4;  // rows start on 16 bytes

// kDepth lines along k, or kTile rows of sums.
using Lines = float[kPitch];

// One operand of a tile whose elements are contiguous along k: a thread fetches 4 of one line.
class AlongK {
 public:
  // The line of the tile that this thread fetches.
  __device__ static int line() { return static_cast<int>(threadIdx.x) / (kDepth / kPerThread); }

  // `row` is that line's row of the matrix, negative for a line of zeros.
  __device__ AlongK(const AnyFloats& matrix, int64_t row, int64_t k_end)
      : matrix_(matrix), row_(row), k_end_(k_end) {}

  __device__ void fetch(int64_t k) {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int64_t at = k + first() + i;
      values_[i] = row_ >= 0 && at < k_end_ ? matrix_.at(row_, at) : 0.0F;
    }
  }
  __device__ void put(Lines* lines) const {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) lines[first() + i][line()] = values_[i];
  }

 private:
  __device__ static int first() {
    return static_cast<int>(threadIdx.x) % (kDepth / kPerThread) * kPerThread;
  }

  AnyFloats matrix_;
  int64_t row_, k_end_;
  float values_[kPerThread];
};

// One whose elements are contiguous across the tile: a thread fetches 4 columns of one step of k.
// RowOf gives the matrix's row of a k, negative for zeros.
template <class RowOf>
class AcrossK {
 public:
  __device__ static int first_column() {
    return static_cast<int>(threadIdx.x) % (kTile / kPerThread) * kPerThread;
  }

  // `columns` are the matrix's columns that this thread fetches, negative for zeros.
  __device__ AcrossK(const AnyFloats& matrix, const RowOf& row_of,
                     const int64_t (&columns)[kPerThread], int64_t k_end)
      : matrix_(matrix), row_of_(row_of), k_end_(k_end) {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) columns_[i] = columns[i];
  }

  __device__ void fetch(int64_t k) {
    const int64_t at = k + line(), row = at < k_end_ ? row_of_(at) : -1;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      values_[i] = row >= 0 && columns_[i] >= 0 ? matrix_.at(row, columns_[i]) : 0.0F;
    }
  }
  __device__ void put(Lines* lines) const {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) lines[line()][first_column() + i] = values_[i];
  }

 private:
  __device__ static int line() { return static_cast<int>(threadIdx.x) / (kTile / kPerThread); }

  AnyFloats matrix_;
  RowOf row_of_;
  int64_t k_end_;
  int64_t columns_[kPerThread];
  float values_[kPerThread];
};

// Shared memory: slices of both operands while it multiplies, then planes of sums.
template <int kHalves, int kPlanes>
struct Shared {
  static constexpr int kSlices = (1 + kHalves) * kDepth;
  static constexpr int kRows = kSlices > kPlanes* kTile ? kSlices : kPlanes* kTile;
  static constexpr size_t kBytes = sizeof(float) * kRows * kPitch;

  __device__ static Lines* left() { return dynamic_shared<Lines>(); }
  __device__ static Lines* right(int half) { return left() + (1 + half) * kDepth; }
  __device__ static Lines* plane(int i) { return left() + i * kTile; }
};

// The sums of a tile, left in the first kHalves planes; the whole block calls it.
template <class Memory, int kHalves, class Left, class Right>
__device__ void multiply(Left left, Right (&right)[kHalves], int64_t k_end) {
  const int row = static_cast<int>(threadIdx.x) / (kTile / kPerThread) * kPerThread;
  const int column = static_cast<int>(threadIdx.x) % (kTile / kPerThread) * kPerThread;
  float sums[kHalves][kPerThread][kPerThread] = {};
  left.fetch(0);
  for (int h = 0; h < kHalves; ++h) right[h].fetch(0);
  for (int64_t k = 0; k < k_end; k += kDepth) {
    __syncthreads();
    left.put(Memory::left());
    for (int h = 0; h < kHalves; ++h) right[h].put(Memory::right(h));
    __syncthreads();
    if (k + kDepth < k_end) {
      left.fetch(k + kDepth);
      for (int h = 0; h < kHalves; ++h) right[h].fetch(k + kDepth);
    }
#pragma unroll
    for (int step = 0; step < kDepth; ++step) {
      const auto a = load<kPerThread>(&Memory::left()[step][row]);
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        const auto b = load<kPerThread>(&Memory::right(h)[step][column]);
#pragma unroll
        for (int i = 0; i < kPerThread; ++i) {
#pragma unroll
          for (int j = 0; j < kPerThread; ++j) sums[h][i][j] = fmaf(a[i], b[j], sums[h][i][j]);
        }
      }
    }
  }
  __syncthreads();
  for (int h = 0; h < kHalves; ++h) {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) {
        Memory::plane(h)[row + i][column + j] = sums[h][i][j];
      }
    }
  }
  __syncthreads();
}

// Who does what in an epilogue: four threads share a row, as lane_sums.cuh wants them; calls
// visit(row of the tile, column of the tile) for this thread's columns.
__device__ inline int epilogue_row() { return static_cast<int>(threadIdx.x) / 4; }
template <class Visit>
__device__ inline void for_own_columns(Visit&& visit) {
  const int first = static_cast<int>(threadIdx.x) % 4 * kPerThread;
#pragma unroll
  for (int step = 0; step < kTile / 16; ++step) {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) visit(16 * step + first + i, i);
  }
}

}  // namespace moire::cuda::portable::gemm
