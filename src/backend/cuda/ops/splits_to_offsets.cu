// splits_to_offsets on CUDA: one launch of one block, which walks the splits in tiles. It first
// looks for the first wrong group; only if there is none, it walks them again and writes, so that
// an error leaves all outputs untouched. Up to a tile of groups it reads the splits once.
#include <limits>

#include "backend/cuda/device/report.cuh"
#include "backend/cuda/device/scan.cuh"
#include "backend/cuda/device/values.cuh"
#include "backend/cuda/implementations.h"
#include "backend/cuda/runtime/launch.h"

namespace moire::cuda::ops {
namespace {

constexpr int kThreads = 1024;
constexpr int kPerThread = 4;
constexpr int64_t kTile = int64_t{kThreads} * kPerThread;
// They travel as a kernel's parameter.
constexpr int64_t kMaxOutputs = 64;

struct Output {
  void* data;  // of group 0's end
  int64_t multiplier;
  bool is_int32;
  bool with_zero;

  __device__ void write(int64_t group, int64_t value) const {
    if (is_int32) {
      static_cast<int32_t*>(data)[group] = static_cast<int32_t>(value);
    } else {
      static_cast<int64_t*>(data)[group] = value;
    }
  }
};

struct Operands {
  const void* ends;  // or splits; without a leading zero
  const void* leading_zero;
  int64_t num_groups;
  bool are_splits;
  int64_t capacity;  // int64's largest where it is not checked
  // What the narrowest output can hold: rows, its multiplier and the name of its type.
  int64_t row_limit, limit_multiplier;
  const char* limit_type;
  int num_outputs;
  Output outputs[kMaxOutputs];
};

// The ends of a thread's groups within a tile, and the start of the first. Sums past int64 wrap
// around, so that the first of them is negative.
struct Ends {
  uint64_t start;
  uint64_t ends[kPerThread];
};

template <class T>
__device__ Ends ends_of_tile(const Operands& args, int64_t first, uint64_t& carry) {
  const T* values = static_cast<const T*>(args.ends);
  Ends tile;
  uint64_t sum = 0;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int64_t g = first + i;
    const auto value = g < args.num_groups ? static_cast<uint64_t>(int64_t{values[g]}) : 0;
    sum += value;
    tile.ends[i] = args.are_splits ? sum : value;
  }
  if (!args.are_splits) {
    tile.start = first == 0 || first > args.num_groups
                     ? 0
                     : static_cast<uint64_t>(int64_t{values[first - 1]});
    return tile;
  }
  uint64_t total;
  tile.start = carry + exclusive_sum<kThreads>(sum, total);
  carry += total;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) tile.ends[i] += tile.start;
  return tile;
}

__device__ void report_group(const Operands& args, int64_t group, int64_t start, int64_t end,
                             const Reporter& reporter) {
  const auto rows = static_cast<int64_t>(static_cast<uint64_t>(end) - static_cast<uint64_t>(start));
  if (args.are_splits && rows < 0) {
    report(reporter, Finding::kNegativeSplit, group, rows, 0);
  } else if (end < start) {
    report(reporter, Finding::kDecreasing, group, end, start);
  } else if (end > args.capacity) {
    report(reporter, Finding::kPastCapacity, group, end, args.capacity);
  } else {
    report(reporter, Finding::kPastOutput, group, end, args.limit_multiplier, args.limit_type);
  }
}

__device__ void write_ends(const Operands& args, int64_t first, const Ends& tile) {
  for (int o = 0; o < args.num_outputs; ++o) {
    const Output& output = args.outputs[o];
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      if (first + i >= args.num_groups) break;
      output.write(first + i, static_cast<int64_t>(tile.ends[i]) * output.multiplier);
    }
  }
}

// Whether every group of a tile is sound; the first that is not is reported. For the whole block.
__device__ bool check_tile(const Operands& args, int64_t first, const Ends& tile,
                           const Reporter& reporter) {
  __shared__ unsigned long long first_bad;
  constexpr unsigned long long kNone = ~0ULL;
  if (threadIdx.x == 0) first_bad = kNone;
  int bad = -1;
  auto start = static_cast<int64_t>(tile.start);
  for (int i = 0; i < kPerThread && bad < 0 && first + i < args.num_groups; ++i) {
    const auto end = static_cast<int64_t>(tile.ends[i]);
    if (end >= start && end <= min(args.capacity, args.row_limit)) {
      start = end;
    } else {
      bad = i;
    }
  }
  if (__syncthreads_or(bad >= 0) == 0) return true;
  if (bad >= 0) atomicMin(&first_bad, static_cast<unsigned long long>(first + bad));
  __syncthreads();
  if (bad >= 0 && first_bad == static_cast<unsigned long long>(first + bad)) {
    report_group(args, first + bad, start, static_cast<int64_t>(tile.ends[bad]), reporter);
  }
  return false;
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    splits_kernel(const __grid_constant__ Operands args, Reporter reporter) {
  if (args.leading_zero != nullptr) {
    const auto found = int64_t{*static_cast<const T*>(args.leading_zero)};
    if (threadIdx.x == 0 && found != 0) report(reporter, Finding::kFirstOffset, 0, found, 0);
    if (found != 0) return;
  }
  uint64_t carry = 0;
  Ends tile{};
  for (int64_t base = 0; base < args.num_groups; base += kTile) {
    const int64_t first = base + threadIdx.x * kPerThread;
    tile = ends_of_tile<T>(args, first, carry);
    if (!check_tile(args, first, tile, reporter)) return;
  }
  for (int o = threadIdx.x; o < args.num_outputs; o += kThreads) {
    if (args.outputs[o].with_zero) args.outputs[o].write(-1, 0);
  }
  if (args.num_groups <= kTile) {
    write_ends(args, threadIdx.x * kPerThread, tile);
    return;
  }
  carry = 0;
  for (int64_t base = 0; base < args.num_groups; base += kTile) {
    const int64_t first = base + threadIdx.x * kPerThread;
    write_ends(args, first, ends_of_tile<T>(args, first, carry));
  }
}

void add_output(Operands& operands, const moire_offsets_output& given) {
  const TensorView offsets(given.offsets);
  const bool is_int32 = offsets.type() == DType::kInt32, with_zero = given.no_leading_zero == 0;
  const int64_t multiplier = given.multiplier == 0 ? 1 : given.multiplier;
  const int64_t largest =
      is_int32 ? std::numeric_limits<int32_t>::max() : std::numeric_limits<int64_t>::max();
  if (largest / multiplier < operands.row_limit) {
    operands.row_limit = largest / multiplier;
    operands.limit_multiplier = multiplier;
    operands.limit_type = is_int32 ? "int32" : "int64";
  }
  const int64_t offset = with_zero ? dtype_size(offsets.type()) : 0;
  operands.outputs[operands.num_outputs++] = {static_cast<char*>(offsets.data) + offset, multiplier,
                                              is_int32, with_zero};
}

Operands operands_of(const SplitsToOffsetsArgs& args) {
  const TensorView splits(args.splits);
  const bool with_zero = args.kind == MOIRE_OFFSETS;
  constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();
  Operands operands{};
  operands.ends = static_cast<char*>(splits.data) + (with_zero ? dtype_size(splits.type()) : 0);
  operands.leading_zero = with_zero ? splits.data : nullptr;
  operands.num_groups = splits.shape[0] - (with_zero ? 1 : 0);
  operands.are_splits = args.kind == MOIRE_SPLITS;
  operands.capacity = args.capacity < 0 ? kUnlimited : args.capacity;
  operands.row_limit = kUnlimited;
  for (int64_t i = 0; i < args.num_outputs; ++i) add_output(operands, args.outputs[i]);
  return operands;
}

Status run(const Context& context, const SplitsToOffsetsArgs& args) {
  Launcher launcher(context, "splits_to_offsets");
  with_index_type(TensorView(args.splits).type(), [&]<class T>() {
    launcher.launch(splits_kernel<T>, {1, kThreads}, operands_of(args), launcher.reporter());
  });
  return launcher.status();
}

Reason supports(const DeviceState&, const SplitsToOffsetsArgs& args) {
  if (args.num_outputs <= kMaxOutputs) return std::nullopt;
  return concat(args.num_outputs, " outputs, at most ", kMaxOutputs, " are taken");
}

std::string policy(const DeviceState&, const SplitsToOffsetsArgs&) {
  return concat("one block of ", kThreads, " threads, ", kTile, " groups at a time");
}

}  // namespace

const Implementation<SplitsToOffsetsArgs> kSplitsToOffsets = {
    .name = "cuda",
    .device = Device::kCuda,
    .supports = supports,
    .workspace = no_workspace,
    .policy = policy,
    .run = run,
    .always_runs = true,
};

}  // namespace moire::cuda::ops
