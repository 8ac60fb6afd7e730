// convert_scales on CUDA: one launch, which writes every byte of the target. Scales move in
// squares, four blocks of four rows or columns, words in a padded layout; from there into rows that
// begin anywhere, by the target's words; else by bytes. A block takes some groups and a slice of
// each, or of what lies behind the last; where a group's rows start in a layout without gaps it
// finds by adding up those of the groups before, so that the splits stay on the device.
#include <algorithm>

#include "backend/cuda/device/copy_rows.cuh"
#include "backend/cuda/device/groups.cuh"
#include "backend/cuda/device/scan.cuh"
#include "backend/cuda/implementations.h"
#include "backend/cuda/ops/scale_sides.cuh"
#include "backend/cuda/runtime/launch.h"

namespace moire::cuda::ops {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;
// Of groups: each adds up all groups before its own.
constexpr int64_t kMostParts = 1024;
// Blocks that a GPU is given at most where groups are few: a wave of a large one, each of which
// finds its place once.
constexpr int64_t kBlocks = 528;

struct Conversion {
  Side source, target;
  int32_t direction;
  int64_t k;
  moire_groups groups;
  int64_t groups_per_part;
  uint32_t slices;    // of a part
  bool moves_words;   // on the side that is not padded, too
  const char* other;  // the side that is not canonical, a literal
};

// Rows without gaps that the groups before `end` take up in a layout; the block calls it together.
__device__ int64_t rows_before(const Conversion& args, int64_t end, int32_t layout) {
  int64_t rows = 0, total;
  for (int64_t g = threadIdx.x; g < end; g += kThreads) {
    rows += scale_layout_rows(args.direction, layout, rows_of(args.groups, g).size());
  }
  exclusive_sum<kThreads>(rows, total);
  return total;
}

// The first row of a side's scales that belong to `group`, or lie behind the last one: of rows that
// begin there, or of a layout without gaps in which `packed_row` does.
__device__ int64_t first_row(const Side& side, const Conversion& args, int64_t group, int64_t begin,
                             int64_t packed_row) {
  if (!side.is_canonical()) return packed_row;
  return args.direction == MOIRE_ROWWISE ? begin : begin / kMxBlock + group;
}

// A side's place of one group.
__device__ GroupScales place(const Side& side, const Conversion& args, int64_t group,
                             const RowRange& rows, int64_t packed_row) {
  const int64_t padded_blocks = args.direction == MOIRE_ROWWISE
                                    ? side.pitch
                                    : scale_layout_rows(args.direction, side.layout, rows.size());
  return {args.direction, side.layout, side.pitch,
          first_row(side, args, group, rows.begin, packed_row), padded_blocks};
}

// Groups by squares: to a padded side, or from one.
template <bool kPacks, bool kIsRowwise, bool kIsSwizzled>
class BySquares {
 public:
  // This block's slice of a group.
  __device__ static void move(const Conversion& args, const RowRange& rows, const GroupScales& from,
                              const GroupScales& to, uint32_t slice) {
    const PlainScales<kIsRowwise> plain(kPacks ? args.source : args.target, kPacks ? from : to,
                                        args.moves_words);
    const PaddedScales<kIsSwizzled> padded(kPacks ? args.target : args.source, kPacks ? to : from);
    Square square{};
    square.outers = kIsRowwise ? rows.size() : args.k;
    square.blocks = ceil_div(kIsRowwise ? args.k : rows.size(), kMxBlock);
    const uint32_t bits = lane_bits_along_blocks(square.blocks), of_warp = 4U << bits;
    const uint32_t across = (square.blocks + of_warp - 1) >> (bits + 2);
    const uint32_t down = ceil_div(square.outers, 128U) << bits, warps = across * down;
    for (uint32_t i = slice * kWarps + threadIdx.x / kWarp; i < warps; i += args.slices * kWarps) {
      if (kIsRowwise) {
        place(i / across, i % across, bits, square);
      } else {
        place(i % down, i / down, bits, square);
      }
      if constexpr (kPacks) {
        plain.load(square);
        padded.store(square);
      } else {
        padded.load(square);
        plain.store(square);
      }
    }
  }

 private:
  // Eight lanes side by side store a sector of 32 bytes: along the blocks, if there are so many,
  // and four along the outers, or the other way round. Swizzled, four have outers 32 apart.
  __device__ static uint32_t lane_bits_along_blocks(uint32_t blocks) {
    if (kIsRowwise) return 3;
    if (kIsSwizzled) return 0;
    return kPacks && blocks > 16 ? 3 : 2;
  }
  // This thread's square, in the warp at (down, across).
  __device__ static void place(uint32_t down, uint32_t across, uint32_t bits, Square& square) {
    const uint32_t lane = threadIdx.x % kWarp;
    square.b = across << (bits + 2);
    if constexpr (!kIsSwizzled) {
      square.b += 4 * (lane & ((1U << bits) - 1));
      square.o = (down << (7 - bits)) + 4 * (lane >> bits);
    } else if constexpr (kIsRowwise) {
      square.b += lane / 4 * 4;
      square.o = down / 8 * 128 + down % 8 * 4 + 32 * (lane % 4);
    } else {
      square.o = 128 * down + lane / 4 * 4 + 32 * (lane % 4);
    }
  }
};

// Groups whose rows begin anywhere, from a padded side: by the target's words, whatever rows have a
// part of them.
template <bool kIsSwizzled>
struct ByWords {
  // This block's slice of a group.
  __device__ static void move(const Conversion& args, const RowRange& rows, const GroupScales& from,
                              const GroupScales& to, uint32_t slice) {
    const PaddedScales<kIsSwizzled> padded(args.source, from);
    uint8_t* const first = args.target.data + to.offset(0, 0);
    const auto skew = static_cast<int>(reinterpret_cast<uintptr_t>(first) % 4);
    const auto blocks = static_cast<int>(ceil_div(args.k, kMxBlock));
    const int count = static_cast<int>(rows.size()) * blocks;
    const int step = static_cast<int>(4 * args.slices * kThreads);
    for (int i = static_cast<int>(4 * (slice * kThreads + threadIdx.x)) - skew; i < count;
         i += step) {
      if (i >= 0 && i + 4 <= count) {
        const uint32_t four = padded.four_at(i / blocks, i % blocks, blocks);
        *reinterpret_cast<uint32_t*>(first + i) = four;
        continue;
      }
      for (int j = max(i, 0); j < min(i + 4, count); ++j) {
        first[j] = padded.byte_at(j / blocks, j % blocks);
      }
    }
  }
};

// Groups by bytes, neighbours of the target by neighbouring threads.
struct ByBytes {
  // This block's slice of a group.
  __device__ static void move(const Conversion& args, const RowRange& rows, const GroupScales& from,
                              const GroupScales& to, uint32_t slice) {
    const bool is_rowwise = args.direction == MOIRE_ROWWISE;
    const bool pads = to.layout >= MOIRE_SCALES_PADDED, along_blocks = is_rowwise || pads;
    const int64_t outers = is_rowwise ? rows.size() : args.k;
    const int64_t blocks = ceil_div(is_rowwise ? args.k : rows.size(), kMxBlock);
    const int64_t end_outer = pads ? round_up(outers, kPaddedOuter) : outers;
    const int64_t end_block = pads ? round_up(blocks, kPaddedBlocks) : blocks;
    const int64_t lines = along_blocks ? end_outer : end_block;
    const int64_t of_line = along_blocks ? end_block : end_outer;
    for (int64_t i = int64_t{slice} * kWarps + threadIdx.x / kWarp; i < lines;
         i += int64_t{args.slices} * kWarps) {
      for (int64_t j = threadIdx.x % kWarp; j < of_line; j += kWarp) {
        const int64_t o = along_blocks ? i : j, b = along_blocks ? j : i;
        const bool is_there = o < outers && b < blocks;
        args.target.data[to.offset(o, b)] = is_there ? args.source.data[from.offset(o, b)] : 0;
      }
    }
  }
};

// Rows of the target in which there is no scale, zeroed by this part's threads.
__device__ void zero_rows(const Conversion& args, int64_t first, int64_t end, uint32_t slice) {
  const Side& to = args.target;
  const int64_t thread = int64_t{slice} * kThreads + threadIdx.x;
  const int64_t threads = int64_t{args.slices} * kThreads;
  if (to.pitch == to.columns) {
    return zero_run(to.data + first * to.pitch, (end - first) * to.pitch, thread, threads);
  }
  for (int64_t row = first + thread / kWarp; row < end; row += threads / kWarp) {
    zero_run(to.data + row * to.pitch, to.columns, thread % kWarp, kWarp);
  }
}

// One group, by such a way, and the rows between it and the next; the other side's `packed_row`
// becomes the next's.
template <class Way>
__device__ void convert_group(const Conversion& args, const Side& other, int64_t group,
                              uint32_t slice, int64_t& packed_row) {
  const RowRange rows = rows_of(args.groups, group);
  const GroupScales from = place(args.source, args, group, rows, packed_row);
  const GroupScales to = place(args.target, args, group, rows, packed_row);
  packed_row += scale_layout_rows(args.direction, other.layout, rows.size());
  const bool fits = packed_row <= other.num_rows;
  const int64_t own = fits ? scale_layout_rows(args.direction, to.layout, rows.size()) : 0;
  const int64_t next = first_row(args.target, args, group + 1, rows.end, packed_row);
  zero_rows(args, to.first_row + own, min(next, args.target.num_rows), slice);
  if (fits) Way::move(args, rows, from, to, slice);
}

template <class Way>
__global__ void __launch_bounds__(kThreads, 4)
    convert_kernel(const __grid_constant__ Conversion args,
                   const __grid_constant__ Reporter reporter) {
  // One side is canonical: the other's layout decides.
  const Side& other = args.source.is_canonical() ? args.target : args.source;
  const uint32_t slice = blockIdx.x % args.slices;
  const int64_t num_groups = args.groups.num_groups;
  const int64_t first = min(blockIdx.x / args.slices * args.groups_per_part, num_groups);
  const int64_t end = min(first + args.groups_per_part, num_groups);
  int64_t packed_row = rows_before(args, first, other.layout);
  for (int64_t g = first; g < end; ++g) convert_group<Way>(args, other, g, slice, packed_row);
  if (first < end) return;
  const int64_t tail =
      first_row(args.target, args, num_groups, rows_in_use(args.groups), packed_row);
  zero_rows(args, tail, args.target.num_rows, slice);
  if (slice > 0) return;
  check_groups(args.groups, reporter, threadIdx.x, kThreads);
  __syncthreads();  // what is wrong with them is said first
  if (threadIdx.x == 0 && packed_row > other.num_rows) {
    report(reporter, Finding::kTooFewScaleRows, 0, packed_row, other.num_rows, args.other);
  }
}

Side side_of(const TensorView& t, int32_t layout) {
  return {static_cast<uint8_t*>(t.data), layout, t.stride(), t.num_rows(), t.columns()};
}

int64_t groups_per_part(const ConvertScalesArgs& args) {
  return std::max<int64_t>(1, ceil_div(args.groups.num_groups, kMostParts));
}

// Whether one side is padded, in words that are loads and stores; both count in 32 bits.
bool moves_squares(const ConvertScalesArgs& args) {
  const TensorView source(args.source), target(args.target);
  const TensorView& padded = args.from == MOIRE_SCALES_CANONICAL ? target : source;
  return std::max(args.from, args.to) >= MOIRE_SCALES_PADDED && padded.stride() % 4 == 0 &&
         reinterpret_cast<uintptr_t>(padded.data) % 16 == 0 &&
         std::max(source.stride() * source.num_rows(), target.stride() * target.num_rows()) <=
             kMaxInt32 / 2;
}

// Whether the other side opens with whole words, too: four blocks of a row, or four columns.
bool moves_words(const ConvertScalesArgs& args) {
  const TensorView plain(args.from == MOIRE_SCALES_CANONICAL ? args.source : args.target);
  return plain.stride() % 4 == 0 && plain.columns() % 4 == 0 &&
         reinterpret_cast<uintptr_t>(plain.data) % 4 == 0;
}

template <bool kPacks>
auto squares_kernel(bool is_rowwise, bool is_swizzled) {
  if (is_rowwise) {
    return is_swizzled ? convert_kernel<BySquares<kPacks, true, true>>
                       : convert_kernel<BySquares<kPacks, true, false>>;
  }
  return is_swizzled ? convert_kernel<BySquares<kPacks, false, true>>
                     : convert_kernel<BySquares<kPacks, false, false>>;
}
auto kernel_of(const ConvertScalesArgs& args) {
  if (!moves_squares(args)) return convert_kernel<ByBytes>;
  const TensorView target(args.target);
  const bool is_rowwise = args.direction == MOIRE_ROWWISE;
  const bool is_swizzled = std::max(args.from, args.to) == MOIRE_SCALES_SWIZZLED;
  if (args.from == MOIRE_SCALES_CANONICAL) return squares_kernel<true>(is_rowwise, is_swizzled);
  if (is_rowwise && !moves_words(args) && target.is_contiguous() && target.columns() >= 4) {
    return is_swizzled ? convert_kernel<ByWords<true>> : convert_kernel<ByWords<false>>;
  }
  return squares_kernel<false>(is_rowwise, is_swizzled);
}

Status run(const Context& context, const ConvertScalesArgs& args) {
  Launcher launcher(context, "convert_scales");
  Conversion move{};
  move.source = side_of(args.source, args.from);
  move.target = side_of(args.target, args.to);
  move.direction = args.direction;
  move.k = args.k;
  move.groups = args.groups;
  move.groups_per_part = groups_per_part(args);
  // The last part is behind all groups.
  const int64_t parts = ceil_div(args.groups.num_groups, move.groups_per_part) + 1;
  const int64_t squares = ceil_div(TensorView(args.target).num_elements(), 16);
  const int64_t slices = std::min(ceil_div(squares, parts * kThreads), kBlocks / parts);
  move.slices = static_cast<uint32_t>(std::max<int64_t>(1, slices));
  move.moves_words = moves_words(args);
  move.other = args.from == MOIRE_SCALES_CANONICAL ? "target" : "source";
  launcher.launch(kernel_of(args), {blocks_for(parts * move.slices, 1), kThreads}, move,
                  launcher.reporter());
  return launcher.status();
}

std::string policy(const DeviceState&, const ConvertScalesArgs& args) {
  return concat(moves_squares(args) ? "16 bytes" : "a byte", " per thread and step, ",
                groups_per_part(args), " groups a part");
}

}  // namespace

const Implementation<ConvertScalesArgs> kConvertScales = on_cuda(supports_everything, policy, run);

}  // namespace moire::cuda::ops
