// convert_scales on CUDA: the target is zeroed, then every scale that there is moves to its place:
// four blocks of four rows or columns a thread, words in a padded layout; else a byte per thread
// and step, neighbours of the target by neighbouring threads. A block takes some groups and a slice
// of each; where a group's rows start in a layout without gaps it finds by adding up those of the
// groups before, so that the splits stay on the device.
#include <moire/quantize.h>

#include <algorithm>

#include "backend/cuda/device/groups.cuh"
#include "backend/cuda/device/scan.cuh"
#include "backend/cuda/device/transposed_tile.cuh"
#include "backend/cuda/device/warp.cuh"
#include "backend/cuda/implementations.h"
#include "backend/cuda/runtime/launch.h"
#include "core/format.h"
#include "core/scale_layouts.h"

namespace moire::cuda::ops {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;
// Of groups: each adds up all groups before its own.
constexpr int64_t kMostParts = 1024;
// Blocks, about, that a GPU is given: a wave of a large one, each of which finds its place once.
constexpr int64_t kBlocks = 528;

struct Side {
  uint8_t* data;
  int32_t layout;
  int64_t pitch, num_rows;

  __device__ bool is_canonical() const { return layout == MOIRE_SCALES_CANONICAL; }
};

struct Conversion {
  Side source, target;
  int32_t direction;
  int64_t k;
  moire_groups groups;
  int64_t groups_per_part;
  uint32_t slices;
  bool moves_squares, moves_words;  // words: on the side that is not padded, too
  const char* names[2];             // of source and target, literals
};

// Rows of a layout without gaps that the groups before `end` take up; the block calls it together.
__device__ int64_t rows_before(const moire_groups& groups, int64_t end, int32_t direction,
                               int32_t layout) {
  int64_t rows = 0, total;
  for (int64_t g = threadIdx.x; g < end; g += kThreads) {
    rows += scale_layout_rows(direction, layout, rows_of(groups, g).size());
  }
  exclusive_sum<kThreads>(rows, total);
  return total;
}

// A side's place of one group, whose rows without gaps start at `first_row`.
__device__ GroupScales place(const Side& side, const Conversion& args, int64_t group,
                             const RowRange& rows, int64_t first_row) {
  GroupScales at{args.direction, side.layout, side.pitch, first_row, 0};
  if (side.is_canonical()) {
    at.first_row = args.direction == MOIRE_ROWWISE ? rows.begin : rows.begin / kMxBlock + group;
  } else {
    at.padded_blocks = args.direction == MOIRE_ROWWISE
                           ? at.pitch
                           : scale_layout_rows(args.direction, side.layout, rows.size());
  }
  return at;
}

// Sixteen scales of a thread: four blocks, which are a word on the padded side, of each of four
// neighbouring rows or columns (outers).
struct Square {
  uint32_t o, b, outers, blocks;  // the first ones; how many there are
  uint32_t words[4];

  __device__ bool has_outer(uint32_t i) const { return o + i < outers; }
  __device__ bool has_block(uint32_t j) const { return b + j < blocks; }
  // Calls move(i, j, its byte) for each scale that there is, of bytes so far apart.
  template <class Move>
  __device__ void for_each_byte(uint8_t* first, int64_t to_outer, int64_t to_block, Move&& move) {
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
#pragma unroll
      for (uint32_t j = 0; j < 4; ++j) {
        if (has_outer(i) && has_block(j)) move(i, j, first[i * to_outer + j * to_block]);
      }
    }
  }
  // Calls move(a word in memory, its own) for each that there is: of outers, or, of blocks that lie
  // along the outers, of those.
  template <class Move>
  __device__ void for_each_word(uint8_t* first, int64_t pitch, bool are_outers, Move&& move) {
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      const bool is_there =
          are_outers ? has_outer(i) && has_block(0) : has_block(i) && has_outer(0);
      if (is_there) move(*reinterpret_cast<uint32_t*>(first + i * pitch), words[i]);
    }
  }
};

// Words i of four neighbouring lanes become those of lane i. A warp calls it together.
__device__ inline void transpose_lanes(uint32_t (&w)[4]) {
#pragma unroll
  for (uint32_t bit = 1; bit < 4; bit *= 2) {
    const bool is_upper = (threadIdx.x & bit) != 0;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      if ((i & bit) != 0) continue;
      const uint32_t got = __shfl_xor_sync(kAllLanes, is_upper ? w[i] : w[i + bit], bit);
      (is_upper ? w[i] : w[i + bit]) = got;
    }
  }
}

// Between a square and the side that is not padded, whose bytes begin at `first`.
__device__ void move_plain(const Conversion& args, const GroupScales& plain, uint8_t* first,
                           Square& square) {
  const bool packs = args.source.is_canonical(), is_rowwise = args.direction == MOIRE_ROWWISE;
  if (args.moves_words) {
    if (!packs && !is_rowwise) transpose_four(square.words);
    square.for_each_word(first, plain.pitch, is_rowwise,
                         [&](uint32_t& word, uint32_t& own) { packs ? own = word : word = own; });
    if (packs && !is_rowwise) transpose_four(square.words);
    return;
  }
  const int64_t to_outer = is_rowwise ? plain.pitch : 1, to_block = is_rowwise ? 1 : plain.pitch;
  square.for_each_byte(first, to_outer, to_block, [&](uint32_t i, uint32_t j, uint8_t& byte) {
    if (packs) {
      square.words[i] |= uint32_t{byte} << (8 * j);
    } else {
      byte = static_cast<uint8_t>(square.words[i] >> (8 * j));
    }
  });
}

// Between a square and the padded side. Swizzled, four words that lie side by side are of outers 32
// apart, which neighbouring lanes have: behind a group's last outer there are zeros.
__device__ void move_padded(const Conversion& args, const GroupScales& padded, uint8_t* data,
                            Square& square) {
  const bool packs = args.source.is_canonical();
  if (padded.layout == MOIRE_SCALES_PADDED) {
    uint8_t* const first = data + padded.offset(square.o, square.b);
    square.for_each_word(first, padded.padded_blocks, true,
                         [&](uint32_t& word, uint32_t& own) { packs ? word = own : own = word; });
    return;
  }
  const uint32_t lane = threadIdx.x % 4, outer = square.o - 32 * lane + lane;
  auto* const row = reinterpret_cast<uint4*>(data + padded.offset(outer, square.b));
  if (packs) transpose_lanes(square.words);
  auto& w = square.words;
  if (square.has_block(0)) {
    if (packs) {
      *row = {w[0], w[1], w[2], w[3]};
    } else {
      const uint4 v = *row;
      w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
    }
  }
  if (!packs) transpose_lanes(square.words);
}

// This block's slice of a group whose scales lie in fours on one side: a warp moves eight squares
// of outers by four of blocks at once.
__device__ void move_squares(const Conversion& args, const RowRange& rows, const GroupScales& from,
                             const GroupScales& to, uint32_t slice) {
  const bool is_rowwise = args.direction == MOIRE_ROWWISE, packs = args.source.is_canonical();
  const GroupScales &plain = packs ? from : to, &padded = packs ? to : from;
  const bool is_swizzled = padded.layout == MOIRE_SCALES_SWIZZLED;
  const auto outers = static_cast<uint32_t>(is_rowwise ? rows.size() : args.k);
  const auto blocks = static_cast<uint32_t>(ceil_div(is_rowwise ? args.k : rows.size(), kMxBlock));
  const uint32_t across = ceil_div(blocks, 16U);
  const uint32_t down = is_swizzled ? 4 * ceil_div(outers, 128U) : ceil_div(outers, 32U);
  const uint32_t lane = threadIdx.x % kWarp;
  for (uint32_t i = slice * kWarps + threadIdx.x / kWarp; i < across * down;
       i += args.slices * kWarps) {
    const uint32_t n = 8 * (i / across) + lane % 8;
    const uint32_t swizzled = n / 32 * 128 + n % 4 * 32 + n / 4 % 8 * 4;
    Square square{.o = is_swizzled ? swizzled : 4 * n,
                  .b = 16 * (i % across) + 4 * (lane / 8),
                  .outers = outers,
                  .blocks = blocks};
    uint8_t* const first =
        (packs ? args.source : args.target).data + plain.offset(square.o, square.b);
    if (packs) move_plain(args, plain, first, square);
    move_padded(args, padded, (packs ? args.target : args.source).data, square);
    if (!packs) move_plain(args, plain, first, square);
  }
}

// This block's slice of a group: neighbours of the target by neighbouring threads.
__device__ void move_group(const Conversion& args, const RowRange& rows, const GroupScales& from,
                           const GroupScales& to, uint32_t slice) {
  const bool is_rowwise = args.direction == MOIRE_ROWWISE;
  const int64_t outer = is_rowwise ? rows.size() : args.k;
  const int64_t blocks = ceil_div(is_rowwise ? args.k : rows.size(), kMxBlock);
  const auto move = [&](int64_t o, int64_t b) {
    args.target.data[to.offset(o, b)] = args.source.data[from.offset(o, b)];
  };
  const int64_t thread = int64_t{slice} * kThreads + threadIdx.x;
  const int64_t threads = int64_t{args.slices} * kThreads;
  if (!is_rowwise && to.layout <= MOIRE_SCALES_DENSE) {
    for (int64_t b = 0; b < blocks; ++b) {
      for (int64_t o = thread; o < outer; o += threads) move(o, b);
    }
    return;
  }
  for (int64_t o = thread / kWarp; o < outer; o += threads / kWarp) {
    for (int64_t b = threadIdx.x % kWarp; b < blocks; b += kWarp) move(o, b);
  }
}

// Block 0 says what is wrong with the groups, or how many rows they need.
__device__ void check(const Conversion& args, const Side& other, const char* name,
                      const Reporter& reporter) {
  check_groups(args.groups, reporter, threadIdx.x, kThreads);
  if (other.is_canonical()) return;
  const int64_t needed =
      rows_before(args.groups, args.groups.num_groups, args.direction, other.layout);
  if (threadIdx.x == 0 && needed > other.num_rows) {
    report(reporter, Finding::kTooFewScaleRows, 0, needed, other.num_rows, name);
  }
}

__global__ void __launch_bounds__(kThreads, 4)
    convert_kernel(const __grid_constant__ Conversion args,
                   const __grid_constant__ Reporter reporter) {
  // One side is canonical: the other's layout decides.
  const bool from_canonical = args.source.is_canonical();
  const Side& other = from_canonical ? args.target : args.source;
  if (blockIdx.x == 0) check(args, other, args.names[from_canonical ? 1 : 0], reporter);
  const uint32_t slice = blockIdx.x % args.slices;
  const int64_t first = blockIdx.x / args.slices * args.groups_per_part;
  const int64_t end = min(first + args.groups_per_part, args.groups.num_groups);
  int64_t first_row = 0;
  if (!other.is_canonical()) {
    first_row = rows_before(args.groups, first, args.direction, other.layout);
  }
  for (int64_t g = first; g < end; ++g) {
    const RowRange rows = rows_of(args.groups, g);
    const int64_t next = first_row + scale_layout_rows(args.direction, other.layout, rows.size());
    if (!other.is_canonical() && next > other.num_rows) return;
    const GroupScales from = place(args.source, args, g, rows, first_row);
    const GroupScales to = place(args.target, args, g, rows, first_row);
    if (args.moves_squares) {
      move_squares(args, rows, from, to, slice);
    } else {
      move_group(args, rows, from, to, slice);
    }
    first_row = next;
  }
}

Side side_of(const TensorView& t, int32_t layout) {
  return {static_cast<uint8_t*>(t.data), layout, t.stride(), t.num_rows()};
}

int64_t num_parts(const ConvertScalesArgs& args) {
  const int64_t groups = args.groups.num_groups;
  return groups == 0 ? 0 : ceil_div(groups, ceil_div(groups, kMostParts));
}

// Whether one side is padded, in words that are loads and stores; both count in 32 bits.
bool moves_squares(const ConvertScalesArgs& args) {
  const TensorView source(args.source), target(args.target);
  const TensorView& padded = args.from == MOIRE_SCALES_CANONICAL ? target : source;
  return std::max(args.from, args.to) >= MOIRE_SCALES_PADDED && padded.stride() % 4 == 0 &&
         reinterpret_cast<uintptr_t>(padded.data) % 16 == 0 &&
         std::max(source.num_elements(), target.num_elements()) < (int64_t{1} << 31);
}

// Whether the other side opens with whole words, too: four blocks of a row, or four columns.
bool moves_words(const ConvertScalesArgs& args) {
  const TensorView plain(args.from == MOIRE_SCALES_CANONICAL ? args.source : args.target);
  return plain.stride() % 4 == 0 && plain.columns() % 4 == 0 &&
         reinterpret_cast<uintptr_t>(plain.data) % 4 == 0;
}

Status run(const Context& context, const ConvertScalesArgs& args) {
  Launcher launcher(context, "convert_scales");
  const TensorView target(args.target);
  launcher.zero_rows(target.data, static_cast<size_t>(target.stride()),
                     static_cast<size_t>(target.columns()), static_cast<size_t>(target.num_rows()));
  if (args.groups.num_groups == 0) return launcher.status();
  Conversion move{};
  move.source = side_of(args.source, args.from);
  move.target = side_of(args.target, args.to);
  move.direction = args.direction;
  move.k = args.k;
  move.groups = args.groups;
  move.groups_per_part = ceil_div(args.groups.num_groups, kMostParts);
  const int64_t parts = num_parts(args);
  const int64_t bytes_per_slice = int64_t{16} * kThreads;
  const int64_t slices =
      std::min(ceil_div(target.num_elements(), parts * bytes_per_slice), ceil_div(kBlocks, parts));
  move.slices = static_cast<uint32_t>(std::max<int64_t>(1, slices));
  move.moves_squares = moves_squares(args);
  move.moves_words = moves_words(args);
  move.names[0] = "source";
  move.names[1] = "target";
  launcher.launch(convert_kernel, {blocks_for(parts * move.slices, 1), kThreads}, move,
                  launcher.reporter());
  return launcher.status();
}

std::string policy(const DeviceState&, const ConvertScalesArgs& args) {
  return concat(moves_squares(args) ? "16 bytes" : "a byte", " per thread and step, ",
                num_parts(args), " parts of the groups");
}

int64_t launches(const DeviceState&, const ConvertScalesArgs& args) {
  return args.groups.num_groups == 0 ? 1 : 2;
}

}  // namespace

const Implementation<ConvertScalesArgs> kConvertScales = {
    "cuda", Device::kCuda, supports_everything, no_workspace, policy, run, launches};

}  // namespace moire::cuda::ops
