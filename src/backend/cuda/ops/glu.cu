// glu on CUDA: a block takes whole rows, of narrow ones several; each of its threads takes 16 bytes
// of act at a time, or one element where alignment or the layout forbids it.
#include <algorithm>

#include "backend/cuda/device/activation.cuh"
#include "backend/cuda/device/glu_columns.cuh"
#include "backend/cuda/device/groups.cuh"
#include "backend/cuda/device/matrix.cuh"
#include "backend/cuda/implementations.h"
#include "backend/cuda/runtime/launch.h"

namespace moire::cuda::ops {
namespace {

constexpr int kThreads = 256;
// Pieces of act that a block works on: a few per thread hide the latency of the first.
constexpr int64_t kPiecesPerBlock = 4 * kThreads;

template <class T>
struct Operands {
  Matrix<const T> z;
  const float* probs;  // or null
  Matrix<T> act;
  moire_groups groups;
  bool zeroes_tail;
  uint32_t pieces;  // of a row
  uint32_t rows_per_block;
  int64_t rows;
};

template <class Activation, class T, class Columns>
__global__ void __launch_bounds__(kThreads, 5)
    glu_kernel(Activation activation, Operands<T> args, Columns columns, Reporter reporter) {
  constexpr int kN = Columns::kColumns;
  if (blockIdx.x == 0) check_groups(args.groups, reporter, threadIdx.x, kThreads);
  const int64_t first_row = static_cast<int64_t>(blockIdx.x) * args.rows_per_block;
  const int64_t in_use = rows_in_use(args.groups);
  for (uint32_t i = threadIdx.x; i < args.rows_per_block * args.pieces; i += kThreads) {
    const int64_t row = first_row + i / args.pieces;
    const uint32_t column = i % args.pieces * kN;
    if (row >= args.rows) return;
    Packed<T, kN> act{};
    if (row < in_use) {
      const float prob = args.probs == nullptr ? 1.0F : args.probs[row];
      Packed<T, kN> gate, up;
      load_glu(columns, args.z.row(row), column, gate, up);
#pragma unroll
      for (int j = 0; j < kN; ++j) act.set(j, glu_value(activation, gate[j], up[j]) * prob);
    } else if (!args.zeroes_tail) {
      return;
    }
    store(args.act.row(row) + column, act);
  }
}

// Calls f(Columns, Operands<T>) for the types and the alignment of a call.
template <class F>
decltype(auto) with_columns(const GluArgs& args, F&& f) {
  const TensorView z(args.z), act(args.act);
  return with_float_type(z.type(), [&]<class T>() {
    return with_glu_columns<T>(
        resolve_glu_layout(args.layout, act.columns()), opens_vectors({z, act}), [&](auto columns) {
          const int64_t pieces = act.columns() / decltype(columns)::kColumns;
          const int64_t rows_per_block =
              std::max<int64_t>(1, kPiecesPerBlock / std::max<int64_t>(1, pieces));
          return f(columns, Operands<T>{.z = matrix_of<const T>(z),
                                        .probs = vector_of<const float>(args.probs),
                                        .act = matrix_of<T>(act),
                                        .groups = groups_or_all(args.groups, z.num_rows()),
                                        .zeroes_tail = args.tail == MOIRE_TAIL_ZERO,
                                        .pieces = static_cast<uint32_t>(pieces),
                                        .rows_per_block = static_cast<uint32_t>(rows_per_block),
                                        .rows = z.num_rows()});
        });
  });
}

Status run(const Context& context, const GluArgs& args) {
  Launcher launcher(context, "glu");
  with_columns(args, [&]<class T>(auto columns, const Operands<T>& operands) {
    with_gating<decltype(columns)::kIsGated>(args.activation, [&](auto activation) {
      const uint32_t blocks = blocks_for(operands.rows, operands.rows_per_block);
      launcher.launch(glu_kernel<decltype(activation), T, decltype(columns)>, {blocks, kThreads},
                      activation, operands, columns, launcher.reporter());
    });
  });
  return launcher.status();
}

Reason supports(const DeviceState&, const GluArgs& args) {
  return why_not_f(TensorView(args.act).columns());
}

std::string policy(const DeviceState&, const GluArgs& args) {
  return with_columns(args, [](auto columns, const auto& operands) {
    return concat(operands.rows_per_block, " rows per block of ", kThreads, " threads, ",
                  decltype(columns)::kColumns, " columns at once");
  });
}

}  // namespace

const Implementation<GluArgs> kGlu = on_cuda(supports, policy, run);

}  // namespace moire::cuda::ops
