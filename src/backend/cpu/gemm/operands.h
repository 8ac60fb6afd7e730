// The operands of a block product: where their elements lie and how they come into the cache
// blocks. Everything is FP32 from there on: the reader decodes what is stored, and applies scales.
#pragma once

#include <moire/tensor.h>

#include <algorithm>
#include <array>
#include <concepts>
#include <cstdint>

#include "backend/cpu/gemm/columns.h"
#include "backend/cpu/gemm/kernels.h"
#include "backend/cpu/gemm/scales.h"
#include "core/divide.h"

namespace moire::cpu::gemm {

// As long as any row of zeros has to be.
inline constexpr std::array<float, kBlockK> kZeros{};

// Rows left of a block product's sum keep this distance, an odd number of cache lines, so that a
// column of them spreads over the cache's sets.
inline constexpr int64_t kLeftPitch = kBlockK + 16;

// Rows of a matrix as floats, perhaps looked up through an index, perhaps scaled.
class RowReader {
 public:
  RowReader(const TensorView& matrix, const TensorView& row_idx, const Scales& scales)
      : data_(static_cast<const char*>(matrix.data)),
        dtype_(matrix.type()),
        element_bytes_(dtype_size(matrix.type())),
        row_bytes_(matrix.stride() * element_bytes_),
        index_(row_idx.is_present() ? row_idx.data : nullptr),
        index_is_64_bits_(row_idx.type() == DType::kInt64),
        scales_(scales) {}

  // Elements [column, column + n) of a row: where they lie if they are FP32, else decoded into
  // scratch.
  const float* read(const Kernels& k, int64_t row, int64_t column, int64_t n,
                    float* scratch) const {
    const char* p = address(row, column);
    if (dtype_ == DType::kFP32) return reinterpret_cast<const float*>(p);
    if (scales_.is_present()) {
      k.decode_fp8(fp8_row(row), column, n, scratch);
    } else {
      k.decode(p, dtype_, n, scratch);
    }
    return scratch;
  }

  // The same of rows row ... row + count - 1, at most kTransposeRows, of one K block: those of it
  // that share scales do so kTransposeRows at a time.
  void read_rows(const Kernels& k, int64_t row, int64_t count, int64_t column, int64_t n,
                 float* scratch, const float** out) const {
    const bool share_scales = scales_.is_present() && scales_.is_per_column();
    if (share_scales) {
      k.decode_fp8_rows(fp8_row(row), row_bytes_, count, column, n, scratch);
    }
    for (int64_t i = 0; i < count; ++i) {
      float* const decoded = scratch + i * n;
      out[i] = share_scales ? decoded : read(k, row + i, column, n, decoded);
    }
  }

  // The same of both halves of a gate and up row.
  void read_pairs(const Kernels& k, int64_t row, const ResolvedGluLayout& layout, int64_t first,
                  int64_t n, float* target) const {
    if (scales_.is_present()) {
      k.decode_fp8_pairs(fp8_row(row), layout, first, n, target);
    } else {
      k.decode_pairs(address(row, 0), dtype_, layout, first, n, target);
    }
  }

  const char* address(int64_t row, int64_t column) const {
    return data_ + source(row) * row_bytes_ + column * element_bytes_;
  }
  Fp8Row fp8_row(int64_t row) const {
    return {reinterpret_cast<const uint8_t*>(address(row, 0)), dtype_, scales_.row(source(row)),
            scales_.dtype(), scales_.is_per_column()};
  }
  DType dtype() const { return dtype_; }
  int64_t element_bytes() const { return element_bytes_; }
  // Into the second-level cache: rows a power of two apart would push each other out of the first.
  void prefetch(int64_t row, int64_t column, int64_t n) const {
    const char* p = address(row, column);
    for (int64_t at = 0; at < n * element_bytes_; at += 64) __builtin_prefetch(p + at, 0, 2);
  }

 private:
  int64_t source(int64_t row) const {
    if (index_ == nullptr) return row;
    return index_is_64_bits_ ? static_cast<const int64_t*>(index_)[row]
                             : static_cast<const int32_t*>(index_)[row];
  }

  const char* data_;
  DType dtype_;
  int64_t element_bytes_;
  int64_t row_bytes_;
  const void* index_;
  bool index_is_64_bits_;
  Scales scales_;
};

// One K block of a product.
struct KBlock {
  int64_t first;
  int64_t length;  // at most kBlockK
};

// `stage` prepares a K block for rows [0, count); `rows` then gives the floats of some of them, and
// `upcoming` says which memory they will come from.
template <class T>
concept LeftOperand = requires(const T& t, const Kernels& kernels, KBlock block, int64_t i,
                               float* scratch, const float** rows) {
  { t.stage(kernels, block, i, scratch) } -> std::same_as<void>;
  { t.rows(kernels, block, i, i, scratch, rows) } -> std::same_as<void>;
  { t.upcoming(block, i, i) } -> std::same_as<Upcoming>;
};

// Packs columns [first, first + count) of a K block into panels. `scratch` holds kTransposeRows
// rows of max(kBlockK, count) floats.
template <class T>
concept RightOperand = requires(const T& t, const Kernels& kernels, KBlock block, int64_t i,
                                float* panels, float* scratch) {
  { t.pack(kernels, block, i, i, panels, scratch) } -> std::same_as<void>;
};

// Left rows that are contiguous in k: activations, or weights [n, k] (through the column map).
struct RowsOnLeft {
  RowReader matrix;
  int64_t first = 0;
  const Columns* columns = nullptr;  // of a weight: row i is the weight's row columns->source(i)

  void stage(const Kernels&, KBlock, int64_t, float*) const {}
  void rows(const Kernels& kernels, KBlock block, int64_t i, int64_t count, float* scratch,
            const float** out) const {
    for (int64_t r = 0; r < count; ++r) {
      out[r] =
          matrix.read(kernels, source(i + r), block.first, block.length, scratch + r * kLeftPitch);
    }
  }
  Upcoming upcoming(KBlock block, int64_t i, int64_t count) const {
    Upcoming next;
    next.num_rows = count;
    next.bytes = block.length * matrix.element_bytes();
    for (int64_t r = 0; r < count; ++r) {
      next.rows[r] = matrix.address(source(i + r), block.first);
    }
    return next;
  }

 private:
  int64_t source(int64_t i) const {
    return columns != nullptr ? columns->source(first + i) : first + i;
  }
};

// Left rows that run down the columns of a matrix [k, m] (wgrad): transposed, a block at a time.
struct ColumnsOnLeft {
  RowReader matrix;
  int64_t first_k = 0;  // row of the matrix where k = 0
  int64_t first = 0;    // its column where the tile starts

  void stage(const Kernels& kernels, KBlock block, int64_t count, float* scratch) const {
    float* const decoded = scratch + count * kLeftPitch;
    for (int64_t k = 0; k < block.length; k += kTransposeRows) {
      const float* rows[kTransposeRows];
      const int64_t row = first_k + block.first + k;
      const int64_t num_rows = std::min(kTransposeRows, block.length - k);
      const int64_t next = std::min(kTransposeRows, block.length - k - num_rows);
      for (int64_t i = 0; i < next; ++i) matrix.prefetch(row + kTransposeRows + i, first, count);
      matrix.read_rows(kernels, row, num_rows, first, count, decoded, rows);
      // Rows past the block repeat its last one: what they become is never read.
      std::fill(rows + num_rows, rows + kTransposeRows, rows[num_rows - 1]);
      kernels.transpose(rows, kTransposeRows, count, scratch + k, kLeftPitch);
    }
  }
  void rows(const Kernels&, KBlock, int64_t i, int64_t count, float* scratch,
            const float** out) const {
    for (int64_t r = 0; r < count; ++r) out[r] = scratch + (i + r) * kLeftPitch;
  }
  Upcoming upcoming(KBlock, int64_t, int64_t) const { return {}; }  // staged: in the cache
};

// Right columns that are contiguous in k: the activations beside weights on the left.
struct RowsOnRight {
  RowReader matrix;
  int64_t first_row = 0;

  void pack(const Kernels& kernels, KBlock block, int64_t first, int64_t count, float* panels,
            float* scratch) const {
    for (int64_t at = 0; at < count; at += kernels.panel_width) {
      const int64_t rest = std::min(kernels.panel_width, count - at);
      const int64_t width = round_up(rest, kernels.lanes);
      for (int64_t lane = 0; lane < width; lane += kTransposeRows) {
        const float* rows[kTransposeRows];
        for (int64_t i = 0; i < kTransposeRows; ++i) {
          rows[i] = lane + i < rest ? matrix.read(kernels, first_row + first + at + lane + i,
                                                  block.first, block.length, scratch + i * kBlockK)
                                    : kZeros.data();
        }
        kernels.transpose(rows, kTransposeRows, block.length, panels + at * block.length + lane,
                          width);
      }
    }
  }
};

// Right columns that run down a matrix [k, n]: weights of that orientation, or wgrad's second
// operand.
struct ColumnsOnRight {
  RowReader matrix;
  int64_t first_k = 0;
  const Columns* columns = nullptr;

  void pack(const Kernels& kernels, KBlock block, int64_t first, int64_t count, float* panels,
            float* scratch) const {
    for (int64_t k = 0; k < block.length; k += kTransposeRows) {
      const int64_t num_rows = std::min(kTransposeRows, block.length - k);
      const int64_t next = std::min(kTransposeRows, block.length - k - num_rows);
      const int64_t row = first_k + block.first + k;
      const float* rows[kTransposeRows];
      for (int64_t i = 0; i < next; ++i) prefetch(row + kTransposeRows + i, first, count);
      if (!columns->paired) matrix.read_rows(kernels, row, num_rows, first, count, scratch, rows);
      for (int64_t i = 0; columns->paired && i < num_rows; ++i) {
        rows[i] = read_pairs(kernels, row + i, first, count, scratch + i * count);
      }
      kernels.copy_to_panels(rows, k, num_rows, block.length, count, panels);
    }
  }

 private:
  void prefetch(int64_t row, int64_t first, int64_t count) const {
    if (!columns->paired) return matrix.prefetch(row, first, count);
    const int64_t output = first / 2, n = count / 2;
    if (columns->layout.block <= n) {
      matrix.prefetch(row, columns->layout.first(output), count);
    } else {
      matrix.prefetch(row, columns->layout.first(output), n);
      matrix.prefetch(row, columns->layout.second(output), n);
    }
  }
  // A chunk at a time: its gates, then its ups. Tiles start at chunks.
  const float* read_pairs(const Kernels& kernels, int64_t row, int64_t first, int64_t count,
                          float* scratch) const {
    for (int64_t i = 0; i < count;) {
      const int64_t output = (first + i) / 2, n = columns->width(output);
      matrix.read_pairs(kernels, row, columns->layout, output, n, scratch + i);
      i += 2 * n;
    }
    return scratch;
  }
};

}  // namespace moire::cpu::gemm
