// Epilogue of FC2's dgrad: the gated activation's backward.
//
// Slots of a warp: z of one chunk of 64 columns in 0 and 1, of the other in 2 and 3, overwritten in
// place by grad_z; act in 4 and 5. z is loaded before the main loop.
#pragma once

#include "backend/cuda/device/activation.cuh"
#include "backend/cuda/sm90/epilogue_values.cuh"
#include "backend/cuda/sm90/z_slots.cuh"

namespace moire::cuda::sm90 {

// grad_act = round(sum); grad_z, act and the partial sum of grad_prob over each 64 columns.
template <class Activation>
struct GluBackward {
  static constexpr int kChunks = 2, kFirstActSlot = 2 * kChunks;

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
    static_assert(kSums == 32 * kChunks && Slots::kNumSlots == kFirstActSlot + kChunks);
    // begin() has waited for this, but for the leader alone, and a tail tile does without.
    slots.template wait_stored<0>();
    const RowValues prob(tile.group == num_groups ? nullptr : probs, tile, first_m);
    // Not unrolled but for the sums' sake: code that runs once a tile has to be fetched once a
    // tile.
#pragma unroll 1
    for (int c = 0; c < kChunks; ++c) {
      if (tile.first_n + c * kPanel >= f) break;
      char* const act_slot = slots.slot(kFirstActSlot + c);
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        if (i == c) write_sums(act_slot, &sums[32 * i]);
      }
      store_chunk(slots, tile, first_m, c, act_slot, prob);
    }
  }

 private:
  // By the leader: z of chunk c, if there is such a chunk.
  template <class Slots>
  __device__ void load(Slots& slots, const WorkTile& tile, int32_t first_m, int c) const {
    const int32_t column = tile.first_n + c * kPanel;
    if (column >= f) return;
    const int first = 2 * c;
    const RaggedRow r = ragged_row(tile, first_m);
    ptx::mbarrier_arrive_expect_tx(slots.full(first), 2 * 16 * 128);
    z.load(slots.slot(first), slots.full(first), column, 0, r);
    z.load(slots.slot(first + 1), slots.full(first), column, 1, r);
  }

  // Terms of grad_prob by this lane's row, and by column mod 16: of the even and the odd column
  // groups of 8, the first and the second of its columns.
  using ProbSums = float[2][2][2];

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
                              char* act_slot, const RowValues& prob) const {
    const bool is_tail = tile.group == num_groups;
    const int32_t column = tile.first_n + c * kPanel;
    char *const slot0 = slots.slot(2 * c), *const slot1 = slots.slot(2 * c + 1);
    if (!is_tail) slots.wait_full(2 * c);
    ProbSums prob_sums = {};
#pragma unroll 1
    for (int j = 0; j < 8; j += 2) {
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
                           ProbSums& prob_sums) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 g = unpack(gate[i]), u = unpack(up[i]), d = unpack(act_words[i]);
      const float p = prob.at(i % 2);
      const GluGradient x = glu_gradient(activation, g.x, u.x, d.x, p);
      const GluGradient y = glu_gradient(activation, g.y, u.y, d.y, p);
      gate[i] = pack(x.gate, y.gate);
      up[i] = pack(x.up, y.up);
      act_words[i] = pack(x.glu * p, y.glu * p);
      float(&sums)[2] = prob_sums[i % 2][i / 2];
      sums[0] = fmaf(d.x, x.glu, sums[0]);
      sums[1] = fmaf(d.y, y.glu, sums[1]);
    }
  }

  // Joins the 16 lanes of the sum in the order of device/lane_sums.cuh: i + 8 is the other column
  // group, i + 4 and i + 2 are in other threads, i + 1 is the other column.
  __device__ void store_partials(const WorkTile& tile, int32_t first_m, int32_t column,
                                 const ProbSums& sums) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float first = sums[half][0][0] + sums[half][1][0];
      float second = sums[half][0][1] + sums[half][1][1];
#pragma unroll
      for (int distance = 2; distance > 0; distance /= 2) {
        first += __shfl_xor_sync(~0u, first, distance);
        second += __shfl_xor_sync(~0u, second, distance);
      }
      const int32_t row = first_m + lane / 4 + 8 * half;
      if (lane % 4 == 0 && row < tile.num_rows) {
        prob_partials[column / kPanel * capacity + tile.first_row + row] = first + second;
      }
    }
  }
};

}  // namespace moire::cuda::sm90
