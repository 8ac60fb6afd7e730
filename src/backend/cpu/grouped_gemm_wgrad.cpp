// grouped_gemm_wgrad on the CPU: the engine with K running over each group's rows.
#include "backend/cpu/gemm/engine.h"
#include "backend/cpu/implementations.h"

namespace moire::cpu {
namespace {

using gemm::RaggedK;
using gemm::Sums;

RaggedK problem(const GroupedGemmWgradArgs& args) {
  RaggedK p;
  p.a = args.a;
  p.a_row_idx = args.a_row_idx;
  p.b = args.b;
  p.b_row_idx = args.b_row_idx;
  p.m = p.a.columns();
  p.n = p.b.columns();
  p.groups = args.groups;
  p.a_scales = args.a_scales;
  p.b_scales = args.b_scales;
  p.emulates = args.accumulation == MOIRE_ACCUMULATE_EMULATED;
  return p;
}

// d = round(sum), or round(d + sum).
struct Accumulate {
  const gemm::Kernels& kernels;
  Weight d;
  int32_t beta;
  const uint8_t* beta_per_group;
  const int64_t* offsets;

  bool accumulates(int64_t group) const {
    return beta_per_group != nullptr ? beta_per_group[group] != 0 : beta != 0;
  }

  // Adding one block's sums to d at once is adding their total; adding several is not.
  gemm::Direct direct(const gemm::Tile& tile, int64_t num_k) const {
    const TensorView matrix = d.matrix(tile.group);
    const bool adds = accumulates(tile.group);
    if (matrix.type() != DType::kFP32 || (adds && (num_k == 0 || num_k > gemm::kBlockK))) return {};
    auto* const data =
        reinterpret_cast<float*>(gemm::element(matrix, tile.first_row, tile.first_column));
    return {data, matrix.stride(), adds ? gemm::Write::kAdd : gemm::Write::kStore};
  }

  void apply(const Sums& s) const {
    const bool accumulate = accumulates(s.group);
    // Adding the zeros of an empty group would turn -0 into +0.
    if (accumulate && offsets[s.group] == offsets[s.group + 1]) return;
    const TensorView matrix = d.matrix(s.group);
    float before[gemm::kPlainChunk];
    for (int64_t r = 0; r < s.rows; ++r) {
      void* const target = gemm::element(matrix, s.first_row + r, s.first_column);
      float* const sums = s.data + r * s.pitch;
      if (accumulate) {
        kernels.decode(target, matrix.type(), s.columns, before);
        kernels.add_scaled(before, 1.0F, s.columns, sums);
      }
      kernels.encode(sums, s.columns, matrix.type(), target);
    }
  }
};

Status run(const Context& context, const GroupedGemmWgradArgs& args) {
  const Accumulate accumulate{gemm::kernels(), args.d, args.beta, args.beta_per_group,
                              args.groups.offsets};
  gemm::multiply_ragged_k(context, problem(args), args.workspace, accumulate);
  return {};
}

}  // namespace

const Implementation<GroupedGemmWgradArgs> kGroupedGemmWgrad = {
    "cpu",
    Device::kCpu,
    supports_everything,
    [](const DeviceState& state, const GroupedGemmWgradArgs& args) {
      return gemm::workspace_bytes(problem(args), state.num_threads);
    },
    [](const DeviceState& state, const GroupedGemmWgradArgs& args) {
      return gemm::policy_text(problem(args), state);
    },
    run};

}  // namespace moire::cpu
