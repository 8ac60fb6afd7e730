// grouped_gemm_glu_backward on CUDA, the plain way: grad_act is rounded to the storage type, then
// comes the activation's backward. A tile's 64 columns are a segment of grad_probs' sums, its 64
// rows a block of grad_bias's; both leave partial sums in the workspace, which a launch each adds.
#include "backend/cuda/device/activation.cuh"
#include "backend/cuda/device/lane_sums.cuh"
#include "backend/cuda/implementations.h"
#include "backend/cuda/ops/partial_sums.h"
#include "backend/cuda/portable/ragged_m.cuh"
#include "core/arena.h"
#include "core/divide.h"
#include "core/glu_layout.h"

namespace moire::cuda::portable {
namespace {

static_assert(gemm::kTile == kSegment);

struct GluBackward {
  static constexpr int kHalves = 1, kPlanes = 2;

  AnyActivation activation;
  ResolvedGluLayout layout;
  AnyFloats z, grad_z, act;  // act may be absent
  const float* probs;        // or null
  float* prob_partials;      // [capacity][segments], or null
  int64_t segments;
  float* bias_partials;  // [row blocks][2F], each row as grad_z lies, or null
  bool zeroes_tail;

  __device__ int64_t position(int, int64_t column) const { return column; }

  template <class Memory>
  __device__ void apply(const gemm::Tile& tile) const {
    const int row = gemm::epilogue_row();
    const int64_t target = tile.first_row + row;
    const bool has_row = tile.has_row(row);
    const float prob = has_row && probs != nullptr ? probs[target] : 1.0F;
    float sums[gemm::kEpilogueLanes] = {};
    gemm::for_own_columns([&](int column, int lane) {
      if (!has_row || !tile.has_column(column)) return;
      const int64_t at = tile.first_column + column;
      const int64_t gate = layout.gate(at), up = layout.up(at);
      const float grad_act = grad_z.rounded(Memory::plane(0)[row][column]);
      const GluGradient g =
          glu_gradient(activation, z.at(target, gate), z.at(target, up), grad_act, prob);
      sums[lane] = fmaf(grad_act, g.glu, sums[lane]);
      grad_z.set(target, gate, g.gate);
      grad_z.set(target, up, g.up);
      if (act.is_present()) act.set(target, at, g.glu * prob);
      Memory::plane(0)[row][column] = grad_z.rounded(g.gate);
      Memory::plane(1)[row][column] = grad_z.rounded(g.up);
    });
    if (prob_partials != nullptr) {
      const float sum = fold_lanes(sums);
      if (has_row && threadIdx.x % 4 == 0) {
        prob_partials[target * segments + tile.first_column / kSegment] = sum;
      }
    }
    if (bias_partials == nullptr) return;
    __syncthreads();
    sum_rows<Memory>(tile);
  }

  __device__ void zero_tail(int64_t in_use, int64_t capacity) const {
    if (!zeroes_tail) return;
    gemm::zero_rows(grad_z, 2 * layout.f, in_use, capacity);
    if (act.is_present()) gemm::zero_rows(act, layout.f, in_use, capacity);
  }

 private:
  // A thread per column of either half.
  template <class Memory>
  __device__ void sum_rows(const gemm::Tile& tile) const {
    const int half = static_cast<int>(threadIdx.x) / gemm::kTile;
    const int column = static_cast<int>(threadIdx.x) % gemm::kTile;
    if (half > 1 || !tile.has_column(column)) return;
    float sum = 0;
    for (int row = 0; row < tile.num_rows; ++row) sum += Memory::plane(half)[row][column];
    const int64_t at = tile.first_column + column;
    const int64_t position = half == 0 ? layout.gate(at) : layout.up(at);
    bias_partials[tile.block * 2 * layout.f + position] = sum;
  }
};

gemm::RaggedM problem(const GroupedGemmGluBackwardArgs& args, const ops::ListedMatrices& listed) {
  const TensorView grad_y(args.grad_y), weight(args.w2.tensor), scales(args.w2_scales);
  const bool k_is_last = args.w2.layout == MOIRE_IN_OUT;
  return {.a = gemm::rowwise(grad_y, args.grad_y_scales),
          .row_idx = indices_of(args.row_idx, "row_idx"),
          .num_source_rows = grad_y.num_rows(),
          .weight = gemm::weights(weight, scales, k_is_last),
          .listed = listed.addresses(),
          .weight_rows = weight.shape[1],
          .weight_scale_rows = scales.shape[1],
          .weight_is_nk = k_is_last,
          .k = grad_y.columns(),
          .columns = Weight(args.w2).in_features(),
          .groups = args.groups};
}

// The op's workspace.
struct Scratch {
  explicit Scratch(const GroupedGemmGluBackwardArgs& args, Workspace workspace = {})
      : arena(workspace), listed(args.w2, arena) {
    const int64_t f = Weight(args.w2).in_features();
    segments = ceil_div(f, kSegment);
    if (is_present(args.grad_probs)) probs = arena.take_floats(args.groups.capacity, segments);
    if (is_present(args.grad_bias)) bias = arena.take_floats(row_blocks_bound(args.groups), 2 * f);
  }

  Arena arena;
  ops::ListedMatrices listed;
  int64_t segments;
  float* probs = nullptr;
  float* bias = nullptr;
};

Status run(const Context& context, const GroupedGemmGluBackwardArgs& args) {
  Launcher launcher(context, "grouped_gemm_glu_backward");
  const Scratch scratch(args, args.workspace);
  scratch.listed.write(launcher);
  const gemm::RaggedM p = problem(args, scratch.listed);
  gemm::launch(launcher, p,
               GluBackward{.activation = {args.activation},
                           .layout = resolve_glu_layout(args.layout, p.columns),
                           .z = any_floats(args.z),
                           .grad_z = any_floats(args.grad_z),
                           .act = any_floats(args.act),
                           .probs = static_cast<const float*>(args.probs.data),
                           .prob_partials = scratch.probs,
                           .segments = scratch.segments,
                           .bias_partials = scratch.bias,
                           .zeroes_tail = args.tail == MOIRE_TAIL_ZERO});
  if (scratch.probs != nullptr) {
    ops::sum_row_partials(launcher, scratch.probs, scratch.segments, args.groups, args.grad_probs,
                          0, args.tail);
  }
  if (scratch.bias != nullptr) {
    ops::sum_block_partials(launcher, scratch.bias, args.groups, args.grad_bias, args.beta,
                            nullptr);
  }
  return launcher.status();
}

Reason supports(const DeviceState&, const GroupedGemmGluBackwardArgs& args) {
  return gemm::why_not_width(Weight(args.w2).in_features());
}

}  // namespace

const Implementation<GroupedGemmGluBackwardArgs> kGroupedGemmGluBackward = {
    "portable",
    Device::kCuda,
    supports,
    [](const DeviceState&, const GroupedGemmGluBackwardArgs& args) {
      return Scratch(args).arena.used();
    },
    [](const DeviceState&, const GroupedGemmGluBackwardArgs& args) {
      const Scratch scratch(args);
      const gemm::RaggedM p = problem(args, scratch.listed);
      return gemm::policy_text(p.a, p.weight) + scratch.listed.policy();
    },
    run,
    [](const DeviceState&, const GroupedGemmGluBackwardArgs& args) -> int64_t {
      return 1 + Scratch(args).listed.launches() + is_present(args.grad_probs) +
             is_present(args.grad_bias);
    }};

}  // namespace moire::cuda::portable
