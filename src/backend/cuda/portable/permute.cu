// permute on CUDA: a warp copies a row, 16 bytes per thread where alignment allows it; the weights
// are scattered by a thread per choice, in a second launch where both are asked for.
#include <algorithm>

#include "backend/cuda/device/copy_rows.cuh"
#include "backend/cuda/device/groups.cuh"
#include "backend/cuda/device/indices.cuh"
#include "backend/cuda/implementations.h"
#include "backend/cuda/portable/gather_rows.h"
#include "backend/cuda/runtime/launch.h"
#include "core/format.h"

namespace moire::cuda::portable {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kRowsPerBlock = kThreads / kWarp;

template <class Piece>
struct RowCopy {
  Matrix<const Piece> x;
  Indices gather_idx;
  Matrix<Piece> rows;
  int64_t num_tokens;
  uint32_t pieces;
  moire_groups groups;
  bool zeroes_tail;
};

template <class Piece>
__global__ void __launch_bounds__(kThreads) copy_kernel(RowCopy<Piece> args, Reporter reporter) {
  if (blockIdx.x == 0) check_groups(args.groups, reporter, threadIdx.x, kThreads);
  const int64_t row = blockIdx.x * kRowsPerBlock + threadIdx.x / kWarp;
  if (row >= args.groups.capacity) return;
  if (row >= rows_in_use(args.groups)) {
    if (args.zeroes_tail) zero_by_warp(args.rows.row(row), args.pieces);
    return;
  }
  const int64_t token = checked_index(args.gather_idx, row, args.gather_idx.at(row),
                                      args.num_tokens, Dropping::kForbidden, reporter);
  if (token < 0) return;
  copy_by_warp(args.x.row(token), args.rows.row(row), args.pieces);
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

void scatter_weights(Launcher& launcher, const PermuteArgs& args) {
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

Status run(const Context& context, const PermuteArgs& args) {
  Launcher launcher(context, "permute");
  if (args.rows.rank != 0) {
    gather_rows(launcher, args.x, args.gather_idx, "gather_idx", args.rows, args.groups, args.tail);
  }
  if (args.probs.rank != 0) scatter_weights(launcher, args);
  return launcher.status();
}

std::string policy(const DeviceState&, const PermuteArgs& args) {
  if (args.rows.rank == 0) return "a thread per choice";
  return with_piece({args.rows, args.x}, [&]<class Piece>() {
    return concat("a warp per row, ", sizeof(Piece), " bytes per thread",
                  args.probs.rank != 0 ? ", weights in a second launch" : "");
  });
}

}  // namespace

void gather_rows(Launcher& launcher, const TensorView& x, const TensorView& index,
                 const char* index_name, const TensorView& rows, const moire_groups& groups,
                 int32_t tail) {
  with_piece({rows, x}, [&]<class Piece>() {
    const RowCopy<Piece> copy{.x = pieces_of<const Piece>(x),
                              .gather_idx = indices_of(index, index_name),
                              .rows = pieces_of<Piece>(rows),
                              .num_tokens = x.num_rows(),
                              .pieces = pieces_per_row<Piece>(rows),
                              .groups = groups,
                              .zeroes_tail = tail == MOIRE_TAIL_ZERO};
    launcher.launch(copy_kernel<Piece>, {blocks_for(groups.capacity, kRowsPerBlock), kThreads},
                    copy, launcher.reporter());
  });
}

const Implementation<PermuteArgs> kPermute = {
    "portable",
    Device::kCuda,
    supports_everything,
    no_workspace,
    policy,
    run,
    [](const DeviceState&, const PermuteArgs& args) -> int64_t {
      return (args.rows.rank != 0) + (args.probs.rank != 0);
    }};

}  // namespace moire::cuda::portable
