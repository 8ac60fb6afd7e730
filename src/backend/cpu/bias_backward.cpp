// bias_backward on the CPU, one pass over grad_y: a task takes one block of 64 rows of a group,
// writes the block's partial sums to the workspace and finishes its rows' grad_scale; then a task
// per group and 512 columns adds the group's partials in order.
#include "backend/cpu/bias_backward.h"

#include "backend/cpu/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/bias_backward.cpp"
#include <hwy/foreach_target.h>
// The inline headers come after foreach_target.h.
#include "backend/cpu/lane_sums-inl.h"
#include "backend/cpu/row_sums-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moire::cpu::HWY_NAMESPACE {
namespace {

static_assert(kBiasColumns % static_cast<int64_t>(kSegment) == 0);

int64_t source_row(const TensorView& row_idx, int64_t row) {
  if (!row_idx.is_present()) return row;
  return row_idx.type() == DType::kInt32 ? static_cast<const int32_t*>(row_idx.data)[row]
                                         : static_cast<const int64_t*>(row_idx.data)[row];
}

// n columns of one row to floats, padded to whole segments' sums.
void load_columns(const void* row, DType dtype, int64_t first, int64_t n, float* out) {
  const auto* bytes = static_cast<const char*>(row) + first * dtype_size(dtype);
  DecodeRow(bytes, dtype, static_cast<size_t>(n), out);
  PadSegment(out, static_cast<size_t>(n));
}

// Adds the 64-column partial sums of row * bias, in order.
float add_dots(const float* row, const float* bias, int64_t n, float sum) {
  for (int64_t j = 0; j < n; j += kSegment) {
    sum += DotSegment(row + j, bias + j, std::min<size_t>(kSegment, static_cast<size_t>(n - j)));
  }
  return sum;
}

void sum_block(const BiasBlock& task) {
  const int64_t num_columns = task.grad_y.columns();
  const DType dtype = task.grad_y.type();
  const int64_t row_bytes = task.grad_y.stride() * dtype_size(dtype);
  alignas(64) float row[kBiasColumns], bias[kBiasColumns];
  float dots[kBlockRows] = {};
  for (int64_t first = 0; first < num_columns; first += kBiasColumns) {
    const int64_t n = std::min(kBiasColumns, num_columns - first);
    if (task.bias != nullptr) load_columns(task.bias, task.bias_dtype, first, n, bias);
    if (task.partial != nullptr) std::fill_n(task.partial + first, n, 0.0F);
    for (int64_t i = task.block.first; i < task.block.end; ++i) {
      const int64_t source = source_row(task.row_idx, i);
      load_columns(static_cast<const char*>(task.grad_y.data) + source * row_bytes, dtype, first, n,
                   row);
      if (task.partial != nullptr) {
        AddRow(row, task.scale == nullptr ? 1.0F : task.scale[i], static_cast<size_t>(n),
               task.partial + first);
      }
      if (task.grad_scale != nullptr) {
        float& dot = dots[i - task.block.first];
        dot = add_dots(row, bias, n, dot);
      }
    }
  }
  if (task.grad_scale == nullptr) return;
  for (int64_t i = task.block.first; i < task.block.end; ++i) {
    const float dot = dots[i - task.block.first];
    task.grad_scale[i] = task.accumulate_scale ? task.grad_scale[i] + dot : dot;
  }
}

void finish_columns(const BiasSum& task) {
  float sum[kBiasColumns];
  const auto n = static_cast<size_t>(task.n);
  SumPartials(task.partials + task.first, task.num_partials, task.pitch, n, sum);
  StoreBiasGradient(sum, task.first, n, task.accumulate, task.dtype, task.grad_bias);
}

}  // namespace
}  // namespace moire::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "backend/cpu/implementations.h"
#include "core/format.h"

namespace moire::cpu {
namespace {

HWY_EXPORT(sum_block);
HWY_EXPORT(finish_columns);

size_t workspace(const DeviceState&, const BiasBackwardArgs& args) {
  if (!TensorView(args.grad_bias).is_present()) return 0;
  const int64_t blocks = RowBlocks::bound(args.groups.num_groups, args.groups.capacity);
  return static_cast<size_t>(blocks * TensorView(args.grad_y).columns()) * sizeof(float);
}

void* row_of(const TensorView& t, int64_t row) {
  return static_cast<char*>(t.data) + row * t.stride() * dtype_size(t.type());
}

void sum_blocks(const Context& context, const BiasBackwardArgs& args) {
  const TensorView grad_y(args.grad_y), scale(args.scale), bias(args.bias);
  const TensorView grad_bias(args.grad_bias), grad_scale(args.grad_scale);
  const RowBlocks blocks(args.groups);
  const bool with_scale = scale.is_present(), with_dots = grad_scale.is_present();
  const int64_t n = grad_y.columns();
  context.state().pool->parallel_for(blocks.bound(), [&](int64_t index, int) {
    const RowBlock block = blocks.at(index);
    if (block.first >= block.end) return;
    float* const partials = static_cast<float*>(args.workspace.data);
    HWY_DYNAMIC_DISPATCH(sum_block)
    ({.block = block,
      .grad_y = grad_y,
      .row_idx = args.row_idx,
      .scale = with_scale ? static_cast<const float*>(scale.data) : nullptr,
      .bias = with_dots ? row_of(bias, block.group) : nullptr,
      .bias_dtype = bias.type(),
      .partial = grad_bias.is_present() ? partials + index * n : nullptr,
      .grad_scale = with_dots ? static_cast<float*>(grad_scale.data) : nullptr,
      .accumulate_scale = args.beta_scale != 0});
  });
}

void finish_groups(const Context& context, const BiasBackwardArgs& args) {
  const TensorView grad_bias(args.grad_bias);
  const RowBlocks blocks(args.groups);
  const int64_t n = grad_bias.columns();
  const int64_t strips = (n + kBiasColumns - 1) / kBiasColumns;
  context.state().pool->parallel_for(args.groups.num_groups * strips, [&](int64_t task, int) {
    const int64_t group = task / strips, first = task % strips * kBiasColumns;
    const bool accumulate =
        args.beta_per_group != nullptr ? args.beta_per_group[group] != 0 : args.beta != 0;
    const int64_t num_partials = blocks.count_of(group);
    if (num_partials == 0 && accumulate) return;
    HWY_DYNAMIC_DISPATCH(finish_columns)
    ({.partials = static_cast<const float*>(args.workspace.data) + blocks.first_of(group) * n,
      .num_partials = num_partials,
      .pitch = n,
      .first = first,
      .n = std::min(kBiasColumns, n - first),
      .accumulate = accumulate,
      .dtype = grad_bias.type(),
      .grad_bias = row_of(grad_bias, group)});
  });
}

Status run(const Context& context, const BiasBackwardArgs& args) {
  const TensorView grad_scale(args.grad_scale);
  sum_blocks(context, args);
  if (TensorView(args.grad_bias).is_present()) finish_groups(context, args);
  if (grad_scale.is_present() && args.tail == MOIRE_TAIL_ZERO) {
    const moire_groups& groups = args.groups;
    const int64_t in_use = groups.num_groups == 0 ? 0 : groups.offsets[groups.num_groups];
    std::fill_n(static_cast<float*>(grad_scale.data) + in_use, groups.capacity - in_use, 0.0F);
  }
  return {};
}

std::string policy(const DeviceState& state, const BiasBackwardArgs&) {
  return concat("partial sums of 64 rows, ", state.simd, ", ", state.num_threads, " threads");
}

}  // namespace

const Implementation<BiasBackwardArgs> kBiasBackward = {
    "cpu", Device::kCpu, supports_everything, workspace, policy, run,
};

}  // namespace moire::cpu
#endif
