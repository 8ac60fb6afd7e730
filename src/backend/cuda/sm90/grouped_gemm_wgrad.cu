// grouped_gemm_wgrad on SM90: K runs over each group's rows, which ragged maps end exactly; both
// operands are taken as they lie, rows outermost.
#include "backend/cuda/implementations.h"
#include "backend/cuda/sm90/launch_grouped_gemm.cuh"
#include "backend/cuda/sm90/wgrad_epilogue.cuh"

namespace moire::cuda::sm90 {
namespace {

bool stores_fp32(const GroupedGemmWgradArgs& args) { return args.d.tensor.dtype == MOIRE_FP32; }

Reason supports(const DeviceState& state, const GroupedGemmWgradArgs& args) {
  const TensorView d(args.d.tensor);
  return first_of({why_not_device(state), why_not_bf16({{"a", args.a}, {"b", args.b}}),
                   why_not_gradient(d), why_not_listed("d", Weight(args.d)),
                   why_not_sizes(args.groups, d),
                   why_not_tma({{"a", args.a}, {"b", args.b}, {"d", d}})});
}

// The op's workspace.
struct Scratch {
  Scratch(const GroupedGemmWgradArgs& args, Workspace workspace)
      : arena(workspace),
        a(args.a, args.a_row_idx, args.groups, arena),
        b(args.b, args.b_row_idx, args.groups, arena),
        d(args.d, arena) {}
  Arena arena;
  GatheredRows a, b;
  ops::ListedMatrices d;
};

template <class P, class T>
void launch_policy(Launcher& launcher, TensorMaps& maps, const GroupedGemmWgradArgs& args,
                   const Scratch& scratch) {
  const TensorView a(scratch.a.rows()), b(scratch.b.rows());
  const Matrices d{Weight(args.d)};
  const RaggedK operands{maps.ragged_rows("a", a, P::kTileK), maps.ragged_rows("b", b, P::kTileK),
                         static_cast<int32_t>(a.columns()), static_cast<int32_t>(b.columns())};
  const Accumulate<T> epilogue{maps.matrices("d", d, P::kBoxRows), operands.n, args.beta,
                               args.beta_per_group};
  if (!maps.status().ok()) return;
  launch<P>(launcher, sizes(args), args.groups, operands, epilogue, numbers(d, scratch.d));
}

Status run(const Context& context, const GroupedGemmWgradArgs& args) {
  Launcher launcher(context, "grouped_gemm_wgrad");
  const Scratch scratch(args, args.workspace);
  scratch.a.gather(launcher, "a_row_idx");
  scratch.b.gather(launcher, "b_row_idx");
  scratch.d.write(launcher);
  TensorMaps maps(launcher.state(), "grouped_gemm_wgrad");
  const auto launch_as = [&]<class T>(auto tiles, T) {
    with_cheapest(
        tiles, sizes(args), launcher.state().num_multiprocessors,
        [&]<class P>(const Cost&) { launch_policy<P, T>(launcher, maps, args, scratch); });
  };
  if (stores_fp32(args)) {
    launch_as(Fp32WgradTiles(), float());
  } else {
    launch_as(Bf16WgradTiles(), __nv_bfloat16());
  }
  return maps.status().ok() ? launcher.status() : maps.status();
}

}  // namespace

const Implementation<GroupedGemmWgradArgs> kGroupedGemmWgrad = {
    "sm90",
    Device::kCuda,
    supports,
    [](const DeviceState&, const GroupedGemmWgradArgs& args) {
      return Scratch(args, {}).arena.used();
    },
    [](const DeviceState& state, const GroupedGemmWgradArgs& args) {
      return (stores_fp32(args) ? policy_text<Fp32WgradTiles>(state, sizes(args))
                                : policy_text<Bf16WgradTiles>(state, sizes(args))) +
             GatheredRows::policy(args.a_row_idx.rank != 0 ? args.a_row_idx : args.b_row_idx) +
             Scratch(args, {}).d.policy();
    },
    run,
    [](const DeviceState&, const GroupedGemmWgradArgs& args) -> int64_t {
      return 1 + GatheredRows::launches(args.a_row_idx) + GatheredRows::launches(args.b_row_idx) +
             Scratch(args, {}).d.launches();
    }};

}  // namespace moire::cuda::sm90
