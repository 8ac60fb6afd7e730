// From a validated call to the kernel: maps of the operands, and persistent blocks.
#pragma once

#include <bit>

#include "backend/cuda/device/matrix.cuh"
#include "backend/cuda/implementations.h"
#include "backend/cuda/ops/gather_rows.h"
#include "backend/cuda/ops/listed_matrices.h"
#include "backend/cuda/runtime/tensor_map.h"
#include "backend/cuda/sm90/epilogue_values.cuh"
#include "backend/cuda/sm90/grouped_gemm_heuristics.h"
#include "backend/cuda/sm90/grouped_gemm_kernel.cuh"
#include "backend/cuda/sm90/reasons.h"
#include "backend/cuda/sm90/z_buffers.cuh"
#include "core/scale_shapes.h"

namespace moire::cuda::sm90 {

// A product of ragged M: its rows may be gathered, its weights listed.
template <class A>
struct RaggedMCall : PlannedCall<A> {
  RaggedMCall(const DeviceState& device, const A& given, const TensorView& a, const moire_weight& w,
              const Workspace& workspace)
      : PlannedCall<A>(device, given, workspace),
        rows(a, given.row_idx, given.groups, this->arena),
        listed(w, this->arena) {}

  int64_t launches() const { return 1 + rows.launches() + listed.launches(); }
  // What comes before the kernel.
  void prepare(Launcher& launcher) const {
    rows.gather(launcher);
    listed.write(launcher);
  }
  std::string preparation() const { return rows.policy() + listed.policy(); }

  ops::GatheredRows rows;
  ops::ListedMatrices listed;
};

// How kernels number the matrices of a weight.
inline MatrixNumbers numbers(const Matrices& matrices, const ops::ListedMatrices& listed) {
  return {listed.addresses(), reinterpret_cast<uintptr_t>(matrices.tensor.data),
          std::countr_zero(static_cast<uint64_t>(matrices.distance))};
}

template <class P, class Operands, class Epilogue>
void launch(Launcher& launcher, const ProductSizes& sizes, const moire_groups& groups,
            const Operands& operands, const Epilogue& epilogue,
            const MatrixNumbers& matrices = {}) {
  const int blocks = cost_of<P>(sizes, launcher.state().num_multiprocessors).blocks;
  const Parameters<Operands, Epilogue> parameters{
      operands, epilogue, groups, matrices, launcher.tile_counter(), launcher.reporter()};
  launcher.launch(grouped_gemm<P, Operands, Epilogue>,
                  {dim3(static_cast<unsigned>(blocks)), dim3(P::kThreads), kSharedBytes<P>},
                  parameters);
}

// Whether b's last dimension is k.
inline bool is_k_major(const GroupedGemmArgs& args) {
  return (args.b.layout == MOIRE_OUT_IN) == (args.transpose_b == 0);
}
inline ProductSizes sizes(const GroupedGemmArgs& args) {
  return ragged_m_sizes(args.groups, TensorView(args.d).columns(), TensorView(args.a).columns());
}
inline ProductSizes sizes(const GroupedGemmWgradArgs& args) {
  return ragged_k_sizes(args.groups, as_rows(args.a, args.a_scales, args.groups).columns(),
                        as_rows(args.b, args.b_scales, args.groups).columns());
}

inline bool stores_fp32(const GroupedGemmWgradArgs& args) {
  return args.d.tensor.dtype == MOIRE_FP32;
}

// What explain says of a choice; kMore is what else was chosen.
struct PolicyText {
  template <class P, auto... kMore>
  std::string operator()(const Cost& cost) const {
    return concat(P::text(), ", ", cost.blocks, " persistent blocks; ", cost.text());
  }
};
template <class Tiles>
std::string policy_text(const DeviceState& state, const ProductSizes& sizes) {
  return with_cheapest(Tiles(), sizes, state.num_multiprocessors, PolicyText());
}

// How many of a's rows come at once: of groups smaller than half of 64 rows, as most of them have.
template <class P>
int32_t box_rows(const moire_groups& groups) {
  int32_t box = P::kTileM;
  for (const int32_t rows : {64, 32, 16, 8}) {
    if (2 * mean_rows(groups) <= rows) box = rows;
  }
  return box;
}
template <class P>
RowBoxes row_boxes(TensorMaps& maps, const TensorView& a, const moire_groups& groups) {
  const int32_t box = box_rows<P>(groups);
  return {maps.matrix("a", a, box), box};
}

// Weights [n, k] or [k, n]; columns and rows of the stored matrices are as they are.
template <class P, Major kWeights>
RaggedM<kWeights> ragged_m(TensorMaps& maps, const TensorView& a, const moire_groups& groups,
                           const Matrices& weights, int32_t n, int32_t tail) {
  const bool has_panels = kWeights == Major::kMN && n % kPanel == 0;
  const auto b = [&] {
    if (has_panels) return maps.panels("b", weights, P::kTileK, P::kTileN / kPanel);
    return maps.matrices("b", weights, kWeights == Major::kK ? P::kTileN : P::kTileK);
  };
  return {row_boxes<P>(maps, a, groups), b(),       n, static_cast<int32_t>(a.columns()),
          tail == MOIRE_TAIL_ZERO,       has_panels};
}

// Store, StoreStaged or StoreTurned.
template <class P, class Epilogue>
Epilogue store_of(TensorMaps& maps, const GroupedGemmArgs& args) {
  return {maps.ragged_rows("d", args.d, P::kBoxRows),
          static_cast<int32_t>(TensorView(args.d).columns()),
          static_cast<int32_t>(args.groups.num_groups), any_floats(args.bias),
          vector_of<const float>(args.bias_scale)};
}

template <class P, int kColumns>
ZMap<kColumns> z_map(TensorMaps& maps, std::string_view name, const TensorView& z,
                     const ResolvedGluLayout& layout) {
  ZMap<kColumns> map{};
  const bool is_halves = layout.block == layout.f;
  map.columns = {static_cast<int32_t>(layout.block), layout.gate_first ? 0 : 1, is_halves};
  if (z.is_present()) {
    map.map = maps.ragged_rows(name, z, P::kBoxRows, is_halves ? 2 : 1, map.columns.box_columns());
  }
  return map;
}

}  // namespace moire::cuda::sm90
