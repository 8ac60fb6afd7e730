#include "reference/tensor.h"

#include <cstdlib>
#include <cstring>

#include "reference/float_format.h"

namespace moire::reference {
namespace {

size_t bytes_per_element(DType dtype) {
  switch (dtype) {
    case DType::kE4M3:
    case DType::kE5M2:
    case DType::kE8M0:
      return 1;
    case DType::kBF16:
    case DType::kFP16:
      return 2;
    case DType::kFP32:
    case DType::kInt32:
      return 4;
    case DType::kFP64:
    case DType::kInt64:
      return 8;
    default:
      std::abort();
  }
}

unsigned char* address(const TensorView& t, int64_t row, int64_t column) {
  const auto element = static_cast<size_t>(row * t.stride() + column);
  return static_cast<unsigned char*>(t.data) + element * bytes_per_element(t.type());
}

template <class T>
T read_as(const TensorView& t, int64_t row, int64_t column) {
  T value;
  std::memcpy(&value, address(t, row, column), sizeof(T));
  return value;
}

}  // namespace

Matrix transposed(const Matrix& m) {
  Matrix out(m.columns, m.rows);
  for (int64_t i = 0; i < m.rows; ++i) {
    for (int64_t j = 0; j < m.columns; ++j) out.at(j, i) = m.at(i, j);
  }
  return out;
}

Matrix round_to(DType dtype, Matrix m) {
  for (Number& number : m.values) number = round_to(dtype, number);
  return m;
}

double read_element(const TensorView& t, int64_t row, int64_t column) {
  switch (t.type()) {
    case DType::kFP64:
      return read_as<double>(t, row, column);
    case DType::kFP32:
      return decode(DType::kFP32, read_as<uint32_t>(t, row, column));
    case DType::kE4M3:
    case DType::kE5M2:
    case DType::kE8M0:
      return decode(t.type(), read_as<uint8_t>(t, row, column));
    default:
      return decode(t.type(), read_as<uint16_t>(t, row, column));
  }
}

void write_element(const TensorView& t, int64_t row, int64_t column, double value) {
  // The bytes of the pattern, lowest first: every platform of this project is little-endian.
  const uint64_t bits = encode(t.type(), round_to(t.type(), value));
  std::memcpy(address(t, row, column), &bits, bytes_per_element(t.type()));
}

int64_t read_index(const TensorView& t, int64_t row, int64_t column) {
  return t.type() == DType::kInt32 ? read_as<int32_t>(t, row, column)
                                   : read_as<int64_t>(t, row, column);
}

Matrix read(const TensorView& t) { return read_rows(t, {}, t.num_rows()); }

Matrix read_rows(const TensorView& t, const TensorView& row_idx, int64_t count) {
  Matrix out(count, t.columns());
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = row_idx.is_present() ? read_index(row_idx, 0, i) : i;
    for (int64_t j = 0; j < out.columns; ++j) {
      out.at(i, j) = {read_element(t, row, j), 0, 0, least_exponent(t.type())};
    }
  }
  return out;
}

std::vector<double> read_vector(const TensorView& t, int64_t count, double fallback) {
  std::vector<double> out(static_cast<size_t>(count), fallback);
  if (!t.is_present()) return out;
  for (int64_t i = 0; i < count; ++i) out[static_cast<size_t>(i)] = read_element(t, 0, i);
  return out;
}

Matrix read_column(const TensorView& t, int64_t count) {
  Matrix out(count, 1);
  for (int64_t i = 0; i < count; ++i) out.at(i, 0).value = read_element(t, 0, i);
  return out;
}

Matrix read_stored(const moire_weight& w, int64_t group) {
  TensorView matrix = w.tensor;
  matrix.rank = 2;
  matrix.shape[0] = w.tensor.shape[1];
  matrix.shape[1] = w.tensor.shape[2];
  if (w.list != nullptr) {
    matrix.data = const_cast<void*>(w.list[group]);
  } else if (w.tensor.data != nullptr) {
    matrix.data = address(w.tensor, group * matrix.shape[0], 0);
  }
  return read(matrix);
}

Matrix read_weight(const moire_weight& w, int64_t group) {
  Matrix stored = read_stored(w, group);
  return w.layout == MOIRE_IN_OUT ? transposed(stored) : stored;
}

int64_t rows_in_use(const moire_groups& groups) {
  return groups.num_groups == 0 ? 0 : groups.offsets[groups.num_groups];
}

}  // namespace moire::reference
