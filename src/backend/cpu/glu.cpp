// glu and glu_backward on the CPU: rows shared out to threads, each row in pieces of 256
// columns through the cache (glu_rows-inl.h). A row's results depend on that row alone.
#include <moire/glu.h>

#include "backend/cpu/rows.h"
#include "backend/cpu/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/glu.cpp"
#include <hwy/foreach_target.h>
// The inline headers come after foreach_target.h.
#include "backend/cpu/glu_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moire::cpu::HWY_NAMESPACE {
namespace {

// Columns that go through the cache at a time: several segments, because the activation's latency
// is paid once at the end of each loop (64 instead of 256 made glu a fifth slower on a Zen 3, 1024
// no faster).
constexpr size_t kColumns = 4 * kGluSegment;

size_t count_from(int64_t f, int64_t first) {
  return static_cast<size_t>(std::min(f - first, static_cast<int64_t>(kColumns)));
}

void glu_row(const GluArgs& args, const ResolvedGluLayout& layout, int64_t row) {
  const DType dtype = TensorView(args.z).type();
  const float prob = prob_of(args.probs, row);
  const char* const z = row_bytes_of(args.z, row);
  alignas(64) float gate[kColumns], up[kColumns], act[kColumns];
  for (int64_t j = 0; j < layout.f; j += kColumns) {
    const size_t n = count_from(layout.f, j);
    LoadGluSegment(z, dtype, layout, j, n, gate, up);
    GluForwardSegment(args.activation, gate, layout.is_gated ? up : nullptr, prob, act, n);
    EncodeRow(act, n, dtype, row_bytes_of(args.act, row) + j * dtype_size(dtype));
  }
}

// Adds the parts of each 64 columns to grad_prob, in order.
float add_dots(const float* grad_act, const float* glu, size_t n, float grad_prob) {
  for (size_t j = 0; j < n; j += kGluSegment) {
    grad_prob += DotSegment(grad_act + j, glu + j, std::min(kGluSegment, n - j));
  }
  return grad_prob;
}

void glu_backward_row(const GluBackwardArgs& args, const ResolvedGluLayout& layout, int64_t row) {
  const DType dtype = TensorView(args.z).type();
  const float prob = prob_of(args.probs, row);
  const char *const z = row_bytes_of(args.z, row), *const from = row_bytes_of(args.grad_act, row);
  alignas(64) float gate[kColumns], up[kColumns], grad_act[kColumns], glu[kColumns];
  alignas(64) float grad_gate[kColumns], grad_up[kColumns], act[kColumns];
  float* const act_or_null = is_present(args.act) ? act : nullptr;
  float grad_prob = 0;
  for (int64_t j = 0; j < layout.f; j += kColumns) {
    const size_t n = count_from(layout.f, j);
    LoadGluSegment(z, dtype, layout, j, n, gate, up);
    LoadSegment(from, dtype, j, n, grad_act);
    GluGradients(args.activation, gate, layout.is_gated ? up : nullptr, grad_act, prob, grad_gate,
                 grad_up, glu, act_or_null, n);
    if (is_present(args.grad_probs)) grad_prob = add_dots(grad_act, glu, n, grad_prob);
    StoreGluSegment(grad_gate, grad_up, dtype, layout, j, n, row_bytes_of(args.grad_z, row));
    if (act_or_null != nullptr) {
      EncodeRow(act, n, dtype, row_bytes_of(args.act, row) + j * dtype_size(dtype));
    }
  }
  if (is_present(args.grad_probs)) static_cast<float*>(args.grad_probs.data)[row] = grad_prob;
}

}  // namespace
}  // namespace moire::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "backend/cpu/implementations.h"
#include "core/format.h"
#include "core/resolved_groups.h"

namespace moire::cpu {
namespace {

HWY_EXPORT(glu_row);
HWY_EXPORT(glu_backward_row);

// Enough elements of z for a task to hide the cost of taking it (about 0.1 us).
constexpr int64_t kElementsPerTask = 1 << 15;

// Calls row_op(args, layout, row) for every row in use, in tasks of whole rows; the others of
// `outputs` are their tail.
template <class A>
void for_each_row(const Context& context, const A& args, int64_t f, auto row_op,
                  std::initializer_list<TensorView> outputs) {
  ThreadPool& pool = *context.state().pool;
  const TensorView z(args.z);
  const int64_t in_use = is_absent(args.groups) ? z.num_rows() : rows_in_use(args.groups);
  const ResolvedGluLayout layout = resolve_glu_layout(args.layout, f);
  const int64_t per_task =
      std::max<int64_t>(1, kElementsPerTask / std::max<int64_t>(1, z.columns()));
  for_ranges(pool, in_use, per_task, [&](int64_t row, int64_t end) {
    for (; row < end; ++row) row_op(args, layout, row);
  });
  for (const TensorView& t : outputs) {
    if (args.tail == MOIRE_TAIL_ZERO && t.is_present()) zero_rows_from(pool, t, in_use);
  }
}

Status run_glu(const Context& context, const GluArgs& args) {
  for_each_row(context, args, TensorView(args.act).columns(), HWY_DYNAMIC_DISPATCH(glu_row),
               {args.act});
  return {};
}

Status run_glu_backward(const Context& context, const GluBackwardArgs& args) {
  for_each_row(context, args, TensorView(args.grad_act).columns(),
               HWY_DYNAMIC_DISPATCH(glu_backward_row), {args.grad_z, args.act, args.grad_probs});
  return {};
}

template <class A>
std::string policy(const DeviceState& state, const A&) {
  return concat("pieces of 256 columns, ", state.simd, ", ", state.num_threads, " threads");
}

}  // namespace

const Implementation<GluArgs> kGlu = {
    "cpu", Device::kCpu, supports_everything, no_workspace, policy, run_glu,
};
const Implementation<GluBackwardArgs> kGluBackward = {
    "cpu", Device::kCpu, supports_everything, no_workspace, policy, run_glu_backward,
};

}  // namespace moire::cpu
#endif
