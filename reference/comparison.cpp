#include "reference/comparison.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <sstream>

namespace moire::reference {
namespace {

template <class... Parts>
void mismatch(OutputErrors& errors, const Parts&... parts) {
  if (errors.mismatches++ > 0) return;
  std::ostringstream out;
  out.precision(9);
  (out << ... << parts);
  errors.first_mismatch = out.str();
}

int64_t rows_of(const TensorView& t) { return t.rank == 1 ? t.columns() : t.num_rows(); }
int64_t columns_of(const TensorView& t) { return t.rank == 1 ? 1 : t.columns(); }

const uint8_t* row_of(const TensorView& t, int64_t row) {
  const int64_t stride = t.rank == 1 ? 1 : t.stride();
  return static_cast<const uint8_t*>(t.data) + row * stride * dtype_size(t.type());
}

std::string at(const TensorView& t, int64_t row, int64_t column) {
  std::ostringstream out;
  out << "[" << row;
  if (t.rank != 1) out << ", " << column;
  out << "]";
  return out.str();
}

std::string of_group(int64_t row, const moire_groups& groups) {
  for (int64_t g = 0; g < groups.num_groups; ++g) {
    if (row < groups.offsets[g + 1]) return " of group " + std::to_string(g);
  }
  return "";
}

// Half of a rounding step may be added to the bound when the result is stored.
double allowed_error(DType dtype, const Number& want) {
  return want.bound + 0.5 * spacing(dtype, std::abs(want.value) + want.bound);
}

bool is_shape(OutputErrors& errors, const TensorView& got, int64_t rows, int64_t columns,
              bool has_tail = false) {
  const bool holds_rows = has_tail ? rows_of(got) >= rows : rows_of(got) == rows;
  if (holds_rows && columns_of(got) == columns) return true;
  mismatch(errors, to_string(got), " against [", rows, ", ", columns, "]");
  return false;
}

// Of squares.
struct Sums {
  double errors = 0, differences = 0, values = 0;
};

// `group` says which it is, of any row.
void compare_rows(OutputErrors& errors, Sums& sums, const TensorView& got, const Matrix& want,
                  const auto& group) {
  if (!is_shape(errors, got, want.rows, want.columns, true)) return;
  for (int64_t i = 0; i < want.rows; ++i) {
    for (int64_t j = 0; j < want.columns; ++j) {
      const Number& wanted = want.at(i, j);
      const double value = element_of(got, i, j), allowed = allowed_error(got.type(), wanted);
      const double difference = std::abs(value - wanted.value);
      const double error = value == wanted.value       ? 0
                           : std::isfinite(difference) ? difference / allowed
                                                       : std::numeric_limits<double>::infinity();
      ++errors.elements;
      errors.max_error = std::max(errors.max_error, error);
      sums.errors += error * error;
      sums.differences += difference * difference;
      sums.values += wanted.value * wanted.value;
      if (accepts(got.type(), wanted, value)) continue;
      mismatch(errors, "first at ", at(got, i, j), group(i), ": got ", value, ", want ",
               wanted.value, " +- ", allowed);
    }
  }
}

void finish(OutputErrors& errors, const Sums& sums) {
  if (errors.elements == 0) return;
  errors.rms_error = std::sqrt(sums.errors / static_cast<double>(errors.elements));
  errors.relative_rms = std::sqrt(sums.differences / sums.values);
}

int unowned_byte(TailRule tail) { return tail == TailRule::kZero ? 0 : 0xFF; }

void judge_tail(OutputErrors& errors, const TensorView& got, int64_t first, TailRule tail) {
  if (tail == TailRule::kAnything) return;
  const int64_t size = dtype_size(got.type()), bytes = columns_of(got) * size;
  for (int64_t i = first; i < rows_of(got); ++i) {
    for (int64_t b = 0; b < bytes; ++b) {
      const int value = row_of(got, i)[b];
      if (value == unowned_byte(tail)) continue;
      mismatch(errors, "first in the tail, at ", at(got, i, b / size), ": got byte ", value,
               ", want ", tail == TailRule::kZero ? "0" : "what was there before");
      b += size - 1 - b % size;  // an element counts once
    }
  }
}

}  // namespace

double element_of(const TensorView& t, int64_t row, int64_t column) {
  return t.rank == 1 ? read_element(t, 0, row) : read_element(t, row, column);
}

OutputErrors compare(const TensorView& got, const Matrix& want, const RowRule& rule) {
  OutputErrors errors;
  Sums sums;
  compare_rows(errors, sums, got, want, [&](int64_t row) { return of_group(row, rule.groups); });
  finish(errors, sums);
  judge_tail(errors, got, want.rows, rule.tail);
  return errors;
}

OutputErrors compare(const moire_weight& got, const Weights& want, const RowRule&) {
  OutputErrors errors;
  Sums sums;
  const auto groups = static_cast<int64_t>(want.size());
  if (got.tensor.shape[0] != groups) {
    mismatch(errors, "got ", got.tensor.shape[0], " groups, want ", groups);
    return errors;
  }
  for (int64_t g = 0; g < groups; ++g) {
    compare_rows(errors, sums, Weight(got).matrix(g), want[static_cast<size_t>(g)],
                 [&](int64_t) { return " of group " + std::to_string(g); });
  }
  finish(errors, sums);
  return errors;
}

OutputErrors compare(const TensorView& got, const std::vector<int64_t>& want, const RowRule&) {
  OutputErrors errors;
  const TensorView flat(got.data, got.type(), {got.num_elements()});
  const auto count = static_cast<int64_t>(want.size());
  if (!is_shape(errors, flat, count, 1)) return errors;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t value = read_index(got, i / got.columns(), i % got.columns());
    const int64_t wanted = want[static_cast<size_t>(i)];
    ++errors.elements;
    if (value != wanted) mismatch(errors, "first at [", i, "]: got ", value, ", want ", wanted);
  }
  return errors;
}

OutputErrors compare(const TensorView& got, const ByteRows& want, const RowRule& rule) {
  OutputErrors errors;
  const int64_t size = dtype_size(got.type());
  if (!is_shape(errors, got, want.rows, want.row_bytes / size)) return errors;
  for (int64_t i = 0; i < want.rows; ++i) {
    const bool is_owned = want.is_owned[static_cast<size_t>(i)];
    if (!is_owned && rule.tail == TailRule::kAnything) continue;
    for (int64_t b = 0; b < want.row_bytes; ++b) {
      const int value = row_of(got, i)[b];
      const int wanted = is_owned ? want.at(i, b) : unowned_byte(rule.tail);
      if (is_owned) ++errors.elements;
      if (value == wanted) continue;
      mismatch(errors, "first at ", at(got, i, b / size), is_owned ? "" : ", in the tail",
               ": got byte ", value, ", want ", wanted);
    }
  }
  return errors;
}

OutputErrors compare(const TensorView& got, const std::vector<std::byte>& want, const RowRule&) {
  OutputErrors errors;
  const auto count = static_cast<int64_t>(want.size());
  if (got.num_bytes() != count) {
    mismatch(errors, to_string(got), " against ", count, " bytes");
    return errors;
  }
  const auto* const bytes = static_cast<const std::byte*>(got.data);
  for (int64_t i = 0; i < count; ++i) {
    const int value = std::to_integer<int>(bytes[i]);
    const int wanted = std::to_integer<int>(want[static_cast<size_t>(i)]);
    ++errors.elements;
    if (value != wanted) mismatch(errors, "first at byte ", i, ": got ", value, ", want ", wanted);
  }
  return errors;
}

OutputErrors compare_tail(const TensorView& got, int64_t first, TailRule tail) {
  OutputErrors errors;
  judge_tail(errors, got, first, tail);
  return errors;
}

}  // namespace moire::reference
