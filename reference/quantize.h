// FP8 quantisation by the definitions in docs/numerics.md: every byte of codes and scales, in
// double and one block at a time.
#pragma once

#include <moire.h>

#include <cstdint>
#include <vector>

#include "reference/tensor.h"

namespace moire::reference {

// The bytes of a tensor's rows. Rows that nothing owns are its tail: zeros, or untouched.
struct ByteRows {
  ByteRows() = default;
  ByteRows(int64_t rows_, int64_t row_bytes_)
      : rows(rows_),
        row_bytes(row_bytes_),
        bytes(static_cast<size_t>(rows_ * row_bytes_)),
        is_owned(static_cast<size_t>(rows_)) {}
  uint8_t& at(int64_t row, int64_t byte) {
    return bytes[static_cast<size_t>(row * row_bytes + byte)];
  }
  uint8_t at(int64_t row, int64_t byte) const {
    return bytes[static_cast<size_t>(row * row_bytes + byte)];
  }

  int64_t rows = 0, row_bytes = 0;
  std::vector<uint8_t> bytes;
  std::vector<bool> is_owned;
};

// One copy; both empty where the arguments leave it out.
struct QuantizedBytes {
  ByteRows data, scales;
};
struct QuantizeResults {
  QuantizedBytes rowwise, columnwise;
  Matrix grad_bias;
};

QuantizeResults quantize(const moire_quantize_args& args);
// Rows count through the matrices of all groups.
QuantizeResults quantize_weight(const moire_quantize_weight_args& args);
QuantizedBytes requantize(const moire_requantize_args& args);
// Rows in use, before they are rounded to the target's type.
Matrix dequantize(const moire_dequantize_args& args);
// Every byte of the target.
ByteRows convert_scales(const moire_convert_scales_args& args);

}  // namespace moire::reference
