// The engine for two operands of one 16-bit type: tensor cores, 16 steps of k per instruction. A
// warp holds 16 x 32 sums, of each half where gate and up are made together. Slices keep the
// operands' own order: [64 lines][k] where k is contiguous, [k][64 lines] otherwise; ldmatrix turns
// the latter. Their pitches put 8 rows of 16 bytes into different banks.
#pragma once

#include <type_traits>

#include "backend/cuda/portable/gemm.cuh"
#include "backend/cuda/ptx/mma.cuh"

namespace moire::cuda::portable::gemm {

template <class T>
struct Mma {
  static constexpr const char* kName = "16-bit tensor cores";
  static constexpr int kDepth = 32;
  static constexpr int kColumns = 8;  // that a thread fetches at once: 16 bytes
  static constexpr int kAlongPitch = kDepth + 8, kAcrossPitch = kTile + 8;
  static constexpr size_t kSliceBytes = size_t{kTile} * kAlongPitch * sizeof(uint16_t);
  static_assert(kSliceBytes >= size_t{kDepth} * kAcrossPitch * sizeof(uint16_t));

  using Values = Packed<uint16_t, kColumns>;

  class AlongK;
  template <class RowOf>
  class AcrossK;

  __device__ static int first_column() {
    return static_cast<int>(threadIdx.x) % (kTile / kColumns) * kColumns;
  }

  template <class Memory, int kHalves, class Left, class Right>
  __device__ static void multiply(Left left, Right (&right)[kHalves], int64_t k_end);

  // d += a * b.
  __device__ static void product(const uint32_t (&a)[4], uint32_t b0, uint32_t b1, float (&d)[4]) {
    if constexpr (std::is_same_v<T, __half>) {
      ptx::mma_m16n8k16_fp16(a, b0, b1, d);
    } else {
      ptx::mma_m16n8k16_bf16(a, b0, b1, d);
    }
  }

  // Which row of which of its four matrices a lane gives ldmatrix.
  __device__ static int matrix() { return static_cast<int>(threadIdx.x) % 32 / 8; }
  __device__ static int matrix_row() { return static_cast<int>(threadIdx.x) % 8; }
  __device__ static const uint16_t* element(const unsigned char* slice, int pitch, int row,
                                            int column) {
    return reinterpret_cast<const uint16_t*>(slice) + row * pitch + column;
  }
};

template <class T>
class Mma<T>::AlongK {
 public:
  // `row` is the row of the matrix for line(), negative for a line of zeros.
  __device__ AlongK(const AnyFloats& matrix, int64_t row, int64_t k_end)
      : data_(row < 0 ? nullptr : static_cast<const uint16_t*>(matrix.data) + row * matrix.stride),
        k_end_(k_end),
        is_vector_((reinterpret_cast<uintptr_t>(data_) | static_cast<uint64_t>(2 * k_end)) % 16 ==
                   0) {}

  __device__ void fetch(int64_t k) {
    values_ = {};
    const int64_t first = k + part();
    if (data_ == nullptr || first >= k_end_) return;
    if (is_vector_) {
      values_ = load<kColumns>(data_ + first);
      return;
    }
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if (first + i < k_end_) values_.values[i] = data_[first + i];
    }
  }
  __device__ void put(unsigned char* slice) const {
    store(reinterpret_cast<uint16_t*>(slice) + line() * kAlongPitch + part(), values_);
  }

  // Of 16 x 16 on the left, 16 columns by 16 of k on the right.
  __device__ static void load_left(const unsigned char* slice, int row, int k,
                                   uint32_t (&values)[4]) {
    ptx::ldmatrix_x4(
        element(slice, kAlongPitch, row + matrix() % 2 * 8 + matrix_row(), k + matrix() / 2 * 8),
        values);
  }
  __device__ static void load_right(const unsigned char* slice, int column, int k,
                                    uint32_t (&values)[4]) {
    ptx::ldmatrix_x4(
        element(slice, kAlongPitch, column + matrix() / 2 * 8 + matrix_row(), k + matrix() % 2 * 8),
        values);
  }

 private:
  __device__ static int part() {
    return static_cast<int>(threadIdx.x) % (kDepth / kColumns) * kColumns;
  }

  const uint16_t* data_;  // of the row
  int64_t k_end_;
  bool is_vector_;
  Values values_;
};

template <class T>
template <class RowOf>
class Mma<T>::AcrossK {
 public:
  // `columns` are the matrix's columns that this thread fetches, negative for zeros.
  __device__ AcrossK(const AnyFloats& matrix, const RowOf& row_of,
                     const int64_t (&columns)[kColumns], int64_t k_end)
      : data_(static_cast<const uint16_t*>(matrix.data)),
        stride_(matrix.stride),
        row_of_(row_of),
        k_end_(k_end) {
    is_vector_ = columns[0] >= 0 && (reinterpret_cast<uintptr_t>(data_ + columns[0]) |
                                     static_cast<uint64_t>(2 * stride_)) %
                                            16 ==
                                        0;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      columns_[i] = columns[i];
      is_vector_ = is_vector_ && columns[i] == columns[0] + i;
    }
  }

  __device__ void fetch(int64_t k) {
    values_ = {};
    const int64_t at = k + step(), row = at < k_end_ ? row_of_(at) : -1;
    if (row < 0) return;
    const uint16_t* const from = data_ + row * stride_;
    if (is_vector_) {
      values_ = load<kColumns>(from + columns_[0]);
      return;
    }
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if (columns_[i] >= 0) values_.values[i] = from[columns_[i]];
    }
  }
  __device__ void put(unsigned char* slice) const {
    store(reinterpret_cast<uint16_t*>(slice) + step() * kAcrossPitch + first_column(), values_);
  }

  __device__ static void load_left(const unsigned char* slice, int row, int k,
                                   uint32_t (&values)[4]) {
    ptx::ldmatrix_x4_trans(
        element(slice, kAcrossPitch, k + matrix() / 2 * 8 + matrix_row(), row + matrix() % 2 * 8),
        values);
  }
  __device__ static void load_right(const unsigned char* slice, int column, int k,
                                    uint32_t (&values)[4]) {
    ptx::ldmatrix_x4_trans(element(slice, kAcrossPitch, k + matrix() % 2 * 8 + matrix_row(),
                                   column + matrix() / 2 * 8),
                           values);
  }

 private:
  __device__ static int step() { return static_cast<int>(threadIdx.x) / (kTile / kColumns); }

  const uint16_t* data_;
  int64_t stride_;
  RowOf row_of_;
  int64_t k_end_;
  bool is_vector_;
  int64_t columns_[kColumns];
  Values values_;
};

// The sums of a tile, left in the first kHalves planes; the whole block calls it.
template <class T>
template <class Memory, int kHalves, class Left, class Right>
__device__ void Mma<T>::multiply(Left left, Right (&right)[kHalves], int64_t k_end) {
  constexpr int kStep = 16, kPairs = 2;  // of 16 columns each, which are two instructions
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int row = warp % 4 * 16, column = warp / 4 * 32;
  float sums[kHalves][kPairs][2][4] = {};
  left.fetch(0);
  for (int h = 0; h < kHalves; ++h) right[h].fetch(0);
  for (int64_t k = 0; k < k_end; k += kDepth) {
    __syncthreads();
    left.put(Memory::slice(0));
    for (int h = 0; h < kHalves; ++h) right[h].put(Memory::slice(1 + h));
    __syncthreads();
    if (k + kDepth < k_end) {
      left.fetch(k + kDepth);
      for (int h = 0; h < kHalves; ++h) right[h].fetch(k + kDepth);
    }
#pragma unroll
    for (int step = 0; step < kDepth; step += kStep) {
      uint32_t a[4];
      Left::load_left(Memory::slice(0), row, step, a);
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair) {
          uint32_t b[4];
          Right::load_right(Memory::slice(1 + h), column + 16 * pair, step, b);
          product(a, b[0], b[1], sums[h][pair][0]);
          product(a, b[2], b[3], sums[h][pair][1]);
        }
      }
    }
  }
  __syncthreads();
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
#pragma unroll
    for (int i = 0; i < 4 * kPairs * 2; ++i) {
      const int r = row + i % 4 / 2 * 8 + lane / 4;
      const int c = column + i / 4 * 8 + lane % 4 * 2 + i % 2;
      Memory::plane(h)[r][c] = sums[h][i / 8][i / 4 % 2][i % 4];
    }
  }
  __syncthreads();
}

}  // namespace moire::cuda::portable::gemm
