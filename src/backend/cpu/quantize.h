// What the parts of quantize, quantize_weight, requantize and dequantize on the CPU share: a strip,
// some columns of a block of rows, is what a task works on.
#pragma once

#include <moire/quantize.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <string>

#include "backend/cpu/row_blocks.h"
#include "backend/cpu/rows.h"
#include "core/device_state.h"
#include "core/format.h"
#include "core/scale_shapes.h"

namespace moire::cpu {

inline constexpr int64_t kMaxScaleBlock = 128;
// Columns that go through the cache at a time: a multiple of every block.
inline constexpr int64_t kPieceColumns = 128;

struct QuantizeFormat {
  DType element;    // E4M3 or E5M2
  int32_t scaling;  // moire_scaling
  bool fractional;  // FP8_BLOCK, FP8_TILE: scales need not be powers of two

  // Elements along one side of what shares a scale.
  int64_t block() const { return scale_block(scaling); }
  int64_t scale_bytes() const { return dtype_size(scale_dtype(scaling)); }
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

// The rows that a strip reads, each from its column 0: floats, or FP8 with their scales.
struct StripSource {
  DType dtype;
  const void* rows[kMaxScaleBlock];
  const void* scales[kMaxScaleBlock];  // each row's row of scales
  DType scale_dtype;
  int32_t direction;  // MOIRE_COLUMNWISE: a scale per column
};

// Columns first ... end - 1 of a block of rows; `first` is a multiple of kPieceColumns.
struct Strip {
  StripSource source;
  int64_t num_rows, first, end;
};

// The copies are those of column 0 of the block. FP8_TILE: rowwise alone.
struct QuantizeStrip {
  Strip strip;
  QuantizeFormat rowwise_format, columnwise_format;
  QuantizedPiece rowwise, columnwise;
};

// `target` is the first row's column 0.
struct DequantizeStrip {
  Strip strip;
  void* target;
  DType dtype;
  int64_t stride;
  bool bypasses_cache;  // every row starts at a cache line
};

// The row blocks of a ragged matrix, or of the weights [G, n, k] of all groups. An index is the row
// of a block's scales in a columnwise copy, or in tiles.
class ScaleBlocks {
 public:
  ScaleBlocks(const moire_groups& groups, int64_t size)
      : ragged_(groups, size), size_(size), count_(ragged_.bound()) {}
  ScaleBlocks(int64_t num_groups, int64_t n, int64_t size)
      : ragged_({}),
        n_(n),
        per_matrix_(ceil_div(n, size)),
        size_(size),
        count_(num_groups * per_matrix_) {}

  int64_t count() const { return count_; }
  int64_t size() const { return size_; }
  // Rows count through all matrices.
  RowBlock at(int64_t index) const {
    if (per_matrix_ == 0) return ragged_.at(index);
    const int64_t g = index / per_matrix_, first = index % per_matrix_ * size_;
    return {g, g * n_ + first, g * n_ + std::min(n_, first + size_)};
  }

 private:
  RowBlocks ragged_;
  int64_t n_ = 0, per_matrix_ = 0;
  int64_t size_, count_;
};

// The rows of a block of FP8 rows and their scales.
inline void fill_quantized(const moire_quantized& q, int32_t scaling, int32_t direction,
                           int64_t index, const RowBlock& block, StripSource& out) {
  const TensorView data(q.data), scales(q.scales);
  const bool is_tile = scaling == MOIRE_SCALING_FP8_TILE;
  out.dtype = data.type();
  out.scale_dtype = scales.type();
  out.direction = is_tile ? MOIRE_ROWWISE : direction;
  const bool has_row_of_its_own = !is_tile && direction == MOIRE_ROWWISE;
  for (int64_t i = block.first; i < block.end; ++i) {
    out.rows[i - block.first] = row_bytes_of(data, i);
    out.scales[i - block.first] = row_bytes_of(scales, has_row_of_its_own ? i : index);
  }
}

// Columns of a task: enough to stream rows, few enough for the second-level cache.
constexpr int64_t strip_columns(int64_t block_rows) {
  constexpr int64_t kElementsPerTask = 1 << 16;
  return std::max(kElementsPerTask / block_rows, 8 * kPieceColumns);
}

inline constexpr int64_t kMaxStripColumns = strip_columns(scale_block(MOIRE_SCALING_MXFP8));

// Whether a tensor that is written once, row by row, goes to memory past the cache.
inline bool bypasses_cache(const TensorView& t) {
  constexpr int64_t kLine = 64;
  const int64_t bytes = dtype_size(t.type());
  const bool is_aligned = reinterpret_cast<uintptr_t>(t.data) % kLine == 0;
  return is_aligned && t.stride() * bytes % kLine == 0 && t.num_elements() * bytes >= kBypassBytes;
}

// The blocks of data that is quantised: ragged, or weights where it has three dimensions.
inline ScaleBlocks blocks_of(const TensorView& data, const moire_groups& groups, int32_t scaling) {
  const int64_t size = scale_block(scaling);
  return data.rank == 3 ? ScaleBlocks(data.shape[0], data.shape[1], size)
                        : ScaleBlocks(groups, size);
}

inline std::string strips_policy(const DeviceState& state, int32_t scaling) {
  const int64_t rows = scale_block(scaling);
  return concat("blocks of ", rows, " rows, strips of ", strip_columns(rows), " columns, ",
                state.simd, ", ", state.num_threads, " threads");
}

// Calls body(index, block, first, end) for strips of all blocks, those without rows included.
template <class Body>
void for_each_strip(ThreadPool& pool, const ScaleBlocks& blocks, int64_t columns, Body&& body) {
  const int64_t width = strip_columns(blocks.size());
  const int64_t strips = ceil_div(columns, width);
  pool.parallel_for(blocks.count() * strips, [&](int64_t task, int) {
    const int64_t index = task / strips, first = task % strips * width;
    body(index, blocks.at(index), first, std::min(columns, first + width));
  });
}

}  // namespace moire::cpu
