// Which tile of a grouped GEMM a number names. The numbering goes group by group, and within a
// group through bands of row tiles (tile_position.h), so that neighbours share operands in the L2.
// It follows from the offsets on the device; nobody else knows it.
#pragma once

#include "backend/cuda/device/groups.cuh"
#include "backend/cuda/device/tile_position.h"

namespace moire::cuda {

// How a tile of operands with scales is summed (sm90/careful_tiles.cuh).
enum class Care : int32_t {
  kNone,   // as if all scales were moderate, and stored if they were
  kFull,   // whatever they are
  kNoSums  // not at all: a tile that only passes by
};

// One tile of work, as all roles of a block get it.
struct WorkTile {
  int32_t is_valid;  // 0: there are no more
  int32_t group;     // num_groups: the tail
  int32_t first_m;   // ragged M: row from the group's first one; ragged K: row of the output
  int32_t first_n;
  int32_t first_row;   // of the group
  int32_t num_rows;    // of the group
  int32_t num_k;       // steps along the contracted dimension
  int32_t matrix = 0;  // the group's number in maps of weights; no walk knows it
  // Of operands with scales; no walk knows these either.
  int32_t number = 0;  // of tiles that the block drew before
  Care care = Care::kNone;
};

// Ragged M: tiles cover each group's rows, and the tail's with num_k = 0 where it is zeroed. Run by
// a whole warp.
template <int kTileM, int kTileN>
class RaggedMWalk {
 public:
  __device__ RaggedMWalk(const moire_groups& groups, int n, int num_k, bool zeroes_tail)
      : groups_(groups),
        tiles_n_((n + kTileN - 1) / kTileN),
        num_k_(num_k),
        num_segments_(static_cast<int32_t>(groups.num_groups) + (zeroes_tail ? 1 : 0)) {
    load();
  }

  // Tile `index`; calls come with rising indices.
  __device__ WorkTile at(int32_t index) {
    const int lane = threadIdx.x % 32;
    for (; first_ < num_segments_; first_ += 32, before_ = __shfl_sync(~0u, end_, 31), load()) {
      const unsigned behind = __ballot_sync(~0u, end_ > index);
      if (behind == 0) continue;
      const int owner = __ffs(behind) - 1;
      const int32_t rows = __shfl_sync(~0u, num_rows_, owner);
      const int32_t begin = __shfl_sync(~0u, owner == lane ? end_ - tiles_ : 0, owner);
      const int32_t tiles_m = (rows + kTileM - 1) / kTileM;
      const TilePosition p =
          tile_position(index - begin, tiles_m, tiles_n_, bands_of(tiles_m, kTileM, num_k_));
      const int32_t group = first_ + owner, first_row = __shfl_sync(~0u, first_row_, owner);
      const int32_t num_k = group == groups_.num_groups ? 0 : num_k_;  // of the tail
      return {1, group, p.m * kTileM, p.n * kTileN, first_row, rows, num_k};
    }
    return {};
  }

  // How many there are, once at() has found that there is no such tile.
  __device__ int32_t total() const { return before_; }

 private:
  // Each lane takes one of the next 32 segments.
  __device__ void load() {
    const int lane = threadIdx.x % 32;
    const int32_t segment = first_ + lane;
    RowRange rows{0, 0};
    if (segment < groups_.num_groups) {
      rows = rows_of(groups_, segment);
    } else if (segment < num_segments_) {
      rows = {rows_in_use(groups_), groups_.capacity};
    }
    first_row_ = static_cast<int32_t>(rows.begin);
    num_rows_ = static_cast<int32_t>(rows.size());
    tiles_ = (num_rows_ + kTileM - 1) / kTileM * tiles_n_;
    int32_t sum = tiles_;
    for (int step = 1; step < 32; step *= 2) {
      const int32_t other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    end_ = before_ + sum;
  }

  moire_groups groups_;
  int32_t tiles_n_, num_k_, num_segments_;
  int32_t first_ = 0, before_ = 0;  // segment of lane 0; tiles before it
  // This lane's segment.
  int32_t first_row_ = 0, num_rows_ = 0, tiles_ = 0, end_ = 0;
};

// Ragged K: every group has the same tiles of its m x n output; K runs over its rows.
template <int kTileM, int kTileN, int kTileK>
class RaggedKWalk {
 public:
  __device__ RaggedKWalk(const moire_groups& groups, int m, int n)
      : groups_(groups), tiles_m_((m + kTileM - 1) / kTileM), tiles_n_((n + kTileN - 1) / kTileN) {}

  __device__ WorkTile at(int32_t index) {
    const int32_t group = index / (tiles_m_ * tiles_n_);
    if (group >= groups_.num_groups) return {};
    const RowRange rows = rows_of(groups_, group);
    const auto num_rows = static_cast<int32_t>(rows.size());
    const int32_t num_k = (num_rows + kTileK - 1) / kTileK;
    const int64_t columns_bytes = int64_t{tiles_n_} * kTileN * num_k * 128;
    const TilePosition p = tile_position(index % (tiles_m_ * tiles_n_), tiles_m_, tiles_n_,
                                         bands_of(tiles_m_, kTileM, num_k, columns_bytes));
    return {1,        group, p.m * kTileM, p.n * kTileN, static_cast<int32_t>(rows.begin),
            num_rows, num_k};
  }

  __device__ int32_t total() const {
    return static_cast<int32_t>(groups_.num_groups) * tiles_m_ * tiles_n_;
  }

 private:
  moire_groups groups_;
  int32_t tiles_m_, tiles_n_;
};

}  // namespace moire::cuda
