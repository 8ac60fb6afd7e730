// Gate and up of N neighbouring columns of F in a row of 2F: one access pattern per way in which
// the halves can lie. Either way they are two pieces of N elements; first and second say where in
// the row these lie, split and join turn them into gate and up and back. Without a gate there is
// one piece, and `second` and `up` mean nothing. Columns are 32-bit (why_not_f).
#pragma once

#include "backend/cuda/device/values.cuh"
#include "backend/implementation.h"
#include "core/format.h"
#include "core/glu_layout.h"

namespace moire::cuda {

inline Reason why_not_f(int64_t f) {
  if (f < int64_t{1} << 30) return std::nullopt;
  return concat("F is ", f, ", less than 2^30 is taken");
}

// Blocks of a multiple of N columns: each half is one load.
template <int N>
class GluBlocks {
 public:
  static constexpr int kColumns = N;
  static constexpr bool kIsGated = true;

  explicit GluBlocks(const ResolvedGluLayout& layout)
      : block_(static_cast<uint32_t>(layout.block)),
        gate_(layout.gate_first ? 0 : block_),
        up_(layout.gate_first ? block_ : 0) {}

  __device__ uint32_t first(uint32_t column) const { return pair_of(column) + gate_; }
  __device__ uint32_t second(uint32_t column) const { return pair_of(column) + up_; }
  template <class Pack>
  __device__ void split(const Pack& first, const Pack& second, Pack& gate, Pack& up) const {
    gate = first;
    up = second;
  }
  template <class Pack>
  __device__ void join(const Pack& gate, const Pack& up, Pack& first, Pack& second) const {
    first = gate;
    second = up;
  }

 private:
  // 2 * (column - column % block) + column % block.
  __device__ uint32_t pair_of(uint32_t column) const { return column + column / block_ * block_; }

  uint32_t block_, gate_, up_;
};

// Element-interleaved: N pairs are two loads.
template <int N>
class GluPairs {
 public:
  static constexpr int kColumns = N;
  static constexpr bool kIsGated = true;

  explicit GluPairs(const ResolvedGluLayout& layout) : gate_first_(layout.gate_first) {}

  __device__ uint32_t first(uint32_t column) const { return 2 * column; }
  __device__ uint32_t second(uint32_t column) const { return 2 * column + N; }
  template <class Pack>
  __device__ void split(const Pack& first, const Pack& second, Pack& gate, Pack& up) const {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const Pack& pairs = i < N / 2 ? first : second;
      const auto a = pairs.values[2 * i % N], b = pairs.values[2 * i % N + 1];
      gate.values[i] = gate_first_ ? a : b;
      up.values[i] = gate_first_ ? b : a;
    }
  }
  template <class Pack>
  __device__ void join(const Pack& gate, const Pack& up, Pack& first, Pack& second) const {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      Pack& pairs = i < N / 2 ? first : second;
      pairs.values[2 * i % N] = gate_first_ ? gate.values[i] : up.values[i];
      pairs.values[2 * i % N + 1] = gate_first_ ? up.values[i] : gate.values[i];
    }
  }

 private:
  bool gate_first_;
};

// Rows of F, all of it gates.
template <int N>
class GluGates {
 public:
  static constexpr int kColumns = N;
  static constexpr bool kIsGated = false;

  __device__ uint32_t first(uint32_t column) const { return column; }
  template <class Pack>
  __device__ void split(const Pack& first, const Pack&, Pack& gate, Pack& up) const {
    gate = up = first;
  }
  template <class Pack>
  __device__ void join(const Pack& gate, const Pack&, Pack& first, Pack&) const {
    first = gate;
  }
};

template <class Columns, class T, int N>
__device__ void load_glu(const Columns& columns, const T* row, uint32_t column, Packed<T, N>& gate,
                         Packed<T, N>& up) {
  const Packed<T, N> first = load<N>(row + columns.first(column));
  if constexpr (Columns::kIsGated) {
    columns.split(first, load<N>(row + columns.second(column)), gate, up);
  } else {
    columns.split(first, first, gate, up);
  }
}
template <class Columns, class T, int N>
__device__ void store_glu(const Columns& columns, T* row, uint32_t column, const Packed<T, N>& gate,
                          const Packed<T, N>& up) {
  Packed<T, N> first, second;
  columns.join(gate, up, first, second);
  store(row + columns.first(column), first);
  store(row + columns.second(column), second);
}

// Calls f with the pattern for elements of type T; `opens_vectors` as values.cuh has it. The layout
// has a gate and an up.
template <class T, class F>
decltype(auto) with_gated_columns(const ResolvedGluLayout& layout, bool opens_vectors, F&& f) {
  constexpr int kN = kVector<T>;
  if (opens_vectors && layout.f % kN == 0) {
    if (layout.block % kN == 0) return f(GluBlocks<kN>(layout));
    if (layout.block == 1) return f(GluPairs<kN>(layout));
  }
  return f(GluBlocks<1>(layout));
}
// The same of any layout.
template <class T, class F>
decltype(auto) with_glu_columns(const ResolvedGluLayout& layout, bool opens_vectors, F&& f) {
  constexpr int kN = kVector<T>;
  if (layout.is_gated) return with_gated_columns<T>(layout, opens_vectors, f);
  if (opens_vectors && layout.f % kN == 0) return f(GluGates<kN>());
  return f(GluGates<1>());
}

}  // namespace moire::cuda
