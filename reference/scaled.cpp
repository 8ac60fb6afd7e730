#include "reference/scaled.h"

#include <algorithm>

#include "reference/float_format.h"
#include "reference/fp8.h"

namespace moire::reference {
namespace {

// Elements that are folded together, MXFP8 ones: of a row, of a column, or a tile.
struct Region {
  int64_t first_row, end_row, first_column, end_column;
};

class Reader {
 public:
  // So many rows and columns of elements share a scale.
  Reader(const TensorView& elements, const TensorView& scales, int64_t rows, int64_t columns,
         Dot::Factors factors)
      : element_(elements.type()),
        scales_(scales),
        rows_(rows),
        columns_(columns),
        by_tensor_cores_(factors == Dot::Factors::kEmulated) {}

  // Scales the elements of a region whose first row has its scales in this row of them.
  void scale(Matrix& m, const Region& r, int64_t scales_row) const {
    const auto scale_of = [&](int64_t i, int64_t j) {
      return read_element(scales_, scales_row + (i - r.first_row) / rows_, j / columns_);
    };
    double largest = std::ldexp(1.0, -127);
    for (int64_t i = r.first_row; i < r.end_row; i += rows_) {
      for (int64_t j = r.first_column; j < r.end_column; j += columns_) {
        largest = std::fmax(largest, scale_of(i, j));  // NaN left out
      }
    }
    for (int64_t i = r.first_row; i < r.end_row; ++i) {
      for (int64_t j = r.first_column; j < r.end_column; ++j) {
        m.at(i, j) = scaled(m.at(i, j).value, scale_of(i, j), largest);
      }
    }
  }

 private:
  Number scaled(double element, double scale, double largest) const {
    if (!by_tensor_cores_) return {round_to(DType::kFP32, element * scale)};
    const int least = element_ == DType::kE4M3 ? -6 : -14;
    if (scales_.type() != DType::kE8M0) {
      return {element * scale, 0, static_cast<float>(scale), least};
    }
    const double exact = element * scale;
    const double folded = std::isfinite(exact)
                              ? decode(element_, encode_fp8(element_, exact / largest)) * largest
                              : exact;
    return {folded, std::isfinite(exact) ? std::abs(folded - exact) : 0,
            static_cast<float>(largest), least};
  }

  DType element_;
  TensorView scales_;
  int64_t rows_, columns_;
  bool by_tensor_cores_;
};

}  // namespace

Matrix read_rowwise(const TensorView& t, const TensorView& scales, const TensorView& row_idx,
                    int64_t count, Dot::Factors factors) {
  Matrix out = read_rows(t, row_idx, count);
  if (!scales.is_present()) return out;
  const Reader reader(t, scales, 1, block_of(scales.type()), factors);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = row_idx.is_present() ? read_index(row_idx, 0, i) : i;
    for (int64_t j = 0; j < out.columns; j += 128) {
      reader.scale(out, {i, i + 1, j, std::min(j + 128, out.columns)}, row);
    }
  }
  return out;
}

Matrix read_columnwise(const TensorView& t, const TensorView& scales, const TensorView& row_idx,
                       const moire_groups& groups, Dot::Factors factors) {
  Matrix out = read_rows(t, row_idx, rows_in_use(groups));
  if (!scales.is_present()) return out;
  const int64_t b = block_of(scales.type());
  const Reader reader(t, scales, b, 1, factors);
  for (int64_t g = 0; g < groups.num_groups; ++g) {
    const int64_t first = groups.offsets[g], end = groups.offsets[g + 1];
    for (int64_t i = first; i < end; i += 128) {
      for (int64_t j = 0; j < out.columns; ++j) {
        reader.scale(out, {i, std::min(i + 128, end), j, j + 1}, first / b + g + (i - first) / b);
      }
    }
  }
  return out;
}

Matrix read_weight(const moire_weight& w, const TensorView& scales, int32_t direction,
                   int64_t group, Dot::Factors factors) {
  Matrix out = read_stored(w, group);
  if (scales.is_present()) {
    const bool tiles = scales.type() == DType::kFP32;
    const int64_t rows = tiles || direction == MOIRE_COLUMNWISE ? block_of(scales.type()) : 1;
    const int64_t columns = tiles || direction == MOIRE_ROWWISE ? block_of(scales.type()) : 1;
    const Reader reader(w.tensor, scales, rows, columns, factors);
    for (int64_t i = 0; i < out.rows; i += 128) {
      for (int64_t j = 0; j < out.columns; j += 128) {
        reader.scale(out, {i, std::min(i + 128, out.rows), j, std::min(j + 128, out.columns)},
                     group * scales.shape[1] + i / rows);
      }
    }
  }
  return w.layout == MOIRE_IN_OUT ? transposed(out) : out;
}

}  // namespace moire::reference
