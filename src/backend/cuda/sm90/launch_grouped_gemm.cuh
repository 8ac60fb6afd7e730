// From a validated call to the kernel: maps of the operands, and one block per multiprocessor.
#pragma once

#include <string>

#include "backend/cuda/runtime/launch.h"
#include "backend/cuda/runtime/tensor_map.h"
#include "backend/cuda/sm90/grouped_gemm_heuristics.h"
#include "backend/cuda/sm90/grouped_gemm_kernel.cuh"
#include "backend/cuda/sm90/operands.cuh"
#include "backend/cuda/sm90/reasons.h"
#include "backend/cuda/sm90/z_buffers.cuh"
#include "core/format.h"

namespace moire::cuda::sm90 {

template <class P, class Operands, class Epilogue>
void launch(Launcher& launcher, const moire_groups& groups, const Operands& operands,
            const Epilogue& epilogue) {
  const Parameters<Operands, Epilogue> parameters{operands, epilogue, groups,
                                                  launcher.tile_counter(), launcher.reporter()};
  launcher.launch(grouped_gemm<P, Operands, Epilogue>,
                  {dim3(static_cast<unsigned>(launcher.state().num_multiprocessors)),
                   dim3(P::kThreads), kSharedBytes<P>},
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
  return ragged_k_sizes(args.groups, TensorView(args.a).columns(), TensorView(args.b).columns());
}

// What explain says of a choice.
struct PolicyText {
  const DeviceState& state;

  template <class P>
  std::string operator()(const Cost& cost) const {
    return concat(P::text(), ", ", state.num_multiprocessors, " persistent blocks; ", cost.text());
  }
};
template <class Tiles>
std::string policy_text(const DeviceState& state, const ProductSizes& sizes) {
  return with_cheapest(Tiles(), sizes, state.num_multiprocessors, PolicyText{state});
}

// Weights [groups, n, k] or [groups, k, n]; columns and rows of the stored matrices are as they
// are.
template <class P, Major kWeights>
RaggedM<kWeights> ragged_m(TensorMaps& maps, const TensorView& a, const TensorView& weights, int n,
                           int k, bool zeroes_tail) {
  const bool has_panels = kWeights == Major::kMN && n % kPanel == 0;
  const auto b = [&] {
    if (has_panels) return maps.panels("b", weights, P::kTileK, P::kTileN / kPanel);
    return maps.matrices("b", weights, kWeights == Major::kK ? P::kTileN : P::kTileK);
  };
  return {maps.matrix("a", a, P::kTileM), b(), n, k, zeroes_tail, has_panels};
}

template <class P, int kColumns>
ZMap<kColumns> z_map(TensorMaps& maps, std::string_view name, const TensorView& z,
                     const ResolvedGluLayout& layout) {
  ZMap<kColumns> map{};
  const bool is_halves = layout.block == layout.f;
  map.columns = {static_cast<int32_t>(layout.block), layout.gate_first ? 0 : 1, is_halves};
  if (z.is_present()) {
    map.map = maps.ragged_rows(name, z, P::kBoxRows, is_halves ? 2 : 1,
                               map.columns.template box_columns<kColumns>());
  }
  return map;
}

}  // namespace moire::cuda::sm90
