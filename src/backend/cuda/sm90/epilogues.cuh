// Epilogues of ragged M without a second operand: plain store, and the gated activation. What the
// functions are for is in pieces.cuh.
#pragma once

#include "backend/cuda/device/activation.cuh"
#include "backend/cuda/sm90/epilogue_values.cuh"
#include "backend/cuda/sm90/z_buffers.cuh"

namespace moire::cuda::sm90 {

// d = round(sum + scale * bias), BF16. Pieces of 64 columns.
struct Store {
  static constexpr bool kLoads = false, kStagesAll = false, kReadsBack = false;
  static constexpr int kNumSlices = 0, kUnrolled = 8;
  template <class P>
  static constexpr int kPieces = P::kTileN / kPanel;

  CUtensorMap d;  // ragged; box {64, rows of a box}
  int32_t n, num_groups;
  AnyFloats bias;  // [groups, columns]
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
    write_sums<false>(p.buffer, &sums[kPanel / 2 * i]);
  }
  template <class Buffers>
  __device__ void store(const Buffers&, const Part& p, int i) const {
    const RaggedRow r = ragged_row(p.tile, p.first_m);
    ptx::tma_store_4d(&d, p.buffer, p.tile.first_n + i * kPanel, r.row, r.end, r.wrap);
  }
  __device__ void finish(const Part&, int) const {}
};

// The same where each piece has a buffer of its own.
struct StoreStaged : Store {
  template <class Buffers, int kSums>
  __device__ void stage(Buffers& buffers, const Part&, int i, float (&sums)[kSums]) const {
    write_sums<false>(buffers.at(i), &sums[kPanel / 2 * i]);
  }
  template <class Buffers>
  __device__ void store(const Buffers& buffers, Part p, int i) const {
    p.buffer = buffers.at(i);
    Store::store(buffers, p, i);
  }
};

// z = round(sum + bias), act = round(glu(z) * prob): the tile's first half holds gate, its second
// up of the same columns. Pieces of kColumns of either: 64, or 32 where 64 does not divide the
// half.
//
// z is staged and stored as it is; a slice takes 16 columns of it as they are stored, back from the
// buffers that are being stored. Buffers: z of all pieces, then act of two in turn; or of the first
// alone, while that of the second takes the place of the first gate.
template <class Activation, int kColumns>
struct StoreGlu {
  static constexpr bool kLoads = false, kStagesAll = true, kReadsBack = false;
  static constexpr int kNumSlices = kColumns / 16, kUnrolled = 1;
  template <class P>
  static constexpr int kPieces = P::kTileN / 2 / kColumns;

  ZMap<kColumns> z;
  CUtensorMap act;  // ragged; box {kColumns, rows of a box}
  int32_t f, num_groups;
  int32_t has_z;
  AnyFloats bias;  // [groups, columns]
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
  __device__ bool writes(const Part&) const { return true; }
  template <class P>
  __device__ int num_pieces(const Part& p) const {
    return columns_as_pieces<kPieces<P>>(f - p.column, kColumns);
  }

  template <int kSums>
  __device__ void prepare(const Part& p, float (&sums)[kSums]) const {
    if (bias.is_present() && p.group != num_groups) add_bias(p, sums);
    pack_in_place(sums);
  }
  template <class Buffers, int kSums>
  __device__ void stage(Buffers& buffers, const Part&, int i, float (&sums)[kSums]) const {
    const float *const gate = &sums[kColumns / 4 * i], *const up = gate + kSums / 4;
    const ZPiece<kColumns> piece(buffers, i);
#pragma unroll
    for (int j = 0; j < kColumns / 8; j += 2) {
      Words gate_words, up_words;
      packed_words(gate, j, gate_words);
      packed_words(up, j, up_words);
      write_z(piece, z.columns, j, gate_words, up_words);
    }
  }
  template <class Buffers>
  __device__ void store_staged(const Buffers& buffers, const Part& p, int i) const {
    if (has_z == 0 || p.group == num_groups) return;
    z.store(ZPiece<kColumns>(buffers, i), p.column + i * kColumns, p.row);
  }
  template <class Buffers>
  __device__ void compute(Buffers& buffers, const Part& p, int i, int slice) const {
    const int j = 2 * slice;
    if (slice == 0) buffers.template wait_stored<1>();  // the last group may still be read
    Words words, gate, up;
    read_z(ZPiece<kColumns>(buffers, i), z.columns, j, gate, up);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float2 a = unpack(gate[k]), b = unpack(up[k]);
      const float prob = p.prob.at(k % 2);
      words[k] =
          pack(glu_value(activation, a.x, b.x) * prob, glu_value(activation, a.y, b.y) * prob);
    }
    write_words<2 * kColumns>(act_place(buffers, i), j, words);
  }
  template <class Buffers>
  __device__ void store(const Buffers& buffers, const Part& p, int i) const {
    ptx::tma_store_4d(&act, act_place(buffers, i), p.column + i * kColumns, p.row.row, p.row.end,
                      p.row.wrap);
  }
  __device__ void finish(const Part&, int) const {}

 private:
  template <int kSums>
  __device__ void add_bias(const Part& p, float (&sums)[kSums]) const {
#pragma unroll
    for (int j = 0; j < kSums / 8; ++j) {
      const int32_t column = p.column + lane_column(j);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (column + i >= f) break;
        const float gate = bias.at(p.group, z.columns.position(column + i, 0));
        const float up = bias.at(p.group, z.columns.position(column + i, 1));
        sums[4 * j + i] += gate;
        sums[4 * j + 2 + i] += gate;
        sums[kSums / 2 + 4 * j + i] += up;
        sums[kSums / 2 + 4 * j + 2 + i] += up;
      }
    }
  }
  // A place is as large as gate, or up, of a piece; those behind z are act's.
  template <class Buffers>
  static __device__ char* act_place(const Buffers& buffers, int i) {
    using P = typename Buffers::Policy;
    constexpr int kPlaceBytes = P::kBoxRows * 2 * kColumns, kOfZ = 2 * kPieces<P>;
    constexpr int kOfAct = P::kNumBuffers * P::kBufferBytes / kPlaceBytes - kOfZ;
    static_assert(kOfAct == 2 || (kOfAct == 1 && kPieces<P> <= 2));
    return buffers.template place<2 * kColumns>(kOfAct == 1 && i == 1 ? 0 : kOfZ + i % 2);
  }
};

}  // namespace moire::cuda::sm90
