// bias_backward on the CPU, one pass over grad_y: a task takes one block of 32 rows of a group,
// writes the block's partial sums to the workspace and finishes its rows' grad_scale; then a task
// per group and 512 columns adds the group's partials in order (core/row_sums.h).
#include "backend/cpu/bias_backward.h"

#include <algorithm>
#include <cmath>

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

// partial += the sum of a run of so many rows, each times its scale.
template <class Format>
void add_run(const typename Format::Element* const* rows, const float* scales, int64_t count,
             size_t n, float* partial) {
  const FloatTag d;
  const size_t lanes = hn::Lanes(d);
  size_t j = 0;
  for (; j + lanes <= n; j += lanes) {
    auto sum = hn::Zero(d);
    for (int64_t r = 0; r < count; ++r) {
      sum = hn::MulAdd(hn::Set(d, scales[r]), Format::Load(d, rows[r] + j), sum);
    }
    hn::StoreU(hn::Add(hn::LoadU(d, partial + j), sum), d, partial + j);
  }
  for (; j < n; ++j) {
    float sum = 0;
    for (int64_t r = 0; r < count; ++r) {
      sum = std::fma(scales[r], Format::decode(rows[r][j]), sum);
    }
    partial[j] += sum;
  }
}

// Adds the 64-column partial sums of row * bias to `sum`, in order; `bias` is zero-padded.
template <class Format>
float add_dots(const typename Format::Element* row, const float* bias, size_t n, float sum) {
  alignas(64) float segment[kSegment];
  for (size_t j = 0; j < n; j += kSegment) {
    const size_t columns = std::min(kSegment, n - j);
    DecodeRun<Format>(row + j, columns, segment);
    PadSegment(segment, columns);
    sum += DotSegment(segment, bias + j, columns);
  }
  return sum;
}

// Columns first ... first + n - 1 of a block: the partial sums, and the rows' dots with the bias.
template <class Format>
void sum_columns(const BiasBlock& task, int64_t first, size_t n, float* dots) {
  using Element = typename Format::Element;
  const TensorView grad_y(task.args->grad_y), row_idx(task.args->row_idx), scale(task.args->scale);
  const auto* data = static_cast<const Element*>(grad_y.data) + first;
  alignas(64) float bias[kBiasColumns];
  if (dots != nullptr) {
    const TensorView biases(task.args->bias);
    const char* const row = row_bytes_of(biases, task.block.group);
    DecodeRow(row + first * dtype_size(biases.type()), biases.type(), n, bias);
    PadSegment(bias, n);
  }
  if (task.partial != nullptr) std::fill_n(task.partial + first, n, 0.0F);
  for (int64_t i = task.block.first; i < task.block.end;) {
    const int64_t count = std::min(kRunRows, task.block.end - i);
    const Element* rows[kRunRows] = {};
    float scales[kRunRows] = {};
    for (int64_t r = 0; r < count; ++r) {
      rows[r] = data + source_row(row_idx, i + r) * grad_y.stride();
      scales[r] = prob_of(scale, i + r);
    }
    if (task.partial != nullptr) add_run<Format>(rows, scales, count, n, task.partial + first);
    for (int64_t r = 0; dots != nullptr && r < count; ++r) {
      float& dot = dots[i + r - task.block.first];
      dot = add_dots<Format>(rows[r], bias, n, dot);
    }
    i += count;
  }
}

void sum_block(const BiasBlock& task) {
  const bool has_scale = is_present(task.args->grad_scale);
  float dots[kBlockRows] = {};
  with_format(TensorView(task.args->grad_y).type(), [&](auto format) HWY_ATTR {
    for (int64_t first = task.first; first < task.end; first += kBiasColumns) {
      const auto n = static_cast<size_t>(std::min(kBiasColumns, task.end - first));
      sum_columns<decltype(format)>(task, first, n, has_scale ? dots : nullptr);
    }
  });
  for (int64_t i = 0; has_scale && i < task.block.end - task.block.first; ++i) {
    float& sum = static_cast<float*>(task.args->grad_scale.data)[task.block.first + i];
    sum = task.args->beta_scale != 0 ? sum + dots[i] : dots[i];
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
#include "core/resolved_groups.h"
#include "core/sizes.h"

namespace moire::cpu {

HWY_EXPORT(sum_block);
HWY_EXPORT(finish_columns);

void sum_bias_rows(const BiasBackwardArgs& args, RowBlock rows, int64_t first, int64_t end) {
  const RowBlocks blocks(args.groups);
  const int64_t of_group = rows.first - args.groups.offsets[rows.group];
  int64_t index = blocks.first_of(rows.group) + of_group / kBlockRows;
  for (; rows.first < rows.end; rows.first += kBlockRows, ++index) {
    auto* const partials = static_cast<float*>(args.workspace.data);
    HWY_DYNAMIC_DISPATCH(sum_block)
    ({&args, blocks.at(index), first, end,
      is_present(args.grad_bias) ? partials + index * TensorView(args.grad_y).columns() : nullptr});
  }
}

void finish_bias(const Context& context, const BiasBackwardArgs& args) {
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
      .grad_bias = row_bytes_of(grad_bias, group)});
  });
}

namespace {

size_t workspace(const DeviceState&, const BiasBackwardArgs& args) {
  if (!is_present(args.grad_bias)) return 0;
  const int64_t blocks = RowBlocks::bound(args.groups.num_groups, args.groups.capacity);
  return static_cast<size_t>(
      product(blocks, TensorView(args.grad_y).columns(), dtype_size(DType::kFP32)));
}

Status run(const Context& context, const BiasBackwardArgs& args) {
  ThreadPool& pool = *context.state().pool;
  const RowBlocks blocks(args.groups);
  pool.parallel_for(blocks.bound(), [&](int64_t index, int) {
    sum_bias_rows(args, blocks.at(index), 0, TensorView(args.grad_y).columns());
  });
  if (is_present(args.grad_bias)) finish_bias(context, args);
  if (is_present(args.grad_scale) && args.tail == MOIRE_TAIL_ZERO) {
    zero_rows_from(pool, args.grad_scale, rows_in_use(args.groups));
  }
  return {};
}

std::string policy(const DeviceState& state, const BiasBackwardArgs&) {
  return concat("partial sums of ", kBlockRows, " rows, ", state.simd, ", ", state.num_threads,
                " threads");
}

}  // namespace

const Implementation<BiasBackwardArgs> kBiasBackward = {
    "cpu", Device::kCpu, supports_everything, workspace, policy, run,
};

}  // namespace moire::cpu
#endif
