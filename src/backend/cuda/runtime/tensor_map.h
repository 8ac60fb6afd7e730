// Tensor maps: what TMA is told of a tensor, encoded on the host and passed to kernels as a
// parameter. Dimensions are innermost first, strides in bytes and of all dimensions but the first.
#pragma once

#include "backend/cuda/runtime/launch.h"

namespace moire::cuda {

// Matrices [rows, columns] of one shape, `distance` bytes from one to the next, as a dimension of a
// map counts them: a packed tensor's, its groups; or a list's, which lie at multiples of a power of
// two from the first in memory. A map of 2^31 matrices at these multiples, which overlap, has all
// of the list's among them, the one at address p as number (p - tensor.data) / distance.
struct Matrices {
  Matrices(const TensorView& packed);
  explicit Matrices(const Weight& w);
  // Whether the last in memory still has a number.
  bool reach_all() const { return span / distance < kMost; }

  static constexpr int64_t kMost = int64_t{1} << 31;
  TensorView tensor;
  int64_t count, distance;
  int64_t span = 0;  // of a list, from its first matrix in memory to its last
};

// Encodes maps for what a launcher launches; it fails where one cannot be encoded.
class TensorMaps {
 public:
  explicit TensorMaps(Launcher& launcher) : launcher_(launcher) {}

  struct Dimension {
    int64_t size;
    int64_t stride_bytes;  // not read for the innermost
    int64_t box;
  };
  // Elements of `t` (BF16, FP32, FP8), zeros outside. Rows of a box are 128 bytes or 64 and its
  // swizzle is of as many; longer ones have none.
  CUtensorMap encode(std::string_view name, const TensorView& t,
                     std::initializer_list<Dimension> dimensions);

  // [rows, columns] in boxes of box_rows x 128 bytes; here and below, `box_columns` if not 128
  // bytes of them.
  CUtensorMap matrix(std::string_view name, const TensorView& t, int64_t box_rows,
                     int64_t box_columns = 0);
  // In boxes of box_rows x 128 bytes of one matrix.
  CUtensorMap matrices(std::string_view name, const Matrices& m, int64_t box_rows,
                       int64_t box_columns = 0);
  // The same, columns as [columns / 64, 64]: boxes of num_panels of box_rows x 128 bytes, BF16.
  CUtensorMap panels(std::string_view name, const Matrices& m, int64_t box_rows,
                     int64_t num_panels);
  // The rows of one group of [capacity, columns], which clips exactly at the group's end though it
  // knows no group. `halves` > 1: columns as [halves, columns / halves], each clipped by itself.
  //
  // Dimensions {columns, halves, 2^30, many, many} with the strides {., row, row, 2^34 - row}: the
  // element at {c, h, 2^30 - len + i, off + len, 2^30} is at row (2^30 + off + i) * row
  // + 2^30 * (2^34 - row) = (off + i) * row modulo 2^64, and inside the map only while i < len.
  // Many is 2^31: with 2^32, which the encoder takes as well, stores are an illegal instruction.
  CUtensorMap ragged_rows(std::string_view name, const TensorView& t, int64_t box_rows,
                          int64_t halves = 1, int64_t box_columns = 0);

 private:
  Launcher& launcher_;
};

}  // namespace moire::cuda
