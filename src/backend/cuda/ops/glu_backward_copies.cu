// The activation's backward, and the FP8 copies of what it gives, in one pass: a block of threads
// computes grad_z and act of some rows and 128 columns of F into shared memory, a tile of act and
// the two of grad_z that belong to these columns, and quantises one after the other. Where a bias'
// gradient is asked for, it sums grad_z's columns in between.
#include <cuda_pipeline.h>

#include <algorithm>
#include <bit>

#include "backend/cuda/device/lane_sums.cuh"
#include "backend/cuda/device/row_sums.cuh"
#include "backend/cuda/ops/glu_copies.h"
#include "backend/cuda/ops/glu_tiles.cuh"
#include "backend/cuda/ops/partial_sums.h"
#include "backend/cuda/ops/quantize.h"

namespace moire::cuda::ops {
namespace {

// Where pieces of gate and up lie in the tiles of grad_z that belong to 128 columns of F: in
// blocks, each a power of two, as pairs of eight columns do, too.
struct PiecePlaces {
  uint32_t shift, gate;
  uint32_t between;  // what the second piece's place has other than the first's

  explicit PiecePlaces(const ResolvedGluLayout& layout) {
    const bool are_pairs = layout.block == 1, gate_first = layout.gate_first || are_pairs;
    const auto most = static_cast<uint32_t>(std::min<int64_t>(layout.block, kGluColumns));
    const uint32_t block = are_pairs ? kEight : layout.is_gated ? most : kGluColumns;
    shift = static_cast<uint32_t>(std::countr_zero(block));
    gate = gate_first ? 0 : block;
    between = block;
  }
  __device__ uint32_t first(uint32_t column) const { return pair_of(column) + gate; }
  // Bits of a column are bits of the pair's.
  __device__ uint32_t pair_of(uint32_t column) const { return column + (column >> shift << shift); }
};

template <int kScaling, class Columns>
struct BackwardArgs {
  Gating<Columns> gating;
  PiecePlaces places;
  Matrix<const __nv_bfloat16> grad_act;
  float* grad_probs_parts;  // or null
  float* grad_bias_parts;   // [blocks of 32 rows, columns of grad_z], or null
  uint32_t f;
  Divisor f_tiles;
  QuantizeTiles<TileRows<kScaling>> grad_z, act;

  // The tiles of grad_z for the columns of F from `first_f` on; the second of them only where there
  // is an up.
  __device__ uint32_t first_column(uint32_t first_f, uint32_t which) const {
    if constexpr (!Columns::kIsGated) return first_f;
    const Divisor& between = grad_z.source.between;
    return first_f + (between.quotient(first_f) + which) * between.value;
  }
  // Where columns of such a tile end, which may be those of a half.
  __device__ uint32_t end_column(uint32_t first, bool is_act) const {
    if (is_act) return f;
    const uint32_t columns = grad_z.source.columns;
    return Columns::kIsGated && first < f && grad_z.source.between.value == f ? f : columns;
  }
};

template <class Columns>
constexpr uint32_t kActTile = Columns::kIsGated ? 2 : 1;

// Rows of 128 columns from `first` on, before `end`, into a tile, zeros where there is none: 16
// threads side by side fetch a row.
template <int kScaling>
__device__ inline void fetch_tile(uint32_t which, const Matrix<const __nv_bfloat16>& from,
                                  uint32_t first, uint32_t end, const RowRange& rows) {
  using Tile = GluTile<kScaling>;
  constexpr int kRowsAtOnce = Tile::kThreads / Tile::kPieces;
  const uint32_t piece = threadIdx.x % Tile::kPieces, first_row = threadIdx.x / Tile::kPieces;
  const uint32_t column = first + kEight * piece;
  const int left = column < end ? static_cast<int>(rows.size()) - static_cast<int>(first_row) : 0;
  const __nv_bfloat16* p = from.row(rows.begin + first_row) + column;
  uint4* const to = &Tile::piece(which, first_row, piece);
#pragma unroll
  for (int row = 0; row < Tile::kRows; row += kRowsAtOnce) {
    uint4* const place = row % Tile::kPeriod == 0 ? to + row * Tile::kPieces
                                                  : &Tile::piece(which, first_row + row, piece);
    ptx::copy_async(place, p, row < left);
    p += kRowsAtOnce * from.stride;
  }
}

// All that is read, to where what becomes of it will lie: grad_act's tile is act's.
template <int kScaling, class Columns>
__device__ inline void fetch(const BackwardArgs<kScaling, Columns>& args, const RowRange& rows,
                             uint32_t first_f) {
#pragma unroll
  for (uint32_t i = 0; i < kActTile<Columns>; ++i) {
    const uint32_t first = args.first_column(first_f, i);
    fetch_tile<kScaling>(i, args.gating.z, first, args.end_column(first, false), rows);
  }
  fetch_tile<kScaling>(kActTile<Columns>, args.grad_act, first_f, args.f, rows);
  __pipeline_commit();
  __pipeline_wait_prior(0);
  __syncthreads();
}

// A thread's part of these: of its row, eight columns of every 16 of a segment of 64
// (lane_sums.cuh).
template <int kScaling, class Columns>
class GradientPart {
  using Tile = GluTile<kScaling>;

 public:
  __device__ GradientPart(const BackwardArgs<kScaling, Columns>& args, const RowRange& rows,
                          uint32_t first_f)
      : args_(args), first_f_(first_f), rows_(rows) {}

  // The gradients in the places of what was fetched; this part's sum of grad_probs.
  template <class Activation>
  __device__ float backward(const Activation& activation) const {
    const float prob = has_row() ? args_.gating.prob(row()) : 1.0F;
    float sums[kEight] = {};
    const uint32_t column = kSegment * segment() + kEight * (threadIdx.x % 2);
    const uint32_t act_place = place(kActTile<Columns>, column);
    uint32_t first_place = place(0, args_.places.first(column));
    const uint32_t to_second = change(args_.places.between);
    // A step's bits change the same bits of all threads' places: the lower one in every step, the
    // upper one in every other.
    static_assert(kSegmentSteps == 4);
    uint32_t moves = change(args_.places.pair_of(kSumLanes));
    const uint32_t upper = change(args_.places.pair_of(2 * kSumLanes));
    const uint32_t steps = has_row() ? kSegmentSteps : 0;  // zeros stay zeros
#pragma unroll 1
    for (uint32_t step = 0; step < steps; ++step) {
      uint4& first = Tile::at(first_place);
      uint4& second = Tile::at(first_place ^ to_second);
      uint4& of_act = Tile::at(act_place ^ step * change(kSumLanes));
      first_place ^= moves;
      moves ^= upper;
      const uint4 read[] = {first, second, of_act};
      Packed8 gate, up, glu, first_half = bits_as<Packed8>(read[0]), second_half{};
      if constexpr (Columns::kIsGated) second_half = bits_as<Packed8>(read[1]);
      args_.gating.columns.split(first_half, second_half, gate, up);
      glu_gradients(activation, prob, gate, up, bits_as<Packed8>(read[2]), glu, sums);
      args_.gating.columns.join(gate, up, first_half, second_half);
      first = bits_as<uint4>(first_half);
      if constexpr (Columns::kIsGated) second = bits_as<uint4>(second_half);
      of_act = bits_as<uint4>(glu);
    }
    return fold_lanes(sums);
  }

  __device__ void store_sum(float sum) const {
    const int64_t parts = ceil_div(int64_t{args_.f}, int64_t{kSegment});
    const uint32_t part = first_f_ / kSegment + segment();
    if (threadIdx.x % 2 != 0 || !has_row() || part >= parts) return;
    args_.grad_probs_parts[row() * parts + part] = sum;
  }

 private:
  __device__ static uint32_t in_tile() { return threadIdx.x / 4; }
  __device__ int64_t row() const { return rows_.begin + in_tile(); }
  __device__ bool has_row() const { return in_tile() < static_cast<uint32_t>(rows_.size()); }
  __device__ static uint32_t segment() { return threadIdx.x / 2 % 2; }
  __device__ static uint32_t change(uint32_t column) { return Tile::offset(0, 0, column); }
  __device__ static uint32_t place(uint32_t first_tile, uint32_t column) {
    return Tile::offset(first_tile, in_tile(), column);
  }

  const BackwardArgs<kScaling, Columns>& args_;
  uint32_t first_f_;
  const RowRange& rows_;
};

// Partial sums of grad_z's columns, in tiles that others wrote.
template <int kScaling, class Columns>
__device__ inline void sum_bias(const BackwardArgs<kScaling, Columns>& args, uint32_t index,
                                const RowRange& rows, uint32_t first_f) {
  using Tile = GluTile<kScaling>;
  constexpr uint32_t kPairs = kGluColumns / 2;
  const uint32_t pair = threadIdx.x % kPairs, which = threadIdx.x / kPairs % kActTile<Columns>;
  const uint32_t part = threadIdx.x / (kPairs * kActTile<Columns>);
  const uint32_t first = args.first_column(first_f, which), column = first + 2 * pair;
  if (column >= args.end_column(first, false)) return;
  const int64_t columns = args.grad_z.source.columns;
  const auto first_row = static_cast<int>(part * kBlockRows);
  const auto end = static_cast<int>(min(rows.size(), int64_t{first_row} + kBlockRows));
  if (first_row >= end) return;
  const TwoSums sums = sum_of_block(first_row, end, [&](int row) {
    const uint4& piece = Tile::piece(which, static_cast<uint32_t>(row), pair / 4);
    const auto two = load<2>(reinterpret_cast<const __nv_bfloat16*>(&piece) + pair % 4 * 2);
    return TwoSums{two[0], two[1]};
  });
  const int64_t block = partial_index<Tile::kRows>(index, rows.begin) + part;
  *reinterpret_cast<float2*>(args.grad_bias_parts + block * columns + column) = {sums.first,
                                                                                 sums.second};
}

struct Notes {
  const NonFiniteReporter &grad_z, &act;
};

// Row block `index`, which has these rows, and 128 columns of F from first_f on: all copies of the
// tiles in shared memory. Two warps have a tile, the others the next.
template <int kScaling, class Columns>
__device__ inline void quantize_by_warps(const BackwardArgs<kScaling, Columns>& args,
                                         uint32_t index, const RowRange& rows, uint32_t first_f,
                                         const Reporter& reporter, const Notes& notes) {
  using Source = TileRows<kScaling>;
  const uint32_t first_in_tile = kEight * Source::first_piece_of_warp();
  const uint32_t tiles = kActTile<Columns> + (args.act.columnwise.is_present() ? 1 : 0);
#pragma unroll 1
  for (uint32_t i = threadIdx.x / kWarp / 2; i < tiles; i += 2) {
    const bool is_act = i == kActTile<Columns>;
    const uint32_t first = is_act ? first_f : args.first_column(first_f, i);
    const uint32_t end = args.end_column(first, is_act), column = first + first_in_tile;
    if (column >= end) continue;
    const TilePart<kScaling> tile(index, rows, static_cast<int>(column), static_cast<int>(end));
    const QuantizeTiles<Source>& copies = is_act ? args.act : args.grad_z;
    const NonFiniteReporter& of_copies = is_act ? notes.act : notes.grad_z;
    Rows<kScaling, Source> values;
    copies.source.load(tile, reporter, values);
    const uint32_t met = quantize_copies<Way::kQuick>(copies, tile, values);
    if (met >= kIsLeft) {
      quantize_any(copies, tile, reporter, of_copies);
    } else if (met == kIsOdd) {
      note_first(copies, tile, reporter, of_copies);
    }
  }
}

// The copies of tile `which` of those, which is a block's, as its columns lie.
template <bool kTransposes, int kScaling>
__device__ inline void quantize_tile_by_block(const QuantizeTiles<TileRows<kScaling>>& copies,
                                              uint32_t which, const TilePart<kScaling>& tile,
                                              const Reporter& reporter,
                                              const NonFiniteReporter& notes) {
  Rows<kScaling, TileRows<kScaling>> values;
  copies.source.load_from(which, tile, values);
  if constexpr (!kTransposes) {
    const uint32_t met = quantize_copies<Way::kQuick>(copies, tile, values);
    if (met == kIsOdd) note_first_of(copies, tile, values, reporter, notes);
  } else {
    if (copies.rowwise.is_present()) {
      const uint32_t met = quantize_rows<Way::kQuick>(copies, tile, values);
      if (met == kIsOdd) note_first(copies, tile, reporter, notes);
    }
    if (!copies.columnwise.is_present()) return;
    const TilePart<kScaling> part = part_of_columns(tile, copies.source.columns);
    copies.source.load_from(which, part, values);
    const uint32_t met = quantize_transposed(copies, part, values);
    if (met == kIsOdd) note_first(copies, part, reporter, notes);
  }
}
// The same of all of them, one after the other; the block calls it together.
template <bool kTransposes, int kScaling, class Columns>
__device__ inline void quantize_by_block(const BackwardArgs<kScaling, Columns>& args,
                                         uint32_t index, const RowRange& rows, uint32_t first_f,
                                         const Reporter& reporter, const Notes& notes) {
  const auto quantize = [&](const auto& copies, uint32_t which, uint32_t first,
                            const NonFiniteReporter& of_copies) {
    const auto column = static_cast<int>(first);
    if (column >= copies.source.columns) return;  // a pair's second tile may not be there
    const TilePart<kScaling> tile(index, rows, column, copies.source.columns);
    quantize_tile_by_block<kTransposes>(copies, which, tile, reporter, of_copies);
  };
#pragma unroll 1
  for (uint32_t i = 0; i < kActTile<Columns>; ++i) {
    quantize(args.grad_z, i, args.first_column(first_f, i), notes.grad_z);
  }
  if (args.act.columnwise.is_present()) quantize(args.act, kActTile<Columns>, first_f, notes.act);
}

// What no group owns: the rows behind the last, by the blocks' first tiles, and, where the block
// has no rows, the columnwise scales of its tiles.
template <int kScaling, class Columns>
__device__ inline void zero_tails(const BackwardArgs<kScaling, Columns>& args, uint32_t index,
                                  const RowRange& rows, uint32_t first_f) {
  const auto zero = [&](const auto& copies, uint32_t first, bool zeroes_rows) {
    const auto column = static_cast<int>(first);
    if (column >= copies.source.columns) return;
    zero_tail(copies, TilePart<kScaling>(index, rows, column, copies.source.columns), zeroes_rows);
  };
  zero(args.grad_z, args.first_column(first_f, 0), true);
  if (Columns::kIsGated && rows.size() == 0) {
    zero(args.grad_z, args.first_column(first_f, 1), false);
  }
  if (args.act.columnwise.is_present()) zero(args.act, first_f, true);
}

// grad_z and act of these rows, for all threads to see.
template <int kScaling, class Columns>
__device__ inline void compute(const BackwardArgs<kScaling, Columns>& args, const RowRange& rows,
                               uint32_t first_f) {
  const GradientPart<kScaling, Columns> part(args, rows, first_f);
  float sum = 0;
  fetch(args, rows, first_f);
  with_gating<Columns::kIsGated>(args.gating.activation,
                                 [&](const auto& activation) { sum = part.backward(activation); });
  if (args.grad_probs_parts != nullptr) part.store_sum(sum);
  __syncthreads();
}

template <bool kSums, bool kTransposes, int kScaling, class Columns>
__global__ void __launch_bounds__(GluTile<kScaling>::kThreads, GluTile<kScaling>::kBlocks)
    glu_backward_copies_kernel(const __grid_constant__ BackwardArgs<kScaling, Columns> args,
                               const __grid_constant__ Reporter reporter,
                               const __grid_constant__ NonFiniteReporter grad_z_notes,
                               const __grid_constant__ NonFiniteReporter act_notes) {
  using Tile = GluTile<kScaling>;
  const ScaleBlocks& blocks = args.grad_z.blocks;
  if (blockIdx.x == 0) check_groups(blocks.groups, reporter, threadIdx.x, Tile::kThreads);
  const uint32_t index = args.f_tiles.quotient(blockIdx.x);
  const uint32_t first_f = (blockIdx.x - index * args.f_tiles.value) * kGluColumns;
  const RowRange rows = blocks.at_together<Tile::kRows>(index, index);
  if (rows.size() > 0) compute(args, rows, first_f);
  if constexpr (kSums) sum_bias(args, index, rows, first_f);
  const Notes notes{grad_z_notes, act_notes};
  // What no group owns is zeroed where registers are free for it: first, or last.
  const bool zeroes = args.grad_z.zeroes_tail;
  if (Tile::kIsMx && zeroes) zero_tails(args, index, rows, first_f);
  if (rows.size() > 0) {
    if constexpr (Tile::kIsMx) {
      quantize_by_warps(args, index, rows, first_f, reporter, notes);
    } else {
      quantize_by_block<kTransposes>(args, index, rows, first_f, reporter, notes);
    }
  }
  if (!Tile::kIsMx && zeroes) zero_tails(args, index, rows, first_f);
}

// The launch, of copies with such scales.
template <int kScaling>
void launch_copies(Launcher& launcher, const Context& context, const char* op,
                   const GluBackwardCopies& call) {
  const TensorView z(call.glu.z), grad_act(call.glu.grad_act);
  const ResolvedGluLayout layout = resolve_glu_layout(call.glu.layout, grad_act.columns());
  const auto f = static_cast<uint32_t>(layout.f), f_tiles = blocks_for(layout.f, kGluColumns);
  const auto between = static_cast<uint32_t>(std::max<int64_t>(layout.block, kGluColumns));
  const TileRows<kScaling> of_grad_z{static_cast<int>(z.columns()),
                                     layout.is_gated ? Divisor(between) : Divisor{}, 0};
  const TileRows<kScaling> of_act{static_cast<int>(f), {}, layout.is_gated ? 2U : 1U};
  const bool shares_rows = is_present(call.grad_z.columnwise) || is_present(call.act.columnwise) ||
                           is_present(call.grad_bias);
  const ScaleBlocks blocks = scale_blocks(z, call.grad_z.groups, kScaling, shares_rows);
  const bool sums = is_present(call.grad_bias);
  // One block at least: it zeroes the tail where there is nothing else.
  const int64_t row_blocks = std::max<int64_t>(1, blocks.count(GluTile<kScaling>::kRows));
  const LaunchShape shape{blocks_for(row_blocks * f_tiles, 1), GluTile<kScaling>::kThreads,
                          (of_act.first_tile + 1) * GluTile<kScaling>::kBytes};
  // In this order: what is found in grad_z comes first, wherever it is (non_finite.cuh).
  const auto grad_z_notes = non_finite_reporter(context, {op, "grad_z"}, {}, false);
  const auto act_notes = non_finite_reporter(context, {op, "act"}, {}, false);
  with_pieces(layout, [&]<class Columns>(const Columns& columns) {
    const BackwardArgs<kScaling, Columns> args{.gating = gating_of(call.glu, columns),
                                               .places = PiecePlaces(layout),
                                               .grad_act = matrix_of<const __nv_bfloat16>(grad_act),
                                               .grad_probs_parts = call.grad_probs_parts,
                                               .grad_bias_parts = call.grad_bias_parts,
                                               .f = f,
                                               .f_tiles = Divisor(f_tiles),
                                               .grad_z = tiles_of(call.grad_z, of_grad_z, blocks),
                                               .act = tiles_of(call.act, of_act, blocks)};
    const auto launch = [&]<bool kTransposes>() {
      launcher.launch(sums ? glu_backward_copies_kernel<true, kTransposes, kScaling, Columns>
                           : glu_backward_copies_kernel<false, kTransposes, kScaling, Columns>,
                      shape, args, launcher.reporter(), grad_z_notes, act_notes);
    };
    if constexpr (kHasLongLines<kScaling>) {
      const bool transposes =
          args.grad_z.columnwise.is_transposed || args.act.columnwise.is_transposed;
      if (transposes) return launch.template operator()<true>();
    }
    launch.template operator()<false>();
  });
}

}  // namespace

Reason GluBackwardCopies::supports() const {
  return too_wide("grad_z", TensorView(glu.z).columns());
}

void GluBackwardCopies::take_parts(Arena& arena) {
  if (is_present(glu.grad_probs)) {
    const int64_t parts = ceil_div(TensorView(glu.grad_act).columns(), kSegment);
    grad_probs_parts = arena.take_floats(glu.groups.capacity, parts);
  }
  grad_bias_parts = take_block_partials(arena, grad_bias, glu.groups);
}

Status GluBackwardCopies::run(const Context& context) const {
  constexpr const char* kOp = "grouped_gemm_glu_backward";
  Launcher launcher(context, kOp);
  with_ragged_scaling(
      grad_z, [&]<int kScaling>() { launch_copies<kScaling>(launcher, context, kOp, *this); });
  const TensorView grad_act(glu.grad_act);
  sum_row_partials(launcher, grad_probs_parts, ceil_div(grad_act.columns(), kSegment),
                   groups_or_all(glu.groups, grad_act.num_rows()), glu.grad_probs, 0, glu.tail);
  sum_block_partials(launcher, grad_bias_parts, glu.groups, grad_bias, beta);
  return launcher.status();
}

}  // namespace moire::cuda::ops
