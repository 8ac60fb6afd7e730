// Comparison: what a call left in its outputs against the reference, element by element. The rule
// is the reference's (reference/number.h): every element has its own bound. outputs.h says what is
// compared with what.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "operands.h"
#include "reference/quantize.h"
#include "reference/tensor.h"

namespace moire::tool {

// Errors are in units of what the bound allows: 1 is the largest that passes.
struct OutputErrors {
  std::string name;
  int64_t elements = 0;
  int64_t mismatches = 0;
  double max_error = 0;
  double rms_error = 0;
  std::string first_mismatch = {};  // where, group, got, want
};

class Comparison {
 public:
  explicit Comparison(const Operands& operands) : operands_(operands) {}

  enum class TailRule { kZero, kUntouched, kAnything };
  // What a tensor's rows are, from the sizes that its field has.
  enum class Rows { kBatch, kGroups, kOther };

  // Of the batch: rows in use as wanted, then the tail.
  void add(const std::string& name, const TensorView& got, const reference::Matrix& want, Rows rows,
           TailRule tail = TailRule::kZero);
  void add(const std::string& name, const moire_weight& got, const reference::Weights& want);
  void add(const std::string& name, const TensorView& got, const std::vector<int64_t>& want);
  // Every byte; rows that the reference does not own are a tail.
  void add(const std::string& name, const TensorView& got, reference::ByteRows want, TailRule tail);
  void add(const std::string& name, const TensorView& got, const std::vector<std::byte>& want);
  // Outputs that were found wrong may be right by another judge.
  void or_else(const std::function<void(Comparison&)>& judge);
  // One finding in words; "" is none.
  void finding(const std::string& name, const std::string& what);

  const Problem& problem() const { return operands_.problem(); }
  const std::vector<OutputErrors>& outputs() const { return outputs_; }
  bool passed() const;

 private:
  // Each element of `want`, in a group or -1.
  void row(OutputErrors& errors, const TensorView& got, const reference::Matrix& want, int64_t i,
           int64_t group);
  void tail(OutputErrors& errors, const TensorView& got, TailRule rule);
  void finish(OutputErrors& errors);

  const Operands& operands_;
  std::vector<OutputErrors> outputs_;
};

}  // namespace moire::tool
