// The layouts of MXFP8 scales, byte by byte from their description in moire.h.
#include <algorithm>

#include "reference/quantize.h"

namespace moire::reference {
namespace {

int64_t padded(int64_t size, int64_t multiple) {
  return (size + multiple - 1) / multiple * multiple;
}

// Sizes of one group's scales.
struct GroupMatrix {
  int64_t outer, blocks;
};

// A group's scales in a layout, as consecutive bytes; the canonical one is read and written apart.
// Calls visit(byte, outer, block) for each byte that is a scale and returns how many bytes there
// are.
template <class Visit>
int64_t for_each_byte(const GroupMatrix& m, int32_t layout, int32_t direction, Visit&& visit) {
  if (layout == MOIRE_SCALES_DENSE) {
    for (int64_t i = 0; i < m.outer * m.blocks; ++i) {
      if (direction == MOIRE_ROWWISE) {
        visit(i, i / m.blocks, i % m.blocks);
      } else {
        visit(i, i % m.outer, i / m.outer);
      }
    }
    return m.outer * m.blocks;
  }
  const int64_t rows = padded(m.outer, 128), columns = padded(m.blocks, 4);
  for (int64_t i = 0; i < rows * columns; ++i) {
    int64_t r = i / columns, c = i % columns;
    if (layout == MOIRE_SCALES_SWIZZLED) {
      // Byte i is in tile i / 512; within a tile, 16 bytes are a row of four quarters of four.
      const int64_t tile = i / 512, in_tile = i % 512, tiles_per_row = columns / 4;
      r = tile / tiles_per_row * 128 + in_tile % 16 / 4 * 32 + in_tile / 16;
      c = tile % tiles_per_row * 4 + in_tile % 4;
    }
    if (r < m.outer && c < m.blocks) visit(i, r, c);
  }
  return rows * columns;
}

// Where scale [outer, block] of a group lies in the canonical layout.
struct Place {
  int64_t row, column;
};
Place canonical(const moire_convert_scales_args& args, int64_t group, int64_t outer,
                int64_t block) {
  const int64_t offset = args.groups.offsets[group];
  if (args.direction == MOIRE_ROWWISE) return {offset + outer, block};
  return {offset / 32 + group + block, outer};
}

}  // namespace

ByteRows convert_scales(const moire_convert_scales_args& args) {
  const TensorView source(args.source), target(args.target);
  ByteRows out(target.shape[0], target.shape[1]);
  std::fill(out.is_owned.begin(), out.is_owned.end(), true);
  const int32_t layout = args.from == MOIRE_SCALES_CANONICAL ? args.to : args.from;
  const auto* bytes = static_cast<const uint8_t*>(source.data);
  int64_t start = 0;  // of a group, in the bytes of the layout that is not canonical
  for (int64_t g = 0; g < args.groups.num_groups; ++g) {
    const int64_t rows = args.groups.offsets[g + 1] - args.groups.offsets[g];
    const bool is_rowwise = args.direction == MOIRE_ROWWISE;
    const GroupMatrix m{is_rowwise ? rows : args.k, padded(is_rowwise ? args.k : rows, 32) / 32};
    const auto move = [&](int64_t byte, int64_t outer, int64_t block) {
      const Place p = canonical(args, g, outer, block);
      if (args.from == MOIRE_SCALES_CANONICAL && args.to == MOIRE_SCALES_CANONICAL) {
        out.at(p.row, p.column) = bytes[p.row * source.stride() + p.column];
      } else if (args.from == MOIRE_SCALES_CANONICAL) {
        out.bytes[static_cast<size_t>(start + byte)] = bytes[p.row * source.stride() + p.column];
      } else {
        out.at(p.row, p.column) = bytes[start + byte];
      }
    };
    const bool is_copy = layout == MOIRE_SCALES_CANONICAL;
    start += for_each_byte(m, is_copy ? int32_t{MOIRE_SCALES_DENSE} : layout, args.direction, move);
  }
  return out;
}

}  // namespace moire::reference
