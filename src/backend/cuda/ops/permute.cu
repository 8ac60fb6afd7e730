// permute on CUDA: a warp copies a row, or a strip of it, 16 bytes per thread where alignment
// allows it; the weights are scattered by a thread per choice, in a second launch where both are
// asked for.
//
// A token is copied once per choice, at times far apart. So that it comes from DRAM once, columns
// are cut into strips that stay in the L2 until all rows have theirs (88 us instead of 107 for
// 65,536 rows of 4 KiB from 8192 tokens on an H200, 145 instead of 203 for 32,768 of 14 KiB).
#include <algorithm>

#include "backend/cuda/device/copy_rows.cuh"
#include "backend/cuda/device/groups.cuh"
#include "backend/cuda/device/indices.cuh"
#include "backend/cuda/implementations.h"
#include "backend/cuda/ops/gather_rows.h"
#include "backend/cuda/runtime/launch.h"

namespace moire::cuda::ops {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kRowsPerBlock = kThreads / kWarp;
// Of all tokens' strips, about, and of one token's, at least.
constexpr int64_t kStripsBytes = int64_t{8} << 20, kLeastStripBytes = 1024;

template <class Piece>
struct RowCopy {
  Matrix<const Piece> x;
  Indices gather_idx;
  Matrix<Piece> rows;
  int64_t num_tokens;
  uint32_t pieces, strip_pieces;
  uint32_t blocks_per_strip;
  moire_groups groups;
  bool zeroes_tail;
};

template <class Piece>
__global__ void __launch_bounds__(kThreads) copy_kernel(RowCopy<Piece> args, Reporter reporter) {
  if (blockIdx.x == 0) check_groups(args.groups, reporter, threadIdx.x, kThreads);
  const uint32_t strip = blockIdx.x / args.blocks_per_strip;
  const uint32_t block = blockIdx.x % args.blocks_per_strip;
  const int64_t row = block * kRowsPerBlock + threadIdx.x / kWarp;
  if (row >= args.groups.capacity) return;
  const uint32_t first = strip * args.strip_pieces;
  const uint32_t count = min(args.strip_pieces, args.pieces - first);
  if (row >= rows_in_use(args.groups)) {
    if (args.zeroes_tail) zero_by_warp(args.rows.row(row) + first, count);
    return;
  }
  const int64_t token = checked_index(args.gather_idx, row, args.gather_idx.at(row),
                                      args.num_tokens, Dropping::kForbidden, reporter);
  if (token < 0) return;
  copy_by_warp(args.x.row(token) + first, args.rows.row(row) + first, count);
}

// One strip where no token is copied twice.
int64_t num_strips(const TensorView& x, const moire_groups& groups) {
  const int64_t row_bytes = x.columns() * dtype_size(x.type());
  if (groups.capacity <= x.num_rows()) return 1;
  const int64_t wanted = ceil_div(x.num_rows() * row_bytes, kStripsBytes);
  return std::max<int64_t>(1, std::min(wanted, row_bytes / kLeastStripBytes));
}

struct WeightScatter {
  Matrix<const float> topk_weights;
  Indices scatter_idx;
  float* probs;
  uint32_t k;
  int64_t num_choices;
  moire_groups groups;
  bool zeroes_tail;
};

__global__ void __launch_bounds__(kThreads) scatter_kernel(WeightScatter args, Reporter reporter) {
  if (blockIdx.x == 0) check_groups(args.groups, reporter, threadIdx.x, kThreads);
  const int64_t in_use = rows_in_use(args.groups);
  const int64_t thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (thread < args.num_choices) {
    const int64_t token = thread / args.k, choice = thread % args.k;
    const int64_t row = checked_index(args.scatter_idx, thread, args.scatter_idx.at(token, choice),
                                      in_use, Dropping::kAllowed, reporter);
    if (row >= 0) args.probs[row] = args.topk_weights.row(token)[choice];
  }
  if (args.zeroes_tail && thread >= in_use && thread < args.groups.capacity) args.probs[thread] = 0;
}

Status run(const Context& context, const PermuteArgs& args) {
  Launcher launcher(context, "permute");
  if (args.rows.rank != 0) {
    gather_rows(launcher, args.x, args.gather_idx, "gather_idx", args.rows, args.groups, args.tail);
  }
  if (args.probs.rank != 0) {
    const TensorView topk_weights(args.topk_weights);
    const WeightScatter scatter{.topk_weights = matrix_of<const float>(topk_weights),
                                .scatter_idx = indices_of(args.scatter_idx, "scatter_idx"),
                                .probs = vector_of<float>(args.probs),
                                .k = static_cast<uint32_t>(topk_weights.shape[1]),
                                .num_choices = topk_weights.num_elements(),
                                .groups = args.groups,
                                .zeroes_tail = args.tail == MOIRE_TAIL_ZERO};
    const int64_t threads = std::max(scatter.num_choices, args.groups.capacity);
    launcher.launch(scatter_kernel, {blocks_for(threads, kThreads), kThreads}, scatter,
                    launcher.reporter());
  }
  return launcher.status();
}

std::string policy(const DeviceState&, const PermuteArgs& args) {
  if (args.rows.rank == 0) return "a thread per choice";
  return with_piece({args.rows, args.x}, [&]<class Piece>() {
    const int64_t strips = num_strips(args.x, args.groups);
    return concat("a warp per row", strips > 1 ? concat(" in ", strips, " strips") : "", ", ",
                  sizeof(Piece), " bytes per thread",
                  args.probs.rank != 0 ? ", weights in a second launch" : "");
  });
}

int64_t launches(const DeviceState&, const PermuteArgs& args) {
  return is_present(args.rows) + is_present(args.probs);
}

}  // namespace

void gather_rows(Launcher& launcher, const TensorView& x, const TensorView& index,
                 const char* index_name, const TensorView& rows, const moire_groups& groups,
                 int32_t tail) {
  with_piece({rows, x}, [&]<class Piece>() {
    const uint32_t pieces = pieces_per_row<Piece>(rows);
    const uint32_t blocks = blocks_for(groups.capacity, kRowsPerBlock);
    const int64_t strip =
        std::max<int64_t>(kWarp, round_up(ceil_div(pieces, num_strips(x, groups)), kWarp));
    const int64_t strips = std::max<int64_t>(1, ceil_div(pieces, strip));
    const RowCopy<Piece> copy{.x = pieces_of<const Piece>(x),
                              .gather_idx = indices_of(index, index_name),
                              .rows = pieces_of<Piece>(rows),
                              .num_tokens = x.num_rows(),
                              .pieces = pieces,
                              .strip_pieces = static_cast<uint32_t>(strip),
                              .blocks_per_strip = blocks,
                              .groups = groups,
                              .zeroes_tail = tail == MOIRE_TAIL_ZERO};
    launcher.launch(copy_kernel<Piece>, {blocks * static_cast<uint32_t>(strips), kThreads}, copy,
                    launcher.reporter());
  });
}

const Implementation<PermuteArgs> kPermute = on_cuda(supports_everything, policy, run, launches);

}  // namespace moire::cuda::ops
