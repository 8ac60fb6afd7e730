// bias_backward on CUDA, one pass over grad_y. A block takes 64 rows of a group (or several such
// blocks of narrow rows) and up to 4096 columns; four threads share a segment of 64 columns as the
// order of grad_scale's sums wants it, and walk down the rows, four of them under way at once. Both
// gradients leave partial sums in the workspace, which a launch each adds in order.
#include "backend/cuda/device/any_floats.cuh"
#include "backend/cuda/device/groups.cuh"
#include "backend/cuda/device/indices.cuh"
#include "backend/cuda/device/lane_sums.cuh"
#include "backend/cuda/device/matrix.cuh"
#include "backend/cuda/device/row_blocks.cuh"
#include "backend/cuda/implementations.h"
#include "backend/cuda/portable/partial_sums.h"
#include "core/arena.h"
#include "core/divide.h"
#include "core/format.h"

namespace moire::cuda::portable {
namespace {

constexpr int kThreads = 256;
constexpr int kVectorColumns = 4;
constexpr int kRowsAtOnce = 4;

template <int N>
using Tiling = SegmentTiling<N, kThreads>;

template <class T>
struct Operands {
  Matrix<const T> grad_y;
  Indices row_idx;
  int64_t num_source_rows;
  const float* scale;     // or null
  AnyFloats bias;         // read where row_partials are asked for
  float* block_partials;  // [row blocks][columns], or null
  float* row_partials;    // [capacity][segments], or null
  int64_t columns;
  moire_groups groups;
};

// A thread's columns of one segment.
template <int N>
using Own = float[kSegmentSteps][N];

// The thread's part of rows row ... row + 3 of a block that ends at `end`; nothing where
// `first_column` is past the last. The whole warp calls it.
template <int N, class T>
__device__ void add_rows(const Operands<T>& args, int64_t row, int64_t end, int64_t first_column,
                         const Own<N>& bias, Own<N>& partial, const Reporter& reporter) {
  Packed<T, N> values[kRowsAtOnce][kSegmentSteps] = {};
#pragma unroll
  for (int r = 0; r < kRowsAtOnce; ++r) {
    if (row + r >= end) continue;
    int64_t source = row + r;
    if (args.row_idx.is_present()) {
      source = checked_index(args.row_idx, row + r, args.row_idx.at(row + r), args.num_source_rows,
                             Dropping::kForbidden, reporter);
    }
#pragma unroll
    for (int step = 0; step < kSegmentSteps; ++step) {
      const int64_t column = first_column + step * kSumLanes;
      if (source < 0 || column >= args.columns) continue;
      values[r][step] = load<N>(args.grad_y.row(source) + column);
    }
  }
  const int64_t segments = ceil_div(args.columns, kSegment);
#pragma unroll
  for (int r = 0; r < kRowsAtOnce; ++r) {
    const bool exists = row + r < end;
    const float scale = exists && args.scale != nullptr ? args.scale[row + r] : 1.0F;
    float sums[N] = {};
#pragma unroll
    for (int step = 0; step < kSegmentSteps; ++step) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float v = values[r][step][i];
        if (exists) partial[step][i] = fmaf(scale, v, partial[step][i]);
        sums[i] = fmaf(v, bias[step][i], sums[i]);
      }
    }
    if (args.row_partials == nullptr) continue;
    const float sum = fold_lanes(sums);
    const bool writes = threadIdx.x % Tiling<N>::kThreadsPerSegment == 0;
    if (exists && writes && first_column < args.columns) {
      args.row_partials[(row + r) * segments + first_column / kSegment] = sum;
    }
  }
}

template <int N, class T>
__global__ void __launch_bounds__(kThreads, 2)
    sum_kernel(Operands<T> args, Tiling<N> tiling, Reporter reporter) {
  constexpr uint32_t kSharing = Tiling<N>::kThreadsPerSegment;
  if (blockIdx.x == 0 && blockIdx.y == 0) {
    check_groups(args.groups, reporter, threadIdx.x, kThreads);
  }
  const uint32_t slot = threadIdx.x / kSharing;
  const int64_t index = int64_t{blockIdx.x} * tiling.rows + slot / tiling.per_part;
  const bool takes_part =
      slot < tiling.rows * tiling.per_part && index < row_blocks_bound(args.groups);
  const RowBlock block = takes_part ? row_block_at(args.groups, index) : RowBlock{0, 0, 0};
  const int64_t segment = int64_t{blockIdx.y} * tiling.per_part + slot % tiling.per_part;
  const int64_t first_column = segment * kSegment + threadIdx.x % kSharing * N;
  Own<N> bias = {}, partial = {};
  for (int step = 0; step < kSegmentSteps && args.row_partials != nullptr; ++step) {
    const int64_t column = first_column + step * kSumLanes;
    if (block.first >= block.end || column >= args.columns) continue;
    for (int i = 0; i < N; ++i) bias[step][i] = args.bias.at(block.group, column + i);
  }
  // All threads of a warp take as many rounds, whichever block of rows they have.
  for (int64_t r = 0; r < kBlockRows; r += kRowsAtOnce) {
    if (__any_sync(0xFFFFFFFFU, block.first + r < block.end) == 0) break;
    add_rows<N>(args, block.first + r, block.end, first_column, bias, partial, reporter);
  }
  if (args.block_partials == nullptr || block.first >= block.end) return;
#pragma unroll
  for (int step = 0; step < kSegmentSteps; ++step) {
    const int64_t column = first_column + step * kSumLanes;
    if (column >= args.columns) return;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      args.block_partials[index * args.columns + column + i] = partial[step][i];
    }
  }
}

struct Partials {
  Partials(const BiasBackwardArgs& args, Workspace workspace) : arena(workspace) {
    const int64_t n = TensorView(args.grad_y).columns();
    segments = ceil_div(n, kSegment);
    if (args.grad_bias.rank != 0) blocks = floats(row_blocks_bound(args.groups) * n);
    if (args.grad_scale.rank != 0) rows = floats(args.groups.capacity * segments);
  }
  float* floats(int64_t n) {
    return static_cast<float*>(arena.take(static_cast<size_t>(n) * sizeof(float)));
  }

  Arena arena;
  int64_t segments;
  float* blocks = nullptr;
  float* rows = nullptr;
};

template <class T>
Operands<T> operands_of(const BiasBackwardArgs& args, const Partials& partials) {
  const TensorView grad_y(args.grad_y);
  return {.grad_y = matrix_of<const T>(grad_y),
          .row_idx = indices_of(args.row_idx, "row_idx"),
          .num_source_rows = grad_y.num_rows(),
          .scale = vector_of<const float>(args.scale),
          .bias = any_floats(args.bias),
          .block_partials = partials.blocks,
          .row_partials = partials.rows,
          .columns = grad_y.columns(),
          .groups = args.groups};
}

// Calls f.operator()<N, T>() for the type and the alignment of a call.
template <class F>
decltype(auto) with_columns(const BiasBackwardArgs& args, F&& f) {
  const TensorView grad_y(args.grad_y);
  return with_float_type(grad_y.type(), [&]<class T>() {
    const bool is_vector = opens_vectors({grad_y}) && grad_y.columns() % kVectorColumns == 0;
    return is_vector ? f.template operator()<kVectorColumns, T>() : f.template operator()<1, T>();
  });
}

Status run(const Context& context, const BiasBackwardArgs& args) {
  Launcher launcher(context, "bias_backward");
  const Partials partials(args, args.workspace);
  with_columns(args, [&]<int N, class T>() {
    const Tiling<N> tiling(TensorView(args.grad_y).columns());
    const dim3 grid(blocks_for(row_blocks_bound(args.groups), tiling.rows),
                    blocks_for(tiling.segments, tiling.per_part));
    launcher.launch(sum_kernel<N, T>, {grid, kThreads}, operands_of<T>(args, partials), tiling,
                    launcher.reporter());
  });
  if (args.grad_bias.rank != 0) {
    sum_block_partials(launcher, partials.blocks, args.groups, args.grad_bias, args.beta,
                       args.beta_per_group);
  }
  if (args.grad_scale.rank != 0) {
    sum_row_partials(launcher, partials.rows, partials.segments, args.groups, args.grad_scale,
                     args.beta_scale, args.tail);
  }
  return launcher.status();
}

std::string policy(const DeviceState&, const BiasBackwardArgs& args) {
  return with_columns(args, [&]<int N, class T>() {
    const Tiling<N> tiling(TensorView(args.grad_y).columns());
    return concat("partial sums of ", kBlockRows, " rows, ", tiling.rows, " and ",
                  tiling.per_part * kSegment, " columns per block of ", kThreads, " threads, ", N,
                  " columns at once");
  });
}

}  // namespace

const Implementation<BiasBackwardArgs> kBiasBackward = {
    "portable",
    Device::kCuda,
    supports_everything,
    [](const DeviceState&, const BiasBackwardArgs& args) {
      return Partials(args, {}).arena.used();
    },
    policy,
    run,
    [](const DeviceState&, const BiasBackwardArgs& args) -> int64_t {
      return 1 + (args.grad_bias.rank != 0) + (args.grad_scale.rank != 0);
    }};

}  // namespace moire::cuda::portable
