// grouped_gemm_glu on SM90: FC1 with the activation in its epilogue. The tensor map takes gate and
// up rows of the weights apart, whatever their layout, so that each pair meets in one thread.
#include <algorithm>

#include "backend/cuda/device/matrix.cuh"
#include "backend/cuda/implementations.h"
#include "backend/cuda/sm90/epilogues.cuh"
#include "backend/cuda/sm90/launch_grouped_gemm.cuh"

namespace moire::cuda::sm90 {
namespace {

ResolvedGluLayout layout_of(const GroupedGemmGluArgs& args) {
  return resolve_glu_layout(args.layout, Weight(args.b).out_features() / 2);
}

ProductSizes sizes(const GroupedGemmGluArgs& args) {
  return ragged_m_sizes(args.groups, 2 * layout_of(args).f, TensorView(args.a).columns());
}

// Calls f.operator()<P>(cost) with the tile. Pieces of 32 columns fit halves, and blocks that
// divide 32.
template <class F>
decltype(auto) with_tile(const DeviceState& state, const GroupedGemmGluArgs& args, F&& f) {
  const ResolvedGluLayout layout = layout_of(args);
  if (layout.block == layout.f || 32 % layout.block == 0) {
    return with_cheapest(GluTiles(), sizes(args), state.num_multiprocessors, std::forward<F>(f));
  }
  return with_cheapest(Candidates<GluTile>(), sizes(args), state.num_multiprocessors,
                       std::forward<F>(f));
}

Reason supports(const DeviceState& state, const GroupedGemmGluArgs& args) {
  const Weight b(args.b);
  return first_of(
      {why_not_device(state),
       why_not_bf16({{"a", args.a}, {"b", b.tensor}, {"z", args.z}, {"act", args.act}}),
       args.b.layout == MOIRE_OUT_IN ? "" : "b is [G, in, out], the kernel takes [G, out, in]",
       why_not_listed("b", b), why_not_sizes(args.groups, b.tensor),
       why_not_layout(layout_of(args)), why_not_z(args.z, layout_of(args)),
       why_not_tma({{"a", args.a}, {"b", b.tensor}, {"z", args.z}, {"act", args.act}})});
}

RaggedMScratch scratch_of(const GroupedGemmGluArgs& args, const Workspace& workspace = {}) {
  return {args.a, args.row_idx, args.b, args.groups, workspace};
}

// A box holds half a tile's rows of gate, or of up.
template <class P>
CUtensorMap pairs_map(TensorMaps& maps, const Matrices& matrices, const ResolvedGluLayout& layout) {
  constexpr int64_t kRows = P::kTileN / 2;
  if (layout.block == layout.f) return maps.matrices("b", matrices, kRows);
  const TensorView& b = matrices.tensor;
  const int64_t rows = std::min(layout.block, kRows), row = b.stride() * 2;
  const int64_t num_blocks = layout.f / layout.block;
  return maps.encode<5>("b", b.data, DType::kBF16,
                        {{{b.columns(), 0, P::kTileK},
                          {layout.block, row, rows},
                          {2, layout.block * row, 1},
                          {num_blocks, 2 * layout.block * row, kRows / rows},
                          {matrices.count, matrices.distance, 1}}});
}

// Of gate, or up, in a piece of the epilogue.
template <class P>
constexpr int kPieceColumns = P::kTileN / 2 % kPanel == 0 ? kPanel : kPanel / 2;

template <class P, class Activation>
void launch_policy(Launcher& launcher, TensorMaps& maps, const GroupedGemmGluArgs& args,
                   const RaggedMScratch& scratch, const Activation& activation) {
  const TensorView a(scratch.rows.rows()), z(args.z);
  const Matrices b{Weight(args.b)};
  const ResolvedGluLayout layout = layout_of(args);
  constexpr int kColumns = kPieceColumns<P>;
  const ZMap<kColumns> z_columns = z_map<P, kColumns>(maps, "z", z, layout);
  const auto f = static_cast<int32_t>(layout.f);
  const GluPairs operands{
      maps.matrix("a", a, P::kTileM),    pairs_map<P>(maps, b, layout), f,
      static_cast<int32_t>(a.columns()), z_columns.columns.block,       z_columns.columns.gate,
      args.tail == MOIRE_TAIL_ZERO};
  const StoreGlu<Activation, kColumns> epilogue{
      z_columns,
      maps.ragged_rows("act", args.act, P::kBoxRows, 1, kColumns),
      f,
      static_cast<int32_t>(args.groups.num_groups),
      z.is_present(),
      Bias(args.bias),
      vector_of<const float>(args.probs),
      activation};
  if (!maps.status().ok()) return;
  launch<P>(launcher, sizes(args), args.groups, operands, epilogue, numbers(b, scratch.listed));
}

Status run(const Context& context, const GroupedGemmGluArgs& args) {
  Launcher launcher(context, "grouped_gemm_glu");
  if (args.groups.capacity == 0) return launcher.status();
  const RaggedMScratch scratch = scratch_of(args, args.workspace);
  scratch.prepare(launcher);
  TensorMaps maps(launcher.state(), "grouped_gemm_glu");
  with_activation<false>(args.activation, [&](const auto& activation) {
    with_tile(launcher.state(), args, [&]<class P>(const Cost&) {
      launch_policy<P>(launcher, maps, args, scratch, activation);
    });
  });
  return maps.status().ok() ? launcher.status() : maps.status();
}

}  // namespace

const Implementation<GroupedGemmGluArgs> kGroupedGemmGlu = {
    "sm90",
    Device::kCuda,
    supports,
    [](const DeviceState&, const GroupedGemmGluArgs& args) {
      return scratch_of(args).arena.used();
    },
    [](const DeviceState& state, const GroupedGemmGluArgs& args) {
      return with_tile(state, args, PolicyText()) + scratch_of(args).policy();
    },
    run,
    [](const DeviceState&, const GroupedGemmGluArgs& args) -> int64_t {
      return 1 + scratch_of(args).launches();
    }};

}  // namespace moire::cuda::sm90
