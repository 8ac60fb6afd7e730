// grouped_gemm_glu on the CPU: the engine on pairs of gate and up columns, with the activation as
// its epilogue.
#include "backend/cpu/gemm/glu_epilogue.h"
#include "backend/cpu/implementations.h"

namespace moire::cpu {
namespace {

using gemm::RaggedM;

RaggedM problem(const GroupedGemmGluArgs& args) {
  const int64_t f = TensorView(args.act).columns();
  RaggedM p;
  p.a = args.a;
  p.row_idx = args.row_idx;
  p.weight = args.b;
  p.weight_is_nk = args.b.layout == MOIRE_OUT_IN;
  p.columns = gemm::Columns::glu_pairs(resolve_glu_layout(args.layout, f));
  p.k = p.a.columns();
  p.groups = args.groups;
  p.row_step = 1;
  p.a_scales = args.a_scales;
  p.weight_scales = args.b_scales;
  return p;
}

Status run(const Context& context, const GroupedGemmGluArgs& args) {
  const RaggedM p = problem(args);
  const gemm::GluEpilogue epilogue{args.activation, p.columns.layout, args.bias,
                                   args.probs,      args.z,           args.act};
  gemm::multiply_ragged_m(context, p, args.workspace, epilogue);
  if (args.tail == MOIRE_TAIL_ZERO) {
    gemm::zero_rows(*context.state().pool, args.act, gemm::rows_in_use(args.groups));
  }
  return {};
}

}  // namespace

const Implementation<GroupedGemmGluArgs> kGroupedGemmGlu = {
    "cpu",
    Device::kCpu,
    supports_everything,
    [](const DeviceState& state, const GroupedGemmGluArgs& args) {
      return gemm::workspace_bytes(problem(args), state.num_threads);
    },
    [](const DeviceState& state, const GroupedGemmGluArgs& args) {
      return gemm::policy_text(gemm::tile_limits(problem(args)), state);
    },
    run};

}  // namespace moire::cpu
