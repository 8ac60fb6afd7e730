// Codes of FP8 and their scales as dequantize and requantize read them: a thread has four
// neighbouring columns of some rows, each a word in registers, which it decodes where it uses them:
// floats would take four times the registers.
#pragma once

#include <algorithm>

#include "backend/cuda/ops/quantize_tiles.cuh"

namespace moire::cuda::ops {

constexpr int kFour = 4;

// Sizes of tiles, TileSizes of four columns a thread, of codes with such scales.
template <int kOfScaling, class Sizes>
struct WordTile : Sizes {
  static constexpr int kScaling = kOfScaling;
  static constexpr bool kIsWarps = Sizes::kTileThreads == kWarp;
  static constexpr int kLanes = Scales<kScaling>::kBlock / kFour;  // that share a rowwise scale
  // A lane owns every so many-th row of its part: of scales along the rows it has those.
  static constexpr int kTurn = std::min(kLanes, Sizes::kRowsPerThread);
  static constexpr int kOwned = Sizes::kRowsPerThread / kTurn;

  __device__ static int owned_row(int k) {
    return k * kTurn + static_cast<int>(threadIdx.x) % kTurn;
  }
  // What the lane that owns row i has of it.
  __device__ static float lent(const float (&owned)[kOwned], int i) {
    return __shfl_sync(kAllLanes, owned[i / kTurn], i % kTurn, kLanes);
  }
};

template <class Tile>
using PartOf = TilePart<Tile::kScaling, Tile>;

// A part's words, zeros where there are none, and the scales that decode them: of the thread's
// columns or of its owned rows.
template <class Tile, bool kIsColumnwise>
struct PartWords {
  static constexpr int kRows = Tile::kRowsPerThread;
  static constexpr int kScales = kIsColumnwise ? kFour : Tile::kOwned;
  uint32_t words[kRows];
  float scales[kScales];
  bool has_rows;  // the warp

  // Calls visit(i, the four values) for each row, if a thread of the warp has one.
  template <class IsE5m2, class Visit>
  __device__ void for_each_row(IsE5m2 is_e5m2, Visit&& visit) const {
    if (!has_rows) return;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float4 v = decode_four(words[i], is_e5m2.value);
      float values[kFour] = {v.x, v.y, v.z, v.w};
      if constexpr (kIsColumnwise) {
#pragma unroll
        for (int j = 0; j < kFour; ++j) values[j] *= scales[j];
      } else {
        const float scale = Tile::lent(scales, i);
#pragma unroll
        for (float& value : values) value *= scale;
      }
      visit(i, values);
    }
  }
  // A compiler is not to keep what it decoded before.
  __device__ void forget_values() {
#pragma unroll
    for (uint32_t& word : words) asm volatile("" : "+r"(word));
  }
};

// Rows of codes. kVectors: four codes are one load, as are four columnwise scales (opens_words).
template <class OfTile, bool kIsColumnwise_, bool kVectors_>
struct WordRows {
  static constexpr bool kIsColumnwise = kIsColumnwise_, kVectors = kVectors_;
  using Tile = OfTile;
  using Words = PartWords<Tile, kIsColumnwise>;
  using S = Scales<Tile::kScaling>;
  using Stored = typename S::Stored;
  Matrix<const uint8_t> codes;
  const Stored* scales;
  int64_t scale_stride;
  int columns;
  bool is_e5m2;

  __device__ void load(const PartOf<Tile>& part, Words& out) const {
    const uint8_t* const first = codes.row(part.row(0)) + part.column;
    const auto stride = static_cast<uint32_t>(codes.stride);
    with_flag(part.is_whole(columns), [&](auto is_whole) {
#pragma unroll
      for (int i = 0; i < Words::kRows; ++i) {
        const uint8_t* const p = first + static_cast<uint64_t>(stride) * i;
        out.words[i] = is_whole.value || part.has_row(i) ? four_bytes(p, part.column) : 0;
      }
    });
    const int rows = part.template rows_of_lanes<Tile::kLanes>();
    out.has_rows = __any_sync(kAllLanes, rows > 0) != 0;
    if constexpr (kIsColumnwise) {
      load_column_scales(part, out.scales);
    } else {
#pragma unroll
      for (int k = 0; k < Words::kScales; ++k) {
        const int i = Tile::owned_row(k);
        const int64_t row = Tile::kScaling == MOIRE_SCALING_FP8_TILE ? part.index : part.row(i);
        const Stored* scale = scales + row * scale_stride + part.column / S::kBlock;
        out.scales[k] = i < rows ? S::decode(*scale) : 0.0F;
      }
    }
  }

 private:
  __device__ uint32_t four_bytes(const uint8_t* p, int column) const {
    if constexpr (kVectors) {
      return __ldg(reinterpret_cast<const uint32_t*>(p));
    } else {
      uint32_t word = 0;
#pragma unroll
      for (int j = 0; j < kFour; ++j) {
        if (column + j < columns) word |= uint32_t{p[j]} << (8 * j);
      }
      return word;
    }
  }
  __device__ void load_column_scales(const PartOf<Tile>& part, float (&out)[kFour]) const {
    const Stored* const row = scales + part.index * scale_stride;
    if constexpr (kVectors) {  // the last ones' where there is no column: they are multiplied by 0
      using Four = std::conditional_t<S::kIsMx, uchar4, float4>;
      const auto four =
          __ldg(reinterpret_cast<const Four*>(row + min(part.column, columns - kFour)));
      const Stored each[] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int j = 0; j < kFour; ++j) out[j] = S::decode(each[j]);
    } else {
#pragma unroll
      for (int j = 0; j < kFour; ++j) {
        const int column = part.column + j;
        out[j] = column < columns ? S::decode(row[column]) : 0.0F;
      }
    }
  }
};

inline bool opens_words(const moire_quantized& copy, int32_t direction) {
  const TensorView data(copy.data), scales(copy.scales);
  const bool are_of_columns =
      direction == MOIRE_COLUMNWISE && scales.columns() == data.columns();  // not of tiles
  return opens_eights(copy, direction) &&
         (scales.type() != DType::kFP32 || !are_of_columns || opens_vectors({scales}));
}

// Calls f.operator()<kScaling, kDirection>() for scales of blocks.
template <class F>
decltype(auto) with_blocks(int32_t scaling, int32_t direction, F&& f) {
  const bool is_rowwise = direction == MOIRE_ROWWISE;
  if (scaling == MOIRE_SCALING_MXFP8) {
    return is_rowwise ? f.template operator()<MOIRE_SCALING_MXFP8, MOIRE_ROWWISE>()
                      : f.template operator()<MOIRE_SCALING_MXFP8, MOIRE_COLUMNWISE>();
  }
  return is_rowwise ? f.template operator()<MOIRE_SCALING_FP8_BLOCK, MOIRE_ROWWISE>()
                    : f.template operator()<MOIRE_SCALING_FP8_BLOCK, MOIRE_COLUMNWISE>();
}

// The tiles' source, and where they lie in it; `shares_rows`: whether rows share scales.
void set_source(auto& tiles, const auto& args, bool shares_rows) {
  using Source = decltype(tiles.source);
  const TensorView data(args.source.data), scales(args.source.scales);
  tiles.source = {.codes = matrix_of<const uint8_t>(data),
                  .scales = static_cast<const typename Source::Stored*>(scales.data),
                  .scale_stride = scales.stride(),
                  .columns = static_cast<int>(data.columns()),
                  .is_e5m2 = data.type() == DType::kE5M2};
  tiles.blocks = scale_blocks(data, args.groups, args.scaling, shares_rows);
  tiles.capacity = data.num_rows();
  tiles.zeroes_tail = args.tail == MOIRE_TAIL_ZERO && data.rank == 2;
}

// Kernels count the bytes from one row of codes to the next in 32 bits.
inline Reason too_far_apart(std::string_view name, const TensorView& codes) {
  if (codes.stride() <= UINT32_MAX) return std::nullopt;
  return concat(name, " has rows ", codes.stride(), " bytes apart, less than 2^32 are taken");
}
template <class A>
Reason supports_words(const DeviceState&, const A& args) {
  const TensorView source(args.source.data);
  Reason reason = too_wide("source", source.columns());
  if (!reason) reason = too_far_apart("source", source);
  if constexpr (std::is_same_v<decltype(args.target), moire_quantized>) {
    if (!reason) reason = too_far_apart("target", TensorView(args.target.data));
  }
  return reason;
}

}  // namespace moire::cuda::ops
