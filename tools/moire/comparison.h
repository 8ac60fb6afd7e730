// Comparison: what a call left in its outputs against the reference, element by element. The rule
// is the reference's (reference/number.h): every element has its own bound.
#pragma once

#include <moire/quantize.h>
#include <moire/tensor.h>

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

  // Outputs that are absent were not asked for.
  //
  // A ragged output [capacity, n] or [capacity]: rows in use as wanted, then the tail.
  enum class TailRule { kZero, kUntouched, kAnything };
  void ragged(const std::string& name, const TensorView& got, const reference::Matrix& want,
              TailRule tail);
  TailRule tail_rule() const;
  // Rows are groups ([G, n] biases).
  void per_group(const std::string& name, const TensorView& got, const reference::Matrix& want);
  void plain(const std::string& name, const TensorView& got, const reference::Matrix& want);
  void weights(const std::string& name, const moire_weight& got, const reference::Weights& want);
  void indices(const std::string& name, const TensorView& got, const std::vector<int64_t>& want);
  // Every byte; rows that the reference does not own are a tail.
  void bytes(const std::string& name, const TensorView& got, reference::ByteRows want,
             TailRule tail);
  // Every byte of the quantised copies that are there: those of the source, as it is now, in the
  // format of their scales and in the order of the call's groups.
  template <class A>
  void copies(const std::string& name, const A& args, const moire_tensor& source,
              const moire_tensor& row_idx, const moire_quantized& rowwise,
              const moire_quantized& columnwise, TailRule tail) {
    QuantizeArgs q;
    q.source = source;
    q.row_idx = row_idx;
    q.rowwise = rowwise;
    q.columnwise = columnwise;
    q.fractional_scales = args.fractional_scales;
    q.groups = args.groups;
    copies(name, q, tail);
  }
  // One finding in words; "" is none.
  void finding(const std::string& name, const std::string& what);

  const std::vector<OutputErrors>& outputs() const { return outputs_; }
  bool passed() const;

 private:
  // Each element of `want`, and the group of a row or -1.
  template <class GroupOf>
  void matrix(OutputErrors& errors, const TensorView& got, const reference::Matrix& want,
              GroupOf&& group_of);
  void copies(const std::string& name, QuantizeArgs args, TailRule tail);
  void element(OutputErrors& errors, const TensorView& got, const reference::Number& want,
               int64_t row, int64_t column, int64_t group);
  void tail(OutputErrors& errors, const TensorView& got, TailRule rule);
  void finish(OutputErrors& errors);

  const Operands& operands_;
  std::vector<OutputErrors> outputs_;
};

}  // namespace moire::tool
