// A block of threads turns a rectangle of scales over in shared memory.
#include "backend/cuda/device/groups.cuh"
#include "backend/cuda/device/indices.cuh"
#include "backend/cuda/device/matrix.cuh"
#include "backend/cuda/ops/row_scales.h"

namespace moire::cuda::ops {
namespace {

constexpr int kThreads = 256, kRows = 128, kColumns = 32;

struct Scales {
  Matrix<const float> source;
  int64_t source_rows;
  Indices row_idx;
  Matrix<float> target;
  uint32_t columns;
  moire_groups groups;

  __device__ float at(int64_t row, uint32_t column) const {
    if (row_idx.is_present()) row = row_idx.at(row);
    return row >= 0 && row < source_rows ? source.row(row)[column] : 0;
  }
};

__global__ void __launch_bounds__(kThreads) row_scales_kernel(const __grid_constant__ Scales args) {
  __shared__ float turned[kColumns][kRows + 1];
  const int64_t first_row = int64_t{blockIdx.x} * kRows;
  const int64_t in_use = rows_in_use(args.groups);
  if (first_row >= in_use) return;
  const auto rows = static_cast<uint32_t>(min(int64_t{kRows}, in_use - first_row));
  const uint32_t first_column = blockIdx.y * kColumns;
  const uint32_t columns = min(uint32_t{kColumns}, args.columns - first_column);
  for (uint32_t i = threadIdx.x; i < rows * columns; i += kThreads) {
    const uint32_t r = i / columns, c = i % columns;
    turned[c][r] = args.at(first_row + r, first_column + c);
  }
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < kRows * columns; i += kThreads) {
    const uint32_t r = i % kRows, c = i / kRows;
    if (r < rows) args.target.row(first_column + c)[first_row + r] = turned[c][r];
  }
}

}  // namespace

RowScales::RowScales(const TensorView& scales, const TensorView& row_idx,
                     const moire_groups& groups, bool are_turned, Arena& arena)
    : scales_(scales),
      row_idx_(row_idx),
      groups_(groups),
      are_turned_(are_turned),
      made_(are_turned ? scales
                       : arena.take_aligned(DType::kFP32, scales.columns(), groups.capacity)) {}

void RowScales::make(Launcher& launcher) const {
  if (are_turned_) return;
  const Scales args{.source = matrix_of<const float>(scales_),
                    .source_rows = scales_.num_rows(),
                    .row_idx = indices_of(row_idx_, "row_idx"),
                    .target = matrix_of<float>(made_),
                    .columns = static_cast<uint32_t>(scales_.columns()),
                    .groups = groups_};
  const dim3 grid(blocks_for(groups_.capacity, kRows), blocks_for(scales_.columns(), kColumns));
  launcher.launch(row_scales_kernel, {grid, kThreads}, args);
}

}  // namespace moire::cuda::ops
