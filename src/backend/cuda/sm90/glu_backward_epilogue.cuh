// Epilogue of FC2's dgrad: the gated activation's backward.
//
// Slots of a warp: z of one chunk of 64 columns in 0 and 1, of the next in 2 and 3, overwritten in
// place by grad_z; act in the rest, by turns. z of the first two chunks is loaded before the main
// loop; that of chunk c + 1 while chunk c is computed, once chunk c - 1 has left the same slots.
#pragma once

#include "backend/cuda/device/activation.cuh"
#include "backend/cuda/sm90/epilogue_values.cuh"
#include "backend/cuda/sm90/z_slots.cuh"

namespace moire::cuda::sm90 {

// grad_act = round(sum); grad_z, act and the partial sum of grad_prob over each 64 columns.
template <class Activation>
struct GluBackward {
  static constexpr int kFirstActSlot = 4;

  ZMap z;
  ZMap grad_z;
  CUtensorMap act;  // ragged; box {64, 16}
  int32_t f, num_groups;
  int32_t has_act;
  const float* probs;
  float* prob_partials;  // [ceil(f / 64), capacity], or null
  int64_t capacity;
  Activation activation;

  template <class Slots>
  __device__ void begin(Slots& slots, const WorkTile& tile, int32_t first_m) const {
    if (!Slots::is_leader() || tile.group == num_groups) return;
    ptx::bulk_wait_group_read<0>();
    load(slots, tile, first_m, 0);
    load(slots, tile, first_m, 1);
  }

  template <class Slots, int kSums>
  __device__ void store(Slots& slots, const WorkTile& tile, int32_t first_m,
                        float (&sums)[kSums]) const {
    const RowValues prob(tile.group == num_groups ? nullptr : probs, tile, first_m);
    // Not unrolled but for the sums' sake: code that runs once a tile has to be fetched once a
    // tile.
#pragma unroll 1
    for (int c = 0; c < kSums / 32; ++c) {
      if (tile.first_n + c * kPanel >= f) break;
      char* const act_slot = acquire_act(slots, c);
#pragma unroll
      for (int i = 0; i < kSums / 32; ++i) {
        if (i == c) write_sums(act_slot, &sums[32 * i]);
      }
      store_chunk(slots, tile, first_m, c, kSums / 32, act_slot, prob);
    }
  }

 private:
  // By the leader: z of chunk c, if there is such a chunk.
  template <class Slots>
  __device__ void load(Slots& slots, const WorkTile& tile, int32_t first_m, int c) const {
    const int32_t column = tile.first_n + c * kPanel;
    if (column >= f) return;
    const int first = c % 2 * 2;
    const RaggedRow r = ragged_row(tile, first_m);
    ptx::mbarrier_arrive_expect_tx(slots.full(first), 2 * 16 * 128);
    z.load(slots.slot(first), slots.full(first), column, 0, r);
    z.load(slots.slot(first + 1), slots.full(first), column, 1, r);
  }

  // The slot for act of chunk c; the last chunk that used it has left it.
  template <class Slots>
  __device__ char* acquire_act(Slots& slots, int c) const {
    constexpr int kActSlots = Slots::kNumSlots - kFirstActSlot;
    slots.template wait_stored<kActSlots - 1>();
    return slots.slot(kFirstActSlot + c % kActSlots);
  }

  // grad_act goes through act's slot.
  __device__ void write_sums(char* act_slot, const float* sums) const {
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      Words words;
      pack_sums(sums + 4 * j, words);
      write_words(act_slot, j, words);
    }
  }

  template <class Slots>
  __device__ void store_chunk(Slots& slots, const WorkTile& tile, int32_t first_m, int c,
                              int num_chunks, char* act_slot, const RowValues& prob) const {
    const bool is_tail = tile.group == num_groups;
    const int32_t column = tile.first_n + c * kPanel;
    char *const slot0 = slots.slot(c % 2 * 2), *const slot1 = slots.slot(c % 2 * 2 + 1);
    if (!is_tail) slots.wait_full(c % 2 * 2);
    float prob_sums[2] = {0, 0};
#pragma unroll 1
    for (int j = 0; j < 8; j += 2) {
      if (j == 2 && c >= 1 && c + 1 < num_chunks && !is_tail && Slots::is_leader()) {
        ptx::bulk_wait_group_read<0>();
        load(slots, tile, first_m, c + 1);
      }
      Words gate{}, up{}, act_words{};
      if (!is_tail) {
        read_z(slot0, slot1, z.columns, j, gate, up);
        read_words(act_slot, j, act_words);
        backward(prob, gate, up, act_words, prob_sums);
      }
      write_z(slot0, slot1, z.columns, j, gate, up);
      write_words(act_slot, j, act_words);
    }
    const RaggedRow r = ragged_row(tile, first_m);
    slots.release([&] {
      grad_z.store(slot0, column, 0, r);
      grad_z.store(slot1, column, 1, r);
      if (has_act != 0) {
        ptx::tma_store_4d(&act, act_slot, column, r.row, r.end, r.wrap);
      }
      ptx::bulk_commit_group();
    });
    if (prob_partials != nullptr && !is_tail) store_partials(tile, first_m, column, prob_sums);
  }

  // gate and up become their gradients, grad_act becomes act.
  __device__ void backward(const RowValues& prob, Words& gate, Words& up, Words& act_words,
                           float (&prob_sums)[2]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 g = unpack(gate[i]), u = unpack(up[i]), d = unpack(act_words[i]);
      const float p = prob.at(i % 2);
      const GluGradient x = glu_gradient(activation, g.x, u.x, d.x, p);
      const GluGradient y = glu_gradient(activation, g.y, u.y, d.y, p);
      gate[i] = pack(x.gate, y.gate);
      up[i] = pack(x.up, y.up);
      act_words[i] = pack(x.glu * p, y.glu * p);
      prob_sums[i % 2] = fmaf(d.y, y.glu, fmaf(d.x, x.glu, prob_sums[i % 2]));
    }
  }

  __device__ void store_partials(const WorkTile& tile, int32_t first_m, int32_t column,
                                 const float (&sums)[2]) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = sums[half];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      const int32_t row = first_m + lane / 4 + 8 * half;
      if (lane % 4 == 0 && row < tile.num_rows) {
        prob_partials[column / kPanel * capacity + tile.first_row + row] = sum;
      }
    }
  }
};

}  // namespace moire::cuda::sm90
