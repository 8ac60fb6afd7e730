// grouped_gemm_glu_backward on the CPU: the engine with the activation's backward as its epilogue,
// then the partial sums of grad_probs and grad_bias added in order.
#include "backend/cpu/gemm/glu_epilogue.h"
#include "backend/cpu/implementations.h"
#include "backend/cpu/row_blocks.h"
#include "backend/cpu/rows.h"
#include "core/arena.h"
#include "core/status_macros.h"

namespace moire::cpu {
namespace {

using gemm::QuantizedOutput;
using gemm::RaggedM;

ResolvedGluLayout layout_of(const GroupedGemmGluBackwardArgs& args) {
  return resolve_glu_layout(args.layout, Weight(args.w2).in_features());
}

QuantizedOutput quantized_grad_z(const GroupedGemmGluBackwardArgs& args) {
  return {args.grad_z_rowwise, args.grad_z_columnwise, args.fractional_scales != 0,
          gemm::straddles_blocks(layout_of(args))};
}
QuantizedOutput quantized_act(const GroupedGemmGluBackwardArgs& args) {
  return {{}, args.act_columnwise, args.fractional_scales != 0, false};
}

RaggedM problem(const GroupedGemmGluBackwardArgs& args) {
  const Weight w2(args.w2);
  RaggedM p;
  p.a = args.grad_y;
  p.row_idx = args.row_idx;
  p.weight = w2;
  p.weight_is_nk = w2.layout == MOIRE_IN_OUT;
  p.columns = gemm::Columns::in_glu_chunks(w2.in_features());
  p.k = w2.out_features();
  p.groups = args.groups;
  p.row_step = 1;
  if (quantized_grad_z(args).is_fused() || quantized_act(args).is_fused()) {
    p.row_step = p.patch_rows = gemm::kQuantizedRows;
  }
  if (is_present(args.grad_bias)) p.row_step = kBlockRows;  // which the other is, too
  static_assert(gemm::kPatchRows % kRunRows == 0 && gemm::kQuantizedRows % kRunRows == 0,
                "the epilogue is given whole runs of a bias' gradient");
  p.a_scales = args.grad_y_scales;
  p.weight_scales = args.w2_scales;
  p.emulates = args.accumulation == MOIRE_ACCUMULATE_EMULATED;
  return p;
}

int64_t segments_of(const RaggedM& p) { return p.columns.num_chunks(); }

// The op's own part of the workspace; the engine has the rest. Where only quantised copies are
// asked for, the stored tensor that they are made from is here.
struct Partials {
  Partials(const GroupedGemmGluBackwardArgs& args, const RaggedM& p, Workspace workspace)
      : arena(workspace), grad_z(args.grad_z), act(args.act) {
    const DType storage = TensorView(args.z).type();
    const int64_t f = p.columns.outputs, z_columns = layout_of(args).columns();
    if (is_present(args.grad_probs)) probs = arena.take_floats(p.groups.capacity, segments_of(p));
    if (is_present(args.grad_bias)) {
      bias = arena.take_floats(RowBlocks::bound(p.groups.num_groups, p.groups.capacity), z_columns);
    }
    if (!grad_z.is_present() && quantized_grad_z(args).is_deferred()) {
      grad_z = arena.take(storage, p.groups.capacity, z_columns);
    }
    if (!act.is_present() && quantized_act(args).is_deferred()) {
      act = arena.take(storage, p.groups.capacity, f);
    }
  }
  Arena arena;
  TensorView grad_z, act;
  float* probs = nullptr;
  float* bias = nullptr;
};

void sum_prob_partials(ThreadPool& pool, const float* partials, int64_t segments, int64_t rows,
                       float* grad_probs) {
  constexpr int64_t kRowsPerTask = 256;
  for_ranges(pool, rows, kRowsPerTask, [&](int64_t row, int64_t end) {
    for (; row < end; ++row) {
      float sum = 0;
      for (int64_t i = 0; i < segments; ++i) sum += partials[row * segments + i];
      grad_probs[row] = sum;
    }
  });
}

// grad_bias = beta * grad_bias + the group's partial sums, for up to kColumns columns of one group.
constexpr int64_t kColumns = 256;

void sum_bias_partials(const GroupedGemmGluBackwardArgs& args, const float* partials, int64_t group,
                       int64_t first) {
  const gemm::Kernels& kernels = gemm::kernels();
  const TensorView grad_bias(args.grad_bias);
  const int64_t width = grad_bias.columns(), n = std::min(kColumns, width - first);
  const RowBlocks blocks(args.groups);
  const int64_t num_blocks = blocks.count_of(group);
  if (num_blocks == 0 && args.beta != 0) return;
  float sums[kColumns] = {};
  for (int64_t block = 0; block < num_blocks; ++block) {
    const float* partial = partials + (blocks.first_of(group) + block) * width + first;
    kernels.add_scaled(partial, 1.0F, n, sums);
  }
  void* const target = gemm::element(grad_bias, group, first);
  if (args.beta != 0) {
    float before[kColumns];
    kernels.decode(target, grad_bias.type(), n, before);
    kernels.add_scaled(before, 1.0F, n, sums);
  }
  kernels.encode(sums, n, grad_bias.type(), target);
}

void zero_tails(ThreadPool& pool, const GroupedGemmGluBackwardArgs& args, int64_t rows) {
  if (is_present(args.grad_z)) zero_rows_from(pool, args.grad_z, rows);
  if (is_present(args.act)) zero_rows_from(pool, args.act, rows);
  if (is_present(args.grad_probs)) zero_rows_from(pool, args.grad_probs, rows);
}

Status run(const Context& context, const GroupedGemmGluBackwardArgs& args) {
  ThreadPool& pool = *context.state().pool;
  const RaggedM p = problem(args);
  const Partials partials(args, p, args.workspace);
  const gemm::GluBackwardEpilogue epilogue{
      args.activation, layout_of(args),        p.groups,           args.z,
      args.probs,      partials.grad_z,        partials.act,       partials.probs,
      partials.bias,   quantized_grad_z(args), quantized_act(args)};
  gemm::multiply_ragged_m(context, p, partials.arena.rest(), epilogue);
  const int64_t rows = rows_in_use(p.groups);
  if (partials.probs != nullptr) {
    sum_prob_partials(pool, partials.probs, segments_of(p), rows,
                      static_cast<float*>(args.grad_probs.data));
  }
  if (partials.bias != nullptr) {
    const int64_t tasks = ceil_div(epilogue.layout.columns(), kColumns);
    pool.parallel_for(p.groups.num_groups * tasks, [&](int64_t task, int) {
      sum_bias_partials(args, partials.bias, task / tasks, task % tasks * kColumns);
    });
  }
  if (args.tail == MOIRE_TAIL_ZERO) zero_tails(pool, args, rows);
  constexpr std::string_view kOp = "grouped_gemm_glu_backward";
  MOIRE_RETURN_IF_ERROR(epilogue.quantized_grad_z.finish(context, {kOp, "grad_z"}, partials.grad_z,
                                                         p.groups, args.tail));
  return epilogue.quantized_act.finish(context, {kOp, "act"}, partials.act, p.groups, args.tail);
}

}  // namespace

const Implementation<GroupedGemmGluBackwardArgs> kGroupedGemmGluBackward = {
    "cpu",
    Device::kCpu,
    supports_everything,
    [](const DeviceState& state, const GroupedGemmGluBackwardArgs& args) {
      const RaggedM p = problem(args);
      return Partials(args, p, {}).arena.used() + gemm::workspace_bytes(p, state.num_threads);
    },
    [](const DeviceState& state, const GroupedGemmGluBackwardArgs& args) {
      return gemm::policy_text(problem(args), state) + quantized_grad_z(args).policy("grad_z") +
             quantized_act(args).policy("act");
    },
    run};

}  // namespace moire::cpu
