// Validation and dispatch of splits_to_offsets.
#include <moire/groups.h>

#include "core/name.h"
#include "ops/dispatch.h"

namespace moire {
namespace {

void validate(ArgumentCheck& check, const SplitsToOffsetsArgs& args) {
  const TensorView splits(args.splits);
  if (!check.ranked("splits", splits, kIndexTypes, 1)) return;
  const bool with_zero = args.kind == MOIRE_OFFSETS;
  check.require(!with_zero || splits.shape[0] > 0,
                "splits has 0 entries, offsets need at least 1 (the leading zero)");
  check.require(args.capacity >= -1, "capacity is ", args.capacity,
                ", must be a number of rows, or -1 (not checked)");
  check.require(args.num_outputs >= 0 && args.num_outputs <= int64_t{1} << 30, "num_outputs is ",
                args.num_outputs, ", must be 0 to 2^30");
  check.require(args.outputs != nullptr || args.num_outputs == 0,
                "outputs is null but num_outputs is ", args.num_outputs);
  check.require(reinterpret_cast<uintptr_t>(args.outputs) % alignof(moire_offsets_output) == 0,
                "outputs is not aligned to its ", alignof(moire_offsets_output), "-byte structs");
  const int64_t num_groups = splits.shape[0] - (with_zero ? 1 : 0);
  for (int64_t i = 0; check.ok() && i < args.num_outputs; ++i) {
    const moire_offsets_output& output = args.outputs[i];
    const Name name("outputs[", i, "].offsets");
    check.enumerator(Name("outputs[", i, "].no_leading_zero"), output.no_leading_zero, 2);
    const bool short_form = output.no_leading_zero != 0;
    check.tensor(name, output.offsets, kIndexTypes,
                 {{short_form ? "G" : "G + 1", num_groups + (short_form ? 0 : 1)}});
    check.require(output.multiplier >= 0, "outputs[", i, "].multiplier is ", output.multiplier,
                  ", must not be negative");
  }
}

std::string problem_of(const SplitsToOffsetsArgs& args) {
  return concat(TensorView(args.splits), " to ", args.num_outputs, " arrays");
}

}  // namespace

MOIRE_DEFINE_OP_WITH_WORKSPACE(splits_to_offsets)

}  // namespace moire
