// quantize and quantize_weight on CUDA: one launch, one read of the source, one copy or both.
#include "backend/cuda/implementations.h"
#include "backend/cuda/ops/quantize.h"
#include "backend/cuda/ops/quantize_kernel.cuh"
#include "core/quantize_bias.h"

namespace moire::cuda::ops {
namespace {

bool takes_vectors(const TensorView& source, const moire_quantized& rowwise,
                   const moire_quantized& columnwise) {
  return source.columns() % kEight == 0 && opens_vectors({source}) &&
         opens_eights(rowwise, MOIRE_ROWWISE) && opens_eights(columnwise, MOIRE_COLUMNWISE);
}
bool takes_vectors(const QuantizeWeightArgs& args) {
  bool opens = takes_vectors(args.source.tensor, args.rowwise, args.columnwise);
  for_each_matrix(args.source, [&](int64_t, const void* data, int64_t) {
    opens = opens && reinterpret_cast<uintptr_t>(data) % 16 == 0;
  });
  return opens;
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
// Ragged copies have no tiles of one scale.
template <class Source>
void launch_scaling(Launcher& launcher, int32_t scaling, const QuantizeTiles<Source>& tiles,
                    const TensorView& shape, const NonFiniteCall& call) {
  const auto launch = scaling == MOIRE_SCALING_MXFP8 ? launch_quantize<MOIRE_SCALING_MXFP8, Source>
                      : scaling == MOIRE_SCALING_FP8_BLOCK
                          ? launch_quantize<MOIRE_SCALING_FP8_BLOCK, Source>
                          : launch_quantize<MOIRE_SCALING_FP8_TILE, Source>;
  launch(launcher, tiles, shape, call);
}

// What both ops have in common; their structs have fields of the same names.
template <class Source, class A>
QuantizeTiles<Source> tiles_of(const A& args, const TensorView& source, const ScaleBlocks& blocks) {
  QuantizeTiles<Source> tiles{};
  tiles.source.rows = matrix_of<const typename Source::Element>(source);
  tiles.source.num_rows = source.num_rows();
  tiles.source.columns = static_cast<int>(source.columns());
  set_copies(tiles, args, blocks);
  return tiles;
}

TensorView shape_of(const QuantizeArgs& args) {
  const TensorView source(args.source), row_idx(args.row_idx);
  const int64_t rows = row_idx.is_present() ? row_idx.shape[0] : source.num_rows();
  return TensorView(nullptr, source.type(), {rows, source.columns()});
}

Status run_quantize(const Context& context, const QuantizeArgs& args) {
  Launcher launcher(context, "quantize");
  const TensorView source(args.source), shape = shape_of(args);
  const ScaleBlocks blocks =
      scale_blocks(shape, args.groups, args.scaling, is_present(args.columnwise));
  const NonFiniteCall call = non_finite_call(context, {"quantize", "source"}, shape, false);
  with_floats(source.type(), takes_vectors(source, args.rowwise, args.columnwise),
              [&]<class T, bool kVectors>() {
                auto tiles = tiles_of<FloatRows<T, kVectors>>(args, source, blocks);
                tiles.source.row_idx = indices_of(args.row_idx, "row_idx");
                tiles.zeroes_tail = args.tail == MOIRE_TAIL_ZERO;
                launch_scaling(launcher, args.scaling, tiles, shape, call);
              });
  if (!launcher.ok() || !is_present(args.grad_bias)) return launcher.status();
  return kBiasBackward.run(context, bias_backward_of(args));
}

Status run_quantize_weight(const Context& context, const QuantizeWeightArgs& args) {
  Launcher launcher(context, "quantize_weight");
  const TensorView source(args.source.tensor);
  const bool is_listed = args.source.list != nullptr;
  const bool shares_rows =
      is_listed || args.scaling == MOIRE_SCALING_FP8_TILE || is_present(args.columnwise);
  const ScaleBlocks blocks = scale_blocks(source, {}, args.scaling, shares_rows);
  const NonFiniteCall call = non_finite_call(context, {"quantize_weight", "source"}, source, false);
  with_floats(source.type(), takes_vectors(args), [&]<class T, bool kVectors>() {
    if (!is_listed) {
      const auto tiles = tiles_of<FloatRows<T, kVectors>>(args, source, blocks);
      return launch_scaling(launcher, args.scaling, tiles, source, call);
    }
    auto tiles = tiles_of<ListedRows<T, kVectors>>(args, source, blocks);
    tiles.source.matrix_rows = source.shape[1];
    tiles.source.blocks_per_matrix = blocks.blocks_per_matrix;
    for_each_matrix(args.source, [&](int64_t g, const void* data, int64_t) {
      tiles.source.matrices[g] = static_cast<const T*>(data);
    });
    launch_scaling(launcher, args.scaling, tiles, source, call);
  });
  return launcher.status();
}

Reason supports_quantize(const DeviceState&, const QuantizeArgs& args) {
  const moire_groups groups = groups_or_all(args.groups, shape_of(args).num_rows());
  if (const Reason reason = why_not_transposed("columnwise", args.columnwise, groups))
    return reason;
  return too_wide("source", TensorView(args.source).columns());
}
Reason supports_quantize_weight(const DeviceState&, const QuantizeWeightArgs& args) {
  constexpr int64_t kMost = ListedRows<float, false>::kMost;
  const TensorView source(args.source.tensor);
  if (args.source.list != nullptr && source.shape[0] > kMost) {
    return concat("source is a list of ", source.shape[0], " matrices, at most ", kMost,
                  " are taken");
  }
  return too_wide("source", source.columns());
}

std::string policy_of_tiles(int32_t scaling, bool takes_vectors) {
  const bool is_mx = scaling == MOIRE_SCALING_MXFP8;
  return tiles_policy(is_mx ? 32 : 128, is_mx ? 64 : 128, "eight", takes_vectors);
}
std::string policy_quantize(const DeviceState&, const QuantizeArgs& args) {
  return policy_of_tiles(args.scaling, takes_vectors(args.source, args.rowwise, args.columnwise)) +
         (is_present(args.grad_bias) ? ", then bias_backward" : "");
}
size_t bias_workspace(const DeviceState& state, const QuantizeArgs& args) {
  return kBiasBackward.workspace(state, bias_backward_of(args));
}
int64_t launches_quantize(const DeviceState& state, const QuantizeArgs& args) {
  return is_present(args.grad_bias) ? 1 + kBiasBackward.launches(state, bias_backward_of(args)) : 1;
}
std::string policy_quantize_weight(const DeviceState&, const QuantizeWeightArgs& args) {
  return policy_of_tiles(args.scaling, takes_vectors(args));
}

}  // namespace

const Implementation<QuantizeArgs> kQuantize = {
    "cuda",          Device::kCuda, supports_quantize, bias_workspace,
    policy_quantize, run_quantize,  launches_quantize,
};
const Implementation<QuantizeWeightArgs> kQuantizeWeight = {
    "cuda",       Device::kCuda,          supports_quantize_weight,
    no_workspace, policy_quantize_weight, run_quantize_weight,
};

}  // namespace moire::cuda::ops
