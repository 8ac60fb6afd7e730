// grouped_gemm on SM90: d = a * op(b) with a plain store. Weights are taken as they lie, K-major or
// not, so that the dgrad needs no transposed copy.
#include "backend/cuda/device/matrix.cuh"
#include "backend/cuda/implementations.h"
#include "backend/cuda/sm90/epilogues.cuh"
#include "backend/cuda/sm90/launch_grouped_gemm.cuh"

namespace moire::cuda::sm90 {
namespace {

Reason supports(const DeviceState& state, const GroupedGemmArgs& args) {
  const Weight b(args.b);
  return first_of({why_not_device(state),
                   why_not_bf16({{"a", args.a}, {"b", b.tensor}, {"d", args.d}}),
                   why_not_listed("b", b), why_not_sizes(args.groups, b.tensor),
                   why_not_tma({{"a", args.a}, {"b", b.tensor}, {"d", args.d}})});
}

RaggedMScratch scratch_of(const GroupedGemmArgs& args, const Workspace& workspace = {}) {
  return {args.a, args.row_idx, args.b, args.groups, workspace};
}

template <class P, Major kWeights>
void launch_policy(Launcher& launcher, TensorMaps& maps, const GroupedGemmArgs& args,
                   const RaggedMScratch& scratch) {
  const TensorView a(scratch.rows.rows()), d(args.d);
  const Matrices b{Weight(args.b)};
  const auto n = static_cast<int32_t>(d.columns());
  const auto k = static_cast<int32_t>(a.columns());
  const auto operands = ragged_m<P, kWeights>(maps, a, b, n, k, args.tail == MOIRE_TAIL_ZERO);
  const Store store{maps.ragged_rows("d", d, P::kBoxRows), n,
                    static_cast<int32_t>(args.groups.num_groups), Bias(args.bias),
                    vector_of<const float>(args.bias_scale)};
  if (!maps.status().ok()) return;
  launch<P>(launcher, sizes(args), args.groups, operands, store, numbers(b, scratch.listed));
}

Status run(const Context& context, const GroupedGemmArgs& args) {
  return multiply(context, "grouped_gemm", args);
}

}  // namespace

Status multiply(const Context& context, const char* op, const GroupedGemmArgs& args) {
  Launcher launcher(context, op);
  if (args.groups.capacity == 0) return launcher.status();
  const RaggedMScratch scratch = scratch_of(args, args.workspace);
  scratch.prepare(launcher);
  TensorMaps maps(launcher.state(), op);
  const auto launch_tile = [&]<class P>(const Cost&) {
    if (is_k_major(args)) {
      launch_policy<P, Major::kK>(launcher, maps, args, scratch);
    } else {
      launch_policy<P, Major::kMN>(launcher, maps, args, scratch);
    }
  };
  with_cheapest(ProductTiles(), sizes(args), launcher.state().num_multiprocessors, launch_tile);
  return maps.status().ok() ? launcher.status() : maps.status();
}

const Implementation<GroupedGemmArgs> kGroupedGemm = {
    "sm90",
    Device::kCuda,
    supports,
    [](const DeviceState&, const GroupedGemmArgs& args) { return scratch_of(args).arena.used(); },
    [](const DeviceState& state, const GroupedGemmArgs& args) {
      return policy_text<ProductTiles>(state, sizes(args)) + scratch_of(args).policy();
    },
    run,
    [](const DeviceState&, const GroupedGemmArgs& args) -> int64_t {
      return 1 + scratch_of(args).launches();
    }};

}  // namespace moire::cuda::sm90
