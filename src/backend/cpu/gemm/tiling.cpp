#include "backend/cpu/gemm/tiling.h"

#include <algorithm>

namespace moire::cpu::gemm {
namespace {

// Tiles that each thread should get, so that the last ones are a small share of the whole.
constexpr int64_t kTilesPerThread = 8;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t step) { return divide_up(a, step) * step; }

}  // namespace

TileLimits limit_tiles(TileLimits most, int64_t rows, int64_t row_step, int64_t columns,
                       int64_t column_step) {
  return {std::min(most.rows, round_up(std::max<int64_t>(rows, 1), row_step)),
          std::min(most.columns, round_up(std::max<int64_t>(columns, 1), column_step))};
}

int64_t tile_columns(int64_t num_row_blocks, int64_t columns, int64_t step, int64_t limit,
                     int num_threads) {
  if (columns == 0) return step;
  const int64_t wanted = num_threads > 1 ? kTilesPerThread * num_threads : 1;
  const int64_t tiles_per_block = divide_up(wanted, std::max<int64_t>(num_row_blocks, 1));
  const int64_t most = std::min(limit, round_up(divide_up(columns, tiles_per_block), step));
  return even_block(columns, std::max(most, step), step);
}

int64_t even_block(int64_t rows, int64_t limit, int64_t step) {
  if (rows == 0) return step;
  return round_up(divide_up(rows, divide_up(rows, limit)), step);
}

RaggedRows::RaggedRows(const Groups& groups, TileLimits limits, int64_t row_step, int64_t columns,
                       int64_t column_step, int num_threads, int64_t* prefix)
    : groups_(groups), limits_(limits), row_step_(row_step), columns_(columns), prefix_(prefix) {
  for (int64_t g = 0; g < groups.num_groups; ++g) {
    prefix[g] = num_row_blocks_;
    const int64_t rows = groups.offsets[g + 1] - groups.offsets[g];
    num_row_blocks_ += divide_up(rows, even_block(rows, limits.rows, row_step));
  }
  prefix[groups.num_groups] = num_row_blocks_;
  tile_columns_ =
      gemm::tile_columns(num_row_blocks_, columns, column_step, limits.columns, num_threads);
  num_column_tiles_ = divide_up(columns, tile_columns_);
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
