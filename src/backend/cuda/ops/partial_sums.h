// The second half of sums that have one fixed order: partial sums in a workspace, added in order.
// For the epilogues that make such partial sums, whatever architecture they are for.
#pragma once

#include "backend/cuda/runtime/launch.h"
#include "core/arena.h"

namespace moire::cuda::ops {

// Nothing is done for targets that are absent.
//
// target_i = beta * target_i + the sum of partials[i][0], [1], ..., [count - 1] for each row in
// use; the tail of [capacity] gets zeros or stays.
void sum_row_partials(Launcher& launcher, const float* partials, int64_t count,
                      const moire_groups& groups, const TensorView& target, int32_t beta,
                      int32_t tail);

// Memory for the partial sums of the groups' blocks of 32 rows; null where the target is absent.
float* take_block_partials(Arena& arena, const TensorView& target, const moire_groups& groups);
// target_g = beta_g * target_g + the sums of group g's blocks of 32 rows, [columns of target] each,
// at the indices that row_blocks.cuh gives them. An empty group that accumulates is left alone.
void sum_block_partials(Launcher& launcher, const float* partials, const moire_groups& groups,
                        const TensorView& target, int32_t beta,
                        const uint8_t* beta_per_group = nullptr);

}  // namespace moire::cuda::ops
