// The product of ragged rows and their group's weight, for any epilogue: a block per 64 rows of a
// group and 64 columns of the output.
#pragma once

#include <moire/grouped_gemm.h>

#include <algorithm>

#include "backend/cuda/device/indices.cuh"
#include "backend/cuda/device/matrix.cuh"
#include "backend/cuda/device/row_blocks.cuh"
#include "backend/cuda/implementations.h"
#include "backend/cuda/ops/listed_matrices.h"
#include "backend/cuda/portable/fma.cuh"
#include "backend/cuda/portable/mma.cuh"
#include "backend/cuda/runtime/launch.h"

namespace moire::cuda::portable::gemm {

struct RaggedM {
  Operand a;
  Indices row_idx;
  int64_t num_source_rows;
  Operand weight;
  void* const* listed;        // its groups' matrices; null: one after the other
  int64_t weight_rows;        // of one group
  int64_t weight_scale_rows;  // likewise
  bool weight_is_nk;          // k is its last dimension
  int64_t k;
  int64_t columns;  // of the output
  moire_groups groups;
};

// A tile of the output.
struct Tile {
  int64_t group;
  int64_t first_row;
  int num_rows;
  int64_t first_column;
  int64_t columns;  // of the whole output

  // Whether the output has this row and column of the tile.
  __device__ bool has_row(int row) const { return row < num_rows; }
  __device__ bool has_column(int column) const { return first_column + column < columns; }
};

__device__ inline int64_t source_row(const RaggedM& p, int64_t row, const Reporter& reporter) {
  if (!p.row_idx.is_present()) return row;
  return checked_index(p.row_idx, row, p.row_idx.at(row), p.num_source_rows, Dropping::kForbidden,
                       reporter);
}

// The matrix that has a group's weight, and which of its rows is the first.
struct GroupWeight {
  Operand matrix;
  int64_t first_row;
};
template <class Engine>
__device__ GroupWeight weight_of(const RaggedM& p, int64_t group) {
  const int64_t first_row = group * p.weight_rows;
  GroupWeight w{of_group(p.weight, first_row, group * p.weight_scale_rows), first_row};
  if (Engine::kTakesLists && p.listed != nullptr) {
    w.matrix.elements.data = p.listed[group];
    w.first_row = 0;
  }
  return w;
}

struct GroupRows {
  int64_t first;
  __device__ int64_t operator()(int64_t k) const { return first + k; }
};
// Weights whose last dimension is k, or n. `position` is where an output column lies along n, of
// either half; negative past the end.
template <class Engine, bool kIsNK, class Position>
__device__ auto weight_side(const RaggedM& p, int64_t group, const Position& position) {
  if constexpr (kIsNK) {
    const int64_t row = position(Engine::line());
    const GroupWeight w = weight_of<Engine>(p, group);
    return typename Engine::AlongK(w.matrix, row < 0 ? -1 : w.first_row + row, p.k);
  } else {
    int64_t columns[Engine::kColumns];
#pragma unroll
    for (int i = 0; i < Engine::kColumns; ++i) columns[i] = position(Engine::first_column() + i);
    const GroupWeight w = weight_of<Engine>(p, group);
    return typename Engine::template AcrossK<GroupRows>(w.matrix, {w.first_row}, columns, p.k);
  }
}

// Exact zeros in rows `first` ... `end` - 1, shared out to all threads of the grid.
__device__ inline void zero_rows(const AnyFloats& matrix, int64_t columns, int64_t first,
                                 int64_t end) {
  const int64_t threads = int64_t{gridDim.x} * gridDim.y * kThreads;
  const int64_t block = int64_t{blockIdx.y} * gridDim.x + blockIdx.x;
  for (int64_t i = block * kThreads + threadIdx.x; i < (end - first) * columns; i += threads) {
    matrix.set(first + i / columns, i % columns, 0.0F);
  }
}

template <class Engine, bool kIsNK, class Epilogue>
__global__ void __launch_bounds__(kThreads, 2)
    ragged_m_kernel(RaggedM p, Epilogue epilogue, Reporter reporter) {
  using Memory = Shared<Engine, Epilogue::kHalves, Epilogue::kPlanes>;
  if (blockIdx.x == 0 && blockIdx.y == 0) {
    check_groups(p.groups, reporter, threadIdx.x, kThreads);
  }
  const RowBlock rows = row_block_at<kTile>(p.groups, blockIdx.x);
  const Tile tile{.group = rows.group,
                  .first_row = rows.first,
                  .num_rows = static_cast<int>(rows.end - rows.first),
                  .first_column = int64_t{blockIdx.y} * kTile,
                  .columns = p.columns};
  if (tile.num_rows > 0) {
    const int line = Engine::line();
    const int64_t source = tile.has_row(line) ? source_row(p, tile.first_row + line, reporter) : -1;
    const typename Engine::AlongK left(p.a, source, p.k);
    const auto right_of = [&](int half) {
      return weight_side<Engine, kIsNK>(p, tile.group, [&](int column) {
        return tile.has_column(column) ? epilogue.position(half, tile.first_column + column) : -1;
      });
    };
    if constexpr (Epilogue::kHalves == 2) {
      decltype(right_of(0)) right[] = {right_of(0), right_of(1)};
      Engine::template multiply<Memory>(left, right, p.k);
    } else {
      decltype(right_of(0)) right[] = {right_of(0)};
      Engine::template multiply<Memory>(left, right, p.k);
    }
    epilogue.template apply<Memory>(tile);
  }
  epilogue.zero_tail(rows_in_use(p.groups), p.groups.capacity);
}

// Calls f.operator()<Engine>() with the one for these operands' types; on the host.
template <class F>
decltype(auto) with_engine(const Operand& a, const Operand& b, F&& f) {
  if (a.is_fp8() && b.is_fp8() && a.scales.is_e8m0 == b.scales.is_e8m0) {
    if (a.scales.is_e8m0) return f.template operator()<Mma<MxElements>>();
    return f.template operator()<Mma<BlockElements>>();
  }
  const DType dtype = a.elements.dtype == b.elements.dtype ? a.elements.dtype : DType::kNone;
  if (dtype == DType::kBF16) return f.template operator()<Mma<Floats16<__nv_bfloat16>>>();
  if (dtype == DType::kFP16) return f.template operator()<Mma<Floats16<__half>>>();
  return f.template operator()<Fma>();
}

// Why the plain product cannot take so many columns; nothing if it can. A grid has at most 65,535
// blocks along y.
inline Reason why_not_width(int64_t columns) {
  constexpr int64_t kMost = int64_t{65535} * kTile;
  if (columns <= kMost) return {};
  return concat(columns, " columns, at most ", kMost, " are taken");
}

inline std::string policy_text(const Operand& a, const Operand& b) {
  return with_engine(a, b, [&]<class Engine>() {
    return concat("tiles of ", kTile, " x ", kTile, ", k in steps of ", Engine::kDepth, ", ",
                  kThreads, " threads, ", Engine::kName);
  });
}

// A call that makes such a product, of `a` and a weight of `halves` times the output's columns; ops
// derive from it and add what runs.
template <class A>
struct RaggedMCall : PlannedCall<A> {
  RaggedMCall(const DeviceState& device, const A& given, const TensorView& a,
              const TensorView& a_scales, const moire_weight& weight,
              const TensorView& weight_scales, bool weight_is_nk, int64_t halves,
              const Workspace& workspace)
      : PlannedCall<A>(device, given, workspace),
        listed(weight, this->arena),
        has_turned_scales(moire::has_turned_scales(a, a_scales, given.groups)),
        product{.a = rowwise(a, a_scales),
                .row_idx = indices_of(given.row_idx, "row_idx"),
                .num_source_rows = a.num_rows(),
                .weight = weights(weight.tensor, weight_scales, weight_is_nk),
                .listed = listed.addresses(),
                .weight_rows = weight.tensor.shape[1],
                .weight_scale_rows = weight_scales.shape[1],
                .weight_is_nk = weight_is_nk,
                .k = a.columns(),
                .columns = weight.tensor.shape[weight_is_nk ? 1 : 2] / halves,
                .groups = given.groups} {}

  Reason supports() const {
    if (has_turned_scales) return "scales are turned over, as FP8 tensor cores alone read them";
    return why_not_width(product.columns);
  }
  std::string policy() const { return policy_text(product.a, product.weight) + listed.policy(); }
  int64_t launches() const { return 1 + listed.launches(); }
  template <class Epilogue>
  void launch(Launcher& launcher, const Epilogue& epilogue) const {
    listed.write(launcher);
    const RaggedM& p = product;
    const dim3 grid(static_cast<uint32_t>(std::max<int64_t>(1, row_blocks_bound<kTile>(p.groups))),
                    std::max(1U, blocks_for(p.columns, kTile)));
    with_engine(p.a, p.weight, [&]<class Engine>() {
      using Memory = Shared<Engine, Epilogue::kHalves, Epilogue::kPlanes>;
      const auto kernel = p.weight_is_nk ? ragged_m_kernel<Engine, true, Epilogue>
                                         : ragged_m_kernel<Engine, false, Epilogue>;
      launcher.launch(kernel, {grid, kThreads, Memory::kBytes}, p, epilogue, launcher.reporter());
    });
  }

  ops::ListedMatrices listed;
  bool has_turned_scales;
  RaggedM product;
};

}  // namespace moire::cuda::portable::gemm
