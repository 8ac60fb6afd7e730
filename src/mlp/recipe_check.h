// Checks of what a recipe asks for: operands as stored, or quantised copies and what they are made
// of.
#pragma once

#include <moire/fields.h>
#include <moire/grouped_mlp.h>

#include <initializer_list>
#include <string_view>

#include "core/argument_check.h"
#include "core/scales_check.h"
#include "mlp/recipe.h"

namespace moire {

// Columns of the first tensor that is there; 0 if none is.
inline int64_t columns_of(std::initializer_list<TensorView> tensors) {
  for (const TensorView& t : tensors) {
    if (t.is_present()) return t.columns();
  }
  return 0;
}

// The size that three operands should share (0: one that is absent), so that a message blames the
// odd one out; where all differ, the first is believed.
inline int64_t agreed_size(int64_t first, int64_t second, int64_t third) {
  return second == third && second != 0 ? second : first;
}

// Refuses each quantised field of a call, and the scales of an operand.
class NothingQuantized : public MemoryVisitor {
 public:
  using MemoryVisitor::field;
  explicit NothingQuantized(ArgumentCheck& check) : check_(check) {}
  void field(const char*, const moire_weight&, Role, const char*) {}
  void field(const char* name, const moire_quantized& q, Role, const char*) {
    refuse(name, is_given(q));
  }
  void field(const char* name, const moire_tensor& t, Role, const char* sizes) {
    refuse(name, std::string_view(sizes).ends_with('?') && is_present(t));
  }

 private:
  void refuse(const char* name, bool is_there);
  ArgumentCheck& check_;
};

bool check_recipe(ArgumentCheck& check, int32_t recipe, int32_t emulate_accumulation,
                  int32_t fractional_scales, int32_t gradient_dtype);

// The recipe is one of moire_recipe; one that does not quantise is given nothing quantised.
template <class A>
bool check_recipe(ArgumentCheck& check, const A& args) {
  int32_t gradient_dtype = 0;
  if constexpr (requires { args.gradient_dtype; }) gradient_dtype = args.gradient_dtype;
  check_recipe(check, args.recipe, args.emulate_accumulation, args.fractional_scales,
               gradient_dtype);
  if (args.recipe == MOIRE_RECIPE_AS_STORED) visit_fields(args, NothingQuantized(check));
  return check.ok();
}

// The weight of a product along `in` (forward) or along `out`: it, or what stands in for it there.
bool check_weight(ArgumentCheck& check, const Recipe& recipe, const GivenWeight& w, bool along_in,
                  NamedSize num_groups, NamedSize out, NamedSize in);

// A copy of a ragged [capacity, k] in this direction, if it is there.
bool check_copy(ArgumentCheck& check, const Recipe& recipe, std::string_view name,
                const moire_quantized& copy, int32_t direction, const Groups& groups, int64_t k);

// x of a forward product: a float tensor, or FP8 with rowwise x_scales; x_columnwise, which is made
// from a float x only.
template <class A>
bool check_forward_operand(ArgumentCheck& check, const Recipe& recipe, const A& args,
                           const Groups& groups, NamedSize k) {
  if (!is_present(args.x_scales)) {
    check.ragged("x", args.x, "row_idx", args.row_idx, groups, k);
    return check_copy(check, recipe, "x_columnwise", args.x_columnwise, MOIRE_COLUMNWISE, groups,
                      k.size);
  }
  check.require(!is_given(args.x_columnwise),
                "x_columnwise is asked for but x is quantised already: quantise both directions at "
                "once");
  check.ragged("x", args.x, "row_idx", args.row_idx, groups, k, kFp8Types);
  Groups rows = groups;  // x may have another number of rows than the groups
  rows.capacity = args.x.shape[0];
  return check_scales(check, {"x_scales", args.x_scales}, recipe.scaling, MOIRE_ROWWISE, {rows, k});
}

// grad_y [capacity, n], or [T, n] gathered by the row_idx that gathers x; where it is absent, the
// copies that are needed are there.
template <class Args>
bool check_grad_y(ArgumentCheck& check, const Recipe& recipe, const Args& args,
                  const Groups& groups, NamedSize n, bool needs_rowwise, bool needs_columnwise,
                  bool needs_itself) {
  check.require(args.gathered_grad_y == 0 || is_present(args.row_idx),
                "gathered_grad_y is 1 but row_idx is absent");
  check_copy(check, recipe, "grad_y_rowwise", args.grad_y_rowwise, MOIRE_ROWWISE, groups, n.size);
  check_copy(check, recipe, "grad_y_columnwise", args.grad_y_columnwise, MOIRE_COLUMNWISE, groups,
             n.size);
  const bool copies_suffice = recipe.is_quantized && !needs_itself &&
                              (!needs_rowwise || is_present(args.grad_y_rowwise)) &&
                              (!needs_columnwise || is_present(args.grad_y_columnwise));
  if (copies_suffice && !is_present(args.grad_y)) return check.ok();
  return check.ragged("grad_y", args.grad_y, "row_idx",
                      args.gathered_grad_y != 0 ? TensorView(args.row_idx) : TensorView(), groups,
                      n);
}

}  // namespace moire
