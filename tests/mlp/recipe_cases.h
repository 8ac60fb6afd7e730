// The 8-bit recipes that tests of layers run through.
#pragma once

#include <moire/quantize.h>

#include <ostream>
#include <vector>

namespace moire::test {

struct RecipeCase {
  int32_t recipe;
  int32_t gradient_dtype = 0;
  int32_t fractional_scales = 0;

  bool is_block() const { return recipe == MOIRE_RECIPE_FP8_BLOCK; }
  int32_t scaling() const { return is_block() ? MOIRE_SCALING_FP8_BLOCK : MOIRE_SCALING_MXFP8; }
  int32_t weight_scaling() const {
    return is_block() ? MOIRE_SCALING_FP8_TILE : MOIRE_SCALING_MXFP8;
  }
  // Of the products of its layers.
  int32_t accumulation() const {
    return recipe == MOIRE_RECIPE_MXFP8 ? MOIRE_ACCUMULATE_EXACT : MOIRE_ACCUMULATE_FAST;
  }
  DType gradient() const {
    return gradient_dtype == 0 ? DType::kE4M3 : static_cast<DType>(gradient_dtype);
  }
  template <class Args>
  Args in(Args args) const {
    args.recipe = recipe;
    args.fractional_scales = fractional_scales;
    if constexpr (requires { args.gradient_dtype; }) args.gradient_dtype = gradient_dtype;
    return args;
  }
};

inline std::ostream& operator<<(std::ostream& out, const RecipeCase& c) {
  return out << "recipe " << c.recipe << ", gradients " << c.gradient_dtype << ", fractional "
             << c.fractional_scales;
}

inline std::vector<RecipeCase> recipes() {
  return {{MOIRE_RECIPE_MXFP8},
          {MOIRE_RECIPE_MXFP8, MOIRE_E5M2},
          {MOIRE_RECIPE_MXFP8_FAST},
          {MOIRE_RECIPE_FP8_BLOCK},
          {MOIRE_RECIPE_FP8_BLOCK, 0, 1}};
}

}  // namespace moire::test
