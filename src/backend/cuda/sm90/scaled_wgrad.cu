// grouped_gemm_wgrad on SM90's FP8 tensor cores: both operands in blocks of 128 rows of a column.
// The tensor cores read along the rows that are contracted, so what does not lie transposed already
// is transposed first.
#include "backend/cuda/implementations.h"
#include "backend/cuda/ops/core_codes.h"
#include "backend/cuda/sm90/launch_grouped_gemm.cuh"
#include "backend/cuda/sm90/scaled_operands.cuh"
#include "backend/cuda/sm90/wgrad_epilogue.cuh"

namespace moire::cuda::sm90::scaled {
namespace {

bool is_e5m2(const TensorView& t) { return t.type() == DType::kE5M2; }

std::string why_not_padding(const Groups& groups) {
  if (groups.capacity >= 128 * groups.num_groups) return {};
  return concat(groups.capacity, " rows in ", groups.num_groups,
                " groups, transposed, would be padded by up to ", 128 * groups.num_groups, " more");
}

// What lies transposed is asked the same as the rows that it was: then a layer, which has its
// operands transposed, is its ops on the same kernels.
Reason supports(const DeviceState& state, const GroupedGemmWgradArgs& args) {
  const TensorView d(args.d.tensor), a = as_rows(args.a, args.a_scales, args.groups),
                                     b = as_rows(args.b, args.b_scales, args.groups);
  return first_of(
      {why_not_device(state), why_not_fast(args.accumulation),
       why_not_fp8({{"a", args.a}, {"b", args.b}}),
       is_e5m2(args.a) && is_e5m2(args.b) ? "a and b are e5m2, the kernel takes one so" : "",
       why_not_gradient(d), why_not_listed("d", Weight(args.d)), why_not_sizes(args.groups, d),
       why_not_padding(args.groups), why_not_words({{"a", a}, {"b", b}}),
       why_not_tma({{"a", a},
                    {"b", b},
                    {"a_scales", args.a_scales},
                    {"b_scales", args.b_scales},
                    {"d", d}})});
}

// The op's workspace.
struct Scratch {
  Scratch(const GroupedGemmWgradArgs& args, Workspace workspace)
      : arena(workspace),
        a(args.a, args.a_scales, args.groups, true, arena),
        b(args.b, args.b_scales, args.groups, true, arena),
        d(args.d, arena) {}
  Arena arena;
  ops::CoreCodes a, b;
  ops::ListedMatrices d;
};

template <class P, class T, bool kA5, bool kB5>
void launch_policy(Launcher& launcher, TensorMaps& maps, const GroupedGemmWgradArgs& args,
                   const Scratch& scratch) {
  const Matrices d{Weight(args.d)};
  const ScaledRaggedK<kA5, kB5> operands{maps.matrix("a", scratch.a.codes(), P::kTileM),
                                         maps.matrix("b", scratch.b.codes(), P::kTileN),
                                         maps.rows("a_scales", scratch.a.scales(), P::kTileM),
                                         maps.rows("b_scales", scratch.b.scales(), P::kTileN),
                                         static_cast<int32_t>(sizes(args).m),
                                         static_cast<int32_t>(sizes(args).n)};
  const Accumulate<T> epilogue{maps.matrices("d", d, P::kBoxRows), operands.n, args.beta,
                               args.beta_per_group};
  if (!maps.status().ok()) return;
  launch<P>(launcher, sizes(args), args.groups, operands, epilogue, numbers(d, scratch.d));
}

template <class T, bool kA5, bool kB5>
Status launch_types(Launcher& launcher, const GroupedGemmWgradArgs& args, const Scratch& scratch) {
  TensorMaps maps(launcher.state(), "grouped_gemm_wgrad");
  with_cheapest(
      ScaledWgradTiles(), sizes(args), launcher.state().num_multiprocessors,
      [&]<class P>(const Cost&) { launch_policy<P, T, kA5, kB5>(launcher, maps, args, scratch); });
  return maps.status().ok() ? launcher.status() : maps.status();
}

template <class T>
Status launch_into(Launcher& launcher, const GroupedGemmWgradArgs& args, const Scratch& scratch) {
  if (is_e5m2(args.a)) return launch_types<T, true, false>(launcher, args, scratch);
  if (is_e5m2(args.b)) return launch_types<T, false, true>(launcher, args, scratch);
  return launch_types<T, false, false>(launcher, args, scratch);
}

Status run(const Context& context, const GroupedGemmWgradArgs& args) {
  Launcher launcher(context, "grouped_gemm_wgrad");
  const Scratch scratch(args, args.workspace);
  scratch.a.make(launcher);
  scratch.b.make(launcher);
  scratch.d.write(launcher);
  return TensorView(args.d.tensor).type() == DType::kFP32
             ? launch_into<float>(launcher, args, scratch)
             : launch_into<__nv_bfloat16>(launcher, args, scratch);
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
      const Scratch scratch(args, {});
      return concat("FP8 tensor cores, ", policy_text<ScaledWgradTiles>(state, sizes(args)),
                    scratch.a.policy("a"), scratch.b.policy("b"), scratch.d.policy());
    },
    run,
    [](const DeviceState&, const GroupedGemmWgradArgs& args) -> int64_t {
      const Scratch scratch(args, {});
      return 1 + scratch.a.launches() + scratch.b.launches() + scratch.d.launches();
    }};

}  // namespace moire::cuda::sm90::scaled
