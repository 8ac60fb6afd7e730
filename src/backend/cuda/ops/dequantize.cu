// dequantize on CUDA: the tiles of quantize_tiles.cuh, decoded as they are read and stored.
#include "backend/cuda/implementations.h"
#include "backend/cuda/ops/quantize.h"
#include "backend/cuda/ops/quantize_tiles.cuh"

namespace moire::cuda::ops {
namespace {

// Whether rows have a scale in common.
template <int kScaling, int kDirection>
inline constexpr bool kSharesRows =
    kScaling == MOIRE_SCALING_FP8_TILE || kDirection == MOIRE_COLUMNWISE;

// Where scales are of 32 rows at most, lines of a row are a warp's whole and a thread has few rows,
// so that many threads' loads are under way: 0.97 of a copy instead of 0.93 by tiles of a warp.
template <int kScaling, int kDirection>
using DecodedTiles =
    std::conditional_t<kSharesRows<kScaling, kDirection> && !Scales<kScaling>::kIsMx,
                       TileShape<kScaling>, TileSizes<256, 256, 32, 256>>;

// Rows of codes with their scales, of each row or of each column, decoded where they are read:
// floats would take four times the registers.
template <int kRows, bool kIsColumnwise>
struct CodedEights {
  uint2 codes[kRows];
  float scales[kIsColumnwise ? kEight : kRows];
  bool is_e5m2;

  __device__ Eight<float> operator[](int i) const {
    Eight<float> out;
    const auto decode = [&](auto format) {
#pragma unroll
      for (int j = 0; j < kEight; j += 2) {
        const uint32_t word = j < 4 ? codes[i].x : codes[i].y;
        const float2 pair = decode_pair(word >> (8 * (j % 4)) & 0xFFFFU, format.value);
        out.set(j, pair.x * scales[kIsColumnwise ? j : i]);
        out.set(j + 1, pair.y * scales[kIsColumnwise ? j + 1 : i]);
      }
    };
    if (is_e5m2) {
      decode(std::true_type());
    } else {
      decode(std::false_type());
    }
    return out;
  }
};

// Rows of FP8 with their scales, which lie along kDirection (tiles: rowwise), decoded. kVectors:
// codes, and columnwise E8M0 scales, start on 8 bytes.
template <bool kVectors_, int kDirection>
struct CodeRows {
  static constexpr bool kVectors = kVectors_;
  static constexpr bool kIsColumnwise = kDirection == MOIRE_COLUMNWISE;
  template <int kRows>
  using Rows = CodedEights<kRows, kIsColumnwise>;
  Matrix<const uint8_t> codes;
  const void* scales;
  int64_t scale_stride;
  int columns;
  bool is_e5m2;

  template <int kScaling, class Shape, int kRows>
  __device__ void load(const TilePart<kScaling, Shape>& tile,
                       CodedEights<kRows, kIsColumnwise>& values) const {
    using S = Scales<kScaling>;
    const auto* scale = static_cast<const typename S::Stored*>(scales);
    const uint8_t* code = codes.row(tile.row(0)) + tile.column;
    values.is_e5m2 = is_e5m2;
#pragma unroll
    for (int i = 0; i < kRows; ++i, code += codes.stride) {
      values.codes[i] = eight_codes(code, tile, tile.has_row(i));
    }
    if constexpr (kIsColumnwise) {
      load_column_scales(scale + tile.index * scale_stride + tile.column, tile, values.scales);
    } else {
      constexpr bool kIsTile = kScaling == MOIRE_SCALING_FP8_TILE;
      scale += (kIsTile ? tile.index : tile.row(0)) * scale_stride + tile.column / S::kBlock;
      typename S::Stored stored[kRows];  // decoding has branches, which loads do not wait for
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        stored[i] = tile.has_row(i) ? *scale : typename S::Stored{};
        if (!kIsTile) scale += scale_stride;
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) values.scales[i] = S::decode(stored[i]);
    }
  }

 private:
  template <class Tile>
  __device__ uint2 eight_codes(const uint8_t* p, const Tile& tile, bool is_there) const {
    uint2 out{};
    if (!is_there) return out;
    if constexpr (kVectors) {
      out = __ldg(reinterpret_cast<const uint2*>(p));
    } else {
#pragma unroll
      for (int i = 0; i < kEight; ++i) {
        const uint32_t code = tile.column + i < columns ? p[i] : 0;
        (i < 4 ? out.x : out.y) |= code << (8 * (i % 4));
      }
    }
    return out;
  }
  // Zero past the last column, so that what lies there is zero.
  template <int kScaling, class Shape, class Stored>
  __device__ void load_column_scales(const Stored* p, const TilePart<kScaling, Shape>& tile,
                                     float (&out)[kEight]) const {
    if constexpr (kVectors && sizeof(Stored) == 1) {
      const uint2 all = tile.num_rows > 0 ? __ldg(reinterpret_cast<const uint2*>(p)) : uint2{};
#pragma unroll
      for (int i = 0; i < kEight; ++i) {
        const uint32_t word = i < 4 ? all.x : all.y;
        out[i] = Scales<kScaling>::decode(static_cast<uint8_t>(word >> (8 * (i % 4))));
      }
    } else {
#pragma unroll
      for (int i = 0; i < kEight; ++i) {
        out[i] = tile.column + i < columns ? Scales<kScaling>::decode(p[i]) : 0.0F;
      }
    }
  }
};

template <bool kVectors, int kDirection>
CodeRows<kVectors, kDirection> code_rows(const moire_quantized& q) {
  const TensorView data(q.data), scales(q.scales);
  return {.codes = matrix_of<const uint8_t>(data),
          .scales = scales.data,
          .scale_stride = scales.stride(),
          .columns = static_cast<int>(data.columns()),
          .is_e5m2 = data.type() == DType::kE5M2};
}

template <class T, class Source>
struct DequantizeTiles {
  Source source;
  ScaleBlocks blocks;
  Matrix<T> target;
  int64_t capacity;
  uint32_t column_tiles;
  bool zeroes_tail;
};

template <class T, class Source>
__device__ __noinline__ void zero_tail(const DequantizeTiles<T, Source>& args, int64_t in_use) {
  constexpr auto kSize = static_cast<int64_t>(sizeof(T));
  zero_bytes(reinterpret_cast<uint8_t*>(args.target.data), args.target.stride * kSize,
             args.source.columns * kSize, in_use, args.capacity);
}

template <bool kVectors, class T>
__device__ inline void store_floats(T* to, int columns_left, const Eight<float>& values) {
  if constexpr (kVectors) {
    Packed<T, kEight> packed;
#pragma unroll
    for (int j = 0; j < kEight; ++j) packed.set(j, values[j]);
    store(to, packed);
  } else {
#pragma unroll
    for (int j = 0; j < kEight; ++j) {
      if (j < columns_left) to[j] = from_float<T>(values[j]);
    }
  }
}

template <int kScaling, class Shape, class T, class Source>
__global__ void __launch_bounds__(Shape::kThreads)
    dequantize_kernel(const __grid_constant__ DequantizeTiles<T, Source> args,
                      const __grid_constant__ Reporter reporter) {
  if (blockIdx.x == 0) check_groups(args.blocks.groups, reporter, threadIdx.x, Shape::kThreads);
  const TilePart<kScaling, Shape> tile(args.blocks, args.column_tiles, args.source.columns);
  const int64_t in_use = rows_in_use(args.blocks.groups);
  if (args.zeroes_tail && in_use < args.capacity) zero_tail(args, in_use);
  if (tile.num_rows == 0) return;
  typename Source::template Rows<tile.kRows> values;
  args.source.load(tile, values);
  T* p = args.target.row(tile.row(0)) + tile.column;
#pragma unroll
  for (int i = 0; i < tile.kRows; ++i, p += args.target.stride) {
    if (!tile.has_row(i)) continue;
    store_floats<Source::kVectors>(p, args.source.columns - tile.column, values[i]);
  }
}

bool takes_vectors(const DequantizeArgs& args) {
  return opens_eights(args.source, args.direction) && opens_vectors({args.target});
}

template <int kScaling, int kDirection, class T, bool kVectors>
void launch(Launcher& launcher, const DequantizeArgs& args) {
  using Tile = DecodedTiles<kScaling, kDirection>;
  const TensorView data(args.source.data);
  DequantizeTiles<T, CodeRows<kVectors, kDirection>> tiles{};
  tiles.source = code_rows<kVectors, kDirection>(args.source);
  tiles.blocks = scale_blocks(data, args.groups, args.scaling, kSharesRows<kScaling, kDirection>);
  tiles.target = matrix_of<T>(args.target);
  tiles.capacity = data.num_rows();
  tiles.zeroes_tail = args.tail == MOIRE_TAIL_ZERO && data.rank == 2;
  launch_tiles<Tile>(launcher, dequantize_kernel<kScaling, Tile, T, CodeRows<kVectors, kDirection>>,
                     tiles);
}

// Calls f.operator()<kScaling, kDirection>(). A tile is the same in both directions, rowwise here.
template <class F>
void with_blocks(int32_t scaling, int32_t direction, F&& f) {
  const bool is_rowwise = direction == MOIRE_ROWWISE;
  if (scaling == MOIRE_SCALING_MXFP8) {
    is_rowwise ? f.template operator()<MOIRE_SCALING_MXFP8, MOIRE_ROWWISE>()
               : f.template operator()<MOIRE_SCALING_MXFP8, MOIRE_COLUMNWISE>();
  } else if (scaling == MOIRE_SCALING_FP8_BLOCK) {
    is_rowwise ? f.template operator()<MOIRE_SCALING_FP8_BLOCK, MOIRE_ROWWISE>()
               : f.template operator()<MOIRE_SCALING_FP8_BLOCK, MOIRE_COLUMNWISE>();
  } else {
    f.template operator()<MOIRE_SCALING_FP8_TILE, MOIRE_ROWWISE>();
  }
}

Status run(const Context& context, const DequantizeArgs& args) {
  Launcher launcher(context, "dequantize");
  with_blocks(args.scaling, args.direction, [&]<int kScaling, int kDirection>() {
    with_float_type(TensorView(args.target).type(), [&]<class T>() {
      (takes_vectors(args) ? launch<kScaling, kDirection, T, true>
                           : launch<kScaling, kDirection, T, false>)(launcher, args);
    });
  });
  return launcher.status();
}

Reason supports(const DeviceState&, const DequantizeArgs& args) {
  return too_wide("source", TensorView(args.source.data).columns());
}
std::string policy(const DeviceState&, const DequantizeArgs& args) {
  std::string policy;
  with_blocks(args.scaling, args.direction, [&]<int kScaling, int kDirection>() {
    using Tile = DecodedTiles<kScaling, kDirection>;
    policy = tiles_policy(Tile::kRows, Tile::kColumns, "eight", takes_vectors(args));
  });
  return policy;
}

}  // namespace

const Implementation<DequantizeArgs> kDequantize = {
    "cuda", Device::kCuda, supports, no_workspace, policy, run,
};

}  // namespace moire::cuda::ops
