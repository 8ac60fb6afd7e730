// Gate and up of N neighbouring columns of F in a row of 2F: one access pattern per way in which
// the halves can lie. Columns are 32-bit (glu_fits).
#pragma once

#include <cstdint>
#include <utility>

#include "backend/cuda/device/values.cuh"
#include "core/glu_layout.h"

namespace moire::cuda {

inline bool glu_fits(int64_t f) { return f < int64_t{1} << 30; }

// Blocks of a multiple of N columns: each half is one load.
template <int N>
class GluBlocks {
 public:
  static constexpr int kColumns = N;

  explicit GluBlocks(const ResolvedGluLayout& layout)
      : block_(static_cast<uint32_t>(layout.block)),
        gate_(layout.gate_first ? 0 : block_),
        up_(layout.gate_first ? block_ : 0) {}

  template <class T>
  __device__ void load(const T* row, uint32_t column, Packed<T, N>& gate, Packed<T, N>& up) const {
    const uint32_t first = first_of(column);
    gate = cuda::load<N>(row + first + gate_);
    up = cuda::load<N>(row + first + up_);
  }
  template <class T>
  __device__ void store(T* row, uint32_t column, const Packed<T, N>& gate,
                        const Packed<T, N>& up) const {
    const uint32_t first = first_of(column);
    cuda::store(row + first + gate_, gate);
    cuda::store(row + first + up_, up);
  }

 private:
  // 2 * (column - column % block) + column % block.
  __device__ uint32_t first_of(uint32_t column) const { return column + column / block_ * block_; }

  uint32_t block_, gate_, up_;
};

// Element-interleaved: N pairs are two loads.
template <int N>
class GluPairs {
 public:
  static constexpr int kColumns = N;

  explicit GluPairs(const ResolvedGluLayout& layout) : gate_first_(layout.gate_first) {}

  template <class T>
  __device__ void load(const T* row, uint32_t column, Packed<T, N>& gate, Packed<T, N>& up) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto pairs = cuda::load<N>(row + 2 * column + half * N);
#pragma unroll
      for (int i = 0; i < N / 2; ++i) {
        const T a = pairs.values[2 * i], b = pairs.values[2 * i + 1];
        gate.values[half * N / 2 + i] = gate_first_ ? a : b;
        up.values[half * N / 2 + i] = gate_first_ ? b : a;
      }
    }
  }
  template <class T>
  __device__ void store(T* row, uint32_t column, const Packed<T, N>& gate,
                        const Packed<T, N>& up) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Packed<T, N> pairs;
#pragma unroll
      for (int i = 0; i < N / 2; ++i) {
        const T a = gate.values[half * N / 2 + i], b = up.values[half * N / 2 + i];
        pairs.values[2 * i] = gate_first_ ? a : b;
        pairs.values[2 * i + 1] = gate_first_ ? b : a;
      }
      cuda::store(row + 2 * column + half * N, pairs);
    }
  }

 private:
  bool gate_first_;
};

// Calls f with the pattern for elements of type T; `opens_vectors` as values.cuh has it.
template <class T, class F>
decltype(auto) with_glu_columns(const ResolvedGluLayout& layout, bool opens_vectors, F&& f) {
  constexpr int kN = kVector<T>;
  if (opens_vectors && layout.f % kN == 0) {
    if (layout.block % kN == 0) return f(GluBlocks<kN>(layout));
    if (layout.block == 1) return f(GluPairs<kN>(layout));
  }
  return f(GluBlocks<1>(layout));
}

}  // namespace moire::cuda
