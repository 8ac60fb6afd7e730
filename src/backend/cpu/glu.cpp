// glu and glu_backward on the CPU: rows shared out to threads, each row in pieces of 256
// columns through the cache (glu_rows-inl.h). A row's results depend on that row alone.
#include "backend/cpu/glu.h"

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

void glu_row(const GluArgs& args, const ResolvedGluLayout& layout, const GluRow& row) {
  const DType dtype = TensorView(args.z).type();
  const int64_t element_bytes = dtype_size(dtype);
  alignas(64) float gate[kColumns], up[kColumns], act[kColumns];
  for (int64_t j = 0; j < layout.f; j += kColumns) {
    const size_t n = count_from(layout.f, j);
    LoadGluSegment(row.z, dtype, layout, j, n, gate, up);
    GluForwardSegment(args.activation, gate, up, row.prob, act, n);
    EncodeRow(act, n, dtype, static_cast<char*>(row.act) + j * element_bytes);
  }
}

// Adds the parts of each 64 columns to grad_prob, in order.
float add_dots(const float* grad_act, const float* glu, size_t n, float grad_prob) {
  for (size_t j = 0; j < n; j += kGluSegment) {
    grad_prob += DotSegment(grad_act + j, glu + j, std::min(kGluSegment, n - j));
  }
  return grad_prob;
}

void glu_backward_row(const GluBackwardArgs& args, const ResolvedGluLayout& layout,
                      const GluBackwardRow& row) {
  const DType dtype = TensorView(args.z).type();
  const int64_t element_bytes = dtype_size(dtype);
  alignas(64) float gate[kColumns], up[kColumns], grad_act[kColumns], glu[kColumns];
  alignas(64) float grad_gate[kColumns], grad_up[kColumns], act[kColumns];
  float* const act_or_null = row.act != nullptr ? act : nullptr;
  float grad_prob = 0;
  for (int64_t j = 0; j < layout.f; j += kColumns) {
    const size_t n = count_from(layout.f, j);
    LoadGluSegment(row.z, dtype, layout, j, n, gate, up);
    LoadSegment(row.grad_act, dtype, j, n, grad_act);
    GluGradients(args.activation, gate, up, grad_act, row.prob, grad_gate, grad_up, glu,
                 act_or_null, n);
    if (row.grad_prob != nullptr) grad_prob = add_dots(grad_act, glu, n, grad_prob);
    StoreGluSegment(grad_gate, grad_up, dtype, layout, j, n, row.grad_z);
    if (row.act != nullptr) {
      EncodeRow(act, n, dtype, static_cast<char*>(row.act) + j * element_bytes);
    }
  }
  if (row.grad_prob != nullptr) *row.grad_prob = grad_prob;
}

}  // namespace
}  // namespace moire::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <algorithm>
#include <cstring>

#include "backend/cpu/implementations.h"
#include "core/format.h"
#include "core/resolved_groups.h"
#include "core/rows_in_use.h"

namespace moire::cpu {
namespace {

HWY_EXPORT(glu_row);
HWY_EXPORT(glu_backward_row);

// Enough elements of z for a task to hide the cost of taking it (about 0.1 us).
constexpr int64_t kElementsPerTask = 1 << 15;

// Calls body(row, is_in_use) for every row, in tasks of whole rows.
template <class Body>
void for_each_row(const Context& context, const TensorView& z, const moire_groups& groups,
                  Body&& body) {
  const int64_t rows = z.num_rows();
  const int64_t in_use = is_absent(groups) ? rows : rows_in_use(groups);
  const int64_t per_task =
      std::max<int64_t>(1, kElementsPerTask / std::max<int64_t>(1, z.columns()));
  context.state().pool->parallel_for((rows + per_task - 1) / per_task, [&](int64_t task, int) {
    const int64_t end = std::min(rows, (task + 1) * per_task);
    for (int64_t row = task * per_task; row < end; ++row) body(row, row < in_use);
  });
}

// The start of a row; null if the view is absent.
char* row_of(const TensorView& t, int64_t row) {
  if (!t.is_present() || t.data == nullptr) return nullptr;
  return static_cast<char*>(t.data) + row * t.stride() * dtype_size(t.type());
}

float prob_of(const TensorView& probs, int64_t row) {
  return probs.is_present() ? static_cast<const float*>(probs.data)[row] : 1.0F;
}

void zero_row(const TensorView& t, int64_t row) {
  if (char* start = row_of(t, row)) {
    std::memset(start, 0, static_cast<size_t>(t.columns() * dtype_size(t.type())));
  }
}

Status run_glu(const Context& context, const GluArgs& args) {
  const TensorView z(args.z), probs(args.probs), act(args.act);
  const ResolvedGluLayout layout = resolve_glu_layout(args.layout, act.columns());
  for_each_row(context, z, args.groups, [&](int64_t row, bool is_in_use) {
    if (is_in_use) {
      HWY_DYNAMIC_DISPATCH(glu_row)
      (args, layout, {row_of(z, row), prob_of(probs, row), row_of(act, row)});
    } else if (args.tail == MOIRE_TAIL_ZERO) {
      zero_row(act, row);
    }
  });
  return {};
}

Status run_glu_backward(const Context& context, const GluBackwardArgs& args) {
  const TensorView z(args.z), probs(args.probs), grad_act(args.grad_act);
  const TensorView grad_z(args.grad_z), act(args.act), grad_probs(args.grad_probs);
  const ResolvedGluLayout layout = resolve_glu_layout(args.layout, grad_act.columns());
  for_each_row(context, z, args.groups, [&](int64_t row, bool is_in_use) {
    float* const grad_prob =
        grad_probs.is_present() ? static_cast<float*>(grad_probs.data) + row : nullptr;
    if (is_in_use) {
      HWY_DYNAMIC_DISPATCH(glu_backward_row)
      (args, layout,
       {row_of(z, row), prob_of(probs, row), row_of(grad_act, row), row_of(grad_z, row),
        row_of(act, row), grad_prob});
    } else if (args.tail == MOIRE_TAIL_ZERO) {
      zero_row(grad_z, row);
      zero_row(act, row);
      if (grad_prob != nullptr) *grad_prob = 0;
    }
  });
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
