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

bool is_poison(const TensorView& t, int64_t row, int64_t column) {
  return std::isnan(reference::read_element(t, row, column));
}

}  // namespace

Comparison::TailRule Comparison::tail_rule() const {
  return operands_.problem().keep_tail ? TailRule::kUntouched : TailRule::kZero;
}

void Comparison::element(OutputErrors& errors, const TensorView& got, const Number& want,
                         int64_t row, int64_t column, int64_t group) {
  const bool is_vector = got.rank == 1;  // over rows
  const double value = reference::read_element(got, is_vector ? 0 : row, is_vector ? row : column);
  ++errors.elements;
  const double allowed = allowed_error(got.type(), want);
  const double difference = std::abs(value - want.value);
  const double error = value == want.value         ? 0
                       : std::isfinite(difference) ? difference / allowed
                                                   : std::numeric_limits<double>::infinity();
  errors.max_error = std::max(errors.max_error, error);
  errors.rms_error += error * error;
  if (reference::accepts(got.type(), want, value)) return;
  const std::string where = is_vector ? text("[", row, "]") : text("[", row, ", ", column, "]");
  const std::string of_group = group >= 0 ? text(" of group ", group) : "";
  mismatch(errors, text("first at ", where, of_group, ": got ", exact(value), ", want ",
                        exact(want.value), " +- ", exact(allowed)));
}

void Comparison::finish(OutputErrors& errors) {
  if (errors.elements > 0) {
    errors.rms_error = std::sqrt(errors.rms_error / static_cast<double>(errors.elements));
  }
  outputs_.push_back(std::move(errors));
}

void Comparison::tail(OutputErrors& errors, const TensorView& got, TailRule rule) {
  if (rule == TailRule::kAnything) return;
  const bool is_vector = got.rank == 1;
  const int64_t first = operands_.problem().rows;
  for (int64_t i = first; i < operands_.problem().capacity(); ++i) {
    for (int64_t j = 0; j < (is_vector ? 1 : got.columns()); ++j) {
      const int64_t row = is_vector ? 0 : i;
      const int64_t column = is_vector ? i : j;
      const double value = reference::read_element(got, row, column);
      const bool ok = rule == TailRule::kZero ? value == 0 : is_poison(got, row, column);
      if (ok) continue;
      mismatch(errors, text("first in the tail, at [", i, ", ", j, "]: got ", exact(value),
                            ", want ", rule == TailRule::kZero ? "0" : "what was there before"));
    }
  }
}

template <class GroupOf>
void Comparison::matrix(OutputErrors& errors, const TensorView& got, const reference::Matrix& want,
                        GroupOf&& group_of) {
  for (int64_t i = 0; i < want.rows; ++i) {
    const int64_t group = group_of(i);
    for (int64_t j = 0; j < want.columns; ++j) element(errors, got, want.at(i, j), i, j, group);
  }
}

void Comparison::ragged(const std::string& name, const TensorView& got,
                        const reference::Matrix& want, TailRule rule) {
  if (!got.is_present()) return;
  OutputErrors errors{name};
  matrix(errors, got, want, [this](int64_t row) { return operands_.group_of(row); });
  tail(errors, got, rule);
  finish(errors);
}

void Comparison::per_group(const std::string& name, const TensorView& got,
                           const reference::Matrix& want) {
  if (!got.is_present()) return;
  OutputErrors errors{name};
  matrix(errors, got, want, [](int64_t row) { return row; });
  finish(errors);
}

void Comparison::plain(const std::string& name, const TensorView& got,
                       const reference::Matrix& want) {
  if (!got.is_present()) return;
  OutputErrors errors{name};
  matrix(errors, got, want, [](int64_t) { return int64_t{-1}; });
  finish(errors);
}

void Comparison::weights(const std::string& name, const moire_weight& got,
                         const reference::Weights& want) {
  OutputErrors errors{name};
  for (size_t g = 0; g < want.size(); ++g) {
    const auto group = static_cast<int64_t>(g);
    matrix(errors, Weight(got).matrix(group), want[g], [group](int64_t) { return group; });
  }
  finish(errors);
}

void Comparison::indices(const std::string& name, const TensorView& got,
                         const std::vector<int64_t>& want) {
  OutputErrors errors{name};
  for (size_t i = 0; i < want.size(); ++i) {
    const TensorView flat(got.data, got.type(), {got.num_elements()});
    const int64_t value = reference::read_index(flat, 0, static_cast<int64_t>(i));
    ++errors.elements;
    if (value == want[i]) continue;
    mismatch(errors, text("first at [", i, "]: got ", value, ", want ", want[i]));
  }
  outputs_.push_back(errors);
}

void Comparison::bytes(const std::string& name, const TensorView& got, reference::ByteRows want,
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

void Comparison::copies(const std::string& name, QuantizeArgs args, TailRule rule) {
  const moire_quantized& any = is_present(args.rowwise) ? args.rowwise : args.columnwise;
  if (!is_present(any)) return;
  args.scaling = any.scales.dtype == MOIRE_E8M0 ? MOIRE_SCALING_MXFP8 : MOIRE_SCALING_FP8_BLOCK;
  const reference::QuantizeResults want = reference::quantize(args);
  const auto compare = [&](const std::string& copy, const moire_quantized& got,
                           const reference::QuantizedBytes& expected) {
    if (!is_present(got)) return;
    bytes(name + copy + ".data", got.data, expected.data, rule);
    bytes(name + copy + ".scales", got.scales, expected.scales, rule);
  };
  compare("_rowwise", args.rowwise, want.rowwise);
  compare("_columnwise", args.columnwise, want.columnwise);
}

void Comparison::finding(const std::string& name, const std::string& what) {
  OutputErrors errors{name};
  if (!what.empty()) mismatch(errors, what);
  outputs_.push_back(errors);
}

bool Comparison::passed() const {
  return std::all_of(outputs_.begin(), outputs_.end(),
                     [](const OutputErrors& e) { return e.mismatches == 0; });
}

}  // namespace moire::tool
