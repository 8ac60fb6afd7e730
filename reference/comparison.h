// What a call left in its outputs against the reference, element by element. Every element has its
// own bound (number.h), which is the whole rule; where the first is that breaks it is said in
// words.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "reference/quantize.h"
#include "reference/tensor.h"

namespace moire::reference {

// Errors are in units of what the bound allows: 1 is the largest that passes.
struct OutputErrors {
  std::string name = {};  // of who compares several
  int64_t elements = 0;
  int64_t mismatches = 0;
  double max_error = 0;
  double rms_error = 0;
  double relative_rms = 0;          // of the differences, over that of the values
  std::string first_mismatch = {};  // where, group, got, want
};

// Of rows that nothing owns: zero bits, the 0xFF that tests and tools fill outputs with, or any.
enum class TailRule { kZero, kUntouched, kAnything };

// What is known of an output's rows beside what they hold; groups name that of a mismatch.
struct RowRule {
  TailRule tail = TailRule::kAnything;
  moire_groups groups = {};
};

// A vector over rows reads as a column.
double element_of(const TensorView& t, int64_t row, int64_t column);

// Rows as wanted, then the tail.
OutputErrors compare(const TensorView& got, const Matrix& want, const RowRule& rule = {});
OutputErrors compare(const moire_weight& got, const Weights& want, const RowRule& = {});
// Indices.
OutputErrors compare(const TensorView& got, const std::vector<int64_t>& want, const RowRule& = {});
// Every byte; rows that the reference does not own are a tail.
OutputErrors compare(const TensorView& got, const ByteRows& want, const RowRule& rule = {});
OutputErrors compare(const TensorView& got, const std::vector<std::byte>& want,
                     const RowRule& = {});
// Rows from `first` on.
OutputErrors compare_tail(const TensorView& got, int64_t first, TailRule tail);

}  // namespace moire::reference
