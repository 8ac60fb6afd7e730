// prepare_weight on CUDA, by the ops that quantise and decode. Decoded weights are kept on request,
// and for Hopper alone: its BF16 kernels would decode codes into the workspace at each call, the
// plain ones decode while they load.
#include <array>

#include "backend/cuda/implementations.h"
#include "core/format.h"
#include "core/prepared_weight.h"
#include "core/status_macros.h"

namespace moire::cuda::ops {
namespace {

// The weight quantised, into the memory that is kept or on the way to what is kept of it.
struct Steps {
  explicit Steps(const PrepareWeightArgs& args)
      : is_decoded(args.prepared.form == static_cast<int32_t>(WeightForm::kDequantized)),
        arena(args.workspace) {
    const WeightCopies kept = copies_of(args.prepared);
    const WeightCopies codes =
        is_decoded ? take_copies(arena, args.prepared, WeightForm::kCodes) : kept;
    quantize = quantize_step(args, codes);
    if (!is_decoded) return;
    add(codes.rowwise, kept.rowwise, MOIRE_ROWWISE);
    add(codes.columnwise, kept.columnwise, MOIRE_COLUMNWISE);
  }
  std::span<const DequantizeArgs> decode() const { return std::span(decode_).first(num_decoded_); }

  bool is_decoded;
  Arena arena;
  QuantizeWeightArgs quantize;

 private:
  void add(const moire_quantized& codes, const moire_quantized& kept, int32_t direction) {
    if (!is_present(kept)) return;
    DequantizeArgs& args = decode_[num_decoded_++];
    args.source = codes;
    args.scaling = MOIRE_SCALING_MXFP8;
    args.direction = direction;
    args.target = kept.data;
  }
  std::array<DequantizeArgs, 2> decode_;
  size_t num_decoded_ = 0;
};

Reason supports(const DeviceState& state, const PrepareWeightArgs& args) {
  return kQuantizeWeight.supports(state, quantize_step(args, {}));
}

Status run(const Context& context, const PrepareWeightArgs& args) {
  const Context own = context.within({"prepare_weight", "w"});
  const Steps steps(args);
  MOIRE_RETURN_IF_ERROR(kQuantizeWeight.run(own, steps.quantize));
  for (const DequantizeArgs& decode : steps.decode()) {
    MOIRE_RETURN_IF_ERROR(kDequantize.run(own, decode));
  }
  return {};
}

size_t workspace(const DeviceState&, const PrepareWeightArgs& args) {
  return Steps(args).arena.used();
}

std::string policy(const DeviceState&, const PrepareWeightArgs& args) {
  return concat(Steps(args).is_decoded ? "decoded into bf16, " : "codes, ",
                args.prepared.memory.shape[0], " bytes kept");
}

int64_t launches(const DeviceState&, const PrepareWeightArgs& args) {
  return 1 + static_cast<int64_t>(Steps(args).decode().size());
}

}  // namespace

WeightForm prepared_form(const DeviceState& state, const PrepareWeightArgs& args) {
  const bool is_hopper = state.compute_capability == 90;
  return args.dequantized != 0 && is_hopper ? WeightForm::kDequantized : WeightForm::kCodes;
}

const Implementation<PrepareWeightArgs> kPrepareWeight = {
    .name = "cuda",
    .device = Device::kCuda,
    .supports = supports,
    .workspace = workspace,
    .policy = policy,
    .run = run,
    .launches = launches,
};

}  // namespace moire::cuda::ops
