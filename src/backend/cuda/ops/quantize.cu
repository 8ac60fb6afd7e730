// quantize and quantize_weight on CUDA: one launch, one read of the source, one copy or both, and
// the partial sums of a bias' gradient, which another launch adds.
#include "backend/cuda/implementations.h"
#include "backend/cuda/ops/partial_sums.h"
#include "backend/cuda/ops/quantize.h"
#include "backend/cuda/ops/quantize_kernel.cuh"
#include "core/arena.h"
#include "core/quantize_bias.h"

namespace moire::cuda::ops {
namespace {

bool are_eights(const moire_quantized& rowwise, const moire_quantized& columnwise) {
  return opens_eights(rowwise, MOIRE_ROWWISE) && opens_eights(columnwise, MOIRE_COLUMNWISE);
}
bool takes_vectors(const TensorView& source, const moire_quantized& rowwise,
                   const moire_quantized& columnwise) {
  return source.columns() % kEight == 0 && opens_vectors({source}) &&
         are_eights(rowwise, columnwise);
}
bool takes_vectors(const QuantizeWeightArgs& args) {
  return opens_eights(Weight(args.source)) && are_eights(args.rowwise, args.columnwise);
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

std::string policy_of_tiles(int32_t scaling, bool takes_vectors) {
  const bool is_mx = scaling == MOIRE_SCALING_MXFP8;
  return tiles_policy(is_mx ? 32 : 128, is_mx ? 64 : 128, "eight", takes_vectors);
}

// A call of quantize. Its kernel makes the partial sums of grad_bias where it reads by vectors;
// else bias_backward makes that from a second read.
class Call {
 public:
  Call(const DeviceState& state, const QuantizeArgs& args, const Workspace& workspace)
      : state_(state),
        args_(args),
        bias_(bias_backward_of(args)),
        arena_(workspace),
        takes_vectors_(takes_vectors(args.source, args.rowwise, args.columnwise)),
        sums_(is_present(args.grad_bias) && takes_vectors_) {
    if (sums_) bias_parts_ = take_block_partials(arena_, args.grad_bias, args.groups);
  }

  Reason supports() const {
    const moire_groups groups = groups_or_all(args_.groups, shape().num_rows());
    if (const Reason reason = why_not_transposed("columnwise", args_.columnwise, groups))
      return reason;
    if (const Reason reason = why_not_mixed(args_)) return reason;
    return too_wide("source", source_.columns());
  }
  size_t workspace() const {
    return reads_twice() ? kBiasBackward.workspace(state_, bias_) : arena_.used();
  }
  int64_t launches() const {
    return 1 + sums_ + (reads_twice() ? kBiasBackward.launches(state_, bias_) : 0);
  }
  std::string policy() const {
    return concat(policy_of_tiles(args_.scaling, takes_vectors_),
                  args_.fractional_scales == kFoldedScales ? ", folded" : "",
                  reads_twice() ? ", then bias_backward" : "");
  }
  Status run(const Context& context) const {
    Launcher launcher(context, "quantize");
    if (sums_) {
      with_float_type(source_.type(), [&]<class T>() { launch<SummedRows<T>>(launcher, context); });
      sum_block_partials(launcher, bias_parts_, args_.groups, args_.grad_bias, args_.beta,
                         args_.beta_per_group);
    } else if (is_plain()) {
      launch<PlainRows>(launcher, context);
    } else {
      with_floats(source_.type(), takes_vectors_, [&]<class T, bool kVectors>() {
        launch<FloatRows<T, kVectors>>(launcher, context);
      });
    }
    if (!launcher.ok() || !reads_twice()) return launcher.status();
    return kBiasBackward.run(context, bias_);
  }

 private:
  bool is_plain() const {
    return args_.scaling == MOIRE_SCALING_FP8_BLOCK && args_.fractional_scales == 0 &&
           takes_vectors_ && source_.type() == DType::kBF16;
  }
  bool reads_twice() const { return is_present(args_.grad_bias) && !sums_; }
  // Of the copies.
  TensorView shape() const {
    const TensorView row_idx(args_.row_idx);
    const int64_t rows = row_idx.is_present() ? row_idx.shape[0] : source_.num_rows();
    return TensorView(nullptr, source_.type(), {rows, source_.columns()});
  }
  template <class Source>
  void launch(Launcher& launcher, const Context& context) const {
    const ScaleBlocks blocks =
        scale_blocks(shape(), args_.groups, args_.scaling, is_present(args_.columnwise) || sums_);
    auto tiles = tiles_of<Source>(args_, source_, blocks);
    tiles.source.row_idx = indices_of(args_.row_idx, "row_idx");
    if constexpr (kIsSummed<Source>) tiles.source.bias_parts = bias_parts_;
    const auto notes = non_finite_reporter(context, {"quantize", "source"}, shape(), false);
    if constexpr (std::is_same_v<Source, PlainRows>) {
      launch_quantize<MOIRE_SCALING_FP8_BLOCK>(launcher, tiles, shape(), notes);
    } else {
      with_ragged_scaling(args_, [&]<int kScaling>() {
        launch_quantize<kScaling>(launcher, tiles, shape(), notes);
      });
    }
  }

  const DeviceState& state_;
  const QuantizeArgs& args_;
  const BiasBackwardArgs bias_;
  Arena arena_;
  const TensorView source_{args_.source};
  bool takes_vectors_, sums_;
  float* bias_parts_ = nullptr;
};

// Only listed and packed matrices have tiles of one scale.
template <class Source>
void launch_scaling(Launcher& launcher, int32_t scaling, const QuantizeTiles<Source>& tiles,
                    const TensorView& shape, const NonFiniteReporter& notes) {
  const auto launch = scaling == MOIRE_SCALING_MXFP8 ? launch_quantize<MOIRE_SCALING_MXFP8, Source>
                      : scaling == MOIRE_SCALING_FP8_BLOCK
                          ? launch_quantize<MOIRE_SCALING_FP8_BLOCK, Source>
                          : launch_quantize<MOIRE_SCALING_FP8_TILE, Source>;
  launch(launcher, tiles, shape, notes);
}

// The matrices of a list from `first` on, as many as a launch takes, of the tiles of all.
template <class T, bool kVectors>
void launch_listed(Launcher& launcher, const QuantizeWeightArgs& args,
                   QuantizeTiles<ListedRows<T, kVectors>> tiles, int64_t first,
                   const NonFiniteReporter& notes) {
  const TensorView shape = tiles.source.take(args.source, first);
  const int64_t rows = tiles.source.first_row, blocks = first * tiles.blocks.blocks_per_matrix;
  tiles.source.blocks_per_matrix = tiles.blocks.blocks_per_matrix;
  tiles.blocks = scale_blocks(shape, {}, args.scaling, true);
  tiles.rowwise.skip(rows, args.scaling == MOIRE_SCALING_FP8_TILE ? blocks : rows,
                     scale_dtype(args.scaling));
  tiles.columnwise.skip(rows, blocks, scale_dtype(args.scaling));
  launch_scaling(launcher, args.scaling, tiles, shape, notes);
}

Status run(const Context& context, const QuantizeWeightArgs& args) {
  Launcher launcher(context, "quantize_weight");
  const TensorView source(args.source.tensor);
  const bool is_listed = args.source.list != nullptr;
  const bool shares_rows =
      is_listed || args.scaling == MOIRE_SCALING_FP8_TILE || is_present(args.columnwise);
  const ScaleBlocks blocks = scale_blocks(source, {}, args.scaling, shares_rows);
  const auto notes = non_finite_reporter(context, {"quantize_weight", "source"}, source, false);
  with_floats(source.type(), takes_vectors(args), [&]<class T, bool kVectors>() {
    if (!is_listed) {
      const auto tiles = tiles_of<FloatRows<T, kVectors>>(args, source, blocks);
      return launch_scaling(launcher, args.scaling, tiles, source, notes);
    }
    using Source = ListedRows<T, kVectors>;
    auto tiles = tiles_of<Source>(args, source, blocks);
    for (int64_t first = 0; first < source.shape[0]; first += Source::kMost) {
      launch_listed(launcher, args, tiles, first, notes);
    }
  });
  return launcher.status();
}

Reason supports(const DeviceState&, const QuantizeWeightArgs& args) {
  return too_wide("source", TensorView(args.source.tensor).columns());
}
int64_t launches(const DeviceState&, const QuantizeWeightArgs& args) {
  const int64_t count = args.source.tensor.shape[0];
  return args.source.list == nullptr ? 1 : ListedRows<float, false>::launches(count);
}

std::string policy(const DeviceState&, const QuantizeWeightArgs& args) {
  return policy_of_tiles(args.scaling, takes_vectors(args));
}

}  // namespace

const Implementation<QuantizeArgs> kQuantize = implementation_of<QuantizeArgs, Call>("cuda");
const Implementation<QuantizeWeightArgs> kQuantizeWeight = on_cuda(supports, policy, run, launches);

}  // namespace moire::cuda::ops
