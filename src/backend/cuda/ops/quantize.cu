// quantize and quantize_weight on CUDA: one launch, one read of the source, one copy or both.
#include "backend/cuda/implementations.h"
#include "backend/cuda/ops/quantize.h"
#include "backend/cuda/ops/quantize_kernel.cuh"

namespace moire::cuda::ops {
namespace {

bool takes_vectors(const TensorView& source, const moire_quantized& rowwise,
                   const moire_quantized& columnwise) {
  return source.columns() % kEight == 0 && opens_vectors({source}) &&
         opens_eights(rowwise, MOIRE_ROWWISE) && opens_eights(columnwise, MOIRE_COLUMNWISE);
}

// Calls f.operator()<T, kVectors>().
template <class F>
void with_floats(DType dtype, bool takes_vectors, F&& f) {
  with_float_type(dtype, [&]<class T>() {
    if (takes_vectors) {
      f.template operator()<T, true>();
    } else {
      f.template operator()<T, false>();
    }
  });
}
// Calls f.operator()<kScaling>().
template <class F>
void with_scaling(int32_t scaling, F&& f) {
  if (scaling == MOIRE_SCALING_MXFP8) {
    f.template operator()<MOIRE_SCALING_MXFP8>();
  } else {
    f.template operator()<MOIRE_SCALING_FP8_BLOCK>();
  }
}

// What both ops have in common; their structs have fields of the same names.
template <class T, bool kVectors, class A>
QuantizeTiles<FloatRows<T, kVectors>> tiles_of(const A& args, const TensorView& source,
                                               const ScaleBlocks& blocks) {
  QuantizeTiles<FloatRows<T, kVectors>> tiles{};
  tiles.source.rows = matrix_of<const T>(source);
  tiles.source.num_rows = source.num_rows();
  tiles.source.columns = static_cast<int>(source.columns());
  tiles.blocks = blocks;
  tiles.rowwise = copy_target(args.rowwise);
  tiles.columnwise = copy_target(args.columnwise);
  tiles.fractional = args.fractional_scales != 0;
  return tiles;
}

TensorView shape_of(const moire_quantized& rowwise, const moire_quantized& columnwise) {
  return is_present(rowwise) ? rowwise.data : columnwise.data;
}

Status run_quantize(const Context& context, const QuantizeArgs& args) {
  Launcher launcher(context, "quantize");
  const TensorView source(args.source), shape = shape_of(args.rowwise, args.columnwise);
  const ScaleBlocks blocks =
      scale_blocks(shape, args.groups, args.scaling, is_present(args.columnwise));
  const NonFiniteCall call = non_finite_call(context, {"quantize", "source"}, shape, false);
  with_floats(source.type(), takes_vectors(source, args.rowwise, args.columnwise),
              [&]<class T, bool kVectors>() {
                auto tiles = tiles_of<T, kVectors>(args, source, blocks);
                tiles.source.row_idx = indices_of(args.row_idx, "row_idx");
                tiles.zeroes_tail = args.tail == MOIRE_TAIL_ZERO;
                with_scaling(args.scaling, [&]<int kScaling>() {
                  launch_quantize<kScaling>(launcher, tiles, shape, call);
                });
              });
  return launcher.status();
}

Status run_quantize_weight(const Context& context, const QuantizeWeightArgs& args) {
  Launcher launcher(context, "quantize_weight");
  const TensorView source(args.source.tensor);
  const bool is_tiled = args.scaling == MOIRE_SCALING_FP8_TILE;
  const ScaleBlocks blocks =
      scale_blocks(source, {}, args.scaling, is_tiled || is_present(args.columnwise));
  const NonFiniteCall call = non_finite_call(context, {"quantize_weight", "source"}, source, false);
  with_floats(source.type(), takes_vectors(source, args.rowwise, args.columnwise),
              [&]<class T, bool kVectors>() {
                const auto tiles = tiles_of<T, kVectors>(args, source, blocks);
                if (is_tiled) {
                  launch_quantize<MOIRE_SCALING_FP8_TILE>(launcher, tiles, source, call);
                } else {
                  with_scaling(args.scaling, [&]<int kScaling>() {
                    launch_quantize<kScaling>(launcher, tiles, source, call);
                  });
                }
              });
  return launcher.status();
}

Reason supports_quantize(const DeviceState&, const QuantizeArgs& args) {
  return too_wide("source", TensorView(args.source).columns());
}
Reason supports_quantize_weight(const DeviceState&, const QuantizeWeightArgs& args) {
  if (args.source.list != nullptr) return "source is a list, the kernel takes packed weights";
  return too_wide("source", TensorView(args.source.tensor).columns());
}

std::string policy_quantize(const DeviceState&, const QuantizeArgs& args) {
  return tiles_policy(args.scaling, takes_vectors(args.source, args.rowwise, args.columnwise));
}
std::string policy_quantize_weight(const DeviceState&, const QuantizeWeightArgs& args) {
  return tiles_policy(args.scaling,
                      takes_vectors(args.source.tensor, args.rowwise, args.columnwise));
}

}  // namespace

const Implementation<QuantizeArgs> kQuantize = {
    "cuda", Device::kCuda, supports_quantize, no_workspace, policy_quantize, run_quantize,
};
const Implementation<QuantizeWeightArgs> kQuantizeWeight = {
    "cuda",       Device::kCuda,          supports_quantize_weight,
    no_workspace, policy_quantize_weight, run_quantize_weight,
};

}  // namespace moire::cuda::ops
