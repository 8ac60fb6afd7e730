// unpermute_backward on CUDA. The fixed order of grad_weights' sums decides who sums what, as in
// glu_backward: the threads that share a segment of 64 columns each hold their columns of grad_y
// and meet the rows of the token's choices one after the other, while the next is on its way
// (segment_pieces.cuh). A block takes a token, or several narrow ones, 8 choices at a time.
#include <algorithm>

#include "backend/cuda/device/copy_rows.cuh"
#include "backend/cuda/device/groups.cuh"
#include "backend/cuda/device/indices.cuh"
#include "backend/cuda/device/segment_pieces.cuh"
#include "backend/cuda/implementations.h"
#include "backend/cuda/runtime/launch.h"

namespace moire::cuda::ops {
namespace {

constexpr int kThreads = kSegmentThreads;
constexpr int kWarps = kThreads / kWarp;
constexpr int kChoicesAtOnce = 8;
constexpr int kTokens = kThreads / kChoicesAtOnce;  // of a block, at most
// Rows under way to a warp, the one that is being summed among them.
constexpr int kStages = 2;

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

struct Choice {
  int64_t row;  // -1: dropped, or past the token's last
  float weight;
};
using Choices = Choice[kTokens][kChoicesAtOnce];

// A warp's segments of its tokens' grad_y and of their rows, choice after choice. The first is slot
// `first_slot` of the block's tokens from `first_token` on.
template <int N, class Grad, class Row>
struct WarpPieces {
  using Pieces = SegmentPieces<Row, N>;
  using GradPieces = SegmentPieces<Grad, N>;
  struct Shared {
    typename GradPieces::Shared grad_y;
    typename Pieces::Shared stages[kStages];
  };

  Shared& shared;
  const Operands<Grad, Row>& args;
  const SegmentTiling<N>& tiling;
  const Choices& choices;
  int64_t first_token;
  uint32_t first_slot;
  GradPieces grad_y{shared.grad_y};

  // The caller commits and waits, here and below.
  __device__ void fetch_grad_y(uint32_t part) {
#pragma unroll 1
    for (uint32_t i = 0; i < kSegmentSteps; ++i) {
      const auto [token, column] = place_of(i, part);
      grad_y.fetch(i, args.grad_y.row(first_token + token) + column, column < args.columns);
    }
  }

  // The rows of choice j.
  __device__ void fetch(uint32_t part, int j) const {
    Pieces pieces(shared.stages[j % kStages]);
#pragma unroll 1
    for (uint32_t i = 0; i < kSegmentSteps; ++i) {
      const auto [token, column] = place_of(i, part);
      const int64_t row = column < args.columns ? choices[token][j].row : -1;
      pieces.fetch(i, args.rows.row(row) + column, row >= 0);
    }
  }

  // The thread's lanes of choice j of its token; its segment starts at `column`.
  __device__ void sum(uint32_t token, uint32_t column, int j, float (&sums)[N]) const {
    if (choices[token][j].row < 0) return;
    const Pieces pieces(shared.stages[j % kStages]);
#pragma unroll
    for (int step = 0; step < kSegmentSteps; ++step) {
      if (column + Pieces::step_column(step) >= args.columns) return;
      const Packed<Row, N> row = pieces.get(step);
      const Packed<Grad, N> grad = grad_y.get(step);
#pragma unroll
      for (int i = 0; i < N; ++i) sums[i] = fmaf(row[i], grad[i], sums[i]);
    }
  }

  // grad_rows of all choices, from the pieces of grad_y that this thread has moved.
  __device__ void write(uint32_t part) const {
#pragma unroll 1
    for (uint32_t i = 0; i < kSegmentSteps; ++i) {
      const auto [token, column] = place_of(i, part);
      if (column >= args.columns) continue;
      const Packed<Grad, N> grad = grad_y.moved(i);
      for (const Choice& choice : choices[token]) {
        if (choice.row < 0) continue;
        Packed<Grad, N> grad_row;
#pragma unroll
        for (int e = 0; e < N; ++e) grad_row.set(e, choice.weight * grad[e]);
        store(args.grad_rows.row(choice.row) + column, grad_row);
      }
    }
  }

  struct Place {
    uint32_t token;   // of the block
    uint32_t column;  // args.columns or more: none
  };
  // Of piece i that this thread moves.
  __device__ Place place_of(uint32_t i, uint32_t part) const {
    const uint32_t slot = first_slot + Pieces::segment_of(i);
    const uint32_t token = slot / tiling.per_part;
    if (token >= tiling.rows || first_token + token >= args.num_tokens) {
      return {0, args.columns};
    }
    const uint32_t segment = part + slot % tiling.per_part;
    return {token, segment * kSegment + Pieces::column_of(i)};
  }
};

template <class Grad, class Row>
__device__ Choice choice_at(const Operands<Grad, Row>& args, int64_t token, int64_t j,
                            int64_t in_use, const Reporter& reporter) {
  if (token >= args.num_tokens || j >= args.k) return {-1, 0};
  const int64_t row =
      checked_index(args.scatter_idx, token * args.k + j, args.scatter_idx.at(token, j), in_use,
                    Dropping::kAllowed, reporter);
  return {row, args.weights.is_present() ? args.weights.row(token)[j] : 1.0F};
}

template <int N, class Grad, class Row>
__global__ void __launch_bounds__(kThreads, 7)
    backward_kernel(Operands<Grad, Row> args, SegmentTiling<N> tiling, Reporter reporter) {
  constexpr uint32_t kSharing = SegmentTiling<N>::kThreadsPerSegment;
  using Pieces = WarpPieces<N, Grad, Row>;
  __shared__ typename Pieces::Shared shared[kWarps];
  __shared__ Choices choices;
  __shared__ float segment_sums[kChoicesAtOnce]
                               [SegmentTiling<N>::kSegmentsAtOnce + 1];  // of all banks
  if (blockIdx.x == 0) check_groups(args.groups, reporter, threadIdx.x, kThreads);
  const int64_t in_use = rows_in_use(args.groups);
  const int64_t first_token = int64_t{blockIdx.x} * tiling.rows;
  const uint32_t warp = threadIdx.x / kWarp, slot = threadIdx.x / kSharing;
  // The token of which this thread has a segment, if any.
  const uint32_t token = slot / tiling.per_part;
  const bool has_segment = token < tiling.rows && first_token + token < args.num_tokens;
  // The token and the choice whose sum this thread adds up.
  const uint32_t own_token = threadIdx.x / kChoicesAtOnce;
  const int own_choice = threadIdx.x % kChoicesAtOnce;
  const bool adds_up = own_token < tiling.rows && first_token + own_token < args.num_tokens;
  Pieces pieces{shared[warp], args, tiling, choices, first_token, warp * kWarp / kSharing};
  for (int64_t base = 0; base < args.k; base += kChoicesAtOnce) {
    const int count = static_cast<int>(min(int64_t{kChoicesAtOnce}, args.k - base));
    __syncthreads();  // the last choices have been read
    choices[own_token][own_choice] =
        choice_at(args, first_token + own_token, base + own_choice, in_use, reporter);
    __syncthreads();
    float grad_weight = 0;
    for (uint32_t part = 0; part < tiling.segments; part += tiling.per_part) {
      pieces.fetch_grad_y(part);
      __pipeline_commit();
      const auto fetch = [&](int j) {
        if (args.grad_weights.is_present() && j < count) pieces.fetch(part, j);
        __pipeline_commit();
      };
      for (int j = 0; j < kStages - 1; ++j) fetch(j);
      __pipeline_wait_prior(kStages - 1);
      if (args.grad_rows.is_present()) pieces.write(part);
      if (!args.grad_weights.is_present()) continue;
      const uint32_t column = (part + slot % tiling.per_part) * kSegment;
      for (int j = 0; j < count; ++j) {
        __syncwarp();  // the stage has been read
        fetch(j + kStages - 1);
        __pipeline_wait_prior(kStages - 1);
        __syncwarp();  // choice j is there
        float sums[N] = {};
        if (has_segment) pieces.sum(token, column, j, sums);
        const float sum = fold_lanes(sums);
        if (threadIdx.x % kSharing == 0) segment_sums[j][slot] = sum;
      }
      __syncthreads();
      const uint32_t segments = adds_up ? min(tiling.per_part, tiling.segments - part) : 0;
      for (uint32_t i = 0; i < segments; ++i) {
        grad_weight += segment_sums[own_choice][own_token * tiling.per_part + i];
      }
      __syncthreads();  // the sums have been read
    }
    if (!args.grad_weights.is_present() || !adds_up || own_choice >= count) continue;
    args.grad_weights.row(first_token + own_token)[base + own_choice] = grad_weight;
  }
  if (args.grad_rows.is_present() && args.zeroes_tail) {
    zero_rows(args.grad_rows, in_use, args.groups.capacity, args.columns);
  }
}

// Calls f.operator()<Grad, Row>(SegmentTiling<N>) for the types and the alignment of a call.
template <class F>
decltype(auto) with_types(const UnpermuteBackwardArgs& args, F&& f) {
  const TensorView grad_y(args.grad_y), rows(args.rows);
  return with_float_type(grad_y.type(), [&]<class Grad>() {
    constexpr int kN = kVector<Grad>;
    const SegmentTiling<1> plain(grad_y.columns(), kTokens);
    if (rows.is_present() && rows.type() != grad_y.type()) {
      return with_float_type(rows.type(),
                             [&]<class Row>() { return f.template operator()<Grad, Row>(plain); });
    }
    const bool is_vector =
        opens_vectors({grad_y, rows, args.grad_rows}) && grad_y.columns() % kN == 0;
    return is_vector
               ? f.template operator()<Grad, Grad>(SegmentTiling<kN>(grad_y.columns(), kTokens))
               : f.template operator()<Grad, Grad>(plain);
  });
}

Status run(const Context& context, const UnpermuteBackwardArgs& args) {
  Launcher launcher(context, "unpermute_backward");
  with_types(args, [&]<class Grad, class Row, int N>(const SegmentTiling<N>& tiling) {
    const TensorView grad_y(args.grad_y);
    const Operands<Grad, Row> operands{.grad_y = matrix_of<const Grad>(grad_y),
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
    const uint32_t blocks = std::max(1U, blocks_for(operands.num_tokens, tiling.rows));
    launcher.launch(backward_kernel<N, Grad, Row>, {blocks, kThreads}, operands, tiling,
                    launcher.reporter());
  });
  return launcher.status();
}

Reason supports(const DeviceState&, const UnpermuteBackwardArgs& args) {
  return too_wide("grad_y", TensorView(args.grad_y).columns(), 31);
}

std::string policy(const DeviceState&, const UnpermuteBackwardArgs& args) {
  return with_types(args, [&]<class Grad, class Row, int N>(const SegmentTiling<N>& tiling) {
    return concat(tiling.rows, " tokens per block of ", kThreads, " threads, ", N,
                  " columns at once");
  });
}

}  // namespace

const Implementation<UnpermuteBackwardArgs> kUnpermuteBackward = on_cuda(supports, policy, run);

}  // namespace moire::cuda::ops
