// grouped_gemm_glu on CUDA, the plain way: each tile makes gate and up of its 64 columns, z is
// rounded to its storage type, and the activation reads that.
#include "backend/cuda/device/activation.cuh"
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

struct Call : gemm::RaggedMCall<GroupedGemmGluArgs> {
  Call(const DeviceState& device, const GroupedGemmGluArgs& given, const Workspace& workspace)
      : RaggedMCall(device, given, given.a, given.a_scales, given.b, given.b_scales,
                    given.b.layout == MOIRE_OUT_IN, Glu::kHalves, workspace) {}

  Status run(const Context& context) const {
    Launcher launcher(context, "grouped_gemm_glu");
    AnyFloats z = any_floats(args.z);
    z.dtype = glu_storage(args);
    launch(launcher, Glu{.activation = {args.activation},
                         .layout = resolve_glu_layout(args.layout, product.columns),
                         .bias = any_floats(args.bias),
                         .z = z,
                         .act = any_floats(args.act),
                         .probs = vector_of<const float>(args.probs),
                         .zeroes_tail = args.tail == MOIRE_TAIL_ZERO});
    return launcher.status();
  }
};

}  // namespace

const Implementation<GroupedGemmGluArgs> kGroupedGemmGlu =
    implementation_of<GroupedGemmGluArgs, Call>("portable");

}  // namespace moire::cuda::portable
