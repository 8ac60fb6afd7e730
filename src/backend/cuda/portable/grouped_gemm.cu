// grouped_gemm on CUDA, the plain way: d = round(sum + bias_scale * bias), one multiply-add.
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

struct Call : gemm::RaggedMCall<GroupedGemmArgs> {
  Call(const DeviceState& device, const GroupedGemmArgs& given, const Workspace& workspace)
      : RaggedMCall(device, given, given.a, given.a_scales, given.b, given.b_scales,
                    (given.b.layout == MOIRE_OUT_IN) == (given.transpose_b == 0), 1, workspace) {}

  Status run(const Context& context, const char* op = "grouped_gemm") const {
    Launcher launcher(context, op);
    launch(launcher, Store{.d = any_floats(args.d),
                           .bias = any_floats(args.bias),
                           .bias_scale = vector_of<const float>(args.bias_scale),
                           .columns = product.columns,
                           .zeroes_tail = args.tail == MOIRE_TAIL_ZERO});
    return launcher.status();
  }
};

}  // namespace

const Product kGroupedGemm = product_of<Call>("portable");

}  // namespace moire::cuda::portable
