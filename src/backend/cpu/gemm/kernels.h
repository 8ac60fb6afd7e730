// The vectorised inner loops of the grouped GEMM, one set per instruction set, chosen at run time.
//
// The product of a block is sum[i][j] = sum over k of left[i][k] * right[k][j]. `left` is rows of
// FP32, each contiguous in k, whose elements are broadcast; `right` is packed in panels, whose rows
// are vectors. Both are FP32: storage types are decoded on the way here, FP8 times its scale.
//
// The rule that all bits rest on: an element's sum over one block of at most kBlockK products is
// one chain of fused multiply-adds from zero with k ascending, and blocks are added in order.
// Neither the panel width nor the number of rows enters, so every instruction set gives the same
// bits.
#pragma once

#include <moire/tensor.h>

#include <cstdint>

#include "core/glu_layout.h"

namespace moire::cpu::gemm {

// Length of one chain of multiply-adds: part of the numerics contract (docs/numerics.md).
inline constexpr int64_t kBlockK = 256;

// Most rows that a micro-tile has on any instruction set.
inline constexpr int64_t kMaxMicroRows = 8;

// Rows that one call of `transpose` takes together: the count must be a multiple of it.
inline constexpr int64_t kTransposeRows = 8;

// What happens to the sums of a K block.
enum class Write {
  kStore,
  kAdd,  // to what is there
};

// Where the sums of a block of rows go.
struct Target {
  float* data;
  int64_t pitch;
  Write write;
};

// Bytes that the next block product will read: the first `bytes` of each row. They are asked for
// while this one is computed.
struct Upcoming {
  const void* rows[kMaxMicroRows];
  int64_t num_rows = 0;
  int64_t bytes = 0;
};

// A row of FP8 elements times their scales, rounded to FP32 once: one scale per element, or one per
// 32 (E8M0) or 128 (FP32) of them.
struct Fp8Row {
  const uint8_t* data;
  DType dtype;  // E4M3 or E5M2
  const void* scales;
  DType scale_dtype;  // E8M0 or FP32
  bool scale_per_column;
};

// A panel's columns: `width` of them, the last panel as many vectors as it needs. Panels follow
// each other, each [kc][its width].
struct Kernels {
  int64_t micro_rows;   // rows of the largest micro-tile
  int64_t panel_width;  // columns of a full panel
  int64_t lanes;        // columns of one vector; the last panel's width is a multiple of it

  void (*decode)(const void* source, DType dtype, int64_t n, float* target);
  void (*encode)(const float* source, int64_t n, DType dtype, void* target);

  // Columns first ... first + n - 1 (at most kGluChunk) of both halves of a row of 2F: n gates,
  // then n ups.
  void (*decode_pairs)(const void* row, DType dtype, const ResolvedGluLayout& layout, int64_t first,
                       int64_t n, float* target);
  // Elements [first, first + n) of a row.
  void (*decode_fp8)(const Fp8Row& row, int64_t first, int64_t n, float* target);
  // The same of rows, `stride` bytes apart, that share a row of scales, one for each column.
  void (*decode_fp8_rows)(const Fp8Row& first_row, int64_t stride, int64_t num_rows, int64_t first,
                          int64_t n, float* target);
  // Columns [first, first + n) of both halves of a gate and up row.
  void (*decode_fp8_pairs)(const Fp8Row& row, const ResolvedGluLayout& layout, int64_t first,
                           int64_t n, float* target);

  // sums += scale * values, one multiply-add each.
  void (*add_scaled)(const float* values, float scale, int64_t n, float* sums);

  // target[c * pitch + r] = rows[r][c]; num_rows is a multiple of kTransposeRows.
  void (*transpose)(const float* const* rows, int64_t num_rows, int64_t num_columns, float* target,
                    int64_t pitch);
  // Rows k ... k + num_rows - 1 of all panels from rows of `num_columns` elements; missing columns
  // of the last panel become zeros.
  void (*copy_to_panels)(const float* const* rows, int64_t k, int64_t num_rows, int64_t kc,
                         int64_t num_columns, float* panels);
  // left * right over kc products, for num_rows (at most micro_rows) rows and num_columns columns.
  // Writes no other column.
  void (*multiply)(const float* const* left, int64_t num_rows, const float* right,
                   int64_t num_columns, int64_t kc, const Target& target, const Upcoming& upcoming);
};

// The set for this machine's best instruction set.
const Kernels& kernels();

}  // namespace moire::cpu::gemm
