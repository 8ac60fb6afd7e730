#include "core/prepared_weight.h"

#include <algorithm>

#include "core/device_state.h"
#include "core/name.h"

namespace moire {
namespace {

constexpr int32_t kVersion = 1;  // of all forms

// Whose directions tell its copies apart: tiles serve both products, but for tensor cores.
int32_t scaling_of_copies(const moire_prepared_weight& p, WeightForm form) {
  return form == WeightForm::kCores ? MOIRE_SCALING_MXFP8 : weight_scaling_of(p.recipe);
}

}  // namespace

moire_quantized take_core_weight(Arena& arena, const TensorView& codes, bool is_turned) {
  constexpr int64_t kSide = 128;
  const int64_t rows = codes.shape[is_turned ? 2 : 1], columns = codes.shape[is_turned ? 1 : 2];
  return take_copy(arena, codes.type(), MOIRE_SCALING_FP8_TILE, MOIRE_ROWWISE,
                   {nullptr, codes.type(), {codes.shape[0], rows, columns}}, 0, 1, kSide);
}

WeightCopies take_copies(Arena& arena, const moire_prepared_weight& p, WeightForm form) {
  const bool is_for_cores = form == WeightForm::kCores;
  const int32_t scaling = scaling_of_copies(p, form);
  const auto take = [&](int32_t direction) -> moire_quantized {
    const bool is_read =
        weight_direction(scaling, p.layout, true) == direction ||
        (p.forward_only == 0 && weight_direction(scaling, p.layout, false) == direction);
    if (!is_read) return {};
    const TensorView like(nullptr, DType::kE4M3, {p.shape[0], p.shape[1], p.shape[2]});
    if (is_for_cores) return take_core_weight(arena, like, direction == MOIRE_COLUMNWISE);
    if (form == WeightForm::kCodes) {
      return take_copy(arena, like.type(), scaling, direction, like, 0, kScalePitch);
    }
    TensorView floats = arena.take_aligned(DType::kBF16, like.num_rows(), like.columns());
    floats.rank = like.rank;
    std::copy_n(like.shape, 3, floats.shape);
    return {floats, {}};
  };
  return {take(MOIRE_ROWWISE), take(MOIRE_COLUMNWISE)};
}

WeightCopies copies_of(const moire_prepared_weight& p) {
  Arena arena({p.memory.data, static_cast<size_t>(p.memory.shape[0])});
  return take_copies(arena, p, static_cast<WeightForm>(p.form));
}

moire_prepared_weight prepared_for(const Context& context, const Weight& like, int32_t recipe,
                                   int32_t fractional_scales, int32_t forward_only) {
  moire_prepared_weight p{};
  p.version = kVersion;
  p.device = static_cast<int32_t>(context.device());
  p.index = context.state().index;
  p.recipe = recipe;
  p.fractional_scales = fractional_scales;
  p.forward_only = forward_only;
  p.layout = like.layout;
  std::copy_n(like.tensor.shape, 3, p.shape);
  return p;
}

bool check_prepared(ArgumentCheck& check, std::string_view name, const moire_prepared_weight& found,
                    const moire_prepared_weight& needed) {
  using P = moire_prepared_weight;
  constexpr std::pair<int32_t P::*, std::string_view> kFields[] = {
      {&P::version, "version"},
      {&P::device, "device"},
      {&P::index, "index"},
      {&P::recipe, "recipe"},
      {&P::fractional_scales, "fractional_scales"},
      {&P::layout, "layout"}};
  for (const auto& [field, word] : kFields) {
    check.require(found.*field == needed.*field, name, " was prepared with ", word, " ",
                  found.*field, ", needs ", needed.*field);
  }
  const int64_t *s = found.shape, *n = needed.shape;
  check.require(std::equal(s, s + 3, n), name, " was prepared of [", s[0], ", ", s[1], ", ", s[2],
                "], needs [", n[0], ", ", n[1], ", ", n[2], "]");
  check.require(found.forward_only <= needed.forward_only, name,
                " was prepared with forward_only 1, needs 0: its gradient of x is asked for");
  const auto form = static_cast<WeightForm>(found.form);
  check.require(form == WeightForm::kCodes ||
                    (form == WeightForm::kDequantized && found.recipe == MOIRE_RECIPE_MXFP8) ||
                    (form == WeightForm::kCores && found.recipe != MOIRE_RECIPE_MXFP8),
                name, " has form ", found.form, ", which recipe ", found.recipe, " has not");
  if (!check.ok()) return false;
  Arena arena;
  take_copies(arena, found, form);
  check.tensor(Name(name, ".memory"), found.memory, kBytesOnly,
               {{"bytes", static_cast<int64_t>(arena.used())}});
  return check.require(reinterpret_cast<uintptr_t>(found.memory.data) % 64 == 0, name,
                       ".memory is not aligned to 64 bytes");
}

WeightOperand prepared_operand(const moire_prepared_weight& p, bool along_in) {
  const WeightCopies copies = copies_of(p);
  const auto form = static_cast<WeightForm>(p.form);
  const int32_t direction = weight_direction(scaling_of_copies(p, form), p.layout, along_in);
  if (direction == MOIRE_ROWWISE)
    return {Weight(copies.rowwise.data, p.layout), copies.rowwise.scales};
  const int32_t layout = form == WeightForm::kCores ? turned(p.layout) : p.layout;
  return {Weight(copies.columnwise.data, layout), copies.columnwise.scales};
}

QuantizeWeightArgs quantize_step(const PrepareWeightArgs& args, const WeightCopies& copies) {
  QuantizeWeightArgs step;
  step.source = args.w;
  step.scaling = weight_scaling_of(args.recipe);
  step.fractional_scales = args.fractional_scales;
  step.rowwise = copies.rowwise;
  step.columnwise = copies.columnwise;
  return step;
}

}  // namespace moire
