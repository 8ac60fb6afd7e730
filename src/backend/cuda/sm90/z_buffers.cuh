// How 64 gate columns f ..., and their up partners, lie in z and in two buffers.
//
// Apart: blocks of at least 64, or halves: each is a run of 64 columns and has a buffer of its own.
// Woven: blocks of 1 to 32: both are the 128 columns from 2 f on, 64 to a buffer, and the columns
// of a lane go where the layout has them.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "backend/cuda/sm90/operands.cuh"
#include "backend/cuda/sm90/staging_buffers.cuh"

namespace moire::cuda::sm90 {

struct ZColumns {
  int32_t block;
  int32_t gate;  // 0: gate comes first
  int32_t is_halves;

  __device__ bool is_woven() const { return is_halves == 0 && block < kPanel; }
};

// A box of 16 rows x 64 columns of z between memory and a buffer, in either direction. `second` is
// the buffer's place: 0 or 1.
struct ZMap {
  CUtensorMap map;  // ragged; with halves where they are
  ZColumns columns;

  __device__ int32_t column(int32_t f, int32_t second) const {
    if (columns.is_woven()) return 2 * f + kPanel * second;
    const int32_t half = second ^ columns.gate;  // buffer 0 holds gate
    return 2 * (f - f % columns.block) + f % columns.block + half * columns.block;
  }
  __device__ void load(char* buffer, uint64_t* barrier, int32_t f, int32_t second,
                       const RaggedRow& r) const {
    if (columns.is_halves) {
      ptx::tma_load_5d(buffer, &map, barrier, f, second ^ columns.gate, r.row, r.end, r.wrap);
    } else {
      ptx::tma_load_4d(buffer, &map, barrier, column(f, second), r.row, r.end, r.wrap);
    }
  }
  __device__ void store(const char* buffer, int32_t f, int32_t second, const RaggedRow& r) const {
    if (columns.is_halves) {
      ptx::tma_store_5d(&map, buffer, f, second ^ columns.gate, r.row, r.end, r.wrap);
    } else {
      ptx::tma_store_4d(&map, buffer, column(f, second), r.row, r.end, r.wrap);
    }
  }
};

// Where a lane's two words of column group j are in woven buffers: with blocks of 1, (first,
// second) of each column; else both columns of each half.
struct WovenPlaces {
  uint32_t* low;
  uint32_t* high;

  __device__ WovenPlaces(char* buffer0, char* buffer1, const ZColumns& columns, int j, int row) {
    const int lane = threadIdx.x % 32, f = 8 * j + 2 * (lane % 4), b = columns.block;
    const int in_block = f & (b - 1);  // woven blocks are powers of two
    const int first = b == 1 ? 2 * f : 2 * (f - in_block) + in_block;
    low = word(buffer0, buffer1, first, row);
    high = word(buffer0, buffer1, b == 1 ? first + 2 : first + b, row);
  }

 private:
  static __device__ uint32_t* word(char* buffer0, char* buffer1, int column, int row) {
    char* const buffer = column < kPanel ? buffer0 : buffer1;
    const int c = column % kPanel;
    return reinterpret_cast<uint32_t*>(buffer + swizzled(row, c / 8) + c % 8 * 2);
  }
};

__device__ inline uint32_t low_halves(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x5410); }
__device__ inline uint32_t high_halves(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x7632); }

// Column groups j and j + 1 of gate and up, from registers to the buffers and back.
__device__ inline void write_z(char* buffer0, char* buffer1, const ZColumns& columns, int j,
                               const Words& gate, const Words& up) {
  if (!columns.is_woven()) {
    write_words(buffer0, j, gate);
    write_words(buffer1, j, up);
    return;
  }
  const int row = threadIdx.x % 32 / 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t first = columns.gate == 0 ? gate[i] : up[i];
    const uint32_t second = columns.gate == 0 ? up[i] : gate[i];
    const WovenPlaces places(buffer0, buffer1, columns, j + i / 2, row + i % 2 * 8);
    *places.low = columns.block == 1 ? low_halves(first, second) : first;
    *places.high = columns.block == 1 ? high_halves(first, second) : second;
  }
}

__device__ inline void read_z(char* buffer0, char* buffer1, const ZColumns& columns, int j,
                              Words& gate, Words& up) {
  if (!columns.is_woven()) {
    read_words(buffer0, j, gate);
    read_words(buffer1, j, up);
    return;
  }
  const int row = threadIdx.x % 32 / 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const WovenPlaces places(buffer0, buffer1, columns, j + i / 2, row + i % 2 * 8);
    const uint32_t low = *places.low, high = *places.high;
    const uint32_t first = columns.block == 1 ? low_halves(low, high) : low;
    const uint32_t second = columns.block == 1 ? high_halves(low, high) : high;
    gate[i] = columns.gate == 0 ? first : second;
    up[i] = columns.gate == 0 ? second : first;
  }
}

}  // namespace moire::cuda::sm90
