// Epilogue of wgrad: d = round(sum), or round(d + sum). What d holds is loaded in the main loop as
// far as there are buffers (kAhead), so that where memory is the limit it flows while the tensor
// cores work; the rest of FP32 gradients is added by the L2, which has the same bits, and that of
// BF16 loaded when a buffer is free.
#pragma once

#include <type_traits>

#include "backend/cuda/sm90/epilogue_values.cuh"
#include "backend/cuda/sm90/staging_buffers.cuh"

namespace moire::cuda::sm90 {

// 128 bytes of columns of d in registers and buffers; sums as wgmma leaves them.
template <class T>
struct Chunk;

template <>
struct Chunk<float> {
  static constexpr int kColumns = 32;
  template <bool kAdd>
  static __device__ void write(char* buffer, float* sums) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 8; ++i) {  // column group i / 2, row lane / 4 (+ 8)
      const int unit = i / 2 * 2 + lane % 4 / 2;
      auto* const at =
          reinterpret_cast<float2*>(buffer + swizzled(lane / 4 + i % 2 * 8, unit) + lane % 2 * 8);
      float2 v{sums[2 * i], sums[2 * i + 1]};
      if constexpr (kAdd) {
        const float2 before = *at;
        v = {before.x + v.x, before.y + v.y};
      }
      *at = v;
    }
  }
};

template <>
struct Chunk<__nv_bfloat16> {
  static constexpr int kColumns = 64;
  template <bool kAdd>
  static __device__ void write(char* buffer, float* sums) {
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      Words words{};
      if constexpr (kAdd) read_words(buffer, j, words);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float2 v{sums[4 * j + 2 * i], sums[4 * j + 2 * i + 1]};
        if constexpr (kAdd) {
          const float2 before = unpack(words[i]);
          v = {before.x + v.x, before.y + v.y};
        }
        words[i] = pack(v.x, v.y);
      }
      write_words(buffer, j, words);
    }
  }
};

// Pieces of 128 bytes of columns, in buffers in turn.
template <class T>
struct Accumulate {
  static constexpr bool kLoads = true, kStagesAll = false, kReadsBack = false;
  static constexpr int kNumSlices = 0, kUnrolled = 8;
  static constexpr int kColumns = Chunk<T>::kColumns;
  template <class P>
  static constexpr int kPieces = P::kTileN / kColumns;
  // Of FP8 products three at most: a fourth that is loaded, too, is slower than the L2.
  template <class P>
  static constexpr int kAhead = P::kIsScaled&& P::kNumBuffers > 3 ? 3 : P::kNumBuffers;
  // Whether pieces past the first kAhead are added by the L2, and not loaded.
  static constexpr bool kAddsRestInL2 = std::is_same_v<T, float>;

  CUtensorMap d;  // {n, m, matrices}; box {128 bytes, rows of a box, 1}
  int32_t n;
  int32_t beta;
  const uint8_t* beta_per_group;

  struct Part {
    WorkTile tile;
    int32_t first_m;
    bool adds;
  };
  __device__ Part part(const WorkTile& tile, int32_t first_m) const {
    return {tile, first_m, beta_per_group != nullptr ? beta_per_group[tile.group] != 0 : beta != 0};
  }
  // Adding zeros would turn -0 into +0.
  __device__ bool writes(const Part& p) const { return !p.adds || p.tile.num_k > 0; }
  template <class P>
  __device__ bool loads(const Part& p, int i) const {
    return p.adds && (!kAddsRestInL2 || i < kAhead<P>);
  }
  template <class P>
  __device__ int num_pieces(const Part& p) const {
    return columns_as_pieces<kPieces<P>>(n - p.tile.first_n, kColumns);
  }

  template <class Buffers>
  __device__ int load_buffer(const Buffers&, int i) const {
    return i % Buffers::kNumBuffers;
  }
  template <class Buffers>
  __device__ void load(const Buffers& buffers, const Part& p, int i) const {
    uint64_t* const full = buffers.full(load_buffer(buffers, i));
    ptx::mbarrier_arrive_expect_tx(full, Buffers::Policy::kBufferBytes);
    ptx::tma_load_3d(buffers.at(load_buffer(buffers, i)), &d, full, p.tile.first_n + i * kColumns,
                     p.first_m, p.tile.matrix);
  }

  template <int kSums>
  __device__ void prepare(const Part&, float (&)[kSums]) const {}
  template <class Buffers, int kSums>
  __device__ void stage(Buffers& buffers, const Part& p, int i, float (&sums)[kSums]) const {
    char* const buffer = buffers.at(load_buffer(buffers, i));
    if (loads<typename Buffers::Policy>(p, i)) {
      buffers.wait_full(load_buffer(buffers, i));
      Chunk<T>::template write<true>(buffer, &sums[i * kColumns / 2]);
    } else {
      Chunk<T>::template write<false>(buffer, &sums[i * kColumns / 2]);
    }
  }
  template <class Buffers>
  __device__ void store(const Buffers& buffers, const Part& p, int i) const {
    const char* const buffer = buffers.at(load_buffer(buffers, i));
    const int32_t column = p.tile.first_n + i * kColumns;
    if constexpr (kAddsRestInL2) {
      if (p.adds && !loads<typename Buffers::Policy>(p, i)) {
        return ptx::tma_reduce_add_3d(&d, buffer, column, p.first_m, p.tile.matrix);
      }
    }
    ptx::tma_store_3d(&d, buffer, column, p.first_m, p.tile.matrix);
  }
  __device__ void finish(const Part&, int) const {}
};

}  // namespace moire::cuda::sm90
