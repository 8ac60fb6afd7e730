// prepare_weight on CUDA, by the ops that quantise and decode. Decoded weights are kept on request,
// and for Hopper alone: its BF16 kernels would decode codes into the workspace at each call, the
// plain ones decode while they load. So is what its FP8 tensor cores read, for the recipes that use
// them.
#include <array>
#include <optional>

#include "backend/cuda/implementations.h"
#include "backend/cuda/ops/core_codes.h"
#include "backend/cuda/ops/quantized_product.h"
#include "core/format.h"
#include "core/prepared_weight.h"
#include "core/status_macros.h"

namespace moire::cuda::ops {
namespace {

// The weight quantised, into the memory that is kept or on the way to what is kept of it.
struct Call : PlannedCall<PrepareWeightArgs> {
  Call(const DeviceState& device, const PrepareWeightArgs& given, const Workspace& workspace)
      : PlannedCall(device, given, workspace), form_(static_cast<WeightForm>(args.prepared.form)) {
    const WeightCopies kept = copies_of(args.prepared);
    const bool is_tiled = args.recipe == MOIRE_RECIPE_FP8_BLOCK;
    WeightCopies codes = kept;
    if (form_ == WeightForm::kCores && is_tiled && is_present(kept.rowwise)) {
      codes.columnwise = {};
    } else if (form_ != WeightForm::kCodes) {
      codes = take_copies(arena, args.prepared, WeightForm::kCodes);
    }
    quantize_ = quantize_step(args, codes);
    if (form_ == WeightForm::kDequantized) {
      add_decoding(codes.rowwise, kept.rowwise, MOIRE_ROWWISE);
      add_decoding(codes.columnwise, kept.columnwise, MOIRE_COLUMNWISE);
    }
    if (form_ != WeightForm::kCores) return;
    if (is_present(kept.rowwise) && !is_tiled) {
      cores_[0].emplace(codes.rowwise, false, kept.rowwise);
    }
    if (is_present(kept.columnwise)) {
      cores_[1].emplace(is_tiled ? codes.rowwise : codes.columnwise, true, kept.columnwise);
    }
  }

  Reason supports() const { return kQuantizeWeight.supports(state, quantize_); }
  std::string policy() const {
    return concat(form_ == WeightForm::kDequantized ? "decoded into bf16, "
                  : form_ == WeightForm::kCores     ? "tiles for FP8 tensor cores, "
                                                    : "codes, ",
                  args.prepared.memory.shape[0], " bytes kept");
  }
  int64_t launches() const {
    return 1 + decoded_.launches(state) + cores_[0].has_value() + cores_[1].has_value();
  }
  Status run(const Context& context) const {
    const Context own = context.within({"prepare_weight", "w"});
    MOIRE_RETURN_IF_ERROR(kQuantizeWeight.run(own, quantize_));
    MOIRE_RETURN_IF_ERROR(decoded_.run(own, "prepare_weight"));
    Launcher launcher(own, "prepare_weight");
    for (const auto& codes : cores_) {
      if (codes) codes->make(launcher);
    }
    return launcher.status();
  }

 private:
  void add_decoding(const moire_quantized& codes, const moire_quantized& kept, int32_t direction) {
    if (!is_present(kept)) return;
    DequantizeArgs decoding;
    decoding.source = codes;
    decoding.scaling = MOIRE_SCALING_MXFP8;
    decoding.direction = direction;
    decoding.target = kept.data;
    decoded_.add("w", decoding);
  }

  WeightForm form_;
  QuantizeWeightArgs quantize_;
  Calls<DequantizeArgs, kDequantize> decoded_;
  std::array<std::optional<CoreCodes>, 2> cores_;
};

}  // namespace

WeightForm prepared_form(const DeviceState& state, const PrepareWeightArgs& args) {
  if (state.compute_capability != 90) return WeightForm::kCodes;
  if (args.dequantized != 0) return WeightForm::kDequantized;
  // What FP8 tensor cores take: rows of a multiple of 16 bytes, whichever dimension is last.
  const int64_t* const shape = args.w.tensor.shape;
  const bool fits = shape[1] % 16 == 0 && shape[2] % 16 == 0;
  return fits && args.recipe != MOIRE_RECIPE_MXFP8 ? WeightForm::kCores : WeightForm::kCodes;
}

const Implementation<PrepareWeightArgs> kPrepareWeight =
    implementation_of<PrepareWeightArgs, Call>("cuda");

}  // namespace moire::cuda::ops
