// Policies of the SM90 grouped GEMM: tile, ring and staging of one instance. A named type carries
// each into the kernel, so that a profiler shows it.
#pragma once

#include <string>

#include "core/format.h"

namespace moire::cuda::sm90 {

// Two or three consumer warpgroups multiply 64 rows each of a tile, 64 of K per stage; or, where
// they alternate, one of the two multiplies 128 rows while the other is in its epilogue.
template <int kN, int kStages, int kWarpSlots, int kWarpgroups = 2, bool kAlternate = false>
struct Policy {
  static constexpr bool kAlternates = kAlternate;
  static constexpr int kRowBlocks = kAlternates ? 2 : 1;  // of 64 rows, of a warpgroup
  static constexpr int kTileM = kAlternates ? 128 : 64 * kWarpgroups, kTileN = kN, kTileK = 64;
  // Of one wgmma: with 512 threads the compiler takes no instruction with 128 sums.
  static constexpr int kInstructionN = kWarpgroups == 2 || kN <= 192 ? kN : kN / 2;
  static constexpr int kNumStages = kStages;
  // Staging of the epilogue: slots of 16 rows x 128 bytes for each consumer warp.
  static constexpr int kNumSlots = kWarpSlots, kSlotBytes = 16 * 128;
  // Ring of work tiles: a block that held one more could not leave it to another.
  static constexpr int kNumTiles = kAlternates ? 2 : 1;
  static constexpr int kWarpsOfConsumer = 4;
  static constexpr int kConsumers = kWarpgroups, kConsumerWarps = kWarpsOfConsumer * kConsumers;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kABytes = kTileM * kTileK * 2, kBBytes = kTileN * kTileK * 2;
  // 65,536 registers: 128 threads of the producer warpgroup, 256 or 384 consumers.
  static constexpr int kProducerRegisters = kWarpgroups == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = kWarpgroups == 2 ? 232 : 160;
  static_assert(kN % 64 == 0 && kN * kRowBlocks <= 384, "sums of a thread; 64 columns a panel");
  static_assert(!kAlternates || kWarpgroups == 2);

  static std::string text() {
    return concat("tile ", kTileM, "x", kTileN, "x", kTileK, ", ", kNumStages, " stages, ",
                  kNumSlots, " slots of ", kSlotBytes, " bytes a warp",
                  kAlternates ? ", warpgroups in turn" : "");
  }
};

}  // namespace moire::cuda::sm90
