// Policies of the SM90 grouped GEMM: tile, ring and staging of one instance. A named type carries
// each into the kernel, so that a profiler shows it.
#pragma once

#include "core/format.h"

namespace moire::cuda::sm90 {

// How the consumer warpgroups share the tiles (schedules.cuh).
enum class Schedule {
  kSideBySide,  // each multiplies 64 rows of every tile
  kPingPong     // two take tiles in turn: one multiplies, the other stores
};

// When a warp runs the pieces of its epilogue (pieces.cuh).
enum class Pieces {  // of operands without scales; those of others are sent later
  kAtOnce,   // after the tile's products; under ping-pong, while the other warpgroup multiplies
  kLeftOver  // while the next tile's products are under way
};

struct Shape {
  int tile_m, tile_n;
  int num_stages = 4;  // of 128 bytes in K
  int num_buffers;     // staging buffers of a warpgroup, 64 rows x 128 bytes each; or of a warp, 16
  int num_warpgroups = 2;
  Schedule schedule = Schedule::kSideBySide;
  Pieces pieces = Pieces::kAtOnce;
  int element_bytes = 2;             // 1: FP8 with scales (scaled_main_loop.cuh)
  bool scales_every_column = false;  // which then come with a stage
  bool decodes_weights = false;      // codes, beside BF16 rows (decoding_main_loop.cuh)
  bool is_thin = false;              // for few rows, and for no others (cost_model.h)
};

// kRows: of an epilogue's copies, a warpgroup's or (BoxesOfWarps) a warp's.
template <Shape kGiven, int kRows = 64>
struct Policy {
  static constexpr Shape kShape = kGiven;
  static constexpr bool kIsPingPong = kShape.schedule == Schedule::kPingPong;
  static constexpr bool kIsScaled = kShape.element_bytes == 1;
  static constexpr bool kTakesTurns = kShape.decodes_weights;  // side by side
  static constexpr bool kIsLeftOver = kShape.pieces == Pieces::kLeftOver;
  static constexpr int kTileM = kShape.tile_m, kTileN = kShape.tile_n;
  static constexpr int kTileKBytes = 128, kTileK = kTileKBytes / kShape.element_bytes;
  static constexpr int kNumStages = kShape.num_stages;
  static constexpr int kBoxRows = kRows, kWarpsOfBox = kBoxRows / 16;
  static constexpr int kNumBuffers = kShape.num_buffers, kBufferBytes = kBoxRows * 128;
  static constexpr int kConsumers = kShape.num_warpgroups, kWarpsOfConsumer = 4;
  static constexpr int kConsumerWarps = kWarpsOfConsumer * kConsumers;
  static constexpr int kBoxes = kConsumerWarps / kWarpsOfBox;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  // Of 64 rows, of a warpgroup.
  static constexpr int kRowBlocks = kTileM / 64 / (kIsPingPong ? 1 : kConsumers);
  // Columns of one wgmma: with 512 threads the compiler takes no instruction with 128 sums.
  static constexpr int kWidth = kConsumers == 2 || kTileN <= 192 ? kTileN : kTileN / 2;
  // Ring of work tiles: a block that holds one more cannot leave it to another. FP8 weight
  // gradients are many, and of few steps: the next is known while one is summed.
  static constexpr int kNumTiles = kIsPingPong || kShape.scales_every_column ? 2 : 1;
  static constexpr int kABytes = kTileM * kTileKBytes;
  static constexpr int kBBytes = kTileN * kTileKBytes / (kShape.decodes_weights ? 2 : 1);
  // Scales that come with a stage. Those of rows alone begin with a multiple of 4 of all rows, as
  // TMA has it, and so up to 3 rows before the tile's.
  static constexpr int kRowScales = kShape.scales_every_column ? kTileM : kTileM + 4;
  static constexpr int kScales =
      kIsScaled ? kRowScales + (kShape.scales_every_column ? kTileN : 0) : 0;
  static constexpr int kStageBytes = kABytes + kBBytes + 4 * kScales;
  static constexpr int kReturns = kIsScaled ? kWarpsOfConsumer : 1;  // of a stage
  static constexpr int kExaminers = kIsScaled ? 1 : 0;               // warps beside them
  // Of a work tile: lanes or, without scales, warps (next_tile).
  static constexpr int kTakersOfTile = (kConsumerWarps + kExaminers) * (kIsScaled ? 32 : 1);
  // Of whose scales a block keeps what was found (careful_tiles.cuh).
  static constexpr int kExaminedTiles = kIsScaled ? kNumTiles + 2 : 0;
  // 65,536 registers: 128 threads of the producer warpgroup, 256 or 384 consumers.
  static constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 232 : 160;

  static_assert(kTileN % 64 == 0, "64 columns a panel");
  static_assert(kTileN * kRowBlocks <= 384, "sums of a thread");
  static_assert(kTileM == 64 * kRowBlocks * (kIsPingPong ? 1 : kConsumers));
  static_assert(!kIsPingPong || (kConsumers == 2 && !kIsLeftOver));

  static std::string text() {
    return concat("tile ", kTileM, "x", kTileN, "x", kTileK, ", ", kNumStages, " stages, ",
                  kNumBuffers, " staging buffers of ", kBufferBytes,
                  kWarpsOfBox == 1 ? " bytes a warp" : " bytes a warpgroup",
                  kIsPingPong ? ", ping-pong" : "", kIsLeftOver ? ", epilogue left over" : "");
  }
};

// The same with copies of a warp's own rows. FP32 gradients lose 3 % where four warps wait for each
// other; FP8 weight gradients spill.
template <class Tile>
struct BoxesOfWarps : Policy<Tile::kShape, 16> {};

}  // namespace moire::cuda::sm90
