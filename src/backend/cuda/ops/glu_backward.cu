// glu_backward on CUDA. The fixed order of grad_probs' sums decides who computes what: two threads
// (of 16-bit elements) share a segment of 64 columns, 16 bytes of each 16 columns to either, so
// that each lane of the sum stays in one register. What they read and write passes through shared
// memory (segment_pieces.cuh). A block takes a row, or several narrow ones.
#include "backend/cuda/device/activation.cuh"
#include "backend/cuda/device/glu_columns.cuh"
#include "backend/cuda/device/groups.cuh"
#include "backend/cuda/device/matrix.cuh"
#include "backend/cuda/device/segment_pieces.cuh"
#include "backend/cuda/implementations.h"
#include "backend/cuda/runtime/launch.h"

namespace moire::cuda::ops {
namespace {

constexpr int kThreads = kSegmentThreads;
constexpr int kWarps = kThreads / kWarp;

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

// A warp's segments of all tensors: what is read becomes, in place, what is written. The first is
// slot `first_slot` of the block's rows from `first_row` on.
template <class T, class Columns>
struct WarpPieces {
  static constexpr int kN = Columns::kColumns;
  using Pieces = SegmentPieces<T, kN>;

  Pieces first, second, grad_act;
  const Operands<T>& args;
  const Columns& columns;
  const SegmentTiling<kN>& tiling;
  int64_t first_row;
  uint32_t first_slot;

  // Of the columns from segment `part` on; rows below `end`.
  __device__ void fetch(uint32_t part, int64_t end) {
#pragma unroll 1  // four at once would take the registers of another block
    for (uint32_t i = 0; i < kSegmentSteps; ++i) {
      const auto [row, column] = place_of(i, part);
      const bool exists = column < args.f && row < end;
      first.fetch(i, args.z.row(row) + columns.first(column), exists);
      if constexpr (Columns::kIsGated) {
        second.fetch(i, args.z.row(row) + columns.second(column), exists);
      }
      grad_act.fetch(i, args.grad_act.row(row) + column, exists);
    }
    __pipeline_commit();
    __pipeline_wait_prior(0);
    __syncwarp();
  }
  __device__ void write(uint32_t part, int64_t end) {
    __syncwarp();
#pragma unroll 1  // four at once would take the registers of another block
    for (uint32_t i = 0; i < kSegmentSteps; ++i) {
      const auto [row, column] = place_of(i, part);
      if (column >= args.f || row >= end) continue;
      first.write(i, args.grad_z.row(row) + columns.first(column));
      if constexpr (Columns::kIsGated) {
        second.write(i, args.grad_z.row(row) + columns.second(column));
      }
      if (args.act.is_present()) grad_act.write(i, args.act.row(row) + column);
    }
  }

  // What a thread does of its segment, which starts at `column`: its part of grad_probs' lanes.
  template <class Activation>
  __device__ void backward(const Activation& activation, float prob, uint32_t column,
                           float (&sums)[kN]) {
#pragma unroll 1  // four at once would take the registers of another block
    for (uint32_t step = 0; step < kSegmentSteps; ++step) {
      if (column + Pieces::step_column(step) >= args.f) break;
      Packed<T, kN> gate, up, first_piece, second_piece, act;
      columns.split(first.get(step), (Columns::kIsGated ? second : first).get(step), gate, up);
      const Packed<T, kN> grad = grad_act.get(step);
      glu_gradients(activation, prob, gate, up, grad, act, sums);
      columns.join(gate, up, first_piece, second_piece);
      first.set(step, first_piece);
      if constexpr (Columns::kIsGated) second.set(step, second_piece);
      grad_act.set(step, act);
    }
  }

  struct Place {
    int64_t row;
    uint32_t column;  // F or more: none
  };
  // Of piece i that this thread moves.
  __device__ Place place_of(uint32_t i, uint32_t part) const {
    const uint32_t slot = first_slot + Pieces::segment_of(i);
    if (slot >= tiling.rows * tiling.per_part) return {0, args.f};
    const uint32_t segment = part + slot % tiling.per_part;
    return {first_row + slot / tiling.per_part, segment * kSegment + Pieces::column_of(i)};
  }
};

template <class Activation, class T, class Columns>
__global__ void __launch_bounds__(kThreads, 5)
    glu_backward_kernel(Activation activation, Operands<T> args, Columns columns,
                        SegmentTiling<Columns::kColumns> tiling, Reporter reporter) {
  constexpr int kN = Columns::kColumns;
  constexpr uint32_t kSharing = SegmentTiling<kN>::kThreadsPerSegment;
  using Pieces = SegmentPieces<T, kN>;
  __shared__ typename Pieces::Shared shared[kWarps][3];
  __shared__ float segment_sums[SegmentTiling<kN>::kSegmentsAtOnce];
  if (blockIdx.x == 0) check_groups(args.groups, reporter, threadIdx.x, kThreads);
  const int64_t first_row = static_cast<int64_t>(blockIdx.x) * tiling.rows;
  const int64_t in_use = min(rows_in_use(args.groups), args.rows);
  const int64_t written = args.zeroes_tail ? args.rows : in_use;
  const uint32_t warp = threadIdx.x / kWarp, slot = threadIdx.x / kSharing;
  const int64_t row = first_row + slot / tiling.per_part;
  const bool takes_part = slot < tiling.rows * tiling.per_part && row < in_use;
  const float prob = takes_part && args.probs != nullptr ? args.probs[row] : 1.0F;
  auto& [first, second, grad_act] = shared[warp];
  WarpPieces<T, Columns> pieces{
      Pieces(first), Pieces(second), Pieces(grad_act), args,
      columns,       tiling,         first_row,        warp * kWarp / kSharing};
  float grad_prob = 0;  // of the block's row threadIdx.x
  for (uint32_t part = 0; part < tiling.segments; part += tiling.per_part) {
    const uint32_t segment = part + slot % tiling.per_part;
    pieces.fetch(part, in_use);
    float sums[kN] = {};
    if (takes_part) pieces.backward(activation, prob, segment * kSegment, sums);
    pieces.write(part, written);
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
  if (args.grad_probs == nullptr || threadIdx.x >= tiling.rows || own_row >= written) return;
  args.grad_probs[own_row] = grad_prob;
}

// Calls f.operator()<T>(Columns, SegmentTiling) for the types and the alignment of a call.
template <class F>
decltype(auto) with_columns(const GluBackwardArgs& args, F&& f) {
  const int64_t f_columns = TensorView(args.grad_act).columns();
  return with_float_type(TensorView(args.z).type(), [&]<class T>() {
    return with_glu_columns<T>(resolve_glu_layout(args.layout, f_columns),
                               opens_vectors({args.z, args.grad_act, args.grad_z, args.act}),
                               [&](auto columns) {
                                 const SegmentTiling<decltype(columns)::kColumns> tiling(f_columns);
                                 return f.template operator()<T>(columns, tiling);
                               });
  });
}

Status run(const Context& context, const GluBackwardArgs& args) {
  Launcher launcher(context, "glu_backward");
  const TensorView z(args.z), grad_act(args.grad_act);
  with_columns(args, [&]<class T>(auto columns, auto tiling) {
    const Operands<T> operands{.z = matrix_of<const T>(z),
                               .grad_act = matrix_of<const T>(grad_act),
                               .probs = vector_of<const float>(args.probs),
                               .grad_z = matrix_of<T>(args.grad_z),
                               .act = matrix_of<T>(args.act),
                               .grad_probs = vector_of<float>(args.grad_probs),
                               .groups = groups_or_all(args.groups, z.num_rows()),
                               .zeroes_tail = args.tail == MOIRE_TAIL_ZERO,
                               .f = static_cast<uint32_t>(grad_act.columns()),
                               .rows = z.num_rows()};
    with_gating<decltype(columns)::kIsGated>(args.activation, [&](auto activation) {
      const uint32_t blocks = blocks_for(operands.rows, tiling.rows);
      launcher.launch(glu_backward_kernel<decltype(activation), T, decltype(columns)>,
                      {blocks, kThreads}, activation, operands, columns, tiling,
                      launcher.reporter());
    });
  });
  return launcher.status();
}

Reason supports(const DeviceState&, const GluBackwardArgs& args) {
  return why_not_f(TensorView(args.grad_act).columns());
}

std::string policy(const DeviceState&, const GluBackwardArgs& args) {
  return with_columns(args, []<class T>(auto columns, auto tiling) {
    return concat(tiling.rows, " rows per block of ", kThreads, " threads, ",
                  decltype(columns)::kColumns, " columns at once");
  });
}

}  // namespace

const Implementation<GluBackwardArgs> kGluBackward = on_cuda(supports, policy, run);

}  // namespace moire::cuda::ops
