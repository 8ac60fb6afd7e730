// grouped_gemm_glu on the CPU: the engine on pairs of gate and up columns, with the activation as
// its epilogue.
#include "backend/cpu/gemm/glu_epilogue.h"
#include "backend/cpu/implementations.h"
#include "backend/cpu/rows.h"
#include "core/arena.h"
#include "core/glu_storage.h"

namespace moire::cpu {
namespace {

using gemm::QuantizedOutput;
using gemm::RaggedM;

QuantizedOutput quantized_act(const GroupedGemmGluArgs& args) {
  return {args.act_rowwise, args.act_columnwise, args.fractional_scales != 0, false};
}

RaggedM problem(const GroupedGemmGluArgs& args) {
  const Weight b(args.b);
  RaggedM p;
  p.a = args.a;
  p.row_idx = args.row_idx;
  p.weight = b;
  p.weight_is_nk = b.layout == MOIRE_OUT_IN;
  p.columns = gemm::Columns::glu_pairs(
      resolve_glu_layout(args.layout, b.out_features() / num_halves(args.layout)));
  p.k = p.a.columns();
  p.groups = args.groups;
  p.row_step = 1;
  if (quantized_act(args).is_fused()) p.row_step = p.patch_rows = gemm::kQuantizedRows;
  p.a_scales = args.a_scales;
  p.weight_scales = args.b_scales;
  p.emulates = args.accumulation == MOIRE_ACCUMULATE_EMULATED;
  return p;
}

// The stored act: the caller's, or the op's own part of the workspace where only its copies are
// asked for and need it.
struct StoredAct {
  StoredAct(const GroupedGemmGluArgs& args, const RaggedM& p, Workspace workspace)
      : arena(workspace), act(args.act) {
    if (act.is_present() || !quantized_act(args).is_deferred()) return;
    act = arena.take(glu_storage(args), p.groups.capacity, p.columns.outputs);
  }
  Arena arena;
  TensorView act;
};

Status run(const Context& context, const GroupedGemmGluArgs& args) {
  const RaggedM p = problem(args);
  const StoredAct stored(args, p, args.workspace);
  const gemm::GluEpilogue epilogue{
      args.activation, p.columns.layout, p.groups,   glu_storage(args),  args.bias,
      args.probs,      args.z,           stored.act, quantized_act(args)};
  gemm::multiply_ragged_m(context, p, stored.arena.rest(), epilogue);
  if (args.tail == MOIRE_TAIL_ZERO && is_present(args.act)) {
    zero_rows_from(*context.state().pool, args.act, rows_in_use(args.groups));
  }
  return epilogue.quantized_act.finish(context, {"grouped_gemm_glu", "act"}, stored.act,
                                       args.groups, args.tail);
}

}  // namespace

const Implementation<GroupedGemmGluArgs> kGroupedGemmGlu = {
    "cpu",
    Device::kCpu,
    supports_everything,
    [](const DeviceState& state, const GroupedGemmGluArgs& args) {
      const RaggedM p = problem(args);
      return StoredAct(args, p, {}).arena.used() + gemm::workspace_bytes(p, state.num_threads);
    },
    [](const DeviceState& state, const GroupedGemmGluArgs& args) {
      return gemm::policy_text(problem(args), state) + quantized_act(args).policy("act");
    },
    run};

}  // namespace moire::cpu
