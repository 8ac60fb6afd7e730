// glu_backward on CUDA. The fixed order of grad_probs' sums decides who takes what: two threads (of
// 16-bit elements) share a segment of 64 columns, 16 bytes of each 16 columns to either, so that
// each lane of the sum stays in one register. A block takes a row, or several narrow ones.
#include "backend/cuda/device/activation.cuh"
#include "backend/cuda/device/glu_columns.cuh"
#include "backend/cuda/device/groups.cuh"
#include "backend/cuda/device/lane_sums.cuh"
#include "backend/cuda/device/matrix.cuh"
#include "backend/cuda/implementations.h"
#include "backend/cuda/runtime/launch.h"
#include "core/format.h"

namespace moire::cuda::portable {
namespace {

constexpr int kThreads = 256;

template <int N>
using Tiling = SegmentTiling<N, kThreads>;

template <class T>
struct Operands {
  Matrix<const T> z, grad_act;
  const float* probs;  // or null
  Matrix<T> grad_z, act;
  float* grad_probs;  // or null
  moire_groups groups;
  bool zeroes_tail;
  uint32_t f;
  int64_t rows;
};

// What one thread does of a segment: its part of grad_probs' lanes.
template <class Activation, class T, class Columns, int N>
__device__ void backward_segment(const Activation& activation, const Operands<T>& args,
                                 const Columns& columns, int64_t row, uint32_t first,
                                 float (&sums)[N]) {
  const float prob = args.probs == nullptr ? 1.0F : args.probs[row];
#pragma unroll
  for (int step = 0; step < kSegmentSteps; ++step) {
    const uint32_t column = first + step * kSumLanes;
    if (column >= args.f) break;
    Packed<T, N> gate, up;
    columns.load(args.z.row(row), column, gate, up);
    const auto grad_act = load<N>(args.grad_act.row(row) + column);
    Packed<T, N> act;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float grad = grad_act[i];
      const GluGradient g = glu_gradient(activation, gate[i], up[i], grad, prob);
      gate.set(i, g.gate);
      up.set(i, g.up);
      act.set(i, g.glu * prob);
      sums[i] = fmaf(grad, g.glu, sums[i]);
    }
    columns.store(args.grad_z.row(row), column, gate, up);
    if (args.act.is_present()) store(args.act.row(row) + column, act);
  }
}

// The same columns of a row in the tail.
template <class T, class Columns>
__device__ void zero_segment(const Operands<T>& args, const Columns& columns, int64_t row,
                             uint32_t first) {
  constexpr int kN = Columns::kColumns;
  const Packed<T, kN> zeros{};
  for (int step = 0; step < kSegmentSteps; ++step) {
    const uint32_t column = first + step * kSumLanes;
    if (column >= args.f) return;
    columns.store(args.grad_z.row(row), column, zeros, zeros);
    if (args.act.is_present()) store(args.act.row(row) + column, zeros);
  }
}

template <class Activation, class T, class Columns>
__global__ void __launch_bounds__(kThreads, 2)
    glu_backward_kernel(Activation activation, Operands<T> args, Columns columns,
                        Tiling<Columns::kColumns> tiling, Reporter reporter) {
  constexpr int kN = Columns::kColumns;
  constexpr uint32_t kSharing = Tiling<kN>::kThreadsPerSegment;
  __shared__ float segment_sums[Tiling<kN>::kSegmentsAtOnce];
  if (blockIdx.x == 0) check_groups(args.groups, reporter, threadIdx.x, kThreads);
  const int64_t first_row = static_cast<int64_t>(blockIdx.x) * tiling.rows;
  const int64_t in_use = rows_in_use(args.groups);
  const uint32_t slot = threadIdx.x / kSharing;
  const int64_t row = first_row + slot / tiling.per_part;
  const bool takes_part = slot < tiling.rows * tiling.per_part && row < args.rows;
  float grad_prob = 0;  // of the block's row threadIdx.x
  for (uint32_t part = 0; part < tiling.segments; part += tiling.per_part) {
    const uint32_t segment = part + slot % tiling.per_part;
    const uint32_t first = segment * kSegment + threadIdx.x % kSharing * kN;
    float sums[kN] = {};
    if (takes_part && row < in_use) {
      backward_segment(activation, args, columns, row, first, sums);
    } else if (takes_part && args.zeroes_tail) {
      zero_segment(args, columns, row, first);
    }
    if (args.grad_probs == nullptr) continue;
    const float sum = fold_lanes(sums);
    __syncthreads();
    if (threadIdx.x % kSharing == 0) segment_sums[slot] = sum;
    __syncthreads();
    if (threadIdx.x >= tiling.rows) continue;
    for (uint32_t i = 0; i < tiling.per_part && part + i < tiling.segments; ++i) {
      grad_prob += segment_sums[threadIdx.x * tiling.per_part + i];
    }
  }
  const int64_t own_row = first_row + threadIdx.x;
  if (args.grad_probs == nullptr || threadIdx.x >= tiling.rows || own_row >= args.rows) return;
  if (own_row < in_use || args.zeroes_tail) args.grad_probs[own_row] = grad_prob;
}

template <class T>
Operands<T> operands_of(const GluBackwardArgs& args) {
  const TensorView z(args.z), grad_act(args.grad_act);
  return {.z = matrix_of<const T>(z),
          .grad_act = matrix_of<const T>(grad_act),
          .probs = vector_of<const float>(args.probs),
          .grad_z = matrix_of<T>(args.grad_z),
          .act = matrix_of<T>(args.act),
          .grad_probs = vector_of<float>(args.grad_probs),
          .groups = groups_or_all(args.groups, z.num_rows()),
          .zeroes_tail = args.tail == MOIRE_TAIL_ZERO,
          .f = static_cast<uint32_t>(grad_act.columns()),
          .rows = z.num_rows()};
}

// Calls f(Columns, Tiling) for the types and the alignment of a call.
template <class T, class F>
decltype(auto) with_columns(const GluBackwardArgs& args, F&& f) {
  const int64_t columns_of_f = TensorView(args.grad_act).columns();
  return with_glu_columns<T>(
      resolve_glu_layout(args.layout, columns_of_f),
      opens_vectors({args.z, args.grad_act, args.grad_z, args.act}),
      [&](auto columns) { return f(columns, Tiling<decltype(columns)::kColumns>(columns_of_f)); });
}

Status run(const Context& context, const GluBackwardArgs& args) {
  Launcher launcher(context, "glu_backward");
  with_float_type(TensorView(args.z).type(), [&]<class T>() {
    with_columns<T>(args, [&](auto columns, auto tiling) {
      with_activation(args.activation, [&](auto activation) {
        const Operands<T> operands = operands_of<T>(args);
        const uint32_t blocks = blocks_for(operands.rows, tiling.rows);
        launcher.launch(glu_backward_kernel<decltype(activation), T, decltype(columns)>,
                        {blocks, kThreads}, activation, operands, columns, tiling,
                        launcher.reporter());
      });
    });
  });
  return launcher.status();
}

Reason supports(const DeviceState&, const GluBackwardArgs& args) {
  const int64_t f = TensorView(args.grad_act).columns();
  if (glu_fits(f)) return std::nullopt;
  return concat("F is ", f, ", less than 2^30 is taken");
}

std::string policy(const DeviceState&, const GluBackwardArgs& args) {
  return with_float_type(TensorView(args.z).type(), [&]<class T>() {
    return with_columns<T>(args, [&](auto columns, auto tiling) {
      return concat(tiling.rows, " rows per block of ", kThreads, " threads, ",
                    decltype(columns)::kColumns, " columns at once");
    });
  });
}

}  // namespace

const Implementation<GluBackwardArgs> kGluBackward = {
    "portable", Device::kCuda, supports, no_workspace, policy, run,
};

}  // namespace moire::cuda::portable
