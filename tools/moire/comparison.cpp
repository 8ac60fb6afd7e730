#include "comparison.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "text.h"

namespace moire::tool {
namespace {

using reference::Number;

std::string exact(double value) {
  char buffer[32];
  std::snprintf(buffer, sizeof(buffer), "%.9g", value);
  return buffer;
}

void mismatch(OutputErrors& errors, const std::string& what) {
  if (errors.mismatches++ == 0) errors.first_mismatch = what;
}

// Half of a rounding step may be added to the bound when the result is stored.
double allowed_error(DType dtype, const Number& want) {
  const double size = std::abs(want.value) + want.bound;
  return want.bound + 0.5 * reference::spacing(dtype, size);
}

}  // namespace

void Comparison::row(OutputErrors& errors, const TensorView& got, const reference::Matrix& want,
                     int64_t i, int64_t group) {
  const bool is_vector = got.rank == 1;  // over rows
  for (int64_t j = 0; j < want.columns; ++j) {
    const Number& wanted = want.at(i, j);
    const double value = reference::read_element(got, is_vector ? 0 : i, is_vector ? i : j);
    ++errors.elements;
    const double allowed = allowed_error(got.type(), wanted);
    const double difference = std::abs(value - wanted.value);
    const double error = value == wanted.value       ? 0
                         : std::isfinite(difference) ? difference / allowed
                                                     : std::numeric_limits<double>::infinity();
    errors.max_error = std::max(errors.max_error, error);
    errors.rms_error += error * error;
    if (reference::accepts(got.type(), wanted, value)) continue;
    const std::string where = is_vector ? text("[", i, "]") : text("[", i, ", ", j, "]");
    const std::string of_group = group >= 0 ? text(" of group ", group) : "";
    mismatch(errors, text("first at ", where, of_group, ": got ", exact(value), ", want ",
                          exact(wanted.value), " +- ", exact(allowed)));
  }
}

void Comparison::tail(OutputErrors& errors, const TensorView& got, TailRule rule) {
  if (rule == TailRule::kAnything) return;
  const bool is_vector = got.rank == 1;
  for (int64_t i = problem().rows; i < problem().capacity(); ++i) {
    for (int64_t j = 0; j < (is_vector ? 1 : got.columns()); ++j) {
      const double value = reference::read_element(got, is_vector ? 0 : i, is_vector ? i : j);
      const bool is_zero = rule == TailRule::kZero;
      if (is_zero ? value == 0 : std::isnan(value)) continue;
      mismatch(errors, text("first in the tail, at [", i, ", ", j, "]: got ", exact(value),
                            ", want ", is_zero ? "0" : "what was there before"));
    }
  }
}

void Comparison::finish(OutputErrors& errors) {
  if (errors.elements > 0) {
    errors.rms_error = std::sqrt(errors.rms_error / static_cast<double>(errors.elements));
  }
  outputs_.push_back(std::move(errors));
}

void Comparison::add(const std::string& name, const TensorView& got, const reference::Matrix& want,
                     Rows rows, TailRule rule) {
  OutputErrors errors{name};
  for (int64_t i = 0; i < want.rows; ++i) {
    row(errors, got, want, i,
        rows == Rows::kBatch    ? operands_.group_of(i)
        : rows == Rows::kGroups ? i
                                : -1);
  }
  if (rows == Rows::kBatch) tail(errors, got, rule);
  finish(errors);
}

void Comparison::add(const std::string& name, const moire_weight& got,
                     const reference::Weights& want) {
  OutputErrors errors{name};
  for (int64_t g = 0; g < static_cast<int64_t>(want.size()); ++g) {
    const reference::Matrix& matrix = want[static_cast<size_t>(g)];
    for (int64_t i = 0; i < matrix.rows; ++i) row(errors, Weight(got).matrix(g), matrix, i, g);
  }
  finish(errors);
}

void Comparison::add(const std::string& name, const TensorView& got,
                     const std::vector<int64_t>& want) {
  OutputErrors errors{name};
  const TensorView flat(got.data, got.type(), {got.num_elements()});
  for (size_t i = 0; i < want.size(); ++i) {
    const int64_t value = reference::read_index(flat, 0, static_cast<int64_t>(i));
    ++errors.elements;
    if (value == want[i]) continue;
    mismatch(errors, text("first at [", i, "]: got ", value, ", want ", want[i]));
  }
  outputs_.push_back(errors);
}

void Comparison::add(const std::string& name, const TensorView& got, reference::ByteRows want,
                     TailRule rule) {
  constexpr int kPoisonByte = 0xFF;
  OutputErrors errors{name};
  const int64_t size = dtype_size(got.type());
  for (int64_t i = 0; i < want.rows; ++i) {
    const auto* row = static_cast<const uint8_t*>(got.data) + i * got.stride() * size;
    const bool is_owned = want.is_owned[static_cast<size_t>(i)];
    const int unowned = rule == TailRule::kZero ? 0 : kPoisonByte;
    for (int64_t j = 0; j < want.row_bytes; ++j) {
      const int wanted = is_owned ? want.at(i, j) : unowned;
      if (is_owned) ++errors.elements;
      if (row[j] == wanted) continue;
      mismatch(errors, text("first at [", i, ", ", j / size, "]", is_owned ? "" : ", in the tail",
                            ": got byte ", int{row[j]}, ", want ", wanted));
    }
  }
  outputs_.push_back(errors);
}

void Comparison::add(const std::string& name, const TensorView& got,
                     const std::vector<std::byte>& want) {
  const auto* bytes = static_cast<const std::byte*>(got.data);
  const auto differs = std::mismatch(want.begin(), want.end(), bytes).first;
  finding(name, differs == want.end() ? "" : text("first at byte ", differs - want.begin()));
}

void Comparison::finding(const std::string& name, const std::string& what) {
  OutputErrors errors{name};
  if (!what.empty()) mismatch(errors, what);
  outputs_.push_back(errors);
}

void Comparison::or_else(const std::function<void(Comparison&)>& judge) {
  if (passed()) return;
  Comparison other(operands_);
  judge(other);
  for (size_t i = 0; i < outputs_.size(); ++i) {
    if (outputs_[i].mismatches != 0) outputs_[i] = other.outputs_[i];
  }
}

bool Comparison::passed() const {
  return std::all_of(outputs_.begin(), outputs_.end(),
                     [](const OutputErrors& e) { return e.mismatches == 0; });
}

}  // namespace moire::tool
