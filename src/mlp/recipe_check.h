// Checks of what a recipe asks for: operands as stored, or quantised copies and what they are made
// of.
#pragma once

#include <moire/fields.h>
#include <moire/grouped_mlp.h>

#include <initializer_list>
#include <string_view>

#include "core/argument_check.h"
#include "core/scale_shapes.h"
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

// x_columnwise of a backward, as rows if it lies transposed.
TensorView columns_as_rows(const auto& args) {
  return as_rows(args.x_columnwise.data, args.x_columnwise.scales, args.groups);
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
  void refuse(const char* name, bool is_there) {
    check_.require(!is_there, name,
                   " is present but recipe is 0 (as stored), which quantises nothing");
  }
  ArgumentCheck& check_;
};

// The checks of one call of a layer, all by its recipe and for its groups.
struct LayerCheck {
  // What the call says of its recipe is sound; one that does not quantise is given nothing
  // quantised.
  LayerCheck(ArgumentCheck& check_of_call, const auto& args)
      : check(check_of_call), recipe(args), groups(args.groups) {
    check_recipe(args.emulate_accumulation, gradient_dtype_of(args));
    if (!recipe.is_quantized) visit_fields(args, NothingQuantized(check));
  }

  // The weight of a product along `in` (forward) or along `out`: it, or what stands in for it
  // there.
  void weight(const GivenWeight& w, bool along_in, NamedSize out, NamedSize in);

  // A copy of a ragged [capacity, k] in this direction, if it is there.
  void copy(std::string_view name, const moire_quantized& copy, int32_t direction, NamedSize k);

  // x_columnwise, which may lie transposed, as FP8 tensor cores read it: its scales are FP32 then,
  // those of mxfp8_fast folded.
  void x_columnwise(const moire_quantized& given, NamedSize k);

  // The dtypes of what a recipe that does not quantise multiplies as it is.
  void same_dtype(std::string_view a_name, const TensorView& a, std::string_view b_name,
                  const TensorView& b) {
    if (!recipe.is_quantized) check.same_dtype(a_name, a, b_name, b);
  }

  // x of a weight gradient: its column-wise copy, or rows of x.
  void wgrad_operand(const auto& args, NamedSize k) {
    if (is_given(args.x_columnwise)) return x_columnwise(args.x_columnwise, k);
    check.ragged("x", args.x, "row_idx", args.row_idx, groups, k);
  }

  // x of a forward product: a float tensor, or FP8 with rowwise x_scales; x_columnwise, which is
  // made from a float x only.
  void forward_operand(const auto& args, NamedSize k) {
    if (!is_present(args.x_scales)) {
      check.ragged("x", args.x, "row_idx", args.row_idx, groups, k);
      return x_columnwise(args.x_columnwise, k);
    }
    check.require(!is_given(args.x_columnwise),
                  "x_columnwise is asked for but x is quantised already: quantise both directions "
                  "at once");
    check.ragged("x", args.x, "row_idx", args.row_idx, groups, k, kFp8Types);
    Groups rows = groups;  // x may have another number of rows than the groups
    rows.capacity = args.x.shape[0];
    check_scales(check, {"x_scales", args.x_scales}, recipe.scaling, MOIRE_ROWWISE, {rows, k});
  }

  // grad_y [capacity, n], or [T, n] gathered by the row_idx that gathers x; where it is absent, the
  // copies that are needed are there. Whichever is gives n, which is returned under this name.
  NamedSize grad_y(const auto& args, std::string_view name, bool needs_rowwise,
                   bool needs_columnwise, bool needs_itself) {
    const NamedSize n{
        name, columns_of({args.grad_y, args.grad_y_rowwise.data, args.grad_y_columnwise.data})};
    check.require(args.gathered_grad_y == 0 || is_present(args.row_idx),
                  "gathered_grad_y is 1 but row_idx is absent");
    copy("grad_y_rowwise", args.grad_y_rowwise, MOIRE_ROWWISE, n);
    copy("grad_y_columnwise", args.grad_y_columnwise, MOIRE_COLUMNWISE, n);
    const bool copies_suffice = recipe.is_quantized && !needs_itself &&
                                (!needs_rowwise || is_present(args.grad_y_rowwise)) &&
                                (!needs_columnwise || is_present(args.grad_y_columnwise));
    if (copies_suffice && !is_present(args.grad_y)) return n;
    check.ragged("grad_y", args.grad_y, "row_idx", GivenGradY(args).itself.row_idx, groups, n);
    return n;
  }

  ArgumentCheck& check;
  const Recipe recipe;
  const Groups groups;
  const GroupSizes sizes = sizes_of(groups);

 private:
  void check_recipe(int32_t emulate_accumulation, int32_t gradient_dtype);
};

}  // namespace moire
