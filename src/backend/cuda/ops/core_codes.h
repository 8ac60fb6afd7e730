// FP8 operands as Hopper's FP8 tensor cores take them, in the workspace: the contracted dimension
// last, and FP32 scales for 128 along it, one for each row or for a tile of 128 x 128. What already
// is so stays where it is.
#pragma once

#include "backend/cuda/runtime/launch.h"
#include "core/arena.h"

namespace moire::cuda::ops {

class CoreCodes {
 public:
  // `codes` are rows, [capacity, k], or weights, [G, ., .]. Where `is_transposed`, what is
  // contracted is not their last dimension, and they are transposed: rows to [k, 128 (capacity div
  // 128 + G)], where the rows of group g are columns from 128 (offsets[g] div 128 + g) on, zeros up
  // to the next multiple of 128; matrices each by itself, with their scales, in rows of a multiple
  // of 128. Rows may lie so already (core/scale_shapes.h). Blocks of MXFP8 are folded
  // (docs/numerics.md). Groups are absent for rows that are all in use.
  CoreCodes(const TensorView& codes, const TensorView& scales, const moire_groups& groups,
            bool is_transposed, Arena& arena);

  const TensorView& codes() const { return made_codes_; }
  const TensorView& scales() const { return made_scales_; }

  void make(Launcher& launcher) const;

  // For explain: what comes before the product, in launches and in words.
  int64_t launches() const { return is_transposed_ || is_folded_ ? 1 : 0; }
  std::string policy(std::string_view name) const;

 private:
  TensorView codes_, scales_;
  moire_groups groups_;
  bool is_transposed_, is_folded_;
  TensorView made_codes_, made_scales_;
};

}  // namespace moire::cuda::ops
