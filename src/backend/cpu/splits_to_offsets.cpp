// splits_to_offsets on the CPU: one pass over the splits that checks every value, then one per
// output, so that an error leaves all outputs untouched.
#include <algorithm>
#include <limits>

#include "backend/cpu/implementations.h"
#include "core/format.h"

namespace moire::cpu {
namespace {

// From here on, threads take an output each.
constexpr int64_t kManyGroups = 4096;

Status invalid(std::string message) {
  return {Code::kInvalidArgument, "splits_to_offsets: " + std::move(message)};
}

// Calls visit(g, end of group g) in order, for valid splits of any kind.
template <class T, class Visit>
void for_each_end(const SplitsToOffsetsArgs& args, const T* values, int64_t num_groups,
                  Visit&& visit) {
  if (args.kind == MOIRE_SPLITS) {
    int64_t end = 0;
    for (int64_t g = 0; g < num_groups; ++g) visit(g, end += static_cast<int64_t>(values[g]));
    return;
  }
  const T* ends = args.kind == MOIRE_OFFSETS ? values + 1 : values;
  for (int64_t g = 0; g < num_groups; ++g) visit(g, static_cast<int64_t>(ends[g]));
}

// Whether check_splits would find nothing, without a branch per group. A negative split or end, a
// decreasing end and a sum past int64 each leave a sign bit in `bad`.
template <class T>
bool are_sound(const SplitsToOffsetsArgs& args, const T* values, int64_t num_groups,
               int64_t* total) {
  uint64_t end = 0, bad = args.kind == MOIRE_OFFSETS && values[0] != 0 ? ~uint64_t{0} : 0;
  if (args.kind == MOIRE_SPLITS) {
    for (int64_t g = 0; g < num_groups; ++g) {
      const auto value = static_cast<uint64_t>(static_cast<int64_t>(values[g]));
      end += value;
      bad |= value | end;
    }
  } else {
    const T* ends = args.kind == MOIRE_OFFSETS ? values + 1 : values;
    for (int64_t g = 0; g < num_groups; ++g) {
      const auto value = static_cast<uint64_t>(static_cast<int64_t>(ends[g]));
      bad |= value | (value - end);
      end = value;
    }
  }
  *total = static_cast<int64_t>(end);
  return bad >> 63 == 0 && (args.capacity < 0 || *total <= args.capacity);
}

// The first negative split, decreasing end, sum past int64 or past the capacity.
template <class T>
Status check_splits(const SplitsToOffsetsArgs& args, const T* values, int64_t num_groups) {
  if (args.kind == MOIRE_OFFSETS && values[0] != 0) {
    return invalid(concat("offsets[0] is ", values[0], ", must be 0"));
  }
  const T* ends = args.kind == MOIRE_OFFSETS ? values + 1 : values;
  int64_t end = 0;
  for (int64_t g = 0; g < num_groups; ++g) {
    const auto value = static_cast<int64_t>(ends[g]);
    if (args.kind == MOIRE_SPLITS) {
      if (value < 0)
        return invalid(concat("group ", g, " has ", value, " rows, must not be negative"));
      if (__builtin_add_overflow(end, value, &end)) {
        return invalid(concat("the rows up to group ", g, ", which has ", value, ", exceed int64"));
      }
    } else {
      if (value < end) {
        return invalid(concat("group ", g, " ends at ", value, ", before its start ", end,
                              ", must not decrease"));
      }
      end = value;
    }
    if (args.capacity >= 0 && end > args.capacity) {
      return invalid(
          concat("group ", g, " ends at row ", end, ", past the capacity ", args.capacity));
    }
  }
  return {};
}

int64_t multiplier_of(const moire_offsets_output& output) {
  return output.multiplier == 0 ? 1 : output.multiplier;
}

// Whether end * multiplier fits in the output's type.
bool fits(const moire_offsets_output& output, int64_t end) {
  int64_t product = 0;
  if (__builtin_mul_overflow(end, multiplier_of(output), &product)) return false;
  return TensorView(output.offsets).type() == DType::kInt64 ||
         product <= std::numeric_limits<int32_t>::max();
}

template <class T>
Status overflow_error(const SplitsToOffsetsArgs& args, int64_t index, const T* values,
                      int64_t num_groups) {
  const moire_offsets_output& output = args.outputs[index];
  Status status;
  for_each_end(args, values, num_groups, [&](int64_t g, int64_t end) {
    if (!status.ok() || fits(output, end)) return;
    status = invalid(concat("outputs[", index, "]: group ", g, " ends at row ", end, ", times ",
                            multiplier_of(output), " exceeds ",
                            dtype_name(TensorView(output.offsets).type())));
  });
  return status;
}

template <class T, class Out>
void write(const SplitsToOffsetsArgs& args, const T* values, int64_t num_groups,
           const moire_offsets_output& output) {
  auto* out = static_cast<Out*>(output.offsets.data);
  if (output.no_leading_zero == 0) *out++ = 0;
  const int64_t multiplier = multiplier_of(output);
  for_each_end(args, values, num_groups,
               [&](int64_t g, int64_t end) { out[g] = static_cast<Out>(end * multiplier); });
}

template <class T>
Status run_typed(const Context& context, const SplitsToOffsetsArgs& args) {
  const auto* values = static_cast<const T*>(args.splits.data);
  const int64_t num_groups = args.splits.shape[0] - (args.kind == MOIRE_OFFSETS ? 1 : 0);
  int64_t total = 0;
  if (!are_sound(args, values, num_groups, &total)) return check_splits(args, values, num_groups);
  for (int64_t i = 0; i < args.num_outputs; ++i) {
    if (!fits(args.outputs[i], total)) return overflow_error(args, i, values, num_groups);
  }
  const auto write_output = [&](int64_t i) {
    const moire_offsets_output& output = args.outputs[i];
    if (TensorView(output.offsets).type() == DType::kInt32) {
      write<T, int32_t>(args, values, num_groups, output);
    } else {
      write<T, int64_t>(args, values, num_groups, output);
    }
  };
  if (num_groups >= kManyGroups) {
    context.state().pool->parallel_for(args.num_outputs, [&](int64_t i, int) { write_output(i); });
  } else {
    for (int64_t i = 0; i < args.num_outputs; ++i) write_output(i);
  }
  return {};
}

Status run(const Context& context, const SplitsToOffsetsArgs& args) {
  return TensorView(args.splits).type() == DType::kInt32 ? run_typed<int32_t>(context, args)
                                                         : run_typed<int64_t>(context, args);
}

std::string policy(const DeviceState& state, const SplitsToOffsetsArgs& args) {
  const bool threaded = args.splits.shape[0] >= kManyGroups && args.num_outputs > 1;
  return concat("one pass to check, one per output, ",
                threaded ? std::min<int64_t>(state.num_threads, args.num_outputs) : 1, " threads");
}

}  // namespace

const Implementation<SplitsToOffsetsArgs> kSplitsToOffsets = {
    .name = "cpu",
    .device = Device::kCpu,
    .supports = supports_everything,
    .workspace = no_workspace,
    .policy = policy,
    .run = run,
    .always_runs = true,
};

}  // namespace moire::cpu
