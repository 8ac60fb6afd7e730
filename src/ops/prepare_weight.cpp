// prepare_weight: validation, the form that it will have, and dispatch.
#include <moire/quantize.h>

#include "core/prepared_weight.h"
#include "core/scales_check.h"
#include "ops/dispatch.h"

namespace moire {
namespace {

// All but what comes out.
bool check_inputs(ArgumentCheck& check, const PrepareWeightArgs& args) {
  const Weight w = args.w;
  check.require(args.recipe >= MOIRE_RECIPE_MXFP8 && args.recipe <= MOIRE_RECIPE_FP8_BLOCK,
                "recipe is ", args.recipe,
                ", needs 1 to 3: the products of others read weights as they are");
  check_fractional(check, weight_scaling_of(args.recipe), args.fractional_scales);
  check.enumerator("dequantized", args.dequantized, 2);
  check.require(args.dequantized == 0 || args.recipe == MOIRE_RECIPE_MXFP8,
                "dequantized is 1 but recipe is ", args.recipe,
                ", needs 1 (mxfp8), whose products may be of decoded numbers");
  check.enumerator("forward_only", args.forward_only, 2);
  check.require(w.tensor.rank == 3, "w has rank ", w.tensor.rank, ", needs rank 3 [G, n, k]");
  if (!check.ok()) return false;
  return check.weight("w", w, kFloatTypes, {"G", w.tensor.shape[0]}, {"out", w.out_features()},
                      {"in", w.in_features()});
}

moire_prepared_weight prepared_of(const Context& context, const PrepareWeightArgs& args) {
  return prepared_for(context, args.w, args.recipe, args.fractional_scales, args.forward_only);
}

void validate(ArgumentCheck& check, const PrepareWeightArgs& args) {
  if (!check_inputs(check, args)) return;
  check_prepared(check, "prepared", args.prepared, prepared_of(check.context(), args));
}

std::string problem_of(const PrepareWeightArgs& args) {
  return concat(TensorView(args.w.tensor), args.w.list == nullptr ? "" : ", listed", ", ",
                scaling_word(weight_scaling_of(args.recipe)));
}

}  // namespace

MOIRE_DEFINE_OP_WITH_WORKSPACE(prepare_weight)

Status prepare_weight_form(const Context& context, const PrepareWeightArgs& args,
                           moire_prepared_weight* form) {
  ArgumentCheck check("prepare_weight_form", context, ArgumentCheck::Purpose::kSizeWorkspace);
  check.require(form != nullptr, "form is null, needs an address");
  if (!check_inputs(check, args)) return check.status();
  const WeightForm chosen = prepared_form(context.state(), args);
  moire_prepared_weight p = prepared_of(context, args);
  p.form = static_cast<int32_t>(chosen);
  Arena arena;
  take_copies(arena, p, chosen);
  p.memory = TensorView(nullptr, DType::kUint8, {static_cast<int64_t>(arena.used())});
  *form = p;
  return {};
}

}  // namespace moire
