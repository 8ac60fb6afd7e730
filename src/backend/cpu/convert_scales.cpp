// convert_scales on the CPU: the target is zeroed, then every scale that there is moves to its
// place, as many at a time as lie together on both sides.
#include <moire/quantize.h>

#include <algorithm>
#include <cstring>

#include "backend/cpu/implementations.h"
#include "backend/cpu/rows.h"
#include "core/format.h"
#include "core/scale_layouts.h"

namespace moire::cpu {
namespace {

// One side of the conversion, going through the groups in order.
class Side {
 public:
  Side(const TensorView& t, int32_t layout, int32_t direction)
      : data_(static_cast<uint8_t*>(t.data)), at_{direction, layout, t.stride(), 0, 0} {}

  // To a group that starts at row `offset` and has so many rows; the one before must have been
  // finished.
  void start(int64_t group, int64_t offset, int64_t rows) {
    if (at_.layout == MOIRE_SCALES_CANONICAL) {
      at_.first_row = at_.direction == MOIRE_ROWWISE ? offset : offset / kMxBlock + group;
      return;
    }
    const int64_t padded = scale_layout_rows(at_.direction, at_.layout, rows);
    at_.padded_blocks = at_.direction == MOIRE_ROWWISE ? at_.pitch : padded;
    at_.first_row = next_row_;
    next_row_ += padded;
  }
  uint8_t* scale(int64_t outer, int64_t block) const { return data_ + at_.offset(outer, block); }
  // Whether neighbours are those of one block, else those of one row or column.
  bool is_along_outer() const {
    return at_.direction == MOIRE_COLUMNWISE && at_.layout <= MOIRE_SCALES_DENSE;
  }
  // How many of one row or column lie together from this block on.
  int64_t run(int64_t block, int64_t blocks) const {
    if (at_.layout != MOIRE_SCALES_SWIZZLED) return blocks - block;
    return std::min(blocks - block, kPaddedBlocks - block % kPaddedBlocks);
  }

 private:
  uint8_t* data_;
  GroupScales at_;
  int64_t next_row_ = 0;
};

// Rows or columns [begin, end) of a group, each with so many blocks.
void move_scales(const Side& from, const Side& to, int64_t begin, int64_t end, int64_t blocks) {
  if (from.is_along_outer() && to.is_along_outer()) {
    for (int64_t b = 0; b < blocks && begin < end; ++b) {
      std::memcpy(to.scale(begin, b), from.scale(begin, b), static_cast<size_t>(end - begin));
    }
    return;
  }
  if (from.is_along_outer() || to.is_along_outer()) {  // a transposition, by rows of a tile
    for (int64_t first = 0; first < blocks; first += kPaddedBlocks) {
      const int64_t last = std::min(first + kPaddedBlocks, blocks);
      for (int64_t o = begin; o < end; ++o) {
        for (int64_t b = first; b < last; ++b) *to.scale(o, b) = *from.scale(o, b);
      }
    }
    return;
  }
  for (int64_t o = begin; o < end; ++o) {
    for (int64_t b = 0, n = 0; b < blocks; b += n) {
      n = std::min(from.run(b, blocks), to.run(b, blocks));
      std::memcpy(to.scale(o, b), from.scale(o, b), static_cast<size_t>(n));
    }
  }
}

// A part of the work: of every group, one of kSlices of what has scales.
constexpr int64_t kSlices = 16;

void move_slice(const ConvertScalesArgs& args, int64_t slice) {
  Side from(args.source, args.from, args.direction), to(args.target, args.to, args.direction);
  const int64_t* offsets = args.groups.offsets;
  const bool is_rowwise = args.direction == MOIRE_ROWWISE;
  for (int64_t g = 0; g < args.groups.num_groups; ++g) {
    const int64_t rows = offsets[g + 1] - offsets[g];
    from.start(g, offsets[g], rows);
    to.start(g, offsets[g], rows);
    const int64_t outer = is_rowwise ? rows : args.k;
    const int64_t blocks = ceil_div(is_rowwise ? args.k : rows, kMxBlock);
    const int64_t per_slice = ceil_div(outer, kSlices);
    const int64_t end = std::min(outer, (slice + 1) * per_slice);
    move_scales(from, to, slice * per_slice, end, blocks);
  }
}

Status run(const Context& context, const ConvertScalesArgs& args) {
  ThreadPool& pool = *context.state().pool;
  zero_rows_from(pool, args.target, 0);
  pool.parallel_for(kSlices, [&](int64_t slice, int) { move_slice(args, slice); });
  return {};
}

std::string policy(const DeviceState& state, const ConvertScalesArgs&) {
  return concat("rows of a copy or of a tile at a time, ", state.num_threads, " threads");
}

}  // namespace

const Implementation<ConvertScalesArgs> kConvertScales = {
    "cpu", Device::kCpu, supports_everything, no_workspace, policy, run,
};

}  // namespace moire::cpu
