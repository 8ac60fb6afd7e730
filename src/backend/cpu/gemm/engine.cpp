#include "backend/cpu/gemm/engine.h"

#include "core/format.h"

namespace moire::cpu::gemm {
namespace {

// Measured on an AVX2 machine with 512 KiB of L2 per core: see docs/kernels/cpu_grouped_gemm.md.
constexpr TileLimits kWeightsLeft = {128, 1056};
constexpr TileLimits kWeightsRight = {384, 288};
constexpr TileLimits kWgrad = {384, 384};
// Columns of a paired product count twice.
constexpr TileLimits kPairsLeft = {128, 512};
constexpr TileLimits kPairsRight = {384, 128};

std::string policy_text(TileLimits limits, bool emulates, const DeviceState& state) {
  return concat("tiles up to ", limits.rows, " x ", limits.columns, ", K blocks of ", kBlockK, ", ",
                state.num_threads, state.num_threads == 1 ? " thread, " : " threads, ", state.simd,
                emulates ? ", sums emulate Hopper's FP8 tensor cores" : "");
}

}  // namespace

TileLimits tile_limits(const RaggedM& p) {
  const TileLimits most = p.weights_left() ? (p.columns.paired ? kPairsLeft : kWeightsLeft)
                                           : (p.columns.paired ? kPairsRight : kWeightsRight);
  const int64_t whole_chunks = most.columns / p.columns.chunk * p.columns.chunk;
  return limit_tiles({most.rows, whole_chunks}, p.groups.capacity, p.row_step, p.columns.outputs,
                     p.columns.chunk);
}

TileLimits tile_limits(const RaggedK& p) {
  return limit_tiles(kWgrad, p.m, kWgradRowStep, p.n, kPlainChunk);
}

ScratchSize scratch_size(const RaggedM& p) {
  const TileLimits limits = tile_limits(p);
  const int64_t columns = limits.columns * p.columns.per_output();
  const int64_t left = p.emulates ? emulated_vectors(limits.rows) : kMaxMicroRows * kLeftPitch;
  if (p.weights_left()) {
    return {padded(limits.rows) * kBlockK, columns * sums_pitch(limits.rows), left,
            kTransposeRows * kBlockK, p.patch_rows * kPatchColumns};
  }
  return {padded(columns) * kBlockK, limits.rows * sums_pitch(columns), left,
          kTransposeRows * columns, 0};
}

ScratchSize scratch_size(const RaggedK& p) {
  const TileLimits limits = tile_limits(p);
  return {padded(limits.columns) * kBlockK, limits.rows * sums_pitch(limits.columns),
          limits.rows * (kLeftPitch + kTransposeRows), kTransposeRows * limits.columns, 0};
}

size_t workspace_bytes(const RaggedM& p, int num_threads) {
  return aligned(static_cast<size_t>(p.groups.num_groups + 1) * sizeof(int64_t)) +
         scratch_size(p).bytes() * static_cast<size_t>(num_threads);
}

size_t workspace_bytes(const RaggedK& p, int num_threads) {
  return scratch_size(p).bytes() * static_cast<size_t>(num_threads);
}

std::string policy_text(const RaggedM& p, const DeviceState& state) {
  return policy_text(tile_limits(p), p.emulates, state);
}

std::string policy_text(const RaggedK& p, const DeviceState& state) {
  return policy_text(tile_limits(p), p.emulates, state);
}

}  // namespace moire::cpu::gemm
