// The grouped GEMM: tiles shared out over threads; of each tile, K blocks packed and multiplied by
// the kernels, then an epilogue over the finished sums. Start at multiply_ragged_m.
//
// Two arrangements, chosen by how the weight lies, so that neither a weight nor a sum is ever
// transposed element by element:
//   weights on the left   weight [n, k]: its rows are read where they lie and broadcast; the few
//                         activations of a group are transposed into panels, and so is the sum
//   weights on the right  weight [k, n]: copied into panels; activations are broadcast
// wgrad has both operands running down rows and is the second, with its left operand transposed.
#pragma once

#include <moire/context.h>
#include <moire/groups.h>
#include <moire/tensor.h>

#include <concepts>
#include <cstring>

#include "backend/cpu/gemm/columns.h"
#include "backend/cpu/gemm/emulated.h"
#include "backend/cpu/gemm/kernels.h"
#include "backend/cpu/gemm/operands.h"
#include "backend/cpu/gemm/scratch.h"
#include "backend/cpu/gemm/tiling.h"
#include "core/device_state.h"
#include "core/divide.h"

namespace moire::cpu::gemm {

// Finished sums of some rows and the columns of one chunk (or several, of a plain product); an
// epilogue may overwrite them. Of a paired product data has 2 * columns columns, gates then ups.
struct Sums {
  float* data;
  int64_t pitch;
  int64_t group;
  int64_t first_row, rows;
  int64_t first_column, columns;
};

// What happens to finished sums. Called once for each element, by any thread; rows of a group come
// in whole tiles, in order within a tile.
template <class T>
concept Epilogue = requires(const T& t, const Sums& sums) {
  { t.apply(sums) } -> std::same_as<void>;
};

// Where a tile's sums may be written by the kernels themselves, if the epilogue has nothing to do
// but store FP32; else data is null. `first` and `later` are of the first K block and the others.
struct Direct {
  float* data = nullptr;
  int64_t pitch = 0;
  Write first = Write::kStore, later = Write::kAdd;
};

template <class T>
concept DirectEpilogue = Epilogue<T> && requires(const T& t, const Tile& tile, int64_t num_k) {
  { t.direct(tile, num_k) } -> std::same_as<Direct>;
};

// Rows of sums that are transposed, and given to the epilogue, at once, unless it wants more.
inline constexpr int64_t kPatchRows = 16;

// d = a * op(weight), for rows of a in groups.
struct RaggedM {
  TensorView a, row_idx;
  Weight weight;
  bool weight_is_nk;  // [n, k]; else [k, n]
  Columns columns;
  int64_t k;
  Groups groups;
  int64_t row_step;  // tiles start at multiples of it, from the group's first row
  int64_t patch_rows = kPatchRows;
  TensorView a_scales, weight_scales;  // of FP8 operands; blocks along k
  bool emulates = false;               // products as Hopper makes them (emulated.h)

  bool weights_left() const { return weight_is_nk && !emulates; }
  RowReader weight_rows(int64_t group) const {
    return {weight.matrix(group), {}, Scales::weight(weight_scales, weight_is_nk, group)};
  }
  RowReader a_rows() const { return {a, row_idx, Scales::rowwise(a_scales)}; }
};

// d_g = a_g^T * b_g over the rows of each group.
struct RaggedK {
  TensorView a, a_row_idx, b, b_row_idx;
  int64_t m, n;
  Groups groups;
  TensorView a_scales, b_scales;  // of FP8 operands; blocks down the rows of each group
  bool emulates = false;
};

// Tiles of wgrad are whole micro-tiles of 6 or 8 rows.
inline constexpr int64_t kWgradRowStep = 48;

TileLimits tile_limits(const RaggedM& p);
TileLimits tile_limits(const RaggedK& p);
size_t workspace_bytes(const RaggedM& p, int num_threads);
size_t workspace_bytes(const RaggedK& p, int num_threads);
ScratchSize scratch_size(const RaggedM& p);
ScratchSize scratch_size(const RaggedK& p);
// "tiles up to 256 x 1024, K blocks of 256, 2 threads, AVX2"
std::string policy_text(const RaggedM& p, const DeviceState& state);
std::string policy_text(const RaggedK& p, const DeviceState& state);

// The address of element [row, column].
inline char* element(const TensorView& t, int64_t row, int64_t column) {
  return static_cast<char*>(t.data) + (row * t.stride() + column) * dtype_size(t.type());
}

// left[first + i] * panels over one K block, for `count` rows.
template <LeftOperand Left>
void multiply_block(const Kernels& kernels, const Left& left, KBlock block, int64_t first,
                    int64_t count, const Scratch& scratch, int64_t num_columns, Target target) {
  // Micro-tiles of nearly equal height run faster than full ones and a short last one.
  const int64_t micro_tiles = ceil_div(count, kernels.micro_rows);
  float* const data = target.data;
  for (int64_t i = 0; i < micro_tiles; ++i) {
    const int64_t begin = count * i / micro_tiles, end = count * (i + 1) / micro_tiles;
    const int64_t next = count * (i + 2) / micro_tiles;
    const float* rows[kMaxMicroRows];
    left.rows(kernels, block, first + begin, end - begin, scratch.left, rows);
    target.data = data + begin * target.pitch;
    kernels.multiply(
        rows, end - begin, scratch.panels, num_columns, block.length, target,
        i + 1 < micro_tiles ? left.upcoming(block, first + end, next - end) : Upcoming{});
  }
}

// Most columns of a chunk's sums.
inline constexpr int64_t kPatchColumns = 128;

// Sums that lie column by column, patch_rows rows at a time: to where they may be stored at once,
// else to the epilogue.
template <Epilogue E>
void finish_transposed(const Kernels& kernels, const E& epilogue, const float* sums, int64_t pitch,
                       int64_t num_columns, const Tile& chunk, const Direct& direct, float* patch,
                       int64_t patch_rows) {
  constexpr int64_t kMost = kPatchColumns;
  const float* columns[kMost];
  const int64_t padded_columns = round_up(num_columns, kTransposeRows);
  const bool is_direct = direct.data != nullptr && padded_columns == num_columns;
  for (int64_t row = 0; row < chunk.rows; row += patch_rows) {
    const int64_t rows = std::min(patch_rows, chunk.rows - row);
    for (int64_t c = 0; c < padded_columns; ++c) {
      columns[c] = c < num_columns ? sums + c * pitch + row : kZeros.data();
    }
    if (is_direct) {
      kernels.transpose(columns, num_columns, rows, direct.data + row * direct.pitch, direct.pitch);
      continue;
    }
    kernels.transpose(columns, padded_columns, rows, patch, kMost);
    epilogue.apply(Sums{patch, kMost, chunk.group, chunk.first_row + row, rows, chunk.first_column,
                        chunk.columns});
  }
}

// A tile with the weight on the left: sums lie as [columns][rows].
template <Epilogue E>
void run_tile_weights_left(const Kernels& kernels, const RaggedM& p, const Tile& tile,
                           const Scratch& scratch, const E& epilogue) {
  const int64_t factor = p.columns.per_output(), pitch = sums_pitch(tile.rows);
  const RowsOnLeft left{p.weight_rows(tile.group), tile.first_column * factor, &p.columns};
  const RowsOnRight right{p.a_rows(), tile.first_row};
  int64_t k = 0;
  do {
    const KBlock block{k, std::min(kBlockK, p.k - k)};
    k += block.length;
    right.pack(kernels, block, 0, tile.rows, scratch.panels, scratch.decoded);
    for (int64_t c = 0; c < tile.columns; c += p.columns.chunk) {
      const int64_t width = p.columns.width(tile.first_column + c);
      float* const sums = scratch.sums + c * factor * pitch;
      multiply_block(kernels, left, block, c * factor, width * factor, scratch, tile.rows,
                     Target{sums, pitch, block.first == 0 ? Write::kStore : Write::kAdd});
      if (k < p.k) continue;
      const Tile part{tile.group, tile.first_row, tile.rows, tile.first_column + c, width};
      Direct direct;
      if constexpr (DirectEpilogue<E>) direct = epilogue.direct(part, p.k);
      finish_transposed(kernels, epilogue, sums, pitch, width * factor, part, direct, scratch.patch,
                        p.patch_rows);
    }
  } while (k < p.k);
}

// Sums that lie row by row, to the epilogue.
template <Epilogue E>
void finish(const Columns& columns, const Tile& tile, float* sums, const E& epilogue) {
  const int64_t factor = columns.per_output(), pitch = sums_pitch(tile.columns * factor);
  for (int64_t c = 0; c < tile.columns; c += columns.chunk) {
    epilogue.apply(Sums{sums + c * factor, pitch, tile.group, tile.first_row, tile.rows,
                        tile.first_column + c, columns.width(tile.first_column + c)});
  }
}

// A tile with the weight, or wgrad's second operand, on the right: sums lie as [rows][columns].
template <LeftOperand Left, RightOperand Right, Epilogue E>
void run_tile_rows_left(const Kernels& kernels, const Left& left, const Right& right, int64_t num_k,
                        const Columns& columns, const Tile& tile, const Scratch& scratch,
                        const E& epilogue) {
  const int64_t factor = columns.per_output();
  Direct sums;
  if constexpr (DirectEpilogue<E>) sums = epilogue.direct(tile, num_k);
  const bool is_direct = sums.data != nullptr;
  if (!is_direct) sums = {scratch.sums, sums_pitch(tile.columns * factor)};
  int64_t k = 0;
  do {
    const KBlock block{k, std::min(kBlockK, num_k - k)};
    k += block.length;
    right.pack(kernels, block, tile.first_column * factor, tile.columns * factor, scratch.panels,
               scratch.decoded);
    left.stage(kernels, block, tile.rows, scratch.left);
    multiply_block(kernels, left, block, 0, tile.rows, scratch, tile.columns * factor,
                   Target{sums.data, sums.pitch, block.first == 0 ? sums.first : sums.later});
  } while (k < num_k);
  if (!is_direct) finish(columns, tile, sums.data, epilogue);
}

template <Epilogue E>
void multiply_ragged_m(const Context& context, const RaggedM& p, const Workspace& workspace,
                       const E& epilogue) {
  const Kernels& set = kernels();
  ThreadPool& pool = *context.state().pool;
  Carver carver(workspace.data);
  auto* prefix = carver.take<int64_t>(p.groups.num_groups + 1);
  const ScratchSize size = scratch_size(p);
  auto* scratch = carver.take<char>(static_cast<int64_t>(size.bytes()) * pool.num_threads());
  const RaggedRows tiles(p.groups, tile_limits(p), p.row_step, p.columns.outputs, p.columns.chunk,
                         pool.num_threads(), prefix);
  pool.parallel_for(tiles.count(), [&](int64_t task, int thread) {
    const Tile tile = tiles.tile(task);
    const Scratch mine(size, scratch + static_cast<size_t>(thread) * size.bytes());
    if (p.emulates) {
      const int64_t n = p.columns.outputs * p.columns.per_output();
      emulate({p.a_rows(), true}, {p.weight_rows(tile.group), p.weight_is_nk, 0, n}, p.k, p.columns,
              tile, mine);
      finish(p.columns, tile, mine.sums, epilogue);
    } else if (p.weight_is_nk) {
      run_tile_weights_left(set, p, tile, mine, epilogue);
    } else {
      const RowsOnLeft left{p.a_rows(), tile.first_row, nullptr};
      const ColumnsOnRight right{p.weight_rows(tile.group), 0, &p.columns};
      run_tile_rows_left(set, left, right, p.k, p.columns, tile, mine, epilogue);
    }
  });
}

template <Epilogue E>
void multiply_ragged_k(const Context& context, const RaggedK& p, const Workspace& workspace,
                       const E& epilogue) {
  const Kernels& set = kernels();
  ThreadPool& pool = *context.state().pool;
  const ScratchSize size = scratch_size(p);
  const Columns columns = Columns::plain(p.n);
  const TileLimits shape = tile_shape(p.groups.num_groups, p.m, kWgradRowStep, p.n, columns.chunk,
                                      tile_limits(p), pool.num_threads());
  const int64_t row_tiles = ceil_div(p.m, shape.rows);
  const int64_t column_tiles = ceil_div(p.n, shape.columns);
  pool.parallel_for(p.groups.num_groups * row_tiles * column_tiles, [&](int64_t task, int thread) {
    const int64_t group = task / (row_tiles * column_tiles);
    const int64_t row = task % row_tiles * shape.rows;
    const int64_t column = task / row_tiles % column_tiles * shape.columns;
    const Tile tile{group, row, std::min(shape.rows, p.m - row), column,
                    std::min(shape.columns, p.n - column)};
    const int64_t first_k = p.groups.offsets[group];
    const ColumnsOnLeft left{
        {p.a, p.a_row_idx, Scales::columnwise(p.a_scales, p.groups, group)}, first_k, row};
    const ColumnsOnRight right{
        {p.b, p.b_row_idx, Scales::columnwise(p.b_scales, p.groups, group)}, first_k, &columns};
    const Scratch mine(
        size, static_cast<char*>(workspace.data) + static_cast<size_t>(thread) * size.bytes());
    const int64_t num_k = p.groups.offsets[group + 1] - first_k;
    if (p.emulates) {
      emulate({left.matrix, false, first_k}, {right.matrix, false, first_k}, num_k, columns, tile,
              mine);
      finish(columns, tile, mine.sums, epilogue);
    } else {
      run_tile_rows_left(set, left, right, num_k, columns, tile, mine, epilogue);
    }
  });
}

}  // namespace moire::cpu::gemm
