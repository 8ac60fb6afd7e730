// Reading what tensor views hold: any dtype to double, row by row, gathered or not, and writing
// doubles back, rounded. Everything else of the reference works on matrices of Numbers.
#pragma once

#include <moire/tensor.h>

#include <cstdint>
#include <vector>

#include "reference/number.h"

namespace moire::reference {

// Row-major [rows, columns].
struct Matrix {
  Matrix() = default;
  Matrix(int64_t rows_, int64_t columns_)
      : rows(rows_), columns(columns_), values(static_cast<size_t>(rows_ * columns_)) {}
  Number& at(int64_t i, int64_t j) { return values[static_cast<size_t>(i * columns + j)]; }
  const Number& at(int64_t i, int64_t j) const {
    return values[static_cast<size_t>(i * columns + j)];
  }

  int64_t rows = 0;
  int64_t columns = 0;
  std::vector<Number> values;
};

Matrix transposed(const Matrix& m);
Matrix round_to(DType dtype, Matrix m);

// One matrix per group.
using Weights = std::vector<Matrix>;

// Element [row, column] of a view of any dtype; rank 3 counts rows through all its matrices, rank 1
// is one row.
double read_element(const TensorView& t, int64_t row, int64_t column);
// Rounds to the dtype of the view.
void write_element(const TensorView& t, int64_t row, int64_t column, double value);
// Entry i of a rank-1 index tensor, INT32 or INT64.
int64_t read_index(const TensorView& t, int64_t row, int64_t column);

Matrix read(const TensorView& t);
// The first `count` rows of the ragged operand: rows t[i], or t[row_idx[i]] where row_idx is given.
Matrix read_rows(const TensorView& t, const TensorView& row_idx, int64_t count);
// The first `count` entries of a rank-1 tensor; all `fallback` where it is absent.
std::vector<double> read_vector(const TensorView& t, int64_t count, double fallback);
inline std::vector<double> ones(int64_t count) { return read_vector({}, count, 1); }

// The first `count` entries of a rank-1 tensor as a column [count, 1].
Matrix read_column(const TensorView& t, int64_t count);

// The matrix of one group as it lies in memory, [shape[1], shape[2]].
Matrix read_stored(const moire_weight& w, int64_t group);
// The same as [out, in], whatever its layout.
Matrix read_weight(const moire_weight& w, int64_t group);

// Rows of the batch that belong to a group; the others are its tail.
int64_t rows_in_use(const moire_groups& groups);

}  // namespace moire::reference
