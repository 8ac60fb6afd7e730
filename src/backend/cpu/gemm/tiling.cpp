#include "backend/cpu/gemm/tiling.h"

#include <algorithm>

#include "core/divide.h"

namespace moire::cpu::gemm {
namespace {

// Packing an element for a tile costs as much as multiplying it this many times (measured: 6 to 8
// elements per ns are packed while 50 multiply-adds are done).
constexpr double kPackingCost = 8;
// Threads take tiles as they get free, so all end within one tile's time: half of it on average is
// idle, on all threads but the last.
double estimated_time(double total, double tile, int num_threads) {
  return (total + 0.5 * tile * (num_threads - 1)) / num_threads;
}

}  // namespace

TileLimits limit_tiles(TileLimits most, int64_t rows, int64_t row_step, int64_t columns,
                       int64_t column_step) {
  return {std::min(most.rows, round_up(std::max<int64_t>(rows, 1), row_step)),
          std::min(most.columns, round_up(std::max<int64_t>(columns, 1), column_step))};
}

int64_t tile_columns(int64_t num_blocks, int64_t columns, int64_t step, int64_t limit,
                     int num_threads) {
  int64_t best = step;
  double best_time = -1;
  for (int64_t parts = ceil_div(std::max<int64_t>(columns, 1), limit);; ++parts) {
    const int64_t size = std::max(round_up(ceil_div(columns, parts), step), step);
    const auto packings = static_cast<double>(ceil_div(columns, size));
    const double total =
        static_cast<double>(num_blocks) * (static_cast<double>(columns) + kPackingCost * packings);
    const double time =
        estimated_time(total, static_cast<double>(size) + kPackingCost, num_threads);
    if (best_time < 0 || time < best_time) {
      best = size;
      best_time = time;
    }
    if (size <= step) return best;
  }
}

TileLimits tile_shape(int64_t num_groups, int64_t rows, int64_t row_step, int64_t columns,
                      int64_t column_step, TileLimits limits, int num_threads) {
  TileLimits best = limits;
  double best_time = -1;
  for (int64_t parts = ceil_div(std::max<int64_t>(rows, 1), limits.rows);; ++parts) {
    const int64_t height = std::max(round_up(ceil_div(rows, parts), row_step), row_step);
    const int64_t blocks = ceil_div(rows, height);
    const int64_t width =
        tile_columns(num_groups * blocks, columns, column_step, limits.columns, num_threads);
    const auto h = static_cast<double>(height), w = static_cast<double>(width);
    const auto m = static_cast<double>(rows), n = static_cast<double>(columns);
    const double packed =
        m * static_cast<double>(ceil_div(columns, width)) + n * static_cast<double>(blocks);
    const double time =
        estimated_time(static_cast<double>(num_groups) * (m * n + kPackingCost * packed),
                       h * w + kPackingCost * (h + w), num_threads);
    if (best_time < 0 || time < best_time) {
      best = {height, width};
      best_time = time;
    }
    if (height <= row_step) return best;
  }
}

int64_t even_block(int64_t rows, int64_t limit, int64_t step) {
  if (rows == 0) return step;
  return round_up(ceil_div(rows, ceil_div(rows, limit)), step);
}

RaggedRows::RaggedRows(const Groups& groups, TileLimits limits, int64_t row_step, int64_t columns,
                       int64_t column_step, int num_threads, int64_t* prefix)
    : groups_(groups), limits_(limits), row_step_(row_step), columns_(columns), prefix_(prefix) {
  for (int64_t g = 0; g < groups.num_groups; ++g) {
    prefix[g] = num_row_blocks_;
    const int64_t rows = groups.offsets[g + 1] - groups.offsets[g];
    num_row_blocks_ += ceil_div(rows, even_block(rows, limits.rows, row_step));
  }
  prefix[groups.num_groups] = num_row_blocks_;
  tile_columns_ =
      gemm::tile_columns(num_row_blocks_, columns, column_step, limits.columns, num_threads);
  num_column_tiles_ = ceil_div(columns, tile_columns_);
}

Tile RaggedRows::tile(int64_t task) const {
  const int64_t block = task / num_column_tiles_;
  const int64_t g =
      std::upper_bound(prefix_, prefix_ + groups_.num_groups + 1, block) - prefix_ - 1;
  const int64_t blocks = prefix_[g + 1] - prefix_[g];
  const int64_t within = task - prefix_[g] * num_column_tiles_;
  const int64_t begin = groups_.offsets[g], rows = groups_.offsets[g + 1] - begin;
  const int64_t step = even_block(rows, limits_.rows, row_step_);
  const int64_t row = within % blocks * step;
  const int64_t column = within / blocks * tile_columns_;
  return {g, begin + row, std::min(step, rows - row), column,
          std::min(tile_columns_, columns_ - column)};
}

}  // namespace moire::cpu::gemm
