// prepare_weight on CUDA, by the ops that quantise and decode, or for Hopper's FP8 tensor cores in
// one pass. Decoded weights are kept on request, and for Hopper alone: its BF16 kernels would
// decode codes into the workspace at each call, the plain ones decode while they load.
#include "backend/cuda/implementations.h"
#include "backend/cuda/ops/core_weights.h"
#include "backend/cuda/ops/quantized_product.h"
#include "core/format.h"
#include "core/prepared_weight.h"
#include "core/status_macros.h"

namespace moire::cuda::ops {
namespace {

// The weight quantised, into the memory that is kept or on the way to what is decoded and kept.
struct Call : PlannedCall<PrepareWeightArgs> {
  Call(const DeviceState& device, const PrepareWeightArgs& given, const Workspace& workspace)
      : PlannedCall(device, given, workspace), form_(static_cast<WeightForm>(args.prepared.form)) {
    kept_ = copies_of(args.prepared);
    WeightCopies codes = kept_;
    if (form_ == WeightForm::kDequantized) {
      codes = take_copies(arena, args.prepared, WeightForm::kCodes);
      add_decoding(codes.rowwise, kept_.rowwise, MOIRE_ROWWISE);
      add_decoding(codes.columnwise, kept_.columnwise, MOIRE_COLUMNWISE);
    }
    quantize_ = quantize_step(args, codes);
  }

  Reason supports() const { return kQuantizeWeight.supports(state, quantize_); }
  std::string policy() const {
    return concat(form_ == WeightForm::kDequantized ? "decoded into bf16, "
                  : form_ == WeightForm::kCores     ? "tiles for FP8 tensor cores, "
                                                    : "codes, ",
                  args.prepared.memory.shape[0], " bytes");
  }
  int64_t launches() const {
    if (is_one_pass()) return launches_of_core_weights(args.w);
    return launches_of(kQuantizeWeight, state, quantize_) + decoded_.launches(state);
  }
  Status run(const Context& context) const {
    if (is_one_pass()) {
      return make_core_weights(context, args.w, args.recipe, args.fractional_scales, kept_);
    }
    const Context own = context.within({"prepare_weight", "w"});
    MOIRE_RETURN_IF_ERROR(kQuantizeWeight.run(own, quantize_));
    return decoded_.run(own, "prepare_weight");
  }

 private:
  // FP8_BLOCK's rows alone are quantize_weight's tiles, and made sooner by it.
  bool is_one_pass() const {
    const bool is_folded = args.recipe == MOIRE_RECIPE_MXFP8_FAST;
    return form_ == WeightForm::kCores && (is_folded || is_present(kept_.columnwise));
  }
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
  WeightCopies kept_;
  QuantizeWeightArgs quantize_;
  Calls<DequantizeArgs, kDequantize> decoded_;
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
