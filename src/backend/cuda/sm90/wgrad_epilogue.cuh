// Epilogue of wgrad: d = round(sum), or round(d + sum). What d holds is loaded before the main loop
// as far as there are slots, so that where memory is the limit it flows while the tensor cores
// work.
#pragma once

#include "backend/cuda/sm90/epilogue_values.cuh"
#include "backend/cuda/sm90/warp_slots.cuh"

namespace moire::cuda::sm90 {

// 128 bytes of columns of d in registers and slots; sums as wgmma leaves them.
template <class T>
struct Chunk;

template <>
struct Chunk<float> {
  static constexpr int kColumns = 32;
  template <bool kAdd>
  static __device__ void write(char* slot, float* sums) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 8; ++i) {  // column group i / 2, row lane / 4 (+ 8)
      const int unit = i / 2 * 2 + lane % 4 / 2;
      auto* const at =
          reinterpret_cast<float2*>(slot + swizzled(lane / 4 + i % 2 * 8, unit) + lane % 2 * 8);
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
  static __device__ void write(char* slot, float* sums) {
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      Words words{};
      if constexpr (kAdd) read_words(slot, j, words);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float2 v{sums[4 * j + 2 * i], sums[4 * j + 2 * i + 1]};
        if constexpr (kAdd) {
          const float2 before = unpack(words[i]);
          v = {before.x + v.x, before.y + v.y};
        }
        words[i] = pack(v.x, v.y);
      }
      write_words(slot, j, words);
    }
  }
};

template <class T>
struct Accumulate {
  static constexpr int kColumns = Chunk<T>::kColumns;

  CUtensorMap d;  // {n, m, groups}; box {128 bytes, 16, 1}
  int32_t n;
  int32_t beta;
  const uint8_t* beta_per_group;

  __device__ bool accumulates(int32_t group) const {
    return beta_per_group != nullptr ? beta_per_group[group] != 0 : beta != 0;
  }

  template <class Slots>
  __device__ void begin(Slots& slots, const WorkTile& tile, int32_t first_m) const {
    if (!Slots::is_leader() || tile.num_k == 0 || !accumulates(tile.group)) return;
    ptx::bulk_wait_group_read<0>();
    for (int c = 0; c < Slots::kNumSlots; ++c) load(slots, tile, first_m, c);
  }

  template <class Slots, int kSums>
  __device__ void store(Slots& slots, const WorkTile& tile, int32_t first_m,
                        float (&sums)[kSums]) const {
    const bool adds = accumulates(tile.group);
    if (adds && tile.num_k == 0) return;  // adding zeros would turn -0 into +0
    constexpr int kChunks = 2 * kSums / kColumns;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int32_t column = tile.first_n + c * kColumns;
      if (column >= n) break;
      const int index = c % Slots::kNumSlots;
      char* const slot = slots.slot(index);
      if (adds) {
        slots.wait_full(index);
        Chunk<T>::template write<true>(slot, &sums[c * kColumns / 2]);
      } else {
        if (c == 0) slots.template wait_stored<0>();
        if (c >= Slots::kNumSlots) slots.template wait_stored<Slots::kNumSlots - 1>();
        Chunk<T>::template write<false>(slot, &sums[c * kColumns / 2]);
      }
      slots.release([&] {
        ptx::tma_store_3d(&d, slot, column, first_m, tile.group);
        ptx::bulk_commit_group();
        // The chunk before has left its slot, or will soon.
        const int later = c - 1 + Slots::kNumSlots;
        if (adds && c >= 1 && later < kChunks) {
          ptx::bulk_wait_group_read<1>();
          load(slots, tile, first_m, later);
        }
      });
    }
  }

 private:
  // By the leader: chunk c of d, if there is such a chunk.
  template <class Slots>
  __device__ void load(Slots& slots, const WorkTile& tile, int32_t first_m, int c) const {
    const int32_t column = tile.first_n + c * kColumns;
    if (column >= n || c * kColumns >= Slots::kTileN) return;
    const int index = c % Slots::kNumSlots;
    ptx::mbarrier_arrive_expect_tx(slots.full(index), 16 * 128);
    ptx::tma_load_3d(slots.slot(index), &d, slots.full(index), column, first_m, tile.group);
  }
};

}  // namespace moire::cuda::sm90
