#include "backend/cuda/device/row_blocks.cuh"
#include "backend/cuda/device/values.cuh"
#include "backend/cuda/ops/partial_sums.h"

namespace moire::cuda::ops {
namespace {

constexpr int kThreads = 256;

// The partial sums of a row, in order; `count` of them, 16 bytes at a time where that divides them.
__device__ float sum_in_order(const float* partials, int64_t count) {
  float sum = 0;
  int64_t i = 0;
  for (; count % 4 == 0 && i < count; i += 4) {
    const auto four = *reinterpret_cast<const float4*>(partials + i);
    sum = sum + four.x + four.y + four.z + four.w;
  }
  for (; i < count; ++i) sum += partials[i];
  return sum;
}

__global__ void __launch_bounds__(kThreads)
    sum_row_partials_kernel(const float* partials, int64_t count, moire_groups groups,
                            float* target, int32_t beta, bool zeroes_tail) {
  const int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (row >= groups.capacity) return;
  const bool is_in_use = row < rows_in_use(groups);
  const float sum = is_in_use ? sum_in_order(partials + row * count, count) : 0;
  if (is_in_use) {
    target[row] = beta != 0 ? target[row] + sum : sum;
  } else if (zeroes_tail) {
    target[row] = 0;
  }
}

// A block per group and so many columns, few, so that groups of many rows are many blocks, but as
// many as a grid needs; a thread waits for so many partial sums at once.
constexpr int kFewColumns = 64, kManyColumns = 1024, kAtOnce = 32;
constexpr int64_t kMostBlocks = 65535;  // of a grid's second dimension
template <int kColumns>
__global__ void __launch_bounds__(kColumns)
    sum_block_partials_kernel(const float* partials, uint32_t columns, moire_groups groups,
                              AnyFloats target, int32_t beta, const uint8_t* beta_per_group) {
  const int64_t group = blockIdx.x;
  const uint32_t column = blockIdx.y * kColumns + threadIdx.x;
  if (column >= columns) return;
  const bool accumulates = beta_per_group != nullptr ? beta_per_group[group] != 0 : beta != 0;
  const RowRange rows = rows_of(groups, group);
  const auto count = static_cast<uint32_t>(ceil_div(rows.size(), kBlockRows));
  if (count == 0 && accumulates) return;
  const float* partial = partials + first_row_block(rows, group) * columns + column;
  float sum = 0;
#pragma unroll 1
  for (uint32_t first = 0; first < count; first += kAtOnce) {
    float of_block[kAtOnce];  // zeros past the last, which change no sum that began with one
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i, partial += columns) {
      of_block[i] = first + i < count ? *partial : 0.0F;
    }
#pragma unroll
    for (const float value : of_block) sum += value;
  }
  target.set(group, column, accumulates ? target.at(group, column) + sum : sum);
}

}  // namespace

void sum_row_partials(Launcher& launcher, const float* partials, int64_t count,
                      const moire_groups& groups, const TensorView& target, int32_t beta,
                      int32_t tail) {
  if (!target.is_present()) return;
  launcher.launch(sum_row_partials_kernel, {blocks_for(groups.capacity, kThreads), kThreads},
                  partials, count, groups, static_cast<float*>(target.data), beta,
                  tail == MOIRE_TAIL_ZERO);
}

float* take_block_partials(Arena& arena, const TensorView& target, const moire_groups& groups) {
  if (!target.is_present()) return nullptr;
  return arena.take_floats(row_blocks_bound(groups), target.columns());
}

void sum_block_partials(Launcher& launcher, const float* partials, const moire_groups& groups,
                        const TensorView& target, int32_t beta, const uint8_t* beta_per_group) {
  if (!target.is_present()) return;
  const bool are_few = target.columns() <= kMostBlocks * kFewColumns;
  const uint32_t columns = are_few ? kFewColumns : kManyColumns;
  const dim3 grid(blocks_for(groups.num_groups, 1), blocks_for(target.columns(), columns));
  launcher.launch(
      are_few ? sum_block_partials_kernel<kFewColumns> : sum_block_partials_kernel<kManyColumns>,
      {grid, columns}, partials, static_cast<uint32_t>(target.columns()), groups,
      any_floats(target), beta, beta_per_group);
}

}  // namespace moire::cuda::ops
