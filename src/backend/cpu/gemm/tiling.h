// How the work of a grouped product is cut into tiles: a group, some of its rows, some columns.
// Nothing here changes a result, only how fast it comes.
#pragma once

#include <moire/groups.h>

#include <cstdint>
#include <string>

namespace moire::cpu::gemm {

// One task.
struct Tile {
  int64_t group;
  int64_t first_row, rows;  // in the batch for ragged M, in the group's matrix for ragged K
  int64_t first_column, columns;
};

// The largest tile of a problem; scratch is sized by it.
struct TileLimits {
  int64_t rows;
  int64_t columns;
};

// Rows up to `most.rows` and columns up to `most.columns`, both whole steps, no larger than the
// problem.
TileLimits limit_tiles(TileLimits most, int64_t rows, int64_t row_step, int64_t columns,
                       int64_t column_step);

// Columns of a tile, a multiple of `step` and at most `limit`, where `num_blocks` blocks of rows
// are cut this way: the number with the least estimated time on `num_threads` threads, which weighs
// what is packed again for each tile against threads that idle at the end.
int64_t tile_columns(int64_t num_blocks, int64_t columns, int64_t step, int64_t limit,
                     int num_threads);

// The same in both directions for `num_groups` outputs [rows, columns].
TileLimits tile_shape(int64_t num_groups, int64_t rows, int64_t row_step, int64_t columns,
                      int64_t column_step, TileLimits limits, int num_threads);

// Rows of each block when `rows` are cut into the fewest blocks of at most `limit`, evenly, in
// steps.
int64_t even_block(int64_t rows, int64_t limit, int64_t step);

// Tiles of ragged M: groups in order, of each its columns, of these its row blocks.
class RaggedRows {
 public:
  // `prefix` has room for groups.num_groups + 1 numbers, and lives as long as this.
  RaggedRows(const Groups& groups, TileLimits limits, int64_t row_step, int64_t columns,
             int64_t column_step, int num_threads, int64_t* prefix);

  int64_t count() const { return num_row_blocks_ * num_column_tiles_; }
  Tile tile(int64_t task) const;

 private:
  Groups groups_;
  TileLimits limits_;
  int64_t row_step_;
  int64_t columns_;
  int64_t num_row_blocks_ = 0;
  int64_t tile_columns_ = 1;
  int64_t num_column_tiles_ = 0;
  const int64_t* prefix_;  // row blocks before each group
};

}  // namespace moire::cpu::gemm
