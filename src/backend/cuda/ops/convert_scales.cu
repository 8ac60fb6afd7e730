// convert_scales on CUDA: the target is zeroed, then every scale that there is moves to its place,
// a byte per thread and step, neighbours of the target by neighbouring threads. A block takes some
// groups and a slice of each; where a group's rows start in a layout without gaps it finds by
// adding up those of the groups before, so that the splits stay on the device.
#include <moire/quantize.h>

#include <algorithm>

#include "backend/cuda/device/groups.cuh"
#include "backend/cuda/device/warp.cuh"
#include "backend/cuda/implementations.h"
#include "backend/cuda/runtime/launch.h"
#include "core/format.h"
#include "core/scale_layouts.h"

namespace moire::cuda::ops {
namespace {

constexpr int kThreads = 256;
// Of groups: each adds up all groups before its own.
constexpr int64_t kMostParts = 1024;
// Blocks, about, that a GPU is given.
constexpr int64_t kBlocks = 2048;

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
  const char* names[2];  // of source and target, literals
};

// Rows of a layout without gaps that the groups before `end` take up; the block calls it together.
__device__ int64_t rows_before(const moire_groups& groups, int64_t end, int32_t direction,
                               int32_t layout) {
  __shared__ unsigned long long sum;
  if (threadIdx.x == 0) sum = 0;
  __syncthreads();
  unsigned long long rows = 0;
  for (int64_t g = threadIdx.x; g < end; g += kThreads) {
    rows += static_cast<unsigned long long>(
        scale_layout_rows(direction, layout, rows_of(groups, g).size()));
  }
  if (rows != 0) atomicAdd(&sum, rows);
  __syncthreads();
  return static_cast<int64_t>(sum);
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
  __syncthreads();
}

__global__ void __launch_bounds__(kThreads)
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
    move_group(args, rows, place(args.source, args, g, rows, first_row),
               place(args.target, args, g, rows, first_row), slice);
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
  const int64_t bytes_per_slice = int64_t{8} * kThreads;
  const int64_t slices =
      std::min(ceil_div(target.num_elements(), parts * bytes_per_slice), ceil_div(kBlocks, parts));
  move.slices = static_cast<uint32_t>(std::max<int64_t>(1, slices));
  move.names[0] = "source";
  move.names[1] = "target";
  launcher.launch(convert_kernel, {blocks_for(parts * move.slices, 1), kThreads}, move,
                  launcher.reporter());
  return launcher.status();
}

std::string policy(const DeviceState&, const ConvertScalesArgs& args) {
  return concat("a byte per thread and step, ", num_parts(args), " parts of the groups");
}

}  // namespace

const Implementation<ConvertScalesArgs> kConvertScales = {
    "cuda",
    Device::kCuda,
    supports_everything,
    no_workspace,
    policy,
    run,
    [](const DeviceState&, const ConvertScalesArgs& args) -> int64_t {
      return args.groups.num_groups == 0 ? 1 : 2;
    }};

}  // namespace moire::cuda::ops
