// bias_backward on CUDA, one pass over grad_y. A block takes 32 rows of a group (or several such
// blocks of narrow rows) and up to 4096 columns; two threads (of 16-bit elements) share a segment
// of 64 columns as the order of grad_scale's sums wants it, and walk down the rows, a run
// (core/row_sums.h) and then the next, while further rows are on their way (segment_pieces.cuh).
// Both gradients leave partial sums in the workspace, which a launch each adds in order.
#include "backend/cuda/device/indices.cuh"
#include "backend/cuda/device/matrix.cuh"
#include "backend/cuda/device/row_blocks.cuh"
#include "backend/cuda/device/segment_pieces.cuh"
#include "backend/cuda/implementations.h"
#include "backend/cuda/ops/partial_sums.h"

namespace moire::cuda::ops {
namespace {

constexpr int kThreads = kSegmentThreads;
constexpr int kWarps = kThreads / kWarp;
// Rows under way to a warp, the one that is being summed among them, and blocks of a
// multiprocessor: without grad_scale nothing holds the bias, and its registers hold another block.
template <bool kScales>
constexpr uint32_t kStages = kScales ? 5 : 4;
template <bool kScales>
constexpr int kBlocks = kScales ? 4 : 5;
constexpr uint32_t kRun = kRunRows, kRows = kBlockRows;
// Blocks of rows of a block of threads, at most.
constexpr uint32_t kMostBlocks = 8;
constexpr int64_t kNoRow = -16;  // an offset at which vectors begin

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

// What a block of threads knows of its rows.
struct Rows {
  RowBlock blocks[kMostBlocks];
  int64_t offsets[kMostBlocks][kRows];  // in grad_y, of their first elements, or kNoRow
  float scales[kMostBlocks][kRows];
};

// Of `count` blocks of rows from `first_index` on; all threads call it.
template <class T>
__device__ void load_rows(const Operands<T>& args, int64_t first_index, uint32_t count, Rows& rows,
                          const Reporter& reporter) {
  for (uint32_t b = threadIdx.x / kWarp; b < count; b += kWarps) {
    const int64_t index = first_index + b;
    RowBlock block{0, 0, 0};
    if (index < row_blocks_bound(args.groups)) block = row_block_at(args.groups, index);
    if (threadIdx.x % kWarp == 0) rows.blocks[b] = block;
  }
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < count * kRows; i += kThreads) {
    const uint32_t b = i / kRows, r = i % kRows;
    const int64_t row = rows.blocks[b].first + r;
    const bool exists = row < rows.blocks[b].end;
    int64_t source = exists ? row : -1;
    if (exists && args.row_idx.is_present()) {
      source = checked_index(args.row_idx, row, args.row_idx.at(row), args.num_source_rows,
                             Dropping::kForbidden, reporter);
    }
    rows.offsets[b][r] = source < 0 ? kNoRow : source * args.grad_y.stride;
    rows.scales[b][r] = exists && args.scale != nullptr ? args.scale[row] : 1.0F;
  }
  __syncthreads();
}

// A segment, or a piece of it that a thread moves, of every row of a block.
struct Place {
  uint32_t block;   // of Rows
  uint32_t column;  // args.columns or more: none
};

template <int N, class T>
__device__ Place place_of(const Operands<T>& args, const SegmentTiling<N>& tiling, uint32_t slot) {
  if (slot >= tiling.rows * tiling.per_part) return {0, static_cast<uint32_t>(args.columns)};
  const uint32_t segment = blockIdx.y * tiling.per_part + slot % tiling.per_part;
  return {slot / tiling.per_part, segment * kSegment};
}

template <int N, class T>
__device__ void fetch_row(const Operands<T>& args, const Rows& rows, uint32_t r,
                          const Place (&places)[kSegmentSteps], SegmentPieces<T, N> pieces) {
#pragma unroll
  for (uint32_t i = 0; i < kSegmentSteps; ++i) {
    const auto [block, column] = places[i];
    const int64_t offset = rows.offsets[block][r];
    pieces.fetch(i, args.grad_y.data + offset + column, offset >= 0 && column < args.columns);
  }
}

// A thread's columns of its segment.
template <int N>
using Own = Packed<float, N>[kSegmentSteps];

template <int N, class T>
__device__ void load_bias(const Operands<T>& args, int64_t group, uint32_t first_column,
                          Own<N>& bias) {
#pragma unroll
  for (int step = 0; step < kSegmentSteps; ++step) {
    const uint32_t column = first_column + SegmentPieces<T, N>::step_column(step);
    if (column >= args.columns) return;
#pragma unroll
    for (int i = 0; i < N; ++i) bias[step].set(i, args.bias.at(group, column + i));
  }
}

// A row's part of grad_bias, the `r`-th of its run, and of grad_scale's lanes.
template <bool kScales, int N, class T>
__device__ void add_row(SegmentPieces<T, N> pieces, uint32_t r, float scale, const Own<N>& bias,
                        Own<N>& run, Own<N>& partial, float (&sums)[N]) {
#pragma unroll
  for (int step = 0; step < kSegmentSteps; ++step) {
    const Packed<T, N> piece = pieces.get(step);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float v = piece[i];
      run[step].set(i, fmaf(scale, v, r == 0 ? 0.0F : run[step][i]));
      if (r + 1 == kRun) partial[step].set(i, partial[step][i] + run[step][i]);
      if constexpr (kScales) sums[i] = fmaf(v, bias[step][i], sums[i]);
    }
  }
}

// A block's sums, where they are asked for.
template <int N, class T>
__device__ void store_partial(const Operands<T>& args, int64_t index, uint32_t first_column,
                              const Own<N>& partial) {
  if (args.block_partials == nullptr) return;
#pragma unroll
  for (int step = 0; step < kSegmentSteps; ++step) {
    const uint32_t column = first_column + SegmentPieces<T, N>::step_column(step);
    if (column >= args.columns) return;
    store(args.block_partials + index * args.columns + column, partial[step]);
  }
}

// kScales: row_partials are asked for, and perhaps block_partials.
template <bool kScales, int N, class T>
__global__ void __launch_bounds__(kThreads, kBlocks<kScales>)
    sum_kernel(Operands<T> args, SegmentTiling<N> tiling, Reporter reporter) {
  constexpr uint32_t kSharing = SegmentTiling<N>::kThreadsPerSegment;
  constexpr uint32_t kDepth = kStages<kScales>;
  using Pieces = SegmentPieces<T, N>;
  __shared__ typename Pieces::Shared stages[kWarps][kDepth];
  __shared__ Rows rows;
  if (blockIdx.x == 0 && blockIdx.y == 0) {
    check_groups(args.groups, reporter, threadIdx.x, kThreads);
  }
  const int64_t first_index = int64_t{blockIdx.x} * tiling.rows;
  load_rows(args, first_index, tiling.rows, rows, reporter);
  const uint32_t warp = threadIdx.x / kWarp;
  Place moved[kSegmentSteps];
#pragma unroll
  for (uint32_t i = 0; i < kSegmentSteps; ++i) {
    moved[i] = place_of(args, tiling, warp * Pieces::kSegments + Pieces::segment_of(i));
    moved[i].column += Pieces::column_of(i);
  }
  const Place own = place_of(args, tiling, threadIdx.x / kSharing);
  const RowBlock& block = rows.blocks[own.block];
  const auto of_block = static_cast<uint32_t>(block.end - block.first);
  const uint32_t count = own.column < args.columns ? of_block : 0U;
  float* row_partial = nullptr;  // of this thread's segment, if it stores any
  Own<N> bias = {}, partial = {}, sums_of_run = {};
  if (kScales && count != 0) {
    load_bias(args, block.group, own.column, bias);
    row_partial = args.row_partials + block.first * tiling.segments + own.column / kSegment;
  }
  const auto fetch = [&](uint32_t r) {
    if (r < kRows) fetch_row(args, rows, r, moved, Pieces(stages[warp][r % kDepth]));
    __pipeline_commit();
  };
  for (uint32_t r = 0; r < kDepth - 1; ++r) fetch(r);
  // All threads of a warp take as many rounds, whichever rows they have; those of no row are zeros.
  const uint32_t rounds = __reduce_max_sync(0xFFFFFFFFU, count);
  for (uint32_t first = 0; first < rounds; first += kRun) {
#pragma unroll
    for (uint32_t i = 0; i < kRun; ++i) {
      const uint32_t r = first + i;
      __syncwarp();  // the stage has been read
      fetch(r + kDepth - 1);
      __pipeline_wait_prior(kDepth - 1);
      __syncwarp();  // row r is there
      float sums[N] = {};
      add_row<kScales>(Pieces(stages[warp][r % kDepth]), i, rows.scales[own.block][r], bias,
                       sums_of_run, partial, sums);
      if (!kScales) continue;
      const float sum = fold_lanes(sums);
      if (r < count && threadIdx.x % kSharing == 0) row_partial[int64_t{r} * tiling.segments] = sum;
    }
  }
  if (count != 0) store_partial(args, first_index + own.block, own.column, partial);
}

// Calls f.operator()<T>(SegmentTiling<N>) for the type and the alignment of a call.
template <class F>
decltype(auto) with_tiling(const TensorView& grad_y, F&& f) {
  const int64_t columns = grad_y.columns();
  return with_float_type(grad_y.type(), [&]<class T>() {
    constexpr int kN = kVector<T>;
    const bool is_vector = opens_vectors({grad_y}) && columns % kN == 0;
    return is_vector ? f.template operator()<T>(SegmentTiling<kN>(columns, kMostBlocks))
                     : f.template operator()<T>(SegmentTiling<1>(columns, kMostBlocks));
  });
}

struct Call : PlannedCall<BiasBackwardArgs> {
  Call(const DeviceState& device, const BiasBackwardArgs& given, const Workspace& workspace)
      : PlannedCall(device, given, workspace),
        grad_y_(args.grad_y),
        segments_(ceil_div(grad_y_.columns(), kSegment)) {
    block_partials_ = take_block_partials(arena, args.grad_bias, args.groups);
    if (has_scale()) row_partials_ = arena.take_floats(args.groups.capacity, segments_);
  }

  Reason supports() const { return too_wide("grad_y", grad_y_.columns(), 31); }
  int64_t launches() const { return 1 + is_present(args.grad_bias) + has_scale(); }
  std::string policy() const {
    return with_tiling(grad_y_, [&]<class T, int N>(const SegmentTiling<N>& tiling) {
      return concat("partial sums of ", kBlockRows, " rows, ", tiling.rows, " and ",
                    tiling.per_part * kSegment, " columns per block of ", kThreads, " threads, ", N,
                    " columns at once");
    });
  }
  Status run(const Context& context) const {
    Launcher launcher(context, "bias_backward");
    with_tiling(grad_y_, [&]<class T, int N>(const SegmentTiling<N>& tiling) {
      const Operands<T> operands{.grad_y = matrix_of<const T>(grad_y_),
                                 .row_idx = indices_of(args.row_idx, "row_idx"),
                                 .num_source_rows = grad_y_.num_rows(),
                                 .scale = vector_of<const float>(args.scale),
                                 .bias = any_floats(args.bias),
                                 .block_partials = block_partials_,
                                 .row_partials = row_partials_,
                                 .columns = grad_y_.columns(),
                                 .groups = args.groups};
      const dim3 grid(blocks_for(row_blocks_bound(args.groups), tiling.rows),
                      blocks_for(tiling.segments, tiling.per_part));
      const auto kernel = has_scale() ? sum_kernel<true, N, T> : sum_kernel<false, N, T>;
      launcher.launch(kernel, {grid, kThreads}, operands, tiling, launcher.reporter());
    });
    sum_block_partials(launcher, block_partials_, args.groups, args.grad_bias, args.beta,
                       args.beta_per_group);
    sum_row_partials(launcher, row_partials_, segments_, args.groups, args.grad_scale,
                     args.beta_scale, args.tail);
    return launcher.status();
  }

 private:
  bool has_scale() const { return is_present(args.grad_scale); }

  TensorView grad_y_;
  int64_t segments_;
  float* block_partials_ = nullptr;
  float* row_partials_ = nullptr;
};

}  // namespace

const Implementation<BiasBackwardArgs> kBiasBackward =
    implementation_of<BiasBackwardArgs, Call>("cuda");

}  // namespace moire::cuda::ops
