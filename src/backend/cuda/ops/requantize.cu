// requantize on CUDA: the tiles of quantize.cu, whose rows are decoded as they are read.
#include "backend/cuda/implementations.h"
#include "backend/cuda/ops/quantize.h"
#include "backend/cuda/ops/quantize_kernel.cuh"

namespace moire::cuda::ops {
namespace {

bool takes_vectors(const RequantizeArgs& args) {
  return opens_eights(args.source, args.direction) && opens_eights(args.target, 1 - args.direction);
}

template <int kScaling, int kDirection, bool kVectors>
void launch(Launcher& launcher, const RequantizeArgs& args, const NonFiniteCall& call) {
  const TensorView data(args.source.data);
  QuantizeTiles<CodeRows<kVectors, kDirection>> tiles{};
  tiles.source = code_rows<kVectors, kDirection>(args.source);
  tiles.blocks = scale_blocks(data, args.groups, args.scaling, true);
  const bool to_rowwise = kDirection == MOIRE_COLUMNWISE;
  (to_rowwise ? tiles.rowwise : tiles.columnwise) = copy_target(args.target);
  tiles.fractional = args.fractional_scales != 0;
  tiles.zeroes_tail = args.tail == MOIRE_TAIL_ZERO && data.rank == 2;
  launch_quantize<kScaling>(launcher, tiles, data, call);
}

template <int kScaling, int kDirection>
void launch(Launcher& launcher, const RequantizeArgs& args, const NonFiniteCall& call) {
  if (takes_vectors(args)) {
    launch<kScaling, kDirection, true>(launcher, args, call);
  } else {
    launch<kScaling, kDirection, false>(launcher, args, call);
  }
}

Status run(const Context& context, const RequantizeArgs& args) {
  Launcher launcher(context, "requantize");
  const NonFiniteCall call =
      non_finite_call(context, {"requantize", "source"}, args.source.data, true);
  const bool is_rowwise = args.direction == MOIRE_ROWWISE;
  if (args.scaling == MOIRE_SCALING_MXFP8) {
    (is_rowwise ? launch<MOIRE_SCALING_MXFP8, MOIRE_ROWWISE>
                : launch<MOIRE_SCALING_MXFP8, MOIRE_COLUMNWISE>)(launcher, args, call);
  } else {
    (is_rowwise ? launch<MOIRE_SCALING_FP8_BLOCK, MOIRE_ROWWISE>
                : launch<MOIRE_SCALING_FP8_BLOCK, MOIRE_COLUMNWISE>)(launcher, args, call);
  }
  return launcher.status();
}

Reason supports(const DeviceState&, const RequantizeArgs& args) {
  return too_wide("source", TensorView(args.source.data).columns());
}
std::string policy(const DeviceState&, const RequantizeArgs& args) {
  return tiles_policy(args.scaling, takes_vectors(args));
}

}  // namespace

const Implementation<RequantizeArgs> kRequantize = {
    "cuda", Device::kCuda, supports, no_workspace, policy, run,
};

}  // namespace moire::cuda::ops
