// A square of 128 x 128 codes on its way from rows to columns. Four rows by four columns are
// transposed in registers; the square lies in shared memory, a row for each of its columns.
#pragma once

#include <cstdint>

namespace moire::cuda {

// Four rows of four codes become four columns of them.
__device__ inline void transpose_four(uint32_t (&w)[4]) {
  const uint32_t a = __byte_perm(w[0], w[1], 0x5140), b = __byte_perm(w[2], w[3], 0x5140);
  const uint32_t c = __byte_perm(w[0], w[1], 0x7362), d = __byte_perm(w[2], w[3], 0x7362);
  w[0] = __byte_perm(a, b, 0x5410), w[1] = __byte_perm(a, b, 0x7632);
  w[2] = __byte_perm(c, d, 0x5410), w[3] = __byte_perm(c, d, 0x7632);
}

// Words of four codes change places so that neither writing nor reading meets a bank twice, where
// neighbouring lanes put four neighbouring columns each and read neighbouring units.
class alignas(16) TransposedTile {
 public:
  static constexpr int kSide = 128, kColumns = 4;

  // Rows 4 `word` ... of kColumns columns, the first of them a multiple of kColumns.
  __device__ void put(int column, int word, const uint32_t (&of_column)[kColumns]) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) words_[column + j][word ^ swap_of(column)] = of_column[j];
  }
  // So many columns, `stride` bytes apart. A block of kThreads calls it together.
  template <int kThreads>
  __device__ void store(uint8_t* to, int64_t stride, int columns) const {
    for (int i = static_cast<int>(threadIdx.x); i < kSide * kUnits; i += kThreads) {
      const int c = i / kUnits, u = i % kUnits;
      if (c >= columns) break;
      *reinterpret_cast<uint4*>(to + c * stride + 16 * u) = unit(c, u);
    }
  }

 private:
  static constexpr int kUnits = kSide / 16;
  // 16 rows of a column.
  __device__ uint4 unit(int column, int unit) const {
    const int swap = swap_of(column);
    uint4 v = *reinterpret_cast<const uint4*>(&words_[column][(4 * unit) ^ (swap & ~3)]);
    if ((swap & 1) != 0) v = {v.y, v.x, v.w, v.z};
    if ((swap & 2) != 0) v = {v.z, v.w, v.x, v.y};
    return v;
  }
  __device__ static int swap_of(int column) { return column / kColumns; }
  uint32_t words_[kSide][kSide / 4];
};

}  // namespace moire::cuda
