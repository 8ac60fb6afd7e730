// The engine for operands of any types beside each other: one fused multiply-add per product. A
// thread holds 4 x 4 sums, of each half where gate and up are made together.
#pragma once

#include "backend/cuda/portable/gemm.cuh"
#include "backend/cuda/portable/operand.cuh"

namespace moire::cuda::portable::gemm {

struct Fma : Fetching<16, 4> {
  static constexpr const char* kName = "FP32 multiply-adds";
  static constexpr bool kTakesLists = true;
  static constexpr int kPerThread = 4;
  static constexpr size_t kSliceBytes = kDepth * sizeof(Lines);  // lines along k

  __device__ static Lines* lines(unsigned char* slice) { return reinterpret_cast<Lines*>(slice); }

  class AlongK {
   public:
    __device__ AlongK(const Operand& matrix, int64_t row, int64_t k_end)
        : matrix_(matrix), row_(row), k_end_(k_end) {}

    __device__ void fetch(int64_t k) {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        const int64_t at = k + first_step() + i;
        values_[i] = row_ >= 0 && at < k_end_ ? matrix_.at(row_, at) : 0.0F;
      }
    }
    __device__ void put(unsigned char* slice) const {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) lines(slice)[first_step() + i][line()] = values_[i];
    }

   private:
    Operand matrix_;
    int64_t row_, k_end_;
    float values_[kColumns];
  };

  template <class RowOf>
  class AcrossK {
   public:
    __device__ AcrossK(const Operand& matrix, const RowOf& row_of,
                       const int64_t (&columns)[kColumns], int64_t k_end)
        : matrix_(matrix), row_of_(row_of), k_end_(k_end) {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) columns_[i] = columns[i];
    }

    __device__ void fetch(int64_t k) {
      const int64_t at = k + step(), row = at < k_end_ ? row_of_(at) : -1;
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        values_[i] = row >= 0 && columns_[i] >= 0 ? matrix_.at(row, columns_[i]) : 0.0F;
      }
    }
    __device__ void put(unsigned char* slice) const {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) lines(slice)[step()][first_column() + i] = values_[i];
    }

   private:
    Operand matrix_;
    RowOf row_of_;
    int64_t k_end_;
    int64_t columns_[kColumns];
    float values_[kColumns];
  };

  template <class Memory, int kHalves, class Left, class Right>
  __device__ static void multiply(Left left, Right (&right)[kHalves], int64_t k_end) {
    const int row = static_cast<int>(threadIdx.x) / (kTile / kPerThread) * kPerThread;
    const int column = static_cast<int>(threadIdx.x) % (kTile / kPerThread) * kPerThread;
    float sums[kHalves][kPerThread][kPerThread] = {};
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
      for (int step = 0; step < kDepth; ++step) {
        const auto a = load<kPerThread>(&lines(Memory::slice(0))[step][row]);
#pragma unroll
        for (int h = 0; h < kHalves; ++h) {
          const auto b = load<kPerThread>(&lines(Memory::slice(1 + h))[step][column]);
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
};

}  // namespace moire::cuda::portable::gemm
