// grouped_gemm_wgrad on SM90: K runs over each group's rows, which ragged maps end exactly; both
// operands are taken as they lie, rows outermost.
#include "backend/cuda/sm90/launch_grouped_gemm.cuh"
#include "backend/cuda/sm90/wgrad_epilogue.cuh"

namespace moire::cuda::sm90 {
namespace {

struct Call : PlannedCall<GroupedGemmWgradArgs> {
  Call(const DeviceState& device, const GroupedGemmWgradArgs& given, const Workspace& workspace)
      : PlannedCall(device, given, workspace),
        a_(args.a, args.a_row_idx, args.groups, arena),
        b_(args.b, args.b_row_idx, args.groups, arena),
        listed_(args.d, arena) {}

  Reason supports() const {
    const TensorView d(args.d.tensor);
    return first_of(
        {why_not_device(state), why_not_type(DType::kBF16, {{"a", args.a}, {"b", args.b}}),
         why_not_gradient(d), why_not_listed("d", Weight(args.d)), why_not_sizes(args.groups, d),
         why_not_tma({{"a", args.a}, {"b", args.b}, {"d", d}})});
  }
  std::string policy() const {
    return (stores_fp32(args) ? policy_text<Fp32WgradTiles>(state, sizes(args))
                              : policy_text<Bf16WgradTiles>(state, sizes(args))) +
           (a_.launches() != 0 ? a_ : b_).policy() + listed_.policy();
  }
  int64_t launches() const { return 1 + a_.launches() + b_.launches() + listed_.launches(); }
  Status run(const Context& context) const {
    Launcher launcher(context, "grouped_gemm_wgrad");
    a_.gather(launcher, "a_row_idx");
    b_.gather(launcher, "b_row_idx");
    listed_.write(launcher);
    stores_fp32(args) ? launch_tiles<float>(launcher, Fp32WgradTiles())
                      : launch_tiles<__nv_bfloat16>(launcher, Bf16WgradTiles());
    return launcher.status();
  }

 private:
  template <class T, class Tiles>
  void launch_tiles(Launcher& launcher, Tiles tiles) const {
    with_cheapest(tiles, sizes(args), state.num_multiprocessors, [&]<class P>(const Cost&) {
      TensorMaps maps(launcher);
      const TensorView a(a_.rows()), b(b_.rows());
      const RaggedK operands{maps.ragged_rows("a", a, P::kTileK),
                             maps.ragged_rows("b", b, P::kTileK), static_cast<int32_t>(a.columns()),
                             static_cast<int32_t>(b.columns())};
      const Matrices d{Weight(args.d)};
      const Accumulate<T> epilogue{maps.matrices("d", d, P::kBoxRows), operands.n, args.beta,
                                   args.beta_per_group};
      launch<P>(launcher, sizes(args), args.groups, operands, epilogue, numbers(d, listed_));
    });
  }

  ops::GatheredRows a_, b_;
  ops::ListedMatrices listed_;
};

}  // namespace

const Implementation<GroupedGemmWgradArgs> kGroupedGemmWgrad =
    implementation_of<GroupedGemmWgradArgs, Call>("sm90");

}  // namespace moire::cuda::sm90
