// grouped_gemm on the CPU: the engine, with sums rounded to d's dtype, bias added on the way.
#include "backend/cpu/gemm/engine.h"
#include "backend/cpu/implementations.h"
#include "backend/cpu/rows.h"

namespace moire::cpu {
namespace {

using gemm::Columns;
using gemm::RaggedM;
using gemm::Sums;

RaggedM problem(const GroupedGemmArgs& args) {
  RaggedM p;
  p.a = args.a;
  p.row_idx = args.row_idx;
  p.weight = args.b;
  p.weight_is_nk = (args.b.layout == MOIRE_OUT_IN) == (args.transpose_b == 0);
  p.columns = Columns::plain(TensorView(args.d).columns());
  p.k = p.a.columns();
  p.groups = args.groups;
  p.row_step = 1;
  p.a_scales = args.a_scales;
  p.weight_scales = args.b_scales;
  p.emulates = args.accumulation == MOIRE_ACCUMULATE_EMULATED;
  return p;
}

// d = round(sum + bias_scale * bias), one multiply-add.
struct Store {
  const gemm::Kernels& kernels;
  TensorView d, bias, bias_scale;

  gemm::Direct direct(const gemm::Tile& tile, int64_t) const {
    if (bias.is_present() || d.type() != DType::kFP32) return {};
    return {reinterpret_cast<float*>(gemm::element(d, tile.first_row, tile.first_column)),
            d.stride()};
  }

  void apply(const Sums& s) const {
    float bias_row[gemm::kPlainChunk];
    if (bias.is_present()) {
      kernels.decode(gemm::element(bias, s.group, s.first_column), bias.type(), s.columns,
                     bias_row);
    }
    for (int64_t r = 0; r < s.rows; ++r) {
      float* const sums = s.data + r * s.pitch;
      if (bias.is_present()) {
        const float scale = bias_scale.is_present()
                                ? static_cast<const float*>(bias_scale.data)[s.first_row + r]
                                : 1.0F;
        kernels.add_scaled(bias_row, scale, s.columns, sums);
      }
      kernels.encode(sums, s.columns, d.type(), gemm::element(d, s.first_row + r, s.first_column));
    }
  }
};

Status run(const Context& context, const GroupedGemmArgs& args) {
  const RaggedM p = problem(args);
  const Store store{gemm::kernels(), args.d, args.bias, args.bias_scale};
  gemm::multiply_ragged_m(context, p, args.workspace, store);
  if (args.tail == MOIRE_TAIL_ZERO) {
    zero_rows_from(*context.state().pool, args.d, rows_in_use(args.groups));
  }
  return {};
}

}  // namespace

const Implementation<GroupedGemmArgs> kGroupedGemm = {
    "cpu",
    Device::kCpu,
    supports_everything,
    [](const DeviceState& state, const GroupedGemmArgs& args) {
      return gemm::workspace_bytes(problem(args), state.num_threads);
    },
    [](const DeviceState& state, const GroupedGemmArgs& args) {
      return gemm::policy_text(problem(args), state);
    },
    run};

}  // namespace moire::cpu
