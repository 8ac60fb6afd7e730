// Epilogue of FC2's dgrad: the gated activation's backward.
#pragma once

#include <algorithm>

#include "backend/cuda/device/activation.cuh"
#include "backend/cuda/device/row_blocks.cuh"
#include "backend/cuda/device/row_sums.cuh"
#include "backend/cuda/sm90/epilogue_values.cuh"
#include "backend/cuda/sm90/z_buffers.cuh"

namespace moire::cuda::sm90 {

// grad_act = round(sum); grad_z, act, the partial sum of grad_prob over each 64 columns, which are
// a piece, and that of grad_bias down each 32 rows, half a box. Buffers: z of as many pieces as
// fit, two each, overwritten in place by grad_z; in the others, in turn, grad_act becomes act.
//
// An instance of its own sums grad_bias: the other has no register to spare.
template <class Activation, bool kSumsBias>
struct GluBackward {
  static constexpr bool kLoads = true, kStagesAll = false, kReadsBack = kSumsBias;
  // Not unrolled: code that runs once a tile has to be fetched once a tile.
  static constexpr int kNumSlices = 4, kUnrolled = 1;
  template <class P>
  static constexpr int kPieces = P::kTileN / kPanel;
  template <class P>
  static constexpr int kAhead = std::min(kPieces<P>, (P::kNumBuffers - 1) / 2);

  ZMap<kPanel> z;
  ZMap<kPanel> grad_z;
  CUtensorMap act;  // ragged; box {64, rows of a box}
  int32_t f, num_groups;
  int32_t has_act;
  const float* probs;
  float* prob_partials;  // [ceil(f / 64), capacity], or null
  int64_t capacity;
  float* bias_partials;  // [row blocks, 2 f] (device/row_blocks.cuh); where kSumsBias
  Activation activation;

  // Terms of grad_prob by this lane's row, and by column mod 16: of the even and the odd column
  // groups of 8, the first and the second of its columns.
  using ProbSums = float[2][2][2];

  struct Part {
    WorkTile tile;
    int32_t first_m;
    RowValues prob;
    ProbSums prob_sums;  // of the piece at work
  };
  __device__ Part part(const WorkTile& tile, int32_t first_m) const {
    return {tile, first_m, RowValues(tile.group == num_groups ? nullptr : probs, tile, first_m)};
  }
  __device__ bool writes(const Part&) const { return true; }
  __device__ bool has_z(const Part& p) const { return p.tile.group != num_groups; }
  template <class P>
  __device__ bool loads(const Part& p, int) const {
    return has_z(p);
  }
  template <class P>
  __device__ int num_pieces(const Part& p) const {
    return columns_as_pieces<kPieces<P>>(f - p.tile.first_n, kPanel);
  }

  template <class Buffers>
  __device__ int load_buffer(const Buffers&, int i) const {
    return 2 * (i % kAheadIn<Buffers>);
  }
  template <class Buffers>
  __device__ void load(const Buffers& buffers, const Part& p, int i) const {
    uint64_t* const full = buffers.full(load_buffer(buffers, i));
    ptx::mbarrier_arrive_expect_tx(full, 2 * Buffers::Policy::kBufferBytes);
    z.load(z_piece(buffers, i), full, p.tile.first_n + i * kPanel, ragged_row(p.tile, p.first_m));
  }

  // Rounded at once, sums take half the registers: those of 192 columns and compute() have room.
  template <int kSums>
  __device__ void prepare(const Part&, float (&sums)[kSums]) const {
    pack_in_place(sums);
  }
  template <class Buffers, int kSums>
  __device__ void stage(const Buffers& buffers, Part& p, int i, float (&sums)[kSums]) const {
    // Sums are selected by a compile-time index, and only they.
#pragma unroll
    for (int k = 0; k < 8; ++k) p.prob_sums[k / 4][k / 2 % 2][k % 2] = 0;
#pragma unroll
    for (int k = 0; k < 2 * kSums / kPanel; ++k) {
      if (k == i) write_sums<true>(act_buffer(buffers, i), &sums[kPanel / 4 * k]);
    }
  }
  template <class Buffers>
  __device__ void compute(const Buffers& buffers, Part& p, int i, int slice) const {
    const int j = 2 * slice;
    const ZPiece<kPanel> piece = z_piece(buffers, i);
    Words gate{}, up{}, act_words{};
    if (has_z(p)) {
      read_z(piece, z.columns, j, gate, up);
      read_words(act_buffer(buffers, i), j, act_words);
      backward(p.prob, gate, up, act_words, p.prob_sums);
    }
    write_z(piece, z.columns, j, gate, up);
    write_words(act_buffer(buffers, i), j, act_words);
  }
  template <class Buffers>
  __device__ void store(const Buffers& buffers, const Part& p, int i) const {
    const int32_t column = p.tile.first_n + i * kPanel;
    const RaggedRow r = ragged_row(p.tile, p.first_m);
    grad_z.store(z_piece(buffers, i), column, r);
    if (has_act == 0) return;
    ptx::tma_store_4d(&act, act_buffer(buffers, i), column, r.row, r.end, r.wrap);
  }
  // A thread adds a column of grad_z as it is stored.
  template <class Buffers>
  __device__ void read_back(const Buffers& buffers, const Part& p, int i) const {
    constexpr int32_t kRows = Buffers::Policy::kBoxRows, kPartRows = kBlockRows;
    static_assert(kRows % kPartRows == 0);
    // From the tile's rows, so that nothing of it is kept in registers while products are made.
    const int warp = p.first_m % kRows / 16, which = warp / 2;
    const int c = warp % 2 * 32 + static_cast<int>(threadIdx.x) % 32;
    const int32_t column = grad_z.column_of(p.tile.first_n + i * kPanel, which, c);
    const int32_t first_row = p.first_m / kRows * kRows;
    const int32_t rows = min(kRows, p.tile.num_rows - first_row);
    if (!has_z(p) || rows <= 0 || column >= 2 * f) return;
    const char* const own = buffers.at(load_buffer(buffers, i) + which);
    const char* const box = own - p.first_m % kRows * 128;  // whose first rows are another warp's
    const int64_t index = (p.tile.first_row + first_row) / kPartRows + p.tile.group;
    float* partial = bias_partials + index * 2 * f + column;
    for (int32_t first = 0; first < rows; first += kPartRows, partial += 2 * f) {
      *partial = sum_of_block(first, min(rows, first + kPartRows), [&](int32_t r) {
        const char* const at = box + swizzled(r, c / 8) + c % 8 * 2;
        return __bfloat162float(*reinterpret_cast<const __nv_bfloat16*>(at));
      });
    }
  }
  // Joins the 16 lanes of the sum in the order of device/lane_sums.cuh: i + 8 is the other column
  // group, i + 4 and i + 2 are in other threads, i + 1 is the other column.
  __device__ void finish(const Part& p, int i) const {
    if (prob_partials == nullptr || !has_z(p)) return;
    const int lane = threadIdx.x % 32;
    const int32_t segment = p.tile.first_n / kPanel + i;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto& sums = p.prob_sums[half];
      float first = sums[0][0] + sums[1][0];
      float second = sums[0][1] + sums[1][1];
#pragma unroll
      for (int distance = 2; distance > 0; distance /= 2) {
        first += __shfl_xor_sync(~0u, first, distance);
        second += __shfl_xor_sync(~0u, second, distance);
      }
      const int32_t row = p.first_m + lane / 4 + 8 * half;
      if (lane % 4 == 0 && row < p.tile.num_rows) {
        prob_partials[segment * capacity + p.tile.first_row + row] = first + second;
      }
    }
  }

 private:
  template <class Buffers>
  static constexpr int kAheadIn = kAhead<typename Buffers::Policy>;

  template <class Buffers>
  static __device__ ZPiece<kPanel> z_piece(const Buffers& buffers, int i) {
    return {buffers, i % kAheadIn<Buffers>};
  }
  template <class Buffers>
  static __device__ char* act_buffer(const Buffers& buffers, int i) {
    constexpr int kFirst = 2 * kAheadIn<Buffers>, kNumActs = Buffers::kNumBuffers - kFirst;
    return buffers.at(kFirst + i % kNumActs);
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
};

}  // namespace moire::cuda::sm90
