// A strip, some columns of a block of rows, as codes in either direction or both. Include after
// simd_targets.h, inside the foreach_target pattern.
#include "backend/cpu/decode_piece-inl.h"
#include "backend/cpu/quantize_block-inl.h"
#include "backend/cpu/requantize_quick-inl.h"

#if defined(MOIRE_QUANTIZE_STRIP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOIRE_QUANTIZE_STRIP_INL_H_
#undef MOIRE_QUANTIZE_STRIP_INL_H_
#else
#define MOIRE_QUANTIZE_STRIP_INL_H_
#endif

#include <hwy/cache_control.h>

#include <algorithm>

HWY_BEFORE_NAMESPACE();
namespace moire::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// The pieces of a strip's copies from a row and a column on, where a block starts.
inline QuantizedPiece RowwiseFrom(const QuantizeStrip& q, int64_t row, int64_t column) {
  const QuantizeFormat& how = q.rowwise_format;
  QuantizedPiece out = q.rowwise;
  out.data += row * out.stride + column;
  out.scales = static_cast<char*>(out.scales) +
               (row * out.scale_stride + column / how.block()) * how.scale_bytes();
  return out;
}
inline QuantizedPiece ColumnwiseFrom(const QuantizeStrip& q, int64_t column) {
  QuantizedPiece out = q.columnwise;
  out.data += column;
  out.scales = static_cast<char*>(out.scales) + column * q.columnwise_format.scale_bytes();
  return out;
}

// Rows of floats are read where they lie: along the rows first, then down the columns of what has
// come into the second-level cache.
inline void QuantizeFloats(const QuantizeStrip& q) {
  constexpr int64_t kAhead = 1024;  // elements: about the time that memory takes
  const Strip& s = q.strip;
  const QuantizeFormat& how = q.rowwise_format;
  const bool has_rowwise = q.rowwise.data != nullptr;
  const bool is_tile = how.scaling == MOIRE_SCALING_FP8_TILE;
  const int64_t width = is_tile ? kMaxScaleBlock : s.end - s.first;
  with_format(s.source.dtype, [&](auto format) HWY_ATTR {
    using Rows = ListedRows<decltype(format)>;
    for (int64_t c = s.first; has_rowwise && c < s.end; c += width) {
      const Rows rows{s.source.rows, c, is_tile ? width : kAhead};
      const auto quantize = is_tile ? QuantizeTile<Rows> : QuantizeRowwise<Rows>;
      quantize(how, rows, s.num_rows, std::min(width, s.end - c), RowwiseFrom(q, 0, c));
    }
    if (q.columnwise.data != nullptr) {
      const Rows rows{s.source.rows, s.first, has_rowwise ? 0 : kAhead};
      QuantizeColumnwise(q.columnwise_format, rows, s.num_rows, s.end - s.first,
                         ColumnwiseFrom(q, s.first));
    }
  });
}

// Rows of FP8 by way of floats, in pieces that the caches close by hold: 32 rows where each row has
// its own blocks, else whole blocks of rows.
inline void QuantizeDecoded(const QuantizeStrip& q) {
  constexpr int64_t kPieceRows = 32, kLine = 64;
  constexpr int64_t kRowsAtOnce = 4;  // few lines can be on their way to the cache

  const Strip& s = q.strip;
  const bool to_rows = q.rowwise.data != nullptr;
  const int64_t height = to_rows ? kPieceRows : s.num_rows;
  alignas(64) float values[kMaxScaleBlock * kPieceColumns];
  for (int64_t r = 0; r < s.num_rows; r += height) {
    const int64_t rows = std::min(height, s.num_rows - r);
    for (int64_t c = s.first; c < s.end; c += kPieceColumns) {
      const int64_t n = std::min(kPieceColumns, s.end - c);
      for (int64_t i = 0; i < rows; i += kRowsAtOnce) {
        const int64_t count = std::min(kRowsAtOnce, rows - i);
        for (int64_t k = i; k < i + count; ++k) {
          const auto* const next = static_cast<const uint8_t*>(s.source.rows[r + k]) + c + n;
          for (int64_t j = 0; j < n; j += kLine) hwy::Prefetch(next + j);
        }
        DecodePiece(s, r + i, count, c, n, values + i * n);
      }
      const PitchedRows<Fp32> piece{values, n};
      if (to_rows) {
        QuantizeRowwise(q.rowwise_format, piece, rows, n, RowwiseFrom(q, r, c));
      } else {
        QuantizeColumnwise(q.columnwise_format, piece, rows, n, ColumnwiseFrom(q, c));
      }
    }
  }
}

// From one copy of FP8 to the other.
inline void QuantizeCodes(const QuantizeStrip& q) {
  const bool to_rows = q.rowwise.data != nullptr;
  const QuantizeFormat& how = to_rows ? q.rowwise_format : q.columnwise_format;
  const QuantizedPiece out =
      to_rows ? RowwiseFrom(q, 0, q.strip.first) : ColumnwiseFrom(q, q.strip.first);
  if (!RequantizeQuick(how, q.strip, out)) QuantizeDecoded(q);
}

}  // namespace moire::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
