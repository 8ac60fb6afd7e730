// grouped_gemm_glu on CUDA, the plain way: each tile makes gate and up of its 64 columns, z is
// rounded to its storage type, and the activation reads that.
#include "backend/cuda/device/activation.cuh"
#include "backend/cuda/implementations.h"
#include "backend/cuda/portable/ragged_m.cuh"
#include "core/glu_layout.h"
#include "core/glu_storage.h"

namespace moire::cuda::portable {
namespace {

struct Glu {
  static constexpr int kHalves = 2, kPlanes = 2;

  AnyActivation activation;
  ResolvedGluLayout layout;
  AnyFloats bias, z, act;  // z may be absent and still gives the storage type
  const float* probs;      // or null
  bool zeroes_tail;

  __device__ int64_t position(int half, int64_t column) const {
    return half == 0 ? layout.gate(column) : layout.up(column);
  }

  template <class Memory>
  __device__ void apply(const gemm::Tile& tile) const {
    const int row = gemm::epilogue_row();
    if (!tile.has_row(row)) return;
    const int64_t target = tile.first_row + row;
    const float prob = probs == nullptr ? 1.0F : probs[target];
    gemm::for_own_columns([&](int column, int) {
      if (!tile.has_column(column)) return;
      const int64_t at = tile.first_column + column;
      float halves[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float v = Memory::plane(h)[row][column];
        const int64_t p = position(h, at);
        if (bias.is_present()) v = fmaf(1.0F, bias.at(tile.group, p), v);
        halves[h] = z.rounded(v);
        if (z.is_present()) z.set(target, p, halves[h]);
      }
      act.set(target, at, glu_value(activation, halves[0], halves[1]) * prob);
    });
  }

  __device__ void zero_tail(int64_t in_use, int64_t capacity) const {
    if (zeroes_tail) gemm::zero_rows(act, layout.f, in_use, capacity);
  }
};

gemm::RaggedM problem(const GroupedGemmGluArgs& args, const ops::ListedMatrices& listed) {
  const TensorView a(args.a), weight(args.b.tensor), scales(args.b_scales);
  const bool k_is_last = args.b.layout == MOIRE_OUT_IN;
  return {.a = gemm::rowwise(a, args.a_scales),
          .row_idx = indices_of(args.row_idx, "row_idx"),
          .num_source_rows = a.num_rows(),
          .weight = gemm::weights(weight, scales, k_is_last),
          .listed = listed.addresses(),
          .weight_rows = weight.shape[1],
          .weight_scale_rows = scales.shape[1],
          .weight_is_nk = k_is_last,
          .k = a.columns(),
          .columns = Weight(args.b).out_features() / 2,
          .groups = args.groups};
}

Status run(const Context& context, const GroupedGemmGluArgs& args) {
  Launcher launcher(context, "grouped_gemm_glu");
  const ops::ListedScratch scratch(args.b, args.workspace);
  scratch.listed.write(launcher);
  const gemm::RaggedM p = problem(args, scratch.listed);
  AnyFloats z = any_floats(args.z);
  z.dtype = glu_storage(args);
  gemm::launch(launcher, p,
               Glu{.activation = {args.activation},
                   .layout = resolve_glu_layout(args.layout, p.columns),
                   .bias = any_floats(args.bias),
                   .z = z,
                   .act = any_floats(args.act),
                   .probs = static_cast<const float*>(args.probs.data),
                   .zeroes_tail = args.tail == MOIRE_TAIL_ZERO});
  return launcher.status();
}

Reason supports(const DeviceState&, const GroupedGemmGluArgs& args) {
  return gemm::why_not_width(Weight(args.b).out_features() / 2);
}

}  // namespace

const Implementation<GroupedGemmGluArgs> kGroupedGemmGlu = {
    "portable",
    Device::kCuda,
    supports,
    [](const DeviceState&, const GroupedGemmGluArgs& args) {
      return ops::ListedScratch(args.b).arena.used();
    },
    [](const DeviceState&, const GroupedGemmGluArgs& args) {
      const ops::ListedScratch scratch(args.b);
      const gemm::RaggedM p = problem(args, scratch.listed);
      return gemm::policy_text(p.a, p.weight) + scratch.listed.policy();
    },
    run,
    [](const DeviceState&, const GroupedGemmGluArgs& args) {
      return 1 + ops::ListedScratch(args.b).listed.launches();
    }};

}  // namespace moire::cuda::portable
