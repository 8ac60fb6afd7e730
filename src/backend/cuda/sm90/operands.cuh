// Operands of the SM90 grouped GEMM: which boxes fill a stage, and which tiles there are.
#pragma once

#include "backend/cuda/device/tile_walk.cuh"
#include "backend/cuda/ptx/tma.cuh"
#include "backend/cuda/ptx/wgmma.cuh"

namespace moire::cuda::sm90 {

using ptx::Major;

inline constexpr int32_t kPanel = 64;  // columns of 128 bytes

// Coordinates 1 to 3 of row i of `num_rows` rows from `first_row` on in a ragged map
// (runtime/tensor_map.h): rows past the last are outside the map.
struct RaggedRow {
  int32_t row, end, wrap;
};
__device__ inline RaggedRow ragged_row(const WorkTile& tile, int32_t i) {
  constexpr int32_t kRaggedRows = 1 << 30;
  return {kRaggedRows - tile.num_rows + i, tile.first_row + tile.num_rows, kRaggedRows};
}

// The number of a group's matrix in the maps of the weights (runtime/tensor_map.h).
struct MatrixNumbers {
  void* const* listed = nullptr;  // of a list, its addresses (ops/listed_matrices.h); else null
  uintptr_t first = 0;
  int32_t log2_distance = 0;

  __device__ int32_t of(int32_t group) const {
    if (listed == nullptr) return group;
    const auto address = reinterpret_cast<uintptr_t>(listed[group]);
    return static_cast<int32_t>((address - first) >> log2_distance);
  }
};

// Rows of a in a stage: boxes of `box` rows, all of a tile's or, where groups are small, a divisor
// of them, and as many boxes as have rows of the group. What lies in the stage below those is
// multiplied and not stored, whatever it is.
struct RowBoxes {
  CUtensorMap map;  // {k, rows}; box {128 bytes, box}
  int32_t box;

  template <class P>
  __device__ int stage_bytes(const WorkTile& tile) const {
    if (box == P::kTileM) return P::kABytes;
    return (rows_of<P>(tile) + box - 1) / box * box * P::kTileKBytes;
  }
  __device__ void load(char* to, uint64_t* barrier, const WorkTile& tile, int32_t k0) const {
    ptx::tma_load_2d(to, &map, barrier, k0, tile.first_row + tile.first_m);
  }
  // The boxes behind the first.
  template <class P>
  __device__ void load_rest(char* to, uint64_t* barrier, const WorkTile& tile, int32_t k0) const {
    if (box == P::kTileM) return;
    const int32_t rows = rows_of<P>(tile);
    for (int32_t i = box; i < rows; i += box) {
      ptx::tma_load_2d(to + i * P::kTileKBytes, &map, barrier, k0,
                       tile.first_row + tile.first_m + i);
    }
  }

 private:
  template <class P>
  static __device__ int32_t rows_of(const WorkTile& tile) {
    return min(P::kTileM, tile.num_rows - tile.first_m);
  }
};

// d = a * op(b), a [capacity, k]. Rows of a past the group's end are multiplied too; what comes of
// them is not stored.
template <Major kWeights>
struct RaggedM {
  static constexpr Major kA = Major::kK, kB = kWeights;

  RowBoxes a;
  // K-major {k, n, matrices}, box {64, tile_n, 1}. Else, in panels of 64 columns, {64, k, n / 64,
  // matrices}, box {64, 64, tile_n / 64, 1}; or {n, k, matrices}, {64, 64, 1}, if 64 does not
  // divide n.
  CUtensorMap b;
  int32_t n, k;
  int32_t zeroes_tail;
  int32_t has_panels;

  template <class P>
  __device__ auto walk(const moire_groups& groups) const {
    return RaggedMWalk<P::kTileM, P::kTileN>(groups, n, (k + P::kTileK - 1) / P::kTileK,
                                             zeroes_tail != 0);
  }
  __device__ int32_t rows_of_output(const WorkTile& tile) const { return tile.num_rows; }
  template <class P>
  __device__ int stage_bytes(const WorkTile& tile) const {
    return P::kStageBytes - P::kABytes + a.stage_bytes<P>(tile);
  }

  template <class P, class Stage>
  __device__ void load(Stage& stage, uint64_t* barrier, const WorkTile& tile, int32_t k0) const {
    a.load(stage.a, barrier, tile, k0);
    if constexpr (kB == Major::kK) {
      ptx::tma_load_3d(stage.b, &b, barrier, k0, tile.first_n, tile.matrix);
    } else if (has_panels != 0) {
      ptx::tma_load_4d(stage.b, &b, barrier, 0, k0, tile.first_n / kPanel, tile.matrix);
    } else {
#pragma unroll
      for (int i = 0; i < P::kTileN / kPanel; ++i) {
        ptx::tma_load_3d(stage.b + i * kPanel * P::kTileK * 2, &b, barrier,
                         tile.first_n + i * kPanel, k0, tile.matrix);
      }
    }
    a.load_rest<P>(stage.a, barrier, tile, k0);
  }
};

// The same with weights [groups, 2F, k] whose gate and up rows are taken apart while they are
// loaded: the tile's first half holds gate rows f0 ..., its second the up rows of the same f. What
// a box of halves holds past its half is multiplied and not stored.
struct GluPairs {
  static constexpr Major kA = Major::kK, kB = Major::kK;

  RowBoxes a;
  // Halves {k, 2F, matrices}, blocks {k, block, 2, F / block, matrices}; box of half a tile's rows.
  CUtensorMap b;
  int32_t f, k;
  int32_t block;  // f: halves
  int32_t gate;   // 0: gate comes first
  int32_t zeroes_tail;

  template <class P>
  __device__ auto walk(const moire_groups& groups) const {
    return RaggedMWalk<P::kTileM, P::kTileN / 2>(groups, f, (k + P::kTileK - 1) / P::kTileK,
                                                 zeroes_tail != 0);
  }
  __device__ int32_t rows_of_output(const WorkTile& tile) const { return tile.num_rows; }
  template <class P>
  __device__ int stage_bytes(const WorkTile& tile) const {
    return P::kBBytes + a.stage_bytes<P>(tile);
  }

  template <class P, class Stage>
  __device__ void load(Stage& stage, uint64_t* barrier, const WorkTile& tile, int32_t k0) const {
    a.load(stage.a, barrier, tile, k0);
    if (block == f) {  // without a division, which would hold up each step's loads
      ptx::tma_load_3d(stage.b, &b, barrier, k0, tile.first_n + gate * f, tile.matrix);
      ptx::tma_load_3d(stage.b + P::kBBytes / 2, &b, barrier, k0, tile.first_n + (1 - gate) * f,
                       tile.matrix);
    } else {
      const int32_t in_block = tile.first_n % block, index = tile.first_n / block;
      ptx::tma_load_5d(stage.b, &b, barrier, k0, in_block, gate, index, tile.matrix);
      ptx::tma_load_5d(stage.b + P::kBBytes / 2, &b, barrier, k0, in_block, 1 - gate, index,
                       tile.matrix);
    }
    a.load_rest<P>(stage.a, barrier, tile, k0);
  }
};

// d_g = a_g^T * b_g over the rows of a group; rows past its end are loaded as zeros.
struct RaggedK {
  static constexpr Major kA = Major::kMN, kB = Major::kMN;

  CUtensorMap a;  // ragged {m, ...}; box {64, 64}
  CUtensorMap b;  // ragged {n, ...}
  int32_t m, n;

  template <class P>
  __device__ auto walk(const moire_groups& groups) const {
    return RaggedKWalk<P::kTileM, P::kTileN, P::kTileK>(groups, m, n);
  }
  __device__ int32_t rows_of_output(const WorkTile&) const { return m; }
  template <class P>
  __device__ int stage_bytes(const WorkTile&) const {
    return P::kStageBytes;
  }

  template <class P, class Stage>
  __device__ void load(Stage& stage, uint64_t* barrier, const WorkTile& tile, int32_t k0) const {
    const RaggedRow r = ragged_row(tile, k0);
    const auto load_panels = [&](char* to, const CUtensorMap& map, int32_t first, int columns) {
#pragma unroll
      for (int i = 0; i < columns / kPanel; ++i) {
        ptx::tma_load_4d(to + i * kPanel * P::kTileK * 2, &map, barrier, first + i * kPanel, r.row,
                         r.end, r.wrap);
      }
    };
    load_panels(stage.a, a, tile.first_m, P::kTileM);
    load_panels(stage.b, b, tile.first_n, P::kTileN);
  }
};

}  // namespace moire::cuda::sm90
