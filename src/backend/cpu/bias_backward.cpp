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

// Rows that a pass over the partial sums adds: each is loaded and stored once for so many.
constexpr int64_t kRowsPerPass = 4;

// partial = fma(scale_r, row_r, partial) for each row in turn, as AddRow does it.
template <class Format, int64_t kRows>
void add_rows(const typename Format::Element* const* rows, const float* scales, size_t n,
              float* partial) {
  const FloatTag d;
  const size_t lanes = hn::Lanes(d);
  size_t j = 0;
  for (; j + lanes <= n; j += lanes) {
    auto sum = hn::LoadU(d, partial + j);
    for (int64_t r = 0; r < kRows; ++r) {
      sum = hn::MulAdd(hn::Set(d, scales[r]), Format::Load(d, rows[r] + j), sum);
    }
    hn::StoreU(sum, d, partial + j);
  }
  for (; j < n; ++j) {
    for (int64_t r = 0; r < kRows; ++r) {
      partial[j] = std::fma(scales[r], Format::decode(rows[r][j]), partial[j]);
    }
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
  const auto* data = static_cast<const Element*>(task.grad_y.data) + first;
  alignas(64) float bias[kBiasColumns];
  if (task.bias != nullptr) {
    const int64_t offset = first * dtype_size(task.bias_dtype);
    DecodeRow(static_cast<const char*>(task.bias) + offset, task.bias_dtype, n, bias);
    PadSegment(bias, n);
  }
  if (task.partial != nullptr) std::fill_n(task.partial + first, n, 0.0F);
  for (int64_t i = task.block.first; i < task.block.end;) {
    const int64_t left = task.block.end - i;
    const int64_t count = left >= kRowsPerPass ? kRowsPerPass : 1;
    const Element* rows[kRowsPerPass] = {};
    float scales[kRowsPerPass] = {};
    for (int64_t r = 0; r < count; ++r) {
      rows[r] = data + source_row(task.row_idx, i + r) * task.grad_y.stride();
      scales[r] = task.scale == nullptr ? 1.0F : task.scale[i + r];
    }
    if (task.partial != nullptr) {
      (count == 1 ? add_rows<Format, 1> : add_rows<Format, kRowsPerPass>)(rows, scales, n,
                                                                          task.partial + first);
    }
    for (int64_t r = 0; task.grad_scale != nullptr && r < count; ++r) {
      float& dot = dots[i + r - task.block.first];
      dot = add_dots<Format>(rows[r], bias, n, dot);
    }
    i += count;
  }
}

void sum_block(const BiasBlock& task) {
  const int64_t num_columns = task.grad_y.columns();
  float dots[kBlockRows] = {};
  with_format(task.grad_y.type(), [&](auto format) HWY_ATTR {
    for (int64_t first = 0; first < num_columns; first += kBiasColumns) {
      const int64_t n = std::min(kBiasColumns, num_columns - first);
      sum_columns<decltype(format)>(task, first, static_cast<size_t>(n), dots);
    }
  });
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
#include "core/resolved_groups.h"
#include "core/sizes.h"

namespace moire::cpu {
namespace {

HWY_EXPORT(sum_block);
HWY_EXPORT(finish_columns);

size_t workspace(const DeviceState&, const BiasBackwardArgs& args) {
  if (!TensorView(args.grad_bias).is_present()) return 0;
  const int64_t blocks = RowBlocks::bound(args.groups.num_groups, args.groups.capacity);
  return static_cast<size_t>(
      product(blocks, TensorView(args.grad_y).columns(), dtype_size(DType::kFP32)));
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
    const int64_t in_use = rows_in_use(args.groups);
    std::fill_n(static_cast<float*>(grad_scale.data) + in_use, args.groups.capacity - in_use, 0.0F);
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
