// Groups: the one description of a ragged batch, and how it is made from whatever the caller has.
#pragma once

#include <moire/context.h>
#include <moire/ops.h>
#include <moire/tensor.h>

namespace moire {

// Group g owns rows offsets[g] to offsets[g + 1] - 1 of a tensor with `capacity` rows. Offsets lie
// on the data's device.
struct Groups : moire_groups {
  Groups() : moire_groups{} {}
  Groups(const moire_groups& g) : moire_groups(g) {}
  Groups(const int64_t* offsets_, int64_t num_groups_, int64_t capacity_)
      : moire_groups{offsets_, num_groups_, capacity_} {}
};
static_assert(sizeof(Groups) == sizeof(moire_groups));

using OffsetsOutput = moire_offsets_output;

// Splits, ends or offsets (the caller says which) to any number of derived arrays, in one launch.
MOIRE_DECLARE_OP_WITH_WORKSPACE(splits_to_offsets, SplitsToOffsetsArgs)

}  // namespace moire
