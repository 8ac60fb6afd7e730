// grouped_gemm on SM90's FP8 tensor cores: a in blocks of 1 x 128 along k, b in tiles of 128 x 128.
#include "backend/cuda/device/matrix.cuh"
#include "backend/cuda/implementations.h"
#include "backend/cuda/ops/core_codes.h"
#include "backend/cuda/ops/row_scales.h"
#include "backend/cuda/sm90/epilogues.cuh"
#include "backend/cuda/sm90/gathered_rows.h"
#include "backend/cuda/sm90/launch_grouped_gemm.cuh"
#include "backend/cuda/sm90/scaled_operands.cuh"

namespace moire::cuda::sm90::scaled {
namespace {

// Scales of columns of b, which are read four at a time; else nothing.
TensorView column_scales(const GroupedGemmArgs& args) {
  const TensorView scales(args.b_scales);
  return scales.type() == DType::kE8M0 && !is_k_major(args) ? scales : TensorView();
}

Reason supports(const DeviceState& state, const GroupedGemmArgs& args) {
  const Weight b(args.b);
  return first_of(
      {why_not_device(state), why_not_fast(args.accumulation),
       why_not_fp8({{"a", args.a}, {"b", b.tensor}}), why_not_e4m3("b", b.tensor),
       why_not_words({{"a", args.a}, {"b", b.tensor}}), why_not_bf16({{"d", args.d}}),
       why_not_sizes(args.groups, b.tensor),
       why_not_tma(
           {{"a", args.a}, {"b", b.tensor}, {"b_scales", column_scales(args)}, {"d", args.d}})});
}

TileScales tile_scales(const TensorView& scales) {
  const auto stride = static_cast<int32_t>(scales.stride());
  const auto tiles = static_cast<int32_t>(scales.shape[1]);
  return {static_cast<const float*>(scales.data), tiles * stride, stride, tiles - 1};
}

// The op's workspace.
struct Scratch {
  Scratch(const GroupedGemmArgs& args, Workspace workspace)
      : arena(workspace),
        a(args.a, args.a_scales, is_present(args.row_idx) ? moire_groups{} : args.groups, false,
          arena),
        rows(a.codes(), args.row_idx, args.groups, arena),
        row_scales(a.scales(), args.row_idx, args.groups, arena),
        b(args.b.tensor, args.b_scales, {}, !is_k_major(args), arena) {}
  Arena arena;
  ops::CoreCodes a;
  GatheredRows rows;
  ops::RowScales row_scales;
  ops::CoreCodes b;  // [G, n, k]
};

template <class P, bool kIsE5M2>
void launch_policy(Launcher& launcher, TensorMaps& maps, const GroupedGemmArgs& args,
                   const Scratch& scratch) {
  const TensorView a(scratch.rows.rows()), d(args.d);
  const auto n = static_cast<int32_t>(d.columns());
  const auto k = static_cast<int32_t>(a.columns());
  const ScaledRaggedM<kIsE5M2> operands{
      ragged_m<P, Major::kK>(maps, a, scratch.b.codes(), n, k, args.tail == MOIRE_TAIL_ZERO),
      maps.rows("a_scales", scratch.row_scales.scales(), P::kRowScales),
      tile_scales(scratch.b.scales())};
  const Store store{maps.ragged_rows("d", d, P::kBoxRows), n,
                    static_cast<int32_t>(args.groups.num_groups), Bias(args.bias),
                    vector_of<const float>(args.bias_scale)};
  if (maps.status().ok()) launch<P>(launcher, sizes(args), args.groups, operands, store);
}

template <bool kIsE5M2>
Status launch_type(Launcher& launcher, const GroupedGemmArgs& args, const Scratch& scratch) {
  TensorMaps maps(launcher.state(), "grouped_gemm");
  with_cheapest(
      ScaledTiles(), sizes(args), launcher.state().num_multiprocessors,
      [&]<class P>(const Cost&) { launch_policy<P, kIsE5M2>(launcher, maps, args, scratch); });
  return maps.status().ok() ? launcher.status() : maps.status();
}

Status run(const Context& context, const GroupedGemmArgs& args) {
  return multiply(context, "grouped_gemm", args);
}

}  // namespace

Status multiply(const Context& context, const char* op, const GroupedGemmArgs& args) {
  Launcher launcher(context, op);
  if (args.groups.capacity == 0) return launcher.status();
  const Scratch scratch(args, args.workspace);
  scratch.a.make(launcher);
  scratch.rows.gather(launcher);
  scratch.row_scales.make(launcher);
  scratch.b.make(launcher);
  return TensorView(args.a).type() == DType::kE5M2 ? launch_type<true>(launcher, args, scratch)
                                                   : launch_type<false>(launcher, args, scratch);
}

const Implementation<GroupedGemmArgs> kGroupedGemm = {
    "sm90",
    Device::kCuda,
    supports,
    [](const DeviceState&, const GroupedGemmArgs& args) { return Scratch(args, {}).arena.used(); },
    [](const DeviceState& state, const GroupedGemmArgs& args) {
      const Scratch scratch(args, {});
      return concat("FP8 tensor cores, ", policy_text<ScaledTiles>(state, sizes(args)),
                    scratch.a.policy("a"), GatheredRows::policy(args.row_idx),
                    ", after transposing a_scales", scratch.b.policy("b"));
    },
    run,
    [](const DeviceState&, const GroupedGemmArgs& args) -> int64_t {
      const Scratch scratch(args, {});
      return 2 + scratch.a.launches() + GatheredRows::launches(args.row_idx) + scratch.b.launches();
    }};

}  // namespace moire::cuda::sm90::scaled
