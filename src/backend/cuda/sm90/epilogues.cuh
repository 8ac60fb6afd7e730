// Epilogues of ragged M without a second operand: plain store, and the gated activation. What the
// functions are for is in pieces.cuh.
#pragma once

#include "backend/cuda/device/activation.cuh"
#include "backend/cuda/sm90/epilogue_values.cuh"
#include "backend/cuda/sm90/z_buffers.cuh"
#include "core/divide.h"
#include "core/glu_layout.h"

namespace moire::cuda::sm90 {

// d = round(sum + scale * bias), BF16. Pieces of 64 columns.
struct Store {
  static constexpr bool kLoads = false;
  static constexpr int kNumSlices = 0, kUnrolled = 8;
  template <class P>
  static constexpr int kPieces = P::kTileN / kPanel;
  template <class P>
  static constexpr int kAhead = P::kNumBuffers;

  CUtensorMap d;  // ragged; box {64, 16}
  int32_t n, num_groups;
  Bias bias;
  const float* bias_scale;

  struct Part {
    WorkTile tile;
    int32_t first_m;
    char* buffer;
  };
  __device__ Part part(const WorkTile& tile, int32_t first_m) const { return {tile, first_m}; }
  __device__ bool writes(const Part&) const { return true; }
  template <class P>
  __device__ int num_pieces(const Part& p) const {
    return columns_as_pieces<kPieces<P>>(n - p.tile.first_n, kPanel);
  }

  template <int kSums>
  __device__ void prepare(const Part& p, float (&sums)[kSums]) const {
    if (!bias.is_present() || p.tile.group == num_groups) return;
    const RowValues scale(bias_scale, p.tile, p.first_m);
#pragma unroll
    for (int j = 0; j < kSums / 4; ++j) {
      const int32_t column = p.tile.first_n + lane_column(j);
      if (column >= n) break;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (column + i >= n) break;
        const float b = bias.at(p.tile.group, column + i);
        sums[4 * j + i] = fmaf(b, scale.first, sums[4 * j + i]);
        sums[4 * j + 2 + i] = fmaf(b, scale.second, sums[4 * j + 2 + i]);
      }
    }
  }
  template <class Buffers, int kSums>
  __device__ void stage(Buffers& buffers, Part& p, int i, float (&sums)[kSums]) const {
    p.buffer = buffers.acquire();
    write_sums(p.buffer, &sums[kPanel / 2 * i]);
  }
  template <class Buffers>
  __device__ void store(const Buffers&, const Part& p, int i) const {
    const RaggedRow r = ragged_row(p.tile, p.first_m);
    ptx::tma_store_4d(&d, p.buffer, p.tile.first_n + i * kPanel, r.row, r.end, r.wrap);
  }
  __device__ void finish(const Part&, int) const {}
};

// z = round(sum + bias), act = round(glu(z) * prob): the tile's first half holds gate, its second
// up of the same columns. Pieces of 64 columns of either.
//
// z is staged and stored as it is; a slice takes 16 columns of it as they are stored, back from the
// buffers that are being stored. Buffers: gate and up of the first piece, of the second; act of the
// first, while that of the second takes the place of the first gate.
template <class Activation>
struct StoreGlu {
  static constexpr bool kLoads = false;
  static constexpr int kNumSlices = 4;
  template <class P>
  static constexpr int kPieces = 2;

  ZMap z;
  CUtensorMap act;  // ragged; box {64, 16}
  int32_t f, num_groups;
  int32_t has_z;
  Bias bias;
  const float* probs;
  Activation activation;

  struct Part {
    int32_t group, column;
    RaggedRow row;
    RowValues prob;
  };
  __device__ Part part(const WorkTile& tile, int32_t first_m) const {
    return {tile.group, tile.first_n, ragged_row(tile, first_m),
            RowValues(tile.group == num_groups ? nullptr : probs, tile, first_m)};
  }
  template <class P>
  __device__ int num_pieces(const Part& p) const {
    static_assert(P::kTileN == 2 * kPieces<P> * kPanel && P::kNumBuffers == 2 * kPieces<P> + 1);
    return columns_as_pieces<kPieces<P>>(f - p.column, kPanel);
  }

  template <int kSums>
  __device__ void prepare(const Part& p, float (&sums)[kSums]) const {
    if (!bias.is_present() || p.group == num_groups) return;
    const ResolvedGluLayout layout{f, z.columns.block, z.columns.gate == 0};
#pragma unroll
    for (int j = 0; j < kSums / 8; ++j) {
      const int32_t column = p.column + lane_column(j);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (column + i >= f) break;
        const float gate = bias.at(p.group, layout.gate(column + i));
        const float up = bias.at(p.group, layout.up(column + i));
        sums[4 * j + i] += gate;
        sums[4 * j + 2 + i] += gate;
        sums[kSums / 2 + 4 * j + i] += up;
        sums[kSums / 2 + 4 * j + 2 + i] += up;
      }
    }
  }
  template <class Buffers, int kSums>
  __device__ void stage(Buffers& buffers, const Part&, int i, float (&sums)[kSums]) const {
    const float *const gate = &sums[kPanel / 2 * i], *const up = gate + kSums / 2;
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      Words gate_words, up_words;
      pack_sums(gate + 4 * j, gate_words);
      pack_sums(up + 4 * j, up_words);
      write_z(buffers.at(2 * i), buffers.at(2 * i + 1), z.columns, j, gate_words, up_words);
    }
  }
  template <class Buffers>
  __device__ void store_staged(const Buffers& buffers, const Part& p, int i) const {
    if (has_z == 0 || p.group == num_groups) return;
    z.store(buffers.at(2 * i), p.column + i * kPanel, 0, p.row);
    z.store(buffers.at(2 * i + 1), p.column + i * kPanel, 1, p.row);
  }
  template <class Buffers>
  __device__ void compute(Buffers& buffers, const Part& p, int i, int slice) const {
    const int j = 2 * slice;
    if (slice == 0) buffers.template wait_stored<1>();  // the last group may still be read
    Words words, gate, up;
    read_z(buffers.at(2 * i), buffers.at(2 * i + 1), z.columns, j, gate, up);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float2 a = unpack(gate[k]), b = unpack(up[k]);
      const float prob = p.prob.at(k % 2);
      words[k] =
          pack(glu_value(activation, a.x, b.x) * prob, glu_value(activation, a.y, b.y) * prob);
    }
    write_words(buffers.at(act_buffer(i)), j, words);
  }
  template <class Buffers>
  __device__ void store(const Buffers& buffers, const Part& p, int i) const {
    ptx::tma_store_4d(&act, buffers.at(act_buffer(i)), p.column + i * kPanel, p.row.row, p.row.end,
                      p.row.wrap);
  }
  __device__ void finish(const Part&, int) const {}

 private:
  static __device__ int act_buffer(int i) { return i == 0 ? 4 : 0; }
};

}  // namespace moire::cuda::sm90
