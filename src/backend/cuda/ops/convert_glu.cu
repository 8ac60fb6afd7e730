// convert_glu on CUDA, one copy. Where gate and up lie along rows (weights), a warp moves a part of
// a row; where they lie along the columns of a row, a thread moves 16 bytes of either half, through
// registers; 8 of either where they are to alternate, so that threads side by side store bytes side
// by side; or an element of either where layouts or alignment forbid that.
#include <algorithm>

#include "backend/cuda/device/copy_rows.cuh"
#include "backend/cuda/device/glu_columns.cuh"
#include "backend/cuda/implementations.h"
#include "backend/cuda/runtime/launch.h"

namespace moire::cuda::ops {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kWarps = kThreads / kWarp;
// Of a row, that a warp moves: enough to hide what it costs to find the row.
constexpr int64_t kPiecesPerWarp = 512;
// Of either half, that a block moves.
constexpr int64_t kPiecesPerBlock = 2 * kThreads;

// [outer, 2F positions, rows] of `pieces` pieces each; strides in bytes, then in pieces.
struct Rows {
  int64_t outer, f, rows, pieces;
  int64_t source_outer, source_step, source_row;
  int64_t target_outer, target_step, target_row;
};

// Position p of the target, and where it comes from.
__device__ int64_t source_position(const ResolvedGluLayout& from, const ResolvedGluLayout& to,
                                   int64_t p) {
  const int64_t within = p % (2 * to.block);
  const int64_t column = p / (2 * to.block) * to.block + within % to.block;
  const bool is_gate = (within < to.block) == to.gate_first;
  return is_gate ? from.gate(column) : from.up(column);
}

template <class Piece>
__global__ void __launch_bounds__(kThreads)
    rows_kernel(const Piece* source, Piece* target, Rows move, ResolvedGluLayout from,
                ResolvedGluLayout to, int64_t num_parts) {
  const int64_t unit = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
  const int64_t row = unit / num_parts, first = unit % num_parts * kPiecesPerWarp;
  const int64_t position = row / move.rows, r = row % move.rows;
  const int64_t outer = position / (2 * move.f), p = position % (2 * move.f);
  if (outer >= move.outer) return;
  const int64_t count = min(kPiecesPerWarp, move.pieces - first);
  const int64_t q = source_position(from, to, p);
  copy_by_warp(
      source + outer * move.source_outer + q * move.source_step + r * move.source_row + first,
      target + outer * move.target_outer + p * move.target_step + r * move.target_row + first,
      static_cast<uint32_t>(count));
}

// GluPairs of half as many columns: both halves are in one piece of 16 bytes.
template <int N>
struct GluPairsTogether {
  static constexpr int kColumns = N;
  GluPairs<2 * N> pairs;
};
template <int N, class T>
__device__ void load_glu(const GluPairsTogether<N>& columns, const T* row, uint32_t column,
                         uint2& gate, uint2& up) {
  const auto both = *reinterpret_cast<const uint4*>(row + 2 * column);
  uint4 gates, ups;
  columns.pairs.split(both, both, gates, ups);
  gate = {gates.x, gates.y};
  up = {ups.x, ups.y};
}
template <int N, class T>
__device__ void store_glu(const GluPairsTogether<N>& columns, T* row, uint32_t column,
                          const uint2& gate, const uint2& up) {
  uint4 both, none;
  columns.pairs.join(uint4{gate.x, gate.y}, uint4{up.x, up.y}, both, none);
  *reinterpret_cast<uint4*>(row + 2 * column) = both;
}

template <class T, class From, class To>
__global__ void __launch_bounds__(kThreads)
    columns_kernel(Matrix<const T> source, Matrix<T> target, From from, To to, int64_t num_rows,
                   uint32_t pieces, uint32_t rows_per_block) {
  constexpr int kN = From::kColumns;
  const int64_t first_row = int64_t{blockIdx.x} * rows_per_block;
  for (uint32_t i = threadIdx.x; i < rows_per_block * pieces; i += kThreads) {
    const int64_t row = first_row + i / pieces;
    if (row >= num_rows) return;
    std::conditional_t<kN == 1, T, std::conditional_t<kN == kVector<T>, uint4, uint2>> gate, up;
    load_glu(from, source.row(row), i % pieces * kN, gate, up);
    store_glu(to, target.row(row), i % pieces * kN, gate, up);
  }
}

bool lies_along_columns(const ConvertGluArgs& args) { return args.dim == args.source.rank - 1; }
int64_t f_of(const ConvertGluArgs& args) { return args.source.shape[args.dim] / 2; }

Rows rows_of(const ConvertGluArgs& args) {
  const TensorView source(args.source), target(args.target);
  const int64_t size = dtype_size(source.type());
  Rows m{};
  m.outer = args.dim == 0 ? 1 : source.shape[0];
  m.f = f_of(args);
  m.rows = source.rank - args.dim == 3 ? source.shape[1] : 1;
  m.pieces = source.columns() * size;
  m.source_row = source.stride() * size;
  m.target_row = target.stride() * size;
  m.source_step = m.rows * m.source_row;
  m.target_step = m.rows * m.target_row;
  m.source_outer = 2 * m.f * m.source_step;
  m.target_outer = 2 * m.f * m.target_step;
  if (m.source_row == m.pieces && m.target_row == m.pieces) {
    m.pieces *= m.rows;
    m.rows = 1;
  }
  return m;
}

// The largest piece that divides every address; all other strides are multiples of these.
int64_t piece_bytes(const ConvertGluArgs& args, const Rows& m) {
  const auto addresses =
      reinterpret_cast<uintptr_t>(args.source.data) | reinterpret_cast<uintptr_t>(args.target.data);
  const uint64_t all = addresses | static_cast<uint64_t>(m.source_row) |
                       static_cast<uint64_t>(m.target_row) | static_cast<uint64_t>(m.pieces);
  const int64_t largest = static_cast<int64_t>(all & (~all + 1));
  return largest == 0 ? kVectorBytes : std::min<int64_t>(kVectorBytes, largest);
}

void move_rows(Launcher& launcher, const ConvertGluArgs& args) {
  Rows m = rows_of(args);
  const int64_t bytes = piece_bytes(args, m);
  for (int64_t* size : {&m.pieces, &m.source_outer, &m.source_step, &m.source_row, &m.target_outer,
                        &m.target_step, &m.target_row}) {
    *size /= bytes;
  }
  const int64_t parts = ceil_div(m.pieces, kPiecesPerWarp);
  const uint32_t blocks = blocks_for(m.outer * 2 * m.f * m.rows * parts, kWarps);
  with_bytes(bytes, [&]<class Piece>() {
    launcher.launch(rows_kernel<Piece>, {blocks, kThreads},
                    static_cast<const Piece*>(args.source.data),
                    static_cast<Piece*>(args.target.data), m, resolve_glu_layout(args.from, m.f),
                    resolve_glu_layout(args.to, m.f), parts);
  });
}

template <class T>
void move_columns(Launcher& launcher, const ConvertGluArgs& args) {
  const int64_t f = f_of(args), num_rows = TensorView(args.source).num_rows();
  const auto source = resolve_glu_layout(args.from, f), target = resolve_glu_layout(args.to, f);
  const auto fits = [](int64_t block) {
    return block % kVector<T> == 0 || (block == 1 && kHasPairs<T>);
  };
  const bool is_vector = opens_vectors({args.source, args.target}) && f % kVector<T> == 0 &&
                         fits(source.block) && fits(target.block);
  const auto move = [&]<class From, class To>(const From& from, const To& to) {
    const int64_t pieces = f / From::kColumns;
    const int64_t rows = std::max<int64_t>(1, kPiecesPerBlock / pieces);
    launcher.launch(columns_kernel<T, From, To>, {blocks_for(num_rows, rows), kThreads},
                    matrix_of<const T>(args.source), matrix_of<T>(args.target), from, to, num_rows,
                    static_cast<uint32_t>(pieces), static_cast<uint32_t>(rows));
  };
  if constexpr (kHasPairs<T>) {
    constexpr int kN = kVector<T> / 2;
    if (is_vector && target.block == 1) {
      const GluPairsTogether<kN> to{GluPairs<2 * kN>(target)};
      if (source.block == 1) return move(GluPairsTogether<kN>{GluPairs<2 * kN>(source)}, to);
      return move(GluBlocks<kN>(source), to);
    }
  }
  with_gated_columns<T>(source, is_vector, [&]<class From>(const From& from) {
    move(from, GluBlocks<From::kColumns>(target));
  });
}

Status run(const Context& context, const ConvertGluArgs& args) {
  Launcher launcher(context, "convert_glu");
  const TensorView source(args.source);
  if (source.num_elements() == 0) return launcher.status();
  if (lies_along_columns(args)) {
    with_element_bytes(dtype_size(source.type()),
                       [&]<class T>() { move_columns<T>(launcher, args); });
  } else {
    move_rows(launcher, args);
  }
  return launcher.status();
}

Reason supports(const DeviceState&, const ConvertGluArgs& args) {
  return lies_along_columns(args) ? why_not_f(f_of(args)) : std::nullopt;
}

std::string policy(const DeviceState&, const ConvertGluArgs& args) {
  if (lies_along_columns(args)) return "both halves of a row by each thread";
  return concat("a warp per part of a row, ", piece_bytes(args, rows_of(args)),
                " bytes per thread");
}

}  // namespace

const Implementation<ConvertGluArgs> kConvertGlu = on_cuda(supports, policy, run);

}  // namespace moire::cuda::ops
