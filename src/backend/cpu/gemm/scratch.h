// The engine's part of the workspace: one piece per thread, sized by the largest tile.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "backend/cpu/gemm/kernels.h"
#include "core/divide.h"

namespace moire::cpu::gemm {

inline constexpr size_t kAlignment = 256;

inline constexpr size_t aligned(size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// Pieces of workspace, one after the other; each 256-byte aligned if the first is.
class Carver {
 public:
  explicit Carver(void* data) : at_(static_cast<char*>(data)) {}
  template <class T>
  T* take(int64_t count) {
    T* piece = reinterpret_cast<T*>(at_);
    at_ += aligned(static_cast<size_t>(count) * sizeof(T));
    return piece;
  }

 private:
  char* at_;
};

// Floats of each buffer that one thread needs.
struct ScratchSize {
  int64_t panels;   // the right operand's K block, packed
  int64_t sums;     // the tile
  int64_t left;     // decoded or transposed rows of the left operand
  int64_t decoded;  // rows of the right operand on their way into panels
  int64_t patch;    // finished sums with rows and columns exchanged

  size_t bytes() const {
    size_t total = 0;
    for (const int64_t n : {panels, sums, left, decoded, patch}) {
      total += aligned(static_cast<size_t>(n) * sizeof(float));
    }
    return total;
  }
};

struct Scratch {
  Scratch(const ScratchSize& size, void* data) {
    Carver carver(data);
    panels = carver.take<float>(size.panels);
    sums = carver.take<float>(size.sums);
    left = carver.take<float>(size.left);
    decoded = carver.take<float>(size.decoded);
    patch = carver.take<float>(size.patch);
  }
  float *panels, *sums, *left, *decoded, *patch;
};

// Columns as the panels store them: whole vectors of any instruction set.
inline constexpr int64_t padded(int64_t columns) { return round_up(columns, 16); }
// Distance of a tile's rows: an odd number of cache lines, so that they spread over the cache's
// sets.
inline constexpr int64_t sums_pitch(int64_t columns) { return round_up(columns, 32) + 16; }

}  // namespace moire::cpu::gemm
