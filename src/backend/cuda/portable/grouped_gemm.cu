// grouped_gemm on CUDA, the plain way: d = round(sum + bias_scale * bias), one multiply-add.
#include "backend/cuda/implementations.h"
#include "backend/cuda/portable/ragged_m.cuh"

namespace moire::cuda::portable {
namespace {

struct Store {
  static constexpr int kHalves = 1, kPlanes = 1;

  AnyFloats d, bias;
  const float* bias_scale;  // or null
  int64_t columns;
  bool zeroes_tail;

  __device__ int64_t position(int, int64_t column) const { return column; }

  template <class Memory>
  __device__ void apply(const gemm::Tile& tile) const {
    const int row = gemm::epilogue_row();
    if (!tile.has_row(row)) return;
    const int64_t target = tile.first_row + row;
    const float scale = bias_scale == nullptr ? 1.0F : bias_scale[target];
    gemm::for_own_columns([&](int column, int) {
      if (!tile.has_column(column)) return;
      float v = Memory::plane(0)[row][column];
      const int64_t at = tile.first_column + column;
      if (bias.is_present()) v = fmaf(scale, bias.at(tile.group, at), v);
      d.set(target, at, v);
    });
  }

  __device__ void zero_tail(int64_t in_use, int64_t capacity) const {
    if (zeroes_tail) gemm::zero_rows(d, columns, in_use, capacity);
  }
};

gemm::RaggedM problem(const GroupedGemmArgs& args, const ops::ListedMatrices& listed) {
  const TensorView a(args.a), weight(args.b.tensor), scales(args.b_scales);
  const bool k_is_last = (args.b.layout == MOIRE_OUT_IN) == (args.transpose_b == 0);
  return {.a = gemm::rowwise(a, args.a_scales),
          .row_idx = indices_of(args.row_idx, "row_idx"),
          .num_source_rows = a.num_rows(),
          .weight = gemm::weights(weight, scales, k_is_last),
          .listed = listed.addresses(),
          .weight_rows = weight.shape[1],
          .weight_scale_rows = scales.shape[1],
          .weight_is_nk = k_is_last,
          .k = a.columns(),
          .columns = TensorView(args.d).columns(),
          .groups = args.groups};
}

Status run(const Context& context, const GroupedGemmArgs& args) {
  return multiply(context, "grouped_gemm", args);
}

Reason supports(const DeviceState&, const GroupedGemmArgs& args) {
  return gemm::why_not_width(TensorView(args.d).columns());
}

}  // namespace

Status multiply(const Context& context, const char* op, const GroupedGemmArgs& args) {
  Launcher launcher(context, op);
  const TensorView d(args.d);
  const ops::ListedScratch scratch(args.b, args.workspace);
  scratch.listed.write(launcher);
  gemm::launch(launcher, problem(args, scratch.listed),
               Store{.d = any_floats(d),
                     .bias = any_floats(args.bias),
                     .bias_scale = static_cast<const float*>(args.bias_scale.data),
                     .columns = d.columns(),
                     .zeroes_tail = args.tail == MOIRE_TAIL_ZERO});
  return launcher.status();
}

const Implementation<GroupedGemmArgs> kGroupedGemm = {
    "portable",
    Device::kCuda,
    supports,
    [](const DeviceState&, const GroupedGemmArgs& args) {
      return ops::ListedScratch(args.b).arena.used();
    },
    [](const DeviceState&, const GroupedGemmArgs& args) {
      const ops::ListedScratch scratch(args.b);
      const gemm::RaggedM p = problem(args, scratch.listed);
      return gemm::policy_text(p.a, p.weight) + scratch.listed.policy();
    },
    run,
    [](const DeviceState&, const GroupedGemmArgs& args) {
      return 1 + ops::ListedScratch(args.b).listed.launches();
    }};

}  // namespace moire::cuda::portable
