// One row of a call: the same operands, cut down to a row that the scalar reference can afford at
// the full width of a model. `moire bench` judges by it what it is about to time.
#pragma once

#include <moire/fields.h>
#include <moire/glu.h>
#include <moire/grouped_gemm.h>
#include <moire/grouped_mlp.h>

#include <concepts>

#include "operands.h"

namespace moire::tool {

// Calls whose rows stand for themselves.
template <class A>
concept OfRows = std::same_as<A, GroupedGemmArgs> || std::same_as<A, GroupedGemmGluArgs> ||
    std::same_as<A, GroupedGemmGluBackwardArgs> || std::same_as<A, BiasBackwardArgs> ||
    std::same_as<A, GluArgs> || std::same_as<A, GluBackwardArgs> ||
    std::same_as<A, GroupedLinearArgs> || std::same_as<A, GroupedLinearBackwardArgs> ||
    std::same_as<A, GroupedMlpArgs> || std::same_as<A, GroupedMlpBackwardArgs>;

// Cuts every field down to rows [first, first + count) of one group. What is gathered keeps its
// tokens, and loses the other indices.
class RowCut : public MemoryVisitor {
 public:
  RowCut(const int64_t* offsets, int64_t group, int64_t first, int64_t count)
      : offsets_(offsets), group_(group), first_(first), count_(count) {}

  void field(const char* name, moire_tensor& t, Role role, const char* sizes);
  void field(const char* name, moire_weight& w, Role role, const char* sizes);
  void field(const char*, moire_quantized& q, Role role, const char*) {
    if (is_written(role)) q = {};
  }
  void field(const char*, const uint8_t*& beta, Role, int64_t) {
    if (beta != nullptr) beta += group_;
  }
  void field(const char*, moire_groups& groups) { groups = Groups(offsets_, 1, count_); }
  void field(const char*, moire_workspace&) {}

 private:
  void gather(bool is_gathered);

  const int64_t* offsets_;  // of the one group
  int64_t group_, first_, count_;
  bool is_gathered_ = false;
  moire_tensor* operand_ = nullptr;  // of which it is not known yet whether it is gathered
  TensorView whole_;
};

// The operands keep the offsets that the cut arguments point at.
template <class A>
A cut_rows(Operands& operands, A args, int64_t group, int64_t first, int64_t count) {
  const int64_t* const offsets = operands.keep(std::vector<int64_t>{0, count});
  visit_fields(args, RowCut(offsets, group, first, count));
  return args;
}

// Row `row`, which belongs to `group`. Results that sum over rows (gradients of weights and biases,
// quantised copies) are left out.
template <OfRows A>
A one_row(Operands& operands, const A& args, int64_t row, int64_t group) {
  return cut_rows(operands, args, group, row, 1);
}
// Of a weight gradient itself, a corner of the group's matrix is kept instead, of all its rows.
GroupedGemmWgradArgs one_row(Operands& operands, const GroupedGemmWgradArgs& args, int64_t row,
                             int64_t group);

}  // namespace moire::tool
