// What quantize_block-inl.h is told: how to quantise, and where the codes and scales go.
#pragma once

#include <moire/tensor.h>

#include <atomic>
#include <cstdint>

namespace moire::cpu {

struct QuantizeFormat {
  DType element;    // E4M3 or E5M2
  int32_t scaling;  // moire_scaling
  bool fractional;  // FP8_BLOCK, FP8_TILE: scales need not be powers of two

  // Elements along one side of what shares a scale.
  int64_t block() const { return scaling == MOIRE_SCALING_MXFP8 ? 32 : 128; }
  int64_t scale_bytes() const { return scaling == MOIRE_SCALING_MXFP8 ? 1 : 4; }
};

// A piece of one quantised copy: the code and the scale of the piece's first element, and elements
// from one row to the next of each. Absent where data is null.
struct QuantizedPiece {
  uint8_t* data = nullptr;
  int64_t stride = 0;
  void* scales = nullptr;  // E8M0 or FP32
  int64_t scale_stride = 0;
  // Codes may go to memory past the cache; every row of the copy starts at a cache line.
  bool bypasses_cache = false;
  // Set where an element is infinite or NaN; not asked for where null.
  std::atomic<bool>* non_finite = nullptr;

  void note_non_finite() const {
    if (non_finite != nullptr) non_finite->store(true, std::memory_order_relaxed);
  }
};

}  // namespace moire::cpu
