// grouped_gemm_glu_backward on CUDA, the plain way: grad_act is rounded to the storage type, then
// comes the activation's backward. A tile's 64 columns are a segment of grad_probs' sums, its rows
// two blocks of grad_bias's; both leave partial sums in the workspace, which a launch each adds.
#include "backend/cuda/device/activation.cuh"
#include "backend/cuda/device/lane_sums.cuh"
#include "backend/cuda/device/row_sums.cuh"
#include "backend/cuda/ops/partial_sums.h"
#include "backend/cuda/portable/ragged_m.cuh"
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
  // A thread per column of either half and block of rows.
  template <class Memory>
  __device__ void sum_rows(const gemm::Tile& tile) const {
    constexpr int kRows = kBlockRows;
    static_assert(gemm::kThreads == 2 * gemm::kTile * (gemm::kTile / kRows));
    const int half = static_cast<int>(threadIdx.x) / gemm::kTile % 2;
    const int column = static_cast<int>(threadIdx.x) % gemm::kTile;
    const int first = static_cast<int>(threadIdx.x) / (2 * gemm::kTile) * kRows;
    if (!tile.has_row(first) || !tile.has_column(column)) return;
    const float sum = sum_of_block(first, min(tile.num_rows, first + kRows),
                                   [&](int row) { return Memory::plane(half)[row][column]; });
    const int64_t at = tile.first_column + column;
    const int64_t position = half == 0 ? layout.gate(at) : layout.up(at);
    const int64_t index = (tile.first_row + first) / kRows + tile.group;
    bias_partials[index * 2 * layout.f + position] = sum;
  }
};

struct Call : gemm::RaggedMCall<GroupedGemmGluBackwardArgs> {
  Call(const DeviceState& device, const GroupedGemmGluBackwardArgs& given,
       const Workspace& workspace)
      : RaggedMCall(device, given, given.grad_y, given.grad_y_scales, given.w2, given.w2_scales,
                    given.w2.layout == MOIRE_IN_OUT, GluBackward::kHalves, workspace),
        segments_(ceil_div(product.columns, kSegment)) {
    if (is_present(args.grad_probs)) probs_ = arena.take_floats(args.groups.capacity, segments_);
    bias_ = ops::take_block_partials(arena, args.grad_bias, args.groups);
  }

  int64_t launches() const {
    return RaggedMCall::launches() + is_present(args.grad_probs) + is_present(args.grad_bias);
  }
  Status run(const Context& context) const {
    Launcher launcher(context, "grouped_gemm_glu_backward");
    launch(launcher, GluBackward{.activation = {args.activation},
                                 .layout = resolve_glu_layout(args.layout, product.columns),
                                 .z = any_floats(args.z),
                                 .grad_z = any_floats(args.grad_z),
                                 .act = any_floats(args.act),
                                 .probs = vector_of<const float>(args.probs),
                                 .prob_partials = probs_,
                                 .segments = segments_,
                                 .bias_partials = bias_,
                                 .zeroes_tail = args.tail == MOIRE_TAIL_ZERO});
    ops::sum_row_partials(launcher, probs_, segments_, args.groups, args.grad_probs, 0, args.tail);
    ops::sum_block_partials(launcher, bias_, args.groups, args.grad_bias, args.beta);
    return launcher.status();
  }

 private:
  int64_t segments_;
  float* probs_ = nullptr;  // partial sums
  float* bias_ = nullptr;
};

}  // namespace

const Implementation<GroupedGemmGluBackwardArgs> kGroupedGemmGluBackward =
    implementation_of<GroupedGemmGluBackwardArgs, Call>("portable");

}  // namespace moire::cuda::portable
