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

// Element-interleaved: N pairs are two loads of 16 bytes, of whose words permutations of bytes pick
// either half: selectors count the bytes of two words, and those xor 0x4444 the other word's.
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
    const auto a = bits_as<uint4>(first), b = bits_as<uint4>(second);
    const auto pick = [&](uint32_t bytes) {
      return bits_as<Pack>(uint4{__byte_perm(a.x, a.y, bytes), __byte_perm(a.z, a.w, bytes),
                                 __byte_perm(b.x, b.y, bytes), __byte_perm(b.z, b.w, bytes)});
    };
    gate = pick(gate_first_ ? kFirsts : kSeconds);
    up = pick(gate_first_ ? kSeconds : kFirsts);
  }
  template <class Pack>
  __device__ void join(const Pack& gate, const Pack& up, Pack& first, Pack& second) const {
    const auto a = bits_as<uint4>(gate), b = bits_as<uint4>(up);
    const uint32_t swap = gate_first_ ? 0 : 0x4444, low = kLow ^ swap, high = kHigh ^ swap;
    first = bits_as<Pack>(uint4{__byte_perm(a.x, b.x, low), __byte_perm(a.x, b.x, high),
                                __byte_perm(a.y, b.y, low), __byte_perm(a.y, b.y, high)});
    second = bits_as<Pack>(uint4{__byte_perm(a.z, b.z, low), __byte_perm(a.z, b.z, high),
                                 __byte_perm(a.w, b.w, low), __byte_perm(a.w, b.w, high)});
  }

 private:
  static constexpr int kSize = kVectorBytes / N;  // of an element
  static_assert(kSize <= sizeof(uint32_t));
  // The first and the second element of each pair in two words.
  static constexpr uint32_t kFirsts = kSize == 1 ? 0x6420 : kSize == 2 ? 0x5410 : 0x3210;
  static constexpr uint32_t kSeconds = kFirsts + kSize * 0x1111;
  // Pairs of the elements of two words, the first in their low halves.
  static constexpr uint32_t kLow = kSize == 1 ? 0x5140 : kFirsts;
  static constexpr uint32_t kHigh = kSize == 1 ? 0x7362 : kSeconds;

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

// A pack is N elements: a Packed, or whatever is as large.
template <class Columns, class T, class Pack>
__device__ void load_glu(const Columns& columns, const T* row, uint32_t column, Pack& gate,
                         Pack& up) {
  const auto at = [&](uint32_t i) { return *reinterpret_cast<const Pack*>(row + i); };
  const Pack first = at(columns.first(column));
  if constexpr (Columns::kIsGated) {
    columns.split(first, at(columns.second(column)), gate, up);
  } else {
    columns.split(first, first, gate, up);
  }
}
template <class Columns, class T, class Pack>
__device__ void store_glu(const Columns& columns, T* row, uint32_t column, const Pack& gate,
                          const Pack& up) {
  Pack first, second;
  columns.join(gate, up, first, second);
  *reinterpret_cast<Pack*>(row + columns.first(column)) = first;
  *reinterpret_cast<Pack*>(row + columns.second(column)) = second;
}

template <class T>
constexpr bool kHasPairs = sizeof(T) <= sizeof(uint32_t);

// Calls f with the pattern for elements of type T; `opens_vectors` as values.cuh has it. The layout
// has a gate and an up.
template <class T, class F>
decltype(auto) with_gated_columns(const ResolvedGluLayout& layout, bool opens_vectors, F&& f) {
  constexpr int kN = kVector<T>;
  if (opens_vectors && layout.f % kN == 0) {
    if (layout.block % kN == 0) return f(GluBlocks<kN>(layout));
    if constexpr (kHasPairs<T>) {
      if (layout.block == 1) return f(GluPairs<kN>(layout));
    }
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
