// Epilogues of ragged M without a second operand: plain store, and the gated activation.
#pragma once

#include "backend/cuda/device/activation.cuh"
#include "backend/cuda/sm90/epilogue_values.cuh"
#include "backend/cuda/sm90/z_slots.cuh"
#include "core/glu_layout.h"

namespace moire::cuda::sm90 {

// d = round(sum + scale * bias), BF16.
struct Store {
  CUtensorMap d;  // ragged; box {64, 16}
  int32_t n, num_groups;
  Bias bias;
  const float* bias_scale;

  template <class Slots>
  __device__ void begin(Slots&, const WorkTile&, int32_t) const {}

  template <class Slots, int kSums>
  __device__ void store(Slots& slots, const WorkTile& tile, int32_t first_m,
                        float (&sums)[kSums]) const {
    if (bias.is_present() && tile.group < num_groups) add_bias(tile, first_m, sums);
    const RaggedRow r = ragged_row(tile, first_m);
#pragma unroll
    for (int c = 0; c < kSums / 32; ++c) {
      const int32_t column = tile.first_n + c * kPanel;
      if (column >= n) break;
      char* const slot = slots.acquire();
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        Words words;
        pack_sums(&sums[32 * c + 4 * j], words);
        write_words(slot, j, words);
      }
      slots.release([&] {
        ptx::tma_store_4d(&d, slot, column, r.row, r.end, r.wrap);
        ptx::bulk_commit_group();
      });
    }
  }

 private:
  template <int kSums>
  __device__ void add_bias(const WorkTile& tile, int32_t first_m, float (&sums)[kSums]) const {
    const RowValues scale(bias_scale, tile, first_m);
#pragma unroll
    for (int j = 0; j < kSums / 4; ++j) {
      const int32_t column = tile.first_n + lane_column(j);
      if (column >= n) break;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (column + i >= n) break;
        const float b = bias.at(tile.group, column + i);
        sums[4 * j + i] = fmaf(b, scale.first, sums[4 * j + i]);
        sums[4 * j + 2 + i] = fmaf(b, scale.second, sums[4 * j + 2 + i]);
      }
    }
  }
};

// z = round(sum + bias), act = round(glu(z) * prob): the tile's first half holds gate, its second
// up of the same columns.
template <class Activation>
struct StoreGlu {
  ZMap z;
  CUtensorMap act;  // ragged; box {64, 16}
  int32_t f, num_groups;
  int32_t has_z;
  Bias bias;
  const float* probs;
  Activation activation;

  template <class Slots>
  __device__ void begin(Slots&, const WorkTile&, int32_t) const {}

  template <class Slots, int kSums>
  __device__ void store(Slots& slots, const WorkTile& tile, int32_t first_m,
                        float (&sums)[kSums]) const {
    const bool is_tail = tile.group == num_groups;
    const RaggedRow r = ragged_row(tile, first_m);
    const RowValues prob(is_tail ? nullptr : probs, tile, first_m);
    if (bias.is_present() && !is_tail) add_bias(tile, sums);
      // Not unrolled but for the sums' sake: code that runs once a tile has to be fetched once a
      // tile.
#pragma unroll 1
    for (int c = 0; c < kSums / 64; ++c) {
      const int32_t column = tile.first_n + c * kPanel;
      if (column >= f) break;
      char* const gate_slot = slots.acquire();
      char* const up_slot = slots.template acquire<1>();
#pragma unroll
      for (int i = 0; i < kSums / 64; ++i) {
        if (i == c) write_sums(gate_slot, up_slot, &sums[32 * i], &sums[kSums / 2 + 32 * i]);
      }
      slots.release([&] {
        if (has_z != 0 && !is_tail) z.store(gate_slot, column, 0, r);
        ptx::bulk_commit_group();
        if (has_z != 0 && !is_tail) z.store(up_slot, column, 1, r);
        ptx::bulk_commit_group();
      });
      store_act(slots, gate_slot, up_slot, column, r, prob);
    }
  }

 private:
  template <int kSums>
  __device__ void add_bias(const WorkTile& tile, float (&sums)[kSums]) const {
    const ResolvedGluLayout layout{f, z.columns.block, z.columns.gate == 0};
#pragma unroll
    for (int j = 0; j < kSums / 8; ++j) {
      const int32_t column = tile.first_n + lane_column(j);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (column + i >= f) break;
        const float gate = bias.at(tile.group, layout.gate(column + i));
        const float up = bias.at(tile.group, layout.up(column + i));
        sums[4 * j + i] += gate;
        sums[4 * j + 2 + i] += gate;
        sums[kSums / 2 + 4 * j + i] += up;
        sums[kSums / 2 + 4 * j + 2 + i] += up;
      }
    }
  }

  __device__ void write_sums(char* gate_slot, char* up_slot, const float* gate,
                             const float* up) const {
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      Words gate_words, up_words;
      pack_sums(gate + 4 * j, gate_words);
      pack_sums(up + 4 * j, up_words);
      write_z(gate_slot, up_slot, z.columns, j, gate_words, up_words);
    }
  }

  // The activation reads z as it is stored, from the slots that are being stored.
  template <class Slots>
  __device__ void store_act(Slots& slots, char* gate_slot, char* up_slot, int32_t column,
                            const RaggedRow& r, const RowValues& prob) const {
    char* const slot = slots.acquire();
#pragma unroll 1
    for (int j = 0; j < 8; j += 2) {
      Words words, gate, up;
      read_z(gate_slot, up_slot, z.columns, j, gate, up);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 a = unpack(gate[i]), b = unpack(up[i]);
        const float p = prob.at(i % 2);
        words[i] = pack(glu_value(activation, a.x, b.x) * p, glu_value(activation, a.y, b.y) * p);
      }
      write_words(slot, j, words);
    }
    slots.release([&] {
      ptx::tma_store_4d(&act, slot, column, r.row, r.end, r.wrap);
      ptx::bulk_commit_group();
    });
  }
};

}  // namespace moire::cuda::sm90
