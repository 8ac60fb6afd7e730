// The activation, and its FP8 copies, in one pass; which calls are such, of the backward too.
#include "backend/cuda/device/lane_sums.cuh"
#include "backend/cuda/ops/glu_copies.h"
#include "backend/cuda/ops/glu_tiles.cuh"
#include "core/glu_storage.h"

namespace moire::cuda::ops {
namespace {

template <class Columns>
struct ForwardArgs {
  Gating<Columns> gating;
  QuantizeTiles<TileRows> act;
};

// A thread's part of a tile, which the thread alone reads again.
template <class Columns, class Activation>
__device__ inline void glu_values(const Gating<Columns>& gating, const Activation& activation,
                                  const GluTilePart& tile) {
#pragma unroll 2
  for (int i = 0; i < GluTilePart::kRows; ++i) {
    Packed8 act{};
    if (tile.has_row(i)) {
      Packed8 gate, up;
      const float prob = gating.prob(tile.row(i));
      load_glu(gating.columns, gating.z.row(tile.row(i)), static_cast<uint32_t>(tile.column), gate,
               up);
#pragma unroll
      for (int j = 0; j < kEight; ++j) {
        act.set(j, glu_value(activation, gate[j], up[j]) * prob);
      }
    }
    TileRows::piece_of(0, tile, i) = bits_as<uint4>(act);
  }
}

template <class Columns>
__global__ void __launch_bounds__(GluTileShape::kThreads, 2)
    glu_copies_kernel(const __grid_constant__ ForwardArgs<Columns> args,
                      const __grid_constant__ Reporter reporter,
                      const __grid_constant__ NonFiniteReporter notes) {
  const QuantizeTiles<TileRows>& act = args.act;
  if (blockIdx.x == 0)
    check_groups(act.blocks.groups, reporter, threadIdx.x, GluTileShape::kThreads);
  const GluTilePart tile(act.blocks, act.column_tiles, act.source.columns);
  if (!tile.is_empty) {
    with_gating<Columns::kIsGated>(args.gating.activation, [&](const auto& activation) {
      glu_values(args.gating, activation, tile);
    });
  }
  quantize_shared(act, tile, true, reporter, notes);
}

int64_t f_of(const GluArgs& glu) { return TensorView(glu.z).columns() / num_halves(glu.layout); }

// Whether eight columns of F are whole pieces of z.
bool takes_pieces(const ResolvedGluLayout& layout, const TensorView& z) {
  if (layout.f % kEight != 0 || !opens_vectors({z})) return false;
  return !layout.is_gated || layout.block == 1 || layout.block % kEight == 0;
}
// Whether tiles of 128 columns of z are made of whole tiles of F.
bool takes_tiles(const ResolvedGluLayout& layout) {
  return !layout.is_gated || layout.block % kGluTile == 0 || kGluTile / 2 % layout.block == 0;
}

bool is_taken(const moire_quantized& copy, int32_t direction, const moire_groups& groups) {
  if (!is_present(copy)) return true;
  return scaling_of(copy) == MOIRE_SCALING_FP8_BLOCK && opens_eights(copy, direction) &&
         (direction == MOIRE_ROWWISE || !why_not_transposed("", copy, groups));
}

}  // namespace

bool leaves_copies(const GroupedGemmGluArgs& args) {
  const int64_t f = Weight(args.b).out_features() / num_halves(args.layout);
  return !is_present(args.act) && glu_storage(args) == DType::kBF16 &&
         (is_present(args.act_rowwise) || is_present(args.act_columnwise)) &&
         is_taken(args.act_rowwise, MOIRE_ROWWISE, args.groups) &&
         is_taken(args.act_columnwise, MOIRE_COLUMNWISE, args.groups) &&
         takes_pieces(resolve_glu_layout(args.layout, f), args.z);
}

bool leaves_copies(const GroupedGemmGluBackwardArgs& args) {
  const ResolvedGluLayout layout = resolve_glu_layout(args.layout, Weight(args.w2).in_features());
  return !is_present(args.grad_z) && !is_present(args.act) && !is_present(args.grad_bias) &&
         TensorView(args.z).type() == DType::kBF16 &&
         (is_present(args.grad_z_rowwise) || is_present(args.grad_z_columnwise)) &&
         is_taken(args.grad_z_rowwise, MOIRE_ROWWISE, args.groups) &&
         is_taken(args.grad_z_columnwise, MOIRE_COLUMNWISE, args.groups) &&
         is_taken(args.act_columnwise, MOIRE_COLUMNWISE, args.groups) &&
         takes_pieces(layout, args.z) && takes_tiles(layout);
}

int64_t num_grad_probs_parts(int64_t f) { return ceil_div(f, kSegment); }

Reason GluCopies::supports() const { return too_wide("act", f_of(glu)); }

Status GluCopies::run(const Context& context) const {
  constexpr const char* kOp = "grouped_gemm_glu";
  Launcher launcher(context, kOp);
  const int64_t f = f_of(glu);
  const ScaleBlocks blocks =
      scale_blocks(glu.z, act.groups, act.scaling, is_present(act.columnwise));
  QuantizeTiles<TileRows> tiles = tiles_of(act, {static_cast<int>(f), 0, 0}, blocks);
  tiles.column_tiles = blocks_for(f, kGluTile);
  const LaunchShape shape = shape_of(blocks, tiles.column_tiles, 1);
  with_pieces(resolve_glu_layout(glu.layout, f), [&]<class Columns>(const Columns& columns) {
    const ForwardArgs<Columns> args{gating_of(glu, columns), tiles};
    launcher.launch(glu_copies_kernel<Columns>, shape, args, launcher.reporter(),
                    notes_of(launcher, context, kOp, "act"));
  });
  return launcher.status();
}

}  // namespace moire::cuda::ops
