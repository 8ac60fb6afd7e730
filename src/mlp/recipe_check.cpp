#include "mlp/recipe_check.h"

#include "core/name.h"

namespace moire {

void LayerCheck::check_recipe(int32_t emulate_accumulation, int32_t gradient_dtype) {
  const int32_t id = recipe.id;
  check.require(gradient_dtype == 0 || gradient_dtype == MOIRE_E4M3 || gradient_dtype == MOIRE_E5M2,
                "gradient_dtype is ", static_cast<DType>(gradient_dtype),
                ", needs e4m3 (or 0) or e5m2");
  check.require(gradient_dtype == 0 || recipe.is_quantized, "gradient_dtype is ",
                static_cast<DType>(gradient_dtype),
                " but recipe is 0 (as stored), which quantises nothing");
  const int32_t fractional = recipe.fractional_scales;
  check.require(fractional == 0 || (fractional == 1 && id == MOIRE_RECIPE_FP8_BLOCK),
                "fractional_scales is ", fractional, " but recipe is ", id,
                ", needs 0, or 1 with recipe 3 (fp8_block), which alone has such scales");
  check.require(
      emulate_accumulation == 0 || id == MOIRE_RECIPE_MXFP8_FAST || id == MOIRE_RECIPE_FP8_BLOCK,
      "emulate_accumulation is 1 but recipe is ", id, ", needs 2 (mxfp8_fast) or 3 (fp8_block)");
}

void LayerCheck::weight(const GivenWeight& w, bool along_in, NamedSize out, NamedSize in) {
  const bool has_other = is_given(w.copy) || is_present(w.prepared);
  if (is_present(w.weight) || !recipe.is_quantized || !has_other) {
    check.weight(w.name, w.weight, kFloatTypes, sizes.num_groups, out, in);
  }
  if (!has_other) return;
  check.enumerator(Name(w.name, ".layout"), w.weight.layout, 2);
  const bool out_in = w.weight.layout == MOIRE_OUT_IN;
  const TensorView shape(
      nullptr, DType::kE4M3,
      {groups.num_groups, out_in ? out.size : in.size, out_in ? in.size : out.size});
  const Weight like(shape, w.weight.layout);
  if (is_given(w.copy)) {
    check_quantized(check, Name(w.name, "_quantized"), w.copy, recipe.weight_scaling,
                    weight_direction(recipe.weight_scaling, w.weight.layout, along_in),
                    ScaledShape(like));
  }
  if (!is_present(w.prepared)) return;
  check_prepared(
      check, Name(w.name, "_prepared"), w.prepared,
      prepared_for(check.context(), like, recipe.id, recipe.fractional_scales, along_in ? 1 : 0));
}

void LayerCheck::copy(std::string_view name, const moire_quantized& copy, int32_t direction,
                      NamedSize k) {
  if (!is_given(copy)) return;
  check_quantized(check, name, copy, recipe.scaling, direction, {groups, {"k", k.size}});
}

void LayerCheck::x_columnwise(const moire_quantized& given, NamedSize k) {
  if (recipe.accumulation != MOIRE_ACCUMULATE_FAST ||
      !is_transposed(given.data, given.scales, groups)) {
    return copy("x_columnwise", given, MOIRE_COLUMNWISE, k);
  }
  check_copy(check, "x_columnwise", given, MOIRE_SCALING_FP8_BLOCK, MOIRE_COLUMNWISE,
             {groups, {"k", k.size}});
}

}  // namespace moire
