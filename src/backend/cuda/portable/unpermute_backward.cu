// unpermute_backward on CUDA. The fixed order of grad_weights' sums decides who takes what, as in
// glu_backward: the threads that share a segment of 64 columns each hold the same columns of
// grad_y, and meet the rows of the token's choices one after the other. A block takes a token, or
// several narrow ones, 8 choices at a time.
#include <algorithm>

#include "backend/cuda/device/copy_rows.cuh"
#include "backend/cuda/device/groups.cuh"
#include "backend/cuda/device/indices.cuh"
#include "backend/cuda/device/lane_sums.cuh"
#include "backend/cuda/implementations.h"
#include "backend/cuda/runtime/launch.h"
#include "core/format.h"

namespace moire::cuda::portable {
namespace {

constexpr int kThreads = 256;
constexpr int kChoicesAtOnce = 8;

template <int N>
using Tiling = SegmentTiling<N, kThreads>;

template <class Grad, class Row>
struct Operands {
  Matrix<const Grad> grad_y;
  Matrix<const Row> rows;
  Indices scatter_idx;
  Matrix<const float> weights;  // or absent
  Matrix<Grad> grad_rows;       // or absent
  Matrix<float> grad_weights;   // or absent
  int64_t num_tokens;
  int64_t k;
  uint32_t columns;
  moire_groups groups;
  bool zeroes_tail;
};

// One choice: a thread's columns of grad_rows and its lanes of grad_weights.
template <int N, class Grad, class Row>
__device__ void backward_choice(const Operands<Grad, Row>& args, int64_t row, float weight,
                                uint32_t first, const Packed<Grad, N> (&grad_y)[kSegmentSteps],
                                float (&sums)[N]) {
#pragma unroll
  for (int step = 0; step < kSegmentSteps; ++step) {
    const uint32_t column = first + step * kSumLanes;
    if (column >= args.columns) break;
    if (args.grad_weights.is_present()) {
      const auto piece = load<N>(args.rows.row(row) + column);
#pragma unroll
      for (int i = 0; i < N; ++i) sums[i] = fmaf(piece[i], grad_y[step][i], sums[i]);
    }
    if (args.grad_rows.is_present()) {
      Packed<Grad, N> grad_row;
#pragma unroll
      for (int i = 0; i < N; ++i) grad_row.set(i, weight * grad_y[step][i]);
      store(args.grad_rows.row(row) + column, grad_row);
    }
  }
}

template <int N, class Grad, class Row>
__global__ void __launch_bounds__(kThreads, 2)
    backward_kernel(Operands<Grad, Row> args, Tiling<N> tiling, Reporter reporter) {
  constexpr uint32_t kSharing = Tiling<N>::kThreadsPerSegment;
  __shared__ float segment_sums[kChoicesAtOnce][Tiling<N>::kSegmentsAtOnce];
  if (blockIdx.x == 0) check_groups(args.groups, reporter, threadIdx.x, kThreads);
  const int64_t in_use = rows_in_use(args.groups);
  const int64_t first_token = int64_t{blockIdx.x} * tiling.rows;
  const uint32_t slot = threadIdx.x / kSharing;
  const int64_t token = first_token + slot / tiling.per_part;
  const bool takes_part = slot < tiling.rows * tiling.per_part && token < args.num_tokens;
  // Whose sum this thread adds up.
  const uint32_t own_slot = threadIdx.x / kChoicesAtOnce;
  const int own_choice = threadIdx.x % kChoicesAtOnce;
  const int64_t own_token = first_token + own_slot;
  const bool owns = own_slot < tiling.rows && own_token < args.num_tokens;
  for (int64_t base = 0; base < args.k; base += kChoicesAtOnce) {
    float grad_weight = 0;
    for (uint32_t part = 0; part < tiling.segments; part += tiling.per_part) {
      const uint32_t segment = part + slot % tiling.per_part;
      const uint32_t first = segment * kSegment + threadIdx.x % kSharing * N;
      Packed<Grad, N> grad_y[kSegmentSteps];
#pragma unroll
      for (int step = 0; step < kSegmentSteps; ++step) {
        const uint32_t column = first + step * kSumLanes;
        if (takes_part && column < args.columns) {
          grad_y[step] = load<N>(args.grad_y.row(token) + column);
        }
      }
      __syncthreads();  // the last part's sums have been read
      for (int j = 0; j < kChoicesAtOnce && base + j < args.k; ++j) {
        float sums[N] = {};
        if (takes_part) {
          const int64_t row = checked_index(args.scatter_idx, token * args.k + base + j,
                                            args.scatter_idx.at(token, base + j), in_use,
                                            Dropping::kAllowed, reporter);
          const float weight = args.weights.is_present() ? args.weights.row(token)[base + j] : 1.0F;
          if (row >= 0) backward_choice(args, row, weight, first, grad_y, sums);
        }
        if (!args.grad_weights.is_present()) continue;
        const float sum = fold_lanes(sums);
        if (threadIdx.x % kSharing == 0) segment_sums[j][slot] = sum;
      }
      __syncthreads();
      for (uint32_t i = 0; owns && i < tiling.per_part && part + i < tiling.segments; ++i) {
        grad_weight += segment_sums[own_choice][own_slot * tiling.per_part + i];
      }
    }
    if (!args.grad_weights.is_present() || !owns || base + own_choice >= args.k) continue;
    args.grad_weights.row(own_token)[base + own_choice] = grad_weight;
  }
  if (args.grad_rows.is_present() && args.zeroes_tail) {
    zero_rows(args.grad_rows, in_use, args.groups.capacity, args.columns);
  }
}

template <class Grad, class Row>
Operands<Grad, Row> operands_of(const UnpermuteBackwardArgs& args) {
  const TensorView grad_y(args.grad_y);
  return {.grad_y = matrix_of<const Grad>(grad_y),
          .rows = matrix_of<const Row>(args.rows),
          .scatter_idx = indices_of(args.scatter_idx, "scatter_idx"),
          .weights = matrix_of<const float>(args.weights),
          .grad_rows = matrix_of<Grad>(args.grad_rows),
          .grad_weights = matrix_of<float>(args.grad_weights),
          .num_tokens = grad_y.num_rows(),
          .k = args.scatter_idx.shape[1],
          .columns = static_cast<uint32_t>(grad_y.columns()),
          .groups = args.groups,
          .zeroes_tail = args.tail == MOIRE_TAIL_ZERO};
}

template <int N>
Tiling<N> tiling_of(const UnpermuteBackwardArgs& args) {
  Tiling<N> tiling(TensorView(args.grad_y).columns());
  tiling.rows = std::min<uint32_t>(tiling.rows, kThreads / kChoicesAtOnce);
  return tiling;
}

// Calls f.operator()<N, Grad, Row>() for the types and the alignment of a call.
template <class F>
decltype(auto) with_types(const UnpermuteBackwardArgs& args, F&& f) {
  const TensorView grad_y(args.grad_y), rows(args.rows);
  return with_float_type(grad_y.type(), [&]<class Grad>() {
    constexpr int kN = kVector<Grad>;
    if (rows.is_present() && rows.type() != grad_y.type()) {
      return with_float_type(rows.type(),
                             [&]<class Row>() { return f.template operator()<1, Grad, Row>(); });
    }
    const bool is_vector =
        opens_vectors({grad_y, rows, args.grad_rows}) && grad_y.columns() % kN == 0;
    return is_vector ? f.template operator()<kN, Grad, Grad>()
                     : f.template operator()<1, Grad, Grad>();
  });
}

Status run(const Context& context, const UnpermuteBackwardArgs& args) {
  Launcher launcher(context, "unpermute_backward");
  with_types(args, [&]<int N, class Grad, class Row>() {
    const auto operands = operands_of<Grad, Row>(args);
    const Tiling<N> tiling = tiling_of<N>(args);
    const uint32_t blocks = std::max(1U, blocks_for(operands.num_tokens, tiling.rows));
    launcher.launch(backward_kernel<N, Grad, Row>, {blocks, kThreads}, operands, tiling,
                    launcher.reporter());
  });
  return launcher.status();
}

std::string policy(const DeviceState&, const UnpermuteBackwardArgs& args) {
  return with_types(args, [&]<int N, class Grad, class Row>() {
    return concat(tiling_of<N>(args).rows, " tokens per block of ", kThreads, " threads, ", N,
                  " columns at once");
  });
}

}  // namespace

const Implementation<UnpermuteBackwardArgs> kUnpermuteBackward = {
    "portable", Device::kCuda, supports_everything, no_workspace, policy, run};

}  // namespace moire::cuda::portable
