// grouped_gemm_glu_backward on SM90: FC2's dgrad with the activation's backward in its epilogue,
// then the partial sums of grad_probs and of grad_bias added in order.
#include "backend/cuda/ops/partial_sums.h"
#include "backend/cuda/sm90/glu_backward_epilogue.cuh"
#include "backend/cuda/sm90/launch_grouped_gemm.cuh"

namespace moire::cuda::sm90 {
namespace {

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

struct Call : RaggedMCall<GroupedGemmGluBackwardArgs> {
  Call(const DeviceState& device, const GroupedGemmGluBackwardArgs& given,
       const Workspace& workspace)
      : RaggedMCall(device, given, given.grad_y, given.w2, workspace),
        layout_(resolve_glu_layout(args.layout, Weight(args.w2).in_features())),
        segments_(static_cast<int32_t>(ceil_div(layout_.f, kPanel))) {
    if (is_present(args.grad_probs)) {
      prob_partials_ = arena.take_floats(segments_, args.groups.capacity);
    }
    bias_partials_ = ops::take_block_partials(arena, args.grad_bias, args.groups);
  }

  Reason supports() const {
    const Weight w2(args.w2);
    const std::initializer_list<Named> tensors{{"grad_y", args.grad_y},
                                               {"w2", w2.tensor},
                                               {"z", args.z},
                                               {"grad_z", args.grad_z},
                                               {"act", args.act}};
    return first_of({why_not_device(state), why_not_type(DType::kBF16, tensors),
                     why_not_listed("w2", w2), why_not_sizes(args.groups, w2.tensor),
                     why_not_layout(layout_), why_not_z(args.z, layout_), why_not_tma(tensors)});
  }
  std::string policy() const {
    return policy_text<GluBackwardTiles>(state, sizes()) + preparation();
  }
  int64_t launches() const {
    return RaggedMCall::launches() + is_present(args.grad_probs) + is_present(args.grad_bias);
  }
  Status run(const Context& context) const {
    Launcher launcher(context, "grouped_gemm_glu_backward");
    if (args.groups.capacity > 0) multiply(launcher);
    ops::sum_block_partials(launcher, bias_partials_, args.groups, args.grad_bias, args.beta);
    return launcher.status();
  }

 private:
  ProductSizes sizes() const {
    return ragged_m_sizes(args.groups, layout_.f, TensorView(args.grad_y).columns());
  }

  void multiply(Launcher& launcher) const {
    prepare(launcher);
    with_activation<false>(args.activation, [&](const auto& activation) {
      with_cheapest(GluBackwardTiles(), sizes(), state.num_multiprocessors,
                    [&]<class P>(const Cost&) {
                      bias_partials_ != nullptr ? launch_layout<P, true>(launcher, activation)
                                                : launch_layout<P, false>(launcher, activation);
                    });
    });
    if (prob_partials_ == nullptr) return;
    constexpr int kThreads = 256;
    launcher.launch(sum_prob_partials, {blocks_for(args.groups.capacity, kThreads), kThreads},
                    prob_partials_, segments_, args.groups, args.tail == MOIRE_TAIL_ZERO,
                    static_cast<float*>(args.grad_probs.data));
  }

  template <class P, bool kSumsBias, class Activation>
  void launch_layout(Launcher& launcher, const Activation& activation) const {
    const bool is_k_major = args.w2.layout == MOIRE_IN_OUT;  // [G, F, H]
    is_k_major ? launch_policy<P, kSumsBias, Major::kK>(launcher, activation)
               : launch_policy<P, kSumsBias, Major::kMN>(launcher, activation);
  }

  template <class P, bool kSumsBias, Major kWeights, class Activation>
  void launch_policy(Launcher& launcher, const Activation& activation) const {
    TensorMaps maps(launcher);
    const TensorView act(args.act);
    const Matrices w2{Weight(args.w2)};
    const auto f = static_cast<int32_t>(layout_.f);
    const GluBackward<Activation, kSumsBias> epilogue{
        z_map<P, kPanel>(maps, "z", args.z, layout_),
        z_map<P, kPanel>(maps, "grad_z", args.grad_z, layout_),
        act.is_present() ? maps.ragged_rows("act", act, P::kBoxRows) : CUtensorMap{},
        f,
        static_cast<int32_t>(args.groups.num_groups),
        act.is_present(),
        vector_of<const float>(args.probs),
        prob_partials_,
        args.groups.capacity,
        bias_partials_,
        activation};
    launch<P>(launcher, sizes(), args.groups,
              ragged_m<P, kWeights>(maps, rows.rows(), args.groups, w2, f, args.tail), epilogue,
              numbers(w2, listed));
  }

  ResolvedGluLayout layout_;
  int32_t segments_;
  // [segments, capacity]: neighbouring rows lie side by side, for the sums above.
  float* prob_partials_ = nullptr;
  float* bias_partials_ = nullptr;  // [row blocks, columns of z]
};

}  // namespace

const Implementation<GroupedGemmGluBackwardArgs> kGroupedGemmGluBackward =
    implementation_of<GroupedGemmGluBackwardArgs, Call>("sm90");

}  // namespace moire::cuda::sm90
