// Epilogues of ragged M without a second operand: plain store, and the gated activation.
#pragma once

#include "backend/cuda/device/activation.cuh"
#include "backend/cuda/sm90/epilogue_values.cuh"
#include "backend/cuda/sm90/z_slots.cuh"
#include "core/divide.h"
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
//
// After a tile's products, z alone is put into slots and stored. Its activation is left over for
// the next tile's steps: advance(), called while products are under way, takes 16 columns of z as
// it is stored from the slots that are being stored. Slots: gate and up of the first 64 columns, of
// the second 64; act of the first, while that of the second takes the place of the first gate.
template <class Activation>
struct StoreGlu {
  ZMap z;
  CUtensorMap act;  // ragged; box {64, 16}
  int32_t f, num_groups;
  int32_t has_z;
  Bias bias;
  const float* probs;
  Activation activation;

  // What is left of a tile.
  struct Left {
    int32_t piece = 0, end = 0;  // of 16 columns
    int32_t column;
    RaggedRow row;
    RowValues prob;

    __device__ bool is_any() const { return piece < end; }
  };

  template <class Slots>
  __device__ void begin(Slots&, const WorkTile&, int32_t) const {}

  template <class Slots, int kSums>
  __device__ void store(Slots& slots, const WorkTile& tile, int32_t first_m, float (&sums)[kSums],
                        Left& left) const {
    static_assert(kSums == 128 && Slots::kNumSlots == 5);
    while (left.is_any()) advance(slots, left);
    const bool is_tail = tile.group == num_groups;
    const RaggedRow r = ragged_row(tile, first_m);
    if (bias.is_present() && !is_tail) add_bias(tile, sums);
    slots.template wait_stored<0>();
    const auto panels =
        static_cast<int32_t>(min(int64_t{kPanels}, ceil_div(f - tile.first_n, kPanel)));
#pragma unroll
    for (int c = 0; c < kPanels; ++c) {
      if (c < panels) write_sums(slots, c, &sums[32 * c], &sums[kSums / 2 + 32 * c]);
    }
    slots.release([&] {
      for (int c = 0; c < panels && has_z != 0 && !is_tail; ++c) {
        z.store(slots.slot(2 * c), tile.first_n + c * kPanel, 0, r);
        z.store(slots.slot(2 * c + 1), tile.first_n + c * kPanel, 1, r);
      }
      ptx::bulk_commit_group();
    });
    left = {0, kPiecesPerPanel * panels, tile.first_n, r,
            RowValues(is_tail ? nullptr : probs, tile, first_m)};
  }

  // The next piece, if there is one.
  template <class Slots>
  __device__ void advance(Slots& slots, Left& left) const {
    if (!left.is_any()) return;
    const int c = left.piece / kPiecesPerPanel, j = left.piece % kPiecesPerPanel * 2;
    char* const slot = slots.slot(c == 0 ? 2 * kPanels : 0);
    if (j == 0) slots.template wait_stored<1>();  // the last group may still be read
    Words words, gate, up;
    read_z(slots.slot(2 * c), slots.slot(2 * c + 1), z.columns, j, gate, up);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 a = unpack(gate[i]), b = unpack(up[i]);
      const float p = left.prob.at(i % 2);
      words[i] = pack(glu_value(activation, a.x, b.x) * p, glu_value(activation, a.y, b.y) * p);
    }
    write_words(slot, j, words);
    if (++left.piece % kPiecesPerPanel != 0) return;
    slots.release([&] {
      const int32_t column = left.column + c * kPanel;
      ptx::tma_store_4d(&act, slot, column, left.row.row, left.row.end, left.row.wrap);
      ptx::bulk_commit_group();
    });
  }

 private:
  static constexpr int kPanels = 2, kPiecesPerPanel = 4;

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

  template <class Slots>
  __device__ void write_sums(Slots& slots, int panel, const float* gate, const float* up) const {
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      Words gate_words, up_words;
      pack_sums(gate + 4 * j, gate_words);
      pack_sums(up + 4 * j, up_words);
      write_z(slots.slot(2 * panel), slots.slot(2 * panel + 1), z.columns, j, gate_words, up_words);
    }
  }
};

}  // namespace moire::cuda::sm90
