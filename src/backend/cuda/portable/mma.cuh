// The engine for two operands of one kind, of 16 bits in shared memory: tensor cores, 16 steps of k
// per instruction. A warp holds 16 x 32 sums, of each half where gate and up are made together.
// Slices keep the operands' own order: [64 lines][k] where k is contiguous, [k][64 lines]
// otherwise; ldmatrix turns the latter. Their pitches put 8 rows of 16 bytes into different banks.
// Behind a slice lie its 64 lines' scales, where sums of products are scaled.
#pragma once

#include "backend/cuda/portable/gemm.cuh"
#include "backend/cuda/portable/operand.cuh"
#include "backend/cuda/ptx/matrix.cuh"
#include "backend/cuda/ptx/mbarrier.cuh"

namespace moire::cuda::portable::gemm {

// What the engine is given eight elements of: those of 16 bits as they are, FP8 ones decoded into
// BF16, which has every value of theirs.
//
// MXFP8 scales are applied there, for a power of two moves a BF16 number onto another: exactly,
// where data * scale is one. Below 2^-133 none is, and what is lost lies within the bound of
// docs/numerics.md. Scales of 128 elements need not be powers of two: they are applied to sums of
// 128 products, in FP32.
inline constexpr int kPiece = 8;  // elements that are fetched at once
using Values = Packed<uint16_t, kPiece>;

// `Raw` elements are fetched. kScalesElements: values() needs the scale of each.
// kScalesSums: sums of kScaledSums products are scaled.
template <class T>
struct Floats16 {
  static constexpr const char* kName = "16-bit tensor cores";
  static constexpr bool kScalesElements = false, kScalesSums = false;
  using Raw = uint16_t;
  using Product = T;

  template <class Scale>
  __device__ static Values values(const Operand&, const Packed<Raw, kPiece>& raw, const Scale&) {
    return raw;
  }
};

template <bool kIsMx>
struct Fp8Elements {
  static constexpr const char* kName =
      kIsMx ? "MXFP8 decoded for 16-bit tensor cores"
            : "FP8 decoded for 16-bit tensor cores, sums of 128 products scaled";
  static constexpr bool kScalesElements = kIsMx, kScalesSums = !kIsMx;
  using Raw = uint8_t;
  using Product = __nv_bfloat16;

  // `scale(i)` is that of element i.
  template <class Scale>
  __device__ static Values values(const Operand& operand, const Packed<Raw, kPiece>& raw,
                                  const Scale& scale) {
    Packed<__nv_bfloat16, kPiece> values;
#pragma unroll
    for (int i = 0; i < kPiece; ++i) {
      const float v = operand.decoded(raw.values[i]);
      values.set(i, kIsMx ? v * scale(i) : v);
    }
    return bit_cast<Values>(values);
  }
};
struct MxElements : Fp8Elements<true> {};
struct BlockElements : Fp8Elements<false> {};
inline constexpr int64_t kScaledSums = 128;

template <class Elements>
struct Mma : Fetching<32, kPiece> {
  static constexpr const char* kName = Elements::kName;
  // FP8 weights are packed: their scales are one tensor.
  static constexpr bool kTakesLists = !Elements::kScalesElements && !Elements::kScalesSums;
  static constexpr int kAlongPitch = kDepth + 8, kAcrossPitch = kTile + 8;
  static constexpr size_t kElementBytes = size_t{kTile} * kAlongPitch * sizeof(uint16_t);
  static_assert(kElementBytes >= size_t{kDepth} * kAcrossPitch * sizeof(uint16_t));
  static constexpr size_t kSliceBytes =
      kElementBytes + (Elements::kScalesSums ? kTile * sizeof(float) : 0);
  static_assert(kScaledSums % kDepth == 0);

  using Raw = typename Elements::Raw;
  using Product = typename Elements::Product;
  using Pieces = Packed<Raw, kColumns>;

  // Which row of which of its four matrices a lane gives ldmatrix, and which half of 16 lines and
  // of 16 of k that matrix is: of 16 x 16 on the left; of 16 columns by 16 of k on the right.
  __device__ static int matrix() { return static_cast<int>(threadIdx.x) % 32 / 8; }
  __device__ static int matrix_row() { return static_cast<int>(threadIdx.x) % 8; }
  __device__ static int half_of_lines(bool is_left) {
    return (is_left ? matrix() % 2 : matrix() / 2) * 8;
  }
  __device__ static int half_of_k(bool is_left) { return half_of_lines(!is_left); }
  __device__ static uint32_t address(const unsigned char* slice, int pitch, int row, int column) {
    return ptx::shared_address(reinterpret_cast<const uint16_t*>(slice) + row * pitch + column);
  }

  // Whether a step from k on needs scales of its own, and is the last that has them.
  __device__ static bool begins_scales(int64_t k) {
    return Elements::kScalesElements || (Elements::kScalesSums && k % kScaledSums == 0);
  }
  __device__ static bool ends_scaled_sums(int64_t k, int64_t k_end) {
    return Elements::kScalesSums && ((k + kDepth) % kScaledSums == 0 || k + kDepth >= k_end);
  }
  __device__ static float* scales_of(unsigned char* slice) {
    return reinterpret_cast<float*>(slice + kElementBytes);
  }
  // sum + products * a * b. The smaller scale comes first: with it a sum of products overflows, or
  // is lost, only where the result is.
  __device__ static float add_scaled(float products, float a, float b, float sum) {
    return fmaf(products * (a < b ? a : b), a < b ? b : a, sum);
  }
  // Whether pieces at multiples of their size from here on are aligned.
  __device__ static bool opens_pieces(const Raw* data, int64_t elements) {
    return (reinterpret_cast<uintptr_t>(data) | static_cast<uint64_t>(elements) * sizeof(Raw)) %
               sizeof(Pieces) ==
           0;
  }

  class AlongK {
   public:
    __device__ AlongK(const Operand& matrix, int64_t row, int64_t k_end)
        : matrix_(matrix),
          row_(row),
          k_end_(k_end),
          data_(static_cast<const Raw*>(matrix.elements.data) + row * matrix.elements.stride),
          is_vector_(opens_pieces(data_, k_end)) {}

    __device__ void fetch(int64_t k) {
      raw_ = {};
      const int64_t first = k + first_step();
      if (row_ < 0 || first >= k_end_) return;
      if (begins_scales(k)) scale_ = matrix_.scales.at(row_, first);
      if (is_vector_) {
        raw_ = load<kColumns>(data_ + first);
        return;
      }
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        if (first + i < k_end_) raw_.values[i] = data_[first + i];
      }
    }
    __device__ void put(unsigned char* slice) const {
      store(reinterpret_cast<uint16_t*>(slice) + line() * kAlongPitch + first_step(),
            Elements::values(matrix_, raw_, [&](int) { return scale_; }));
    }
    __device__ void put_scales(unsigned char* slice) const {
      if (first_step() == 0) scales_of(slice)[line()] = scale_;
    }

    __device__ static void load_matrices(bool is_left, const unsigned char* slice, int line, int k,
                                         uint32_t (&values)[4]) {
      const int row = line + half_of_lines(is_left) + matrix_row(), column = k + half_of_k(is_left);
      ptx::ldmatrix_x4(address(slice, kAlongPitch, row, column), values);
    }

   private:
    Operand matrix_;
    int64_t row_, k_end_;
    const Raw* data_;  // of the row
    bool is_vector_;
    Pieces raw_;
    float scale_ = 1;
  };

  template <class RowOf>
  class AcrossK {
   public:
    __device__ AcrossK(const Operand& matrix, const RowOf& row_of,
                       const int64_t (&columns)[kColumns], int64_t k_end)
        : matrix_(matrix), row_of_(row_of), k_end_(k_end) {
      is_vector_ = columns[0] >= 0 && opens_pieces(data() + columns[0], matrix.elements.stride);
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        columns_[i] = columns[i];
        is_vector_ = is_vector_ && columns[i] == columns[0] + i;
        scales_[i] = 1;
      }
    }

    __device__ void fetch(int64_t k) {
      raw_ = {};
      const int64_t at = k + step(), row = at < k_end_ ? row_of_(at) : -1;
      if (row < 0) return;
      if (begins_scales(k)) {
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
          if (columns_[i] >= 0) scales_[i] = matrix_.scales.at(row, columns_[i]);
        }
      }
      const Raw* const from = data() + row * matrix_.elements.stride;
      if (is_vector_) {
        raw_ = load<kColumns>(from + columns_[0]);
        return;
      }
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        if (columns_[i] >= 0) raw_.values[i] = from[columns_[i]];
      }
    }
    __device__ void put(unsigned char* slice) const {
      store(reinterpret_cast<uint16_t*>(slice) + step() * kAcrossPitch + first_column(),
            Elements::values(matrix_, raw_, [&](int i) { return scales_[i]; }));
    }
    __device__ void put_scales(unsigned char* slice) const {
      if (step() != 0) return;
#pragma unroll
      for (int i = 0; i < kColumns; ++i) scales_of(slice)[first_column() + i] = scales_[i];
    }

    __device__ static void load_matrices(bool is_left, const unsigned char* slice, int line, int k,
                                         uint32_t (&values)[4]) {
      const int row = k + half_of_k(is_left) + matrix_row(), column = line + half_of_lines(is_left);
      ptx::ldmatrix_x4_transposed(address(slice, kAcrossPitch, row, column), values);
    }

   private:
    __device__ const Raw* data() const { return static_cast<const Raw*>(matrix_.elements.data); }

    Operand matrix_;
    RowOf row_of_;
    int64_t k_end_;
    bool is_vector_;
    int64_t columns_[kColumns];
    Pieces raw_;
    float scales_[kColumns];
  };

  template <class Memory, int kHalves, class Left, class Right>
  __device__ static void multiply(Left left, Right (&right)[kHalves], int64_t k_end) {
    constexpr int kStep = 16, kPairs = 2;  // of 16 columns each, which are two instructions
    constexpr int kSums = 4 * kPairs * 2;  // of a thread
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int row = warp % 4 * 16, column = warp / 4 * 32;
    // Where in the tile a thread's sums lie.
    const auto row_of = [&](int i) { return row + i % 4 / 2 * 8 + lane / 4; };
    const auto column_of = [&](int i) { return column + i / 4 * 8 + lane % 4 * 2 + i % 2; };
    float products[kHalves][kSums / 4][4] = {}, scaled[kHalves][kSums] = {};
    left.fetch(0);
    for (int h = 0; h < kHalves; ++h) right[h].fetch(0);
    for (int64_t k = 0; k < k_end; k += kDepth) {
      __syncthreads();
      left.put(Memory::slice(0));
      for (int h = 0; h < kHalves; ++h) right[h].put(Memory::slice(1 + h));
      if (Elements::kScalesSums && begins_scales(k)) {
        left.put_scales(Memory::slice(0));
        for (int h = 0; h < kHalves; ++h) right[h].put_scales(Memory::slice(1 + h));
      }
      __syncthreads();
      if (k + kDepth < k_end) {
        left.fetch(k + kDepth);
        for (int h = 0; h < kHalves; ++h) right[h].fetch(k + kDepth);
      }
#pragma unroll
      for (int step = 0; step < kDepth; step += kStep) {
        uint32_t a[4];
        Left::load_matrices(true, Memory::slice(0), row, step, a);
#pragma unroll
        for (int h = 0; h < kHalves; ++h) {
#pragma unroll
          for (int pair = 0; pair < kPairs; ++pair) {
            uint32_t b[4];
            Right::load_matrices(false, Memory::slice(1 + h), column + 16 * pair, step, b);
            ptx::mma_m16n8k16<Product>(a, b[0], b[1], products[h][2 * pair]);
            ptx::mma_m16n8k16<Product>(a, b[2], b[3], products[h][2 * pair + 1]);
          }
        }
      }
      if (!ends_scaled_sums(k, k_end)) continue;
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) {
          scaled[h][i] =
              add_scaled(products[h][i / 4][i % 4], scales_of(Memory::slice(0))[row_of(i)],
                         scales_of(Memory::slice(1 + h))[column_of(i)], scaled[h][i]);
          products[h][i / 4][i % 4] = 0;
        }
      }
    }
    __syncthreads();
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        Memory::plane(h)[row_of(i)][column_of(i)] =
            Elements::kScalesSums ? scaled[h][i] : products[h][i / 4][i % 4];
      }
    }
    __syncthreads();
  }
};

}  // namespace moire::cuda::portable::gemm
