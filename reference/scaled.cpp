#include "reference/scaled.h"

namespace moire::reference {
namespace {

int64_t block_of(const TensorView& scales) { return scales.type() == DType::kE8M0 ? 32 : 128; }

void scale(Number& number, double factor) {
  number.value = round_to(DType::kFP32, number.value * factor);
}

}  // namespace

Matrix read_rowwise(const TensorView& t, const TensorView& scales, const TensorView& row_idx,
                    int64_t count) {
  Matrix out = read_rows(t, row_idx, count);
  if (!scales.is_present()) return out;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = row_idx.is_present() ? read_index(row_idx, 0, i) : i;
    for (int64_t j = 0; j < out.columns; ++j) {
      scale(out.at(i, j), read_element(scales, row, j / block_of(scales)));
    }
  }
  return out;
}

Matrix read_columnwise(const TensorView& t, const TensorView& scales, const TensorView& row_idx,
                       const moire_groups& groups) {
  Matrix out = read_rows(t, row_idx, rows_in_use(groups));
  if (!scales.is_present()) return out;
  const int64_t b = block_of(scales);
  for (int64_t g = 0; g < groups.num_groups; ++g) {
    const int64_t first = groups.offsets[g];
    for (int64_t i = first; i < groups.offsets[g + 1]; ++i) {
      const int64_t row = first / b + g + (i - first) / b;
      for (int64_t j = 0; j < out.columns; ++j) scale(out.at(i, j), read_element(scales, row, j));
    }
  }
  return out;
}

Matrix read_weight(const moire_weight& w, const TensorView& scales, int32_t direction,
                   int64_t group) {
  Matrix out = read_stored(w, group);
  if (scales.is_present()) {
    const bool tiles = scales.type() == DType::kFP32;
    const int64_t b = block_of(scales), first = group * scales.shape[1];
    for (int64_t i = 0; i < out.rows; ++i) {
      for (int64_t j = 0; j < out.columns; ++j) {
        const int64_t row = tiles || direction == MOIRE_COLUMNWISE ? i / b : i;
        const int64_t column = tiles || direction == MOIRE_ROWWISE ? j / b : j;
        scale(out.at(i, j), read_element(scales, first + row, column));
      }
    }
  }
  return w.layout == MOIRE_IN_OUT ? transposed(out) : out;
}

}  // namespace moire::reference
