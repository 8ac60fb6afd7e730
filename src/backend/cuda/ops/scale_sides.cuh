// The scales of one group in a layout of MXFP8's (core/scale_layouts.h), as convert_scales loads
// and stores them: in squares, four blocks of four rows or columns, words where they lie in fours.
#pragma once

#include <cstdint>
#include <cstring>

#include "backend/cuda/device/fp8.cuh"
#include "backend/cuda/device/transposed_tile.cuh"
#include "backend/cuda/device/warp.cuh"
#include "core/scale_layouts.h"

namespace moire::cuda::ops {

// The scales of all groups.
struct Side {
  uint8_t* data;
  int32_t layout;
  int64_t pitch, num_rows, columns;

  __device__ bool is_canonical() const { return layout == MOIRE_SCALES_CANONICAL; }
};

// Sixteen scales of a thread: four blocks, which are a word on the padded side, of each of four
// neighbouring rows or columns (outers).
struct Square {
  uint32_t o, b, outers, blocks;  // the first ones; how many there are
  uint32_t words[4];

  __device__ bool has_outer(uint32_t i) const { return o + i < outers; }
  __device__ bool has_block(uint32_t j) const { return b + j < blocks; }
};

// Words i of four neighbouring lanes become those of lane i. A warp calls it together.
__device__ inline void transpose_lanes(uint32_t (&w)[4]) {
#pragma unroll
  for (uint32_t bit = 1; bit < 4; bit *= 2) {
    const bool is_upper = (threadIdx.x & bit) != 0;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      if ((i & bit) != 0) continue;
      const uint32_t got = __shfl_xor_sync(kAllLanes, is_upper ? w[i] : w[i + bit], bit);
      (is_upper ? w[i] : w[i + bit]) = got;
    }
  }
}

// A group's scales on the side that is not padded.
template <bool kIsRowwise>
class PlainScales {
 public:
  __device__ PlainScales(const Side& side, const GroupScales& at, bool opens_words)
      : first_(side.data + at.offset(0, 0)), pitch_(at.pitch), opens_words_(opens_words) {}

  __device__ void load(Square& square) const {
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      uint32_t& word = square.words[i] = 0;
      if (opens_words_) {
        if (has_word(square, i)) word = word_of(square, i);
        continue;
      }
#pragma unroll
      for (uint32_t j = 0; j < 4; ++j) {
        if (square.has_outer(i) && square.has_block(j)) word |= byte_of(square, i, j) << (8 * j);
      }
    }
    if (opens_words_ && !kIsRowwise) transpose_four(square.words);
  }
  __device__ void store(Square& square) const {
    if (opens_words_ && !kIsRowwise) transpose_four(square.words);
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      const uint32_t word = square.words[i];
      if (opens_words_) {
        if (has_word(square, i)) word_of(square, i) = word;
        continue;
      }
#pragma unroll
      for (uint32_t j = 0; j < 4; ++j) {
        if (square.has_outer(i) && square.has_block(j)) byte_of(square, i, j) = word >> (8 * j);
      }
    }
  }

 private:
  // Words lie along the blocks of a row, or along the columns of a block.
  __device__ static bool has_word(const Square& square, uint32_t i) {
    return square.has_outer(kIsRowwise ? i : 0) && square.has_block(kIsRowwise ? 0 : i);
  }
  __device__ uint32_t& word_of(const Square& square, uint32_t i) const {
    return reinterpret_cast<uint32_t&>(byte_of(square, kIsRowwise ? i : 0, kIsRowwise ? 0 : i));
  }
  __device__ uint8_t& byte_of(const Square& square, uint32_t i, uint32_t j) const {
    const uint32_t o = square.o + i, b = square.b + j;
    return first_[kIsRowwise ? o * pitch_ + b : b * pitch_ + o];
  }

  uint8_t* first_;
  uint32_t pitch_;
  bool opens_words_;
};

// The same on the padded side, on which there are zeros behind the last outer.
template <bool kIsSwizzled>
class PaddedScales {
 public:
  __device__ PaddedScales(const Side& side, const GroupScales& at)
      : first_(side.data + at.offset(0, 0)), blocks_(at.padded_blocks) {}

  // A warp calls these together: words that lie side by side, swizzled, are of four lanes.
  __device__ void load(Square& square) const {
    if constexpr (kIsSwizzled) {
      if (square.has_block(0)) {
        const uint4 row = row_of(square);
        memcpy(square.words, &row, sizeof(row));
      }
      transpose_lanes(square.words);
    } else if (square.has_block(0)) {
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) square.words[i] = word_at(square.o + i, square.b);
    }
  }
  __device__ void store(Square& square) const {
    if constexpr (kIsSwizzled) {
      transpose_lanes(square.words);
      if (square.has_block(0)) row_of(square) = bits_as<uint4>(square.words);
    } else if (square.has_block(0)) {
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) word_at(square.o + i, square.b) = square.words[i];
    }
  }
  __device__ uint8_t byte_at(uint32_t outer, uint32_t block) const {
    return word_at(outer, block / 4 * 4) >> (8 * (block % 4));
  }
  // Four from here on, of which the last may be the next outer's: each has so many, at least four.
  __device__ uint32_t four_at(uint32_t outer, uint32_t block, uint32_t blocks) const {
    const uint32_t even = block / 4 * 4, left = blocks - block;
    const uint32_t next = even + 4 < blocks ? word_at(outer, even + 4) : 0;
    const uint32_t four = __funnelshift_r(word_at(outer, even), next, 8 * (block % 4));
    if (left >= 4) return four;
    return (four & ((1U << (8 * left)) - 1)) | word_at(outer + 1, 0) << (8 * left);
  }

 private:
  // Four blocks of an outer.
  __device__ uint32_t& word_at(uint32_t outer, uint32_t block) const {
    const uint32_t at = kIsSwizzled
                            ? tile_of(outer, block) + 16 * (outer % 32) + outer % 128 / 32 * 4
                            : outer * blocks_ + block;
    return reinterpret_cast<uint32_t&>(first_[at]);
  }
  // Of four lanes, whose outers lie 32 apart, the words of this one's in turn.
  __device__ uint4& row_of(const Square& square) const {
    const uint32_t lane = threadIdx.x % 4, outer = square.o - 32 * lane + lane;
    return reinterpret_cast<uint4&>(first_[tile_of(outer, square.b) + 16 * (outer % 128)]);
  }
  __device__ uint32_t tile_of(uint32_t outer, uint32_t block) const {
    return (outer / 128 * blocks_ + block) * 128;
  }

  uint8_t* first_;
  uint32_t blocks_;
};

}  // namespace moire::cuda::ops
