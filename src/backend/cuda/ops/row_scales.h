// Scales of an operand's rows as they lie with the stages of the FP8 tensor cores' kernels: those
// of neighbouring rows side by side, in expert order.
#pragma once

#include "backend/cuda/runtime/launch.h"
#include "core/arena.h"

namespace moire::cuda::ops {

class RowScales {
 public:
  // `scales` are FP32, [rows, blocks]; they become [blocks, capacity] in the workspace, row i from
  // row row_idx_i where that is present. What is behind the rows in use stays as it is. Those that
  // are turned over already (core/scale_shapes.h) are left where they are.
  RowScales(const TensorView& scales, const TensorView& row_idx, const moire_groups& groups,
            bool are_turned, Arena& arena);

  const TensorView& scales() const { return made_; }

  // In one launch, if any. An index outside the rows is for the one who gathers them to report.
  void make(Launcher& launcher) const;
  int64_t launches() const { return are_turned_ ? 0 : 1; }
  std::string_view policy() const { return are_turned_ ? "" : ", after transposing a_scales"; }

 private:
  TensorView scales_, row_idx_;
  moire_groups groups_;
  bool are_turned_;
  TensorView made_;
};

}  // namespace moire::cuda::ops
