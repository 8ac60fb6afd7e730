// grouped_gemm_glu_backward on SM90: FC2's dgrad with the activation's backward in its epilogue,
// then the partial sums of grad_probs and of grad_bias added in order.
#include "backend/cuda/device/matrix.cuh"
#include "backend/cuda/device/row_blocks.cuh"
#include "backend/cuda/implementations.h"
#include "backend/cuda/ops/partial_sums.h"
#include "backend/cuda/sm90/glu_backward_epilogue.cuh"
#include "backend/cuda/sm90/launch_grouped_gemm.cuh"
#include "core/divide.h"
#include "core/status_macros.h"

namespace moire::cuda::sm90 {
namespace {

ResolvedGluLayout layout_of(const GroupedGemmGluBackwardArgs& args) {
  return resolve_glu_layout(args.layout, Weight(args.w2).in_features());
}

Reason supports(const DeviceState& state, const GroupedGemmGluBackwardArgs& args) {
  const Weight w2(args.w2);
  return first_of({why_not_device(state),
                   why_not_bf16({{"grad_y", args.grad_y},
                                 {"w2", w2.tensor},
                                 {"z", args.z},
                                 {"grad_z", args.grad_z},
                                 {"act", args.act}}),
                   why_not_listed("w2", w2), why_not_sizes(args.groups, w2.tensor),
                   why_not_layout(layout_of(args)), why_not_z(args.z, layout_of(args)),
                   why_not_tma({{"grad_y", args.grad_y},
                                {"w2", w2.tensor},
                                {"z", args.z},
                                {"grad_z", args.grad_z},
                                {"act", args.act}})});
}

ProductSizes sizes(const GroupedGemmGluBackwardArgs& args) {
  return ragged_m_sizes(args.groups, layout_of(args).f, TensorView(args.grad_y).columns());
}

int32_t num_segments(const GroupedGemmGluBackwardArgs& args) {
  return static_cast<int32_t>(ceil_div(layout_of(args).f, kPanel));
}

// The op's workspace.
struct Scratch : RaggedMScratch {
  explicit Scratch(const GroupedGemmGluBackwardArgs& args, const Workspace& workspace = {})
      : RaggedMScratch(args.grad_y, args.row_idx, args.w2, args.groups, workspace) {
    if (args.grad_probs.rank != 0) {
      prob_partials = arena.take_floats(num_segments(args), args.groups.capacity);
    }
    if (args.grad_bias.rank != 0) {
      bias_partials = arena.take_floats(row_blocks_bound(args.groups), layout_of(args).columns());
    }
  }
  // [segments, capacity]: neighbouring rows lie side by side, for the sums below.
  float* prob_partials = nullptr;
  float* bias_partials = nullptr;  // [row blocks, columns of z]
};

__global__ void sum_prob_partials(const float* partials, int32_t segments, moire_groups groups,
                                  bool zeroes_tail, float* grad_probs) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= groups.capacity) return;
  if (row >= rows_in_use(groups)) {
    if (zeroes_tail) grad_probs[row] = 0;
    return;
  }
  float sum = 0;
  for (int32_t i = 0; i < segments; ++i) sum += partials[i * groups.capacity + row];
  grad_probs[row] = sum;
}

template <class P, Major kWeights, bool kSumsBias, class Activation>
void launch_policy(Launcher& launcher, TensorMaps& maps, const GroupedGemmGluBackwardArgs& args,
                   const Scratch& scratch, const Activation& activation) {
  const TensorView grad_y(scratch.rows.rows()), act(args.act);
  const Matrices w2{Weight(args.w2)};
  const ResolvedGluLayout layout = layout_of(args);
  const auto f = static_cast<int32_t>(layout.f);
  const auto operands = ragged_m<P, kWeights>(
      maps, grad_y, w2, f, static_cast<int32_t>(grad_y.columns()), args.tail == MOIRE_TAIL_ZERO);
  const GluBackward<Activation, kSumsBias> epilogue{
      z_map<P, kPanel>(maps, "z", args.z, layout),
      z_map<P, kPanel>(maps, "grad_z", args.grad_z, layout),
      act.is_present() ? maps.ragged_rows("act", act, P::kBoxRows) : CUtensorMap{},
      f,
      static_cast<int32_t>(args.groups.num_groups),
      act.is_present(),
      vector_of<const float>(args.probs),
      scratch.prob_partials,
      args.groups.capacity,
      scratch.bias_partials,
      activation};
  if (!maps.status().ok()) return;
  launch<P>(launcher, sizes(args), args.groups, operands, epilogue, numbers(w2, scratch.listed));
}

Status multiply(const Context& context, const GroupedGemmGluBackwardArgs& args,
                const Scratch& scratch) {
  Launcher launcher(context, "grouped_gemm_glu_backward");
  scratch.prepare(launcher);
  TensorMaps maps(launcher.state(), "grouped_gemm_glu_backward");
  const auto launch_tile = [&]<Major kWeights, class Activation>(
                               std::integral_constant<Major, kWeights>,
                               const Activation& activation) {
    with_cheapest(GluBackwardTiles(), sizes(args), launcher.state().num_multiprocessors,
                  [&]<class P>(const Cost&) {
                    const auto launch = scratch.bias_partials != nullptr
                                            ? launch_policy<P, kWeights, true, Activation>
                                            : launch_policy<P, kWeights, false, Activation>;
                    launch(launcher, maps, args, scratch, activation);
                  });
  };
  with_activation<false>(args.activation, [&](const auto& activation) {
    if (args.w2.layout == MOIRE_IN_OUT) {  // [G, F, H]
      launch_tile(std::integral_constant<Major, Major::kK>(), activation);
    } else {
      launch_tile(std::integral_constant<Major, Major::kMN>(), activation);
    }
  });
  if (!maps.status().ok()) return maps.status();
  if (scratch.prob_partials != nullptr) {
    constexpr int64_t kThreads = 256;
    const auto blocks = static_cast<unsigned>(ceil_div(args.groups.capacity, kThreads));
    launcher.launch(sum_prob_partials, {dim3(blocks), dim3(kThreads)}, scratch.prob_partials,
                    num_segments(args), args.groups, args.tail == MOIRE_TAIL_ZERO,
                    static_cast<float*>(args.grad_probs.data));
  }
  return launcher.status();
}

Status run(const Context& context, const GroupedGemmGluBackwardArgs& args) {
  const Scratch scratch(args, args.workspace);
  if (args.groups.capacity > 0) MOIRE_RETURN_IF_ERROR(multiply(context, args, scratch));
  if (args.grad_bias.rank == 0) return {};
  Launcher launcher(context, "grouped_gemm_glu_backward");
  ops::sum_block_partials(launcher, scratch.bias_partials, args.groups, args.grad_bias, args.beta,
                          nullptr);
  return launcher.status();
}

}  // namespace

const Implementation<GroupedGemmGluBackwardArgs> kGroupedGemmGluBackward = {
    "sm90",
    Device::kCuda,
    supports,
    [](const DeviceState&, const GroupedGemmGluBackwardArgs& args) {
      return Scratch(args).arena.used();
    },
    [](const DeviceState& state, const GroupedGemmGluBackwardArgs& args) {
      return policy_text<GluBackwardTiles>(state, sizes(args)) + Scratch(args).policy();
    },
    run,
    [](const DeviceState&, const GroupedGemmGluBackwardArgs& args) -> int64_t {
      return 1 + Scratch(args).launches() + (args.grad_probs.rank != 0) +
             (args.grad_bias.rank != 0);
    }};

}  // namespace moire::cuda::sm90
