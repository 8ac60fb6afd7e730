// grouped_gemm_glu on SM90: FC1 with the activation in its epilogue. The tensor map takes gate and
// up rows of the weights apart, whatever their layout, so that each pair meets in one thread.
#include <algorithm>

#include "backend/cuda/sm90/epilogues.cuh"
#include "backend/cuda/sm90/launch_grouped_gemm.cuh"

namespace moire::cuda::sm90 {
namespace {

// A box holds half a tile's rows of gate, or of up.
template <class P>
CUtensorMap pairs_map(TensorMaps& maps, const Matrices& matrices, const ResolvedGluLayout& layout) {
  constexpr int64_t kRows = P::kTileN / 2;
  if (layout.block == layout.f) return maps.matrices("b", matrices, kRows);
  const TensorView& b = matrices.tensor;
  const int64_t rows = std::min(layout.block, kRows), row = b.stride() * 2;
  const int64_t num_blocks = layout.f / layout.block;
  return maps.encode("b", b,
                     {{b.columns(), 0, P::kTileK},
                      {layout.block, row, rows},
                      {2, layout.block * row, 1},
                      {num_blocks, 2 * layout.block * row, kRows / rows},
                      {matrices.count, matrices.distance, 1}});
}

// Calls f.operator()<P>(cost) with the tile. Pieces of 32 columns fit halves, and blocks that
// divide 32.
template <class F>
decltype(auto) with_tile(const DeviceState& state, const ProductSizes& sizes,
                         const ResolvedGluLayout& layout, F&& f) {
  if (layout.block == layout.f || 32 % layout.block == 0) {
    return with_cheapest(GluTiles(), sizes, state.num_multiprocessors, std::forward<F>(f));
  }
  return with_cheapest(Candidates<GluTile, ThinGluTile>(), sizes, state.num_multiprocessors,
                       std::forward<F>(f));
}

struct Call : RaggedMCall<GroupedGemmGluArgs> {
  Call(const DeviceState& device, const GroupedGemmGluArgs& given, const Workspace& workspace)
      : RaggedMCall(device, given, given.a, given.b, workspace),
        layout_(resolve_glu_layout(args.layout, Weight(args.b).out_features() / 2)) {}

  Reason supports() const {
    const Weight b(args.b);
    const std::initializer_list<Named> tensors{
        {"a", args.a}, {"b", b.tensor}, {"z", args.z}, {"act", args.act}};
    return first_of(
        {why_not_device(state), why_not_type(DType::kBF16, tensors),
         args.b.layout == MOIRE_OUT_IN ? "" : "b is [G, in, out], the kernel takes [G, out, in]",
         why_not_listed("b", b), why_not_sizes(args.groups, b.tensor), why_not_layout(layout_),
         why_not_z(args.z, layout_), why_not_tma(tensors)});
  }
  std::string policy() const {
    return with_tile(state, sizes(), layout_, PolicyText()) + preparation();
  }
  Status run(const Context& context) const {
    Launcher launcher(context, "grouped_gemm_glu");
    if (args.groups.capacity == 0) return launcher.status();
    prepare(launcher);
    with_activation<false>(args.activation, [&](const auto& activation) {
      with_tile(state, sizes(), layout_,
                [&]<class P>(const Cost&) { launch_policy<P>(launcher, activation); });
    });
    return launcher.status();
  }

 private:
  ProductSizes sizes() const {
    return ragged_m_sizes(args.groups, 2 * layout_.f, TensorView(args.a).columns());
  }

  template <class P, class Activation>
  void launch_policy(Launcher& launcher, const Activation& activation) const {
    TensorMaps maps(launcher);
    const TensorView a(rows.rows()), z(args.z);
    const Matrices b{Weight(args.b)};
    // Of gate, or up, in a piece of the epilogue.
    constexpr int kColumns = P::kTileN / 2 % kPanel == 0 ? kPanel : kPanel / 2;
    const ZMap<kColumns> z_columns = z_map<P, kColumns>(maps, "z", z, layout_);
    const auto f = static_cast<int32_t>(layout_.f);
    const GluPairs operands{
        row_boxes<P>(maps, a, args.groups), pairs_map<P>(maps, b, layout_), f,
        static_cast<int32_t>(a.columns()),  z_columns.columns.block,        z_columns.columns.gate,
        args.tail == MOIRE_TAIL_ZERO};
    const StoreGlu<Activation, kColumns> epilogue{
        z_columns,
        maps.ragged_rows("act", args.act, P::kBoxRows, 1, kColumns),
        f,
        static_cast<int32_t>(args.groups.num_groups),
        z.is_present(),
        any_floats(args.bias),
        vector_of<const float>(args.probs),
        activation};
    launch<P>(launcher, sizes(), args.groups, operands, epilogue, numbers(b, listed));
  }

  ResolvedGluLayout layout_;
};

}  // namespace

const Implementation<GroupedGemmGluArgs> kGroupedGemmGlu =
    implementation_of<GroupedGemmGluArgs, Call>("sm90");

}  // namespace moire::cuda::sm90
