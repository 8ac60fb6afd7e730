// quantize, quantize_weight and requantize on the CPU, one pass over the source: a task takes a
// block of rows (32 or 128, from a group's first row) and some of its columns.
#include "backend/cpu/quantize.h"

#include "backend/cpu/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/quantize.cpp"
#include <hwy/foreach_target.h>
// The inline headers come after foreach_target.h.
#include <hwy/cache_control.h>

#include <algorithm>

#include "backend/cpu/requantize-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moire::cpu::HWY_NAMESPACE {
namespace {

// The pieces of a strip's copies from a row and a column on, where a block starts.
QuantizedPiece RowwiseFrom(const QuantizeStrip& q, int64_t row, int64_t column) {
  const QuantizeFormat& how = q.rowwise_format;
  QuantizedPiece out = q.rowwise;
  out.data += row * out.stride + column;
  out.scales = static_cast<char*>(out.scales) +
               (row * out.scale_stride + column / how.block()) * how.scale_bytes();
  return out;
}
QuantizedPiece ColumnwiseFrom(const QuantizeStrip& q, int64_t column) {
  QuantizedPiece out = q.columnwise;
  out.data += column;
  out.scales = static_cast<char*>(out.scales) + column * q.columnwise_format.scale_bytes();
  return out;
}

// Rows of floats are read where they lie: along the rows first, then down the columns of what has
// come into the second-level cache.
void QuantizeFloats(const QuantizeStrip& q) {
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
void QuantizeDecoded(const QuantizeStrip& q) {
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
        DecodePiece(s.source, r + i, count, c, n, values + i * n);
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
void QuantizeCodes(const QuantizeStrip& q) {
  const bool to_rows = q.rowwise.data != nullptr;
  const QuantizeFormat& how = to_rows ? q.rowwise_format : q.columnwise_format;
  const QuantizedPiece out =
      to_rows ? RowwiseFrom(q, 0, q.strip.first) : ColumnwiseFrom(q, q.strip.first);
  if (!RequantizeQuick(how, q.strip, out)) QuantizeDecoded(q);
}

void quantize_strip(const QuantizeStrip& q) {
  const bool is_fp8 = dtype_size(q.strip.source.dtype) == 1;
  (is_fp8 ? QuantizeCodes : QuantizeFloats)(q);
  if (q.rowwise.bypasses_cache || q.columnwise.bypasses_cache) hwy::FlushStream();
}

}  // namespace
}  // namespace moire::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <atomic>
#include <cstring>

#include "backend/cpu/bias_backward.h"
#include "backend/cpu/findings.h"
#include "backend/cpu/implementations.h"
#include "backend/cpu/non_finite.h"
#include "core/format.h"
#include "core/quantize_bias.h"
#include "core/resolved_groups.h"

namespace moire::cpu {
namespace {

HWY_EXPORT(quantize_strip);

// Where the copies of a block go; blocks without rows get zeros where their columnwise scales would
// lie.
class Copies {
 public:
  Copies(const moire_quantized& rowwise, const moire_quantized& columnwise, int32_t scaling,
         bool fractional)
      : rowwise_(rowwise), columnwise_(columnwise), scaling_(scaling), fractional_(fractional) {}

  // Rows of a task: what shares a columnwise scale or a tile's, else few enough to share out.
  int64_t task_rows() const {
    const bool is_rowwise = !columnwise_.is_present() && scaling_ != MOIRE_SCALING_FP8_TILE;
    return is_rowwise ? scale_block(MOIRE_SCALING_MXFP8) : scale_block(scaling_);
  }

  // Rows from block.first on; `index` is the block's.
  void aim(QuantizeStrip& q, int64_t index, const RowBlock& block) {
    const bool is_tile = scaling_ == MOIRE_SCALING_FP8_TILE;
    q.rowwise_format = format(rowwise_);
    q.columnwise_format = format(columnwise_);
    q.rowwise = piece(rowwise_, block.first, is_tile ? index : block.first);
    q.columnwise = piece(columnwise_, block.first, index);
    q.rowwise.non_finite = q.columnwise.non_finite = &found_non_finite_;
  }
  // Whether anything that was quantised is infinite or NaN.
  bool found_non_finite() const { return found_non_finite_; }
  // Columns first ... end - 1 of a row of columnwise scales.
  void zero_scales(int64_t index, int64_t first, int64_t end) const {
    const TensorView scales = columnwise_.scales;
    if (!columnwise_.is_present()) return;
    const int64_t bytes = dtype_size(scales.type());
    std::memset(row_bytes_of(scales, index) + first * bytes, 0,
                static_cast<size_t>((end - first) * bytes));
  }
  // Rows past the last group, and all scales where there are no blocks.
  void zero_tail(ThreadPool& pool, int64_t used_rows, int64_t num_blocks) const {
    if (rowwise_.is_present()) {
      zero_rows_from(pool, rowwise_.data, used_rows);
      zero_rows_from(pool, rowwise_.scales, used_rows);
    }
    if (columnwise_.is_present()) {
      zero_rows_from(pool, columnwise_.data, used_rows);
      zero_rows_from(pool, columnwise_.scales, num_blocks);
    }
  }

 private:
  QuantizeFormat format(const Quantized& q) const {
    return {TensorView(q.data).type(), scaling_, fractional_};
  }
  static QuantizedPiece piece(const Quantized& q, int64_t row, int64_t scale_row) {
    if (!q.is_present()) return {};
    const TensorView data(q.data), scales(q.scales);
    return {row_of<uint8_t>(data, row), data.stride(), row_bytes_of(scales, scale_row),
            scales.stride(), bypasses_cache(data)};
  }

  Quantized rowwise_, columnwise_;
  int32_t scaling_;
  bool fractional_;
  std::atomic<bool> found_non_finite_ = false;
};

// All blocks: `fill(block, source)` says where a block's rows lie. Where `bias` asks for sums,
// those of a block are whole partial sums.
template <class Fill>
void quantize_blocks(ThreadPool& pool, const ScaleBlocks& blocks, int64_t columns, Copies& copies,
                     int32_t tail, Fill&& fill, const BiasBackwardArgs* bias = nullptr) {
  for_each_strip(pool, blocks, columns,
                 [&](int64_t index, const RowBlock& block, int64_t first, int64_t end) {
                   if (block.first == block.end) {
                     if (tail == MOIRE_TAIL_ZERO) copies.zero_scales(index, first, end);
                     return;
                   }
                   QuantizeStrip q;
                   q.strip.num_rows = block.end - block.first;
                   q.strip.first = first;
                   q.strip.end = end;
                   fill(index, block, q.strip.source);
                   copies.aim(q, index, block);
                   HWY_DYNAMIC_DISPATCH(quantize_strip)(q);
                   if (bias != nullptr) sum_bias_rows(*bias, block, first, end);
                 });
}

Status run_quantize(const Context& context, const QuantizeArgs& args) {
  ThreadPool& pool = *context.state().pool;
  const TensorView source(args.source), row_idx(args.row_idx);
  const ResolvedGroups groups(args.groups, (row_idx.is_present() ? row_idx : source).shape[0]);
  Copies copies(args.rowwise, args.columnwise, args.scaling, args.fractional_scales != 0);
  const ScaleBlocks blocks(groups.get(), copies.task_rows());
  const auto fill = [&](int64_t, const RowBlock& block, StripSource& out) {
    out.dtype = source.type();
    for (int64_t i = block.first; i < block.end; ++i) {
      out.rows[i - block.first] = row_bytes_of(source, source_row(row_idx, i));
    }
  };
  const BiasBackwardArgs bias = bias_backward_of(args);
  quantize_blocks(pool, blocks, source.columns(), copies, args.tail, fill,
                  is_present(args.grad_bias) ? &bias : nullptr);
  if (is_present(args.grad_bias)) finish_bias(context, bias);
  const int64_t used = rows_in_use(groups.get());
  if (args.tail == MOIRE_TAIL_ZERO) copies.zero_tail(pool, used, blocks.count());
  if (copies.found_non_finite()) {
    const Element first = first_non_finite(blocks, source.columns(), fill);
    note_non_finite(context, {"quantize", "source"}, [&] {
      return index_text(source, {source_row(row_idx, first.row), first.column});
    });
  }
  return {};
}

Status run_quantize_weight(const Context& context, const QuantizeWeightArgs& args) {
  const Weight source = args.source;
  const int64_t num_groups = source.tensor.shape[0], n = source.tensor.shape[1];
  Copies copies(args.rowwise, args.columnwise, args.scaling, args.fractional_scales != 0);
  const ScaleBlocks blocks(num_groups, n, copies.task_rows());
  const int64_t k = source.tensor.shape[2];
  const auto fill = [&](int64_t, const RowBlock& block, StripSource& out) {
    const TensorView matrix = source.matrix(block.group);
    out.dtype = matrix.type();
    for (int64_t i = block.first; i < block.end; ++i) {
      out.rows[i - block.first] = row_bytes_of(matrix, i - block.group * n);
    }
  };
  quantize_blocks(*context.state().pool, blocks, k, copies, MOIRE_TAIL_UNTOUCHED, fill);
  if (copies.found_non_finite()) {
    note_non_finite(context, {"quantize_weight", "source"},
                    [&] { return index_text(source.tensor, first_non_finite(blocks, k, fill)); });
  }
  return {};
}

Status run_requantize(const Context& context, const RequantizeArgs& args) {
  ThreadPool& pool = *context.state().pool;
  const TensorView data(args.source.data), scales(args.source.scales);
  const bool to_rowwise = args.direction == MOIRE_COLUMNWISE;
  Copies copies(to_rowwise ? args.target : moire_quantized{},
                to_rowwise ? moire_quantized{} : args.target, args.scaling,
                args.fractional_scales != 0);
  const ResolvedGroups groups(args.groups, data.num_rows());
  const ScaleBlocks blocks = blocks_of(data, groups.get(), args.scaling);
  const auto fill = [&](int64_t index, const RowBlock& block, StripSource& out) {
    fill_quantized(args.source, args.scaling, args.direction, index, block, out);
  };
  quantize_blocks(pool, blocks, data.columns(), copies, args.tail, fill);
  if (args.tail == MOIRE_TAIL_ZERO && data.rank == 2) {
    copies.zero_tail(pool, rows_in_use(groups.get()), blocks.count());
  }
  if (copies.found_non_finite()) {
    note_non_finite(context, {"requantize", "source"}, [&] {
      return index_text(data, first_non_finite(blocks, data.columns(), fill)) + ", decoded,";
    });
  }
  return {};
}

size_t bias_workspace(const DeviceState& state, const QuantizeArgs& args) {
  return kBiasBackward.workspace(state, bias_backward_of(args));
}

template <class A>
std::string policy(const DeviceState& state, const A& args) {
  return strips_policy(state, args.scaling);
}

}  // namespace

const Implementation<QuantizeArgs> kQuantize = {
    "cpu", Device::kCpu, supports_everything, bias_workspace, policy, run_quantize,
};
const Implementation<QuantizeWeightArgs> kQuantizeWeight = {
    "cpu", Device::kCpu, supports_everything, no_workspace, policy, run_quantize_weight,
};
const Implementation<RequantizeArgs> kRequantize = {
    "cpu", Device::kCpu, supports_everything, no_workspace, policy, run_requantize,
};

}  // namespace moire::cpu
#endif
