// How kColumns gate columns f ..., and their up partners, lie in z and in a piece's buffers: 64, in
// two buffers, or 32, in the halves of one.
//
// Apart: halves, or blocks of at least kColumns: each is a run of kColumns and has its own place.
// Woven: smaller blocks: both are the 2 kColumns columns from 2 f on, 64 to a buffer, and the
// columns of a lane go where the layout has them.
#pragma once

#include "backend/cuda/sm90/operands.cuh"
#include "backend/cuda/sm90/staging_buffers.cuh"

namespace moire::cuda::sm90 {

template <int kColumns>
struct ZColumns {
  int32_t block;
  int32_t gate;  // 0: gate comes first
  int32_t is_halves;

  __host__ __device__ bool is_woven() const { return is_halves == 0 && block < kColumns; }
  // Of a box that holds gate, or up, of kColumns, or both.
  int64_t box_columns() const { return is_woven() ? kPanel : kColumns; }
  // Of gate (second: 0) or up (1) of column f.
  __device__ int32_t position(int32_t f, int32_t second) const {
    const int32_t in_block = f % block;
    return 2 * (f - in_block) + in_block + (second ^ gate) * block;
  }
};

// Piece i of z, from the first buffer on.
template <int kColumns>
struct ZPiece {
  static_assert(kColumns == 64 || kColumns == 32);
  static constexpr int kRowBytes = 2 * kColumns;

  char *gate, *up, *woven;  // this warp's rows

  template <class Buffers>
  __device__ ZPiece(const Buffers& buffers, int i)
      : gate(buffers.template place<kRowBytes>(2 * i)),
        up(buffers.template place<kRowBytes>(2 * i + 1)),
        woven(buffers.at(kColumns == 64 ? 2 * i : i)) {}
};

// The boxes of a piece between memory and its buffers.
template <int kColumns>
struct ZMap {
  CUtensorMap map;  // ragged; with halves where they are
  ZColumns<kColumns> columns;

  __device__ void load(const ZPiece<kColumns>& piece, uint64_t* barrier, int32_t f,
                       const RaggedRow& r) const {
    if (columns.is_halves) {
      ptx::tma_load_5d(piece.gate, &map, barrier, f, columns.gate, r.row, r.end, r.wrap);
      ptx::tma_load_5d(piece.up, &map, barrier, f, 1 - columns.gate, r.row, r.end, r.wrap);
    } else {
      ptx::tma_load_4d(piece.gate, &map, barrier, column_of(f, 0), r.row, r.end, r.wrap);
      if (is_one_box()) return;
      ptx::tma_load_4d(piece.up, &map, barrier, column_of(f, 1), r.row, r.end, r.wrap);
    }
  }
  __device__ void store(const ZPiece<kColumns>& piece, int32_t f, const RaggedRow& r) const {
    if (columns.is_halves) {
      ptx::tma_store_5d(&map, piece.gate, f, columns.gate, r.row, r.end, r.wrap);
      ptx::tma_store_5d(&map, piece.up, f, 1 - columns.gate, r.row, r.end, r.wrap);
    } else {
      ptx::tma_store_4d(&map, piece.gate, column_of(f, 0), r.row, r.end, r.wrap);
      if (is_one_box()) return;
      ptx::tma_store_4d(&map, piece.up, column_of(f, 1), r.row, r.end, r.wrap);
    }
  }
  // Which column of z lies at `column` of a piece's first (0) or second buffer; twice F or more:
  // none.
  __device__ int32_t column_of(int32_t f, int32_t buffer, int32_t column = 0) const {
    return columns.is_woven() ? 2 * f + buffer * kPanel + column
                              : columns.position(f + column, buffer);
  }

 private:
  __device__ bool is_one_box() const { return 2 * kColumns == kPanel && columns.is_woven(); }
};

// Where a lane's two words of column group j are in woven buffers: with blocks of 1, (first,
// second) of each column; else both columns of each half.
struct WovenPlaces {
  uint32_t* low;
  uint32_t* high;

  template <int kColumns>
  __device__ WovenPlaces(const ZPiece<kColumns>& piece, const ZColumns<kColumns>& columns, int j,
                         int row) {
    const int lane = threadIdx.x % 32, f = 8 * j + 2 * (lane % 4), b = columns.block;
    const int in_block = f & (b - 1);  // woven blocks are powers of two
    const int first = b == 1 ? 2 * f : 2 * (f - in_block) + in_block;
    low = word(piece, first, row);
    high = word(piece, b == 1 ? first + 2 : first + b, row);
  }

 private:
  template <int kColumns>
  static __device__ uint32_t* word(const ZPiece<kColumns>& piece, int column, int row) {
    char* const buffer = column < kPanel ? piece.woven : piece.up;  // of 32, all are in the first
    const int c = column % kPanel;
    return reinterpret_cast<uint32_t*>(buffer + swizzled(row, c / 8) + c % 8 * 2);
  }
};

__device__ inline uint32_t low_halves(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x5410); }
__device__ inline uint32_t high_halves(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x7632); }

// Column groups j and j + 1 of gate and up, from registers to the buffers and back.
template <int kColumns>
__device__ inline void write_z(const ZPiece<kColumns>& piece, const ZColumns<kColumns>& columns,
                               int j, const Words& gate, const Words& up) {
  if (!columns.is_woven()) {
    write_words<2 * kColumns>(piece.gate, j, gate);
    write_words<2 * kColumns>(piece.up, j, up);
    return;
  }
  const int row = threadIdx.x % 32 / 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t first = columns.gate == 0 ? gate[i] : up[i];
    const uint32_t second = columns.gate == 0 ? up[i] : gate[i];
    const WovenPlaces places(piece, columns, j + i / 2, row + i % 2 * 8);
    *places.low = columns.block == 1 ? low_halves(first, second) : first;
    *places.high = columns.block == 1 ? high_halves(first, second) : second;
  }
}

template <int kColumns>
__device__ inline void read_z(const ZPiece<kColumns>& piece, const ZColumns<kColumns>& columns,
                              int j, Words& gate, Words& up) {
  if (!columns.is_woven()) {
    read_words<2 * kColumns>(piece.gate, j, gate);
    read_words<2 * kColumns>(piece.up, j, up);
    return;
  }
  const int row = threadIdx.x % 32 / 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const WovenPlaces places(piece, columns, j + i / 2, row + i % 2 * 8);
    const uint32_t low = *places.low, high = *places.high;
    const uint32_t first = columns.block == 1 ? low_halves(low, high) : low;
    const uint32_t second = columns.block == 1 ? high_halves(low, high) : high;
    gate[i] = columns.gate == 0 ? first : second;
    up[i] = columns.gate == 0 ? second : first;
  }
}

}  // namespace moire::cuda::sm90
