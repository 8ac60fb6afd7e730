#include "backend/cpu/gemm/quantized_output.h"

#include <moire/quantize.h>

#include <cmath>

#include "backend/cpu/findings.h"
#include "backend/cpu/gemm/engine.h"
#include "backend/cpu/implementations.h"
#include "backend/cpu/rows.h"
#include "core/divide.h"
#include "core/format.h"
#include "core/resolved_groups.h"
#include "core/scale_shapes.h"
#include "core/status_macros.h"

namespace moire::cpu::gemm {
namespace {

// Rows of columnwise scales that belong to no block: zeros.
void zero_unowned(const TensorView& scales, const Groups& groups) {
  if (scales.columns() == 0) return;  // its data may be null
  const auto zero = [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      std::memset(element(scales, row, 0), 0, static_cast<size_t>(scales.columns()));
    }
  };
  int64_t end = 0;
  for (int64_t g = 0; g < groups.num_groups; ++g) {
    const int64_t first = groups.offsets[g], rows = groups.offsets[g + 1] - first;
    const int64_t base = first / kQuantizedRows + g;
    zero(end, base);
    end = base + ceil_div(rows, kQuantizedRows);
  }
  zero(end, scales.shape[0]);
}

std::string_view names(const moire_quantized (&copies)[2]) {
  if (!is_present(copies[1])) return "rowwise";
  return !is_present(copies[0]) ? "columnwise" : "rowwise and columnwise";
}

}  // namespace

QuantizedOutput::QuantizedOutput(const moire_quantized& rowwise, const moire_quantized& columnwise,
                                 bool fractional_scales, bool straddles)
    : fractional_(fractional_scales) {
  const bool fuses_rows = rowwise.scales.dtype == MOIRE_E8M0 && !straddles;
  (fuses_rows ? fused_ : deferred_)[0] = rowwise;
  (columnwise.scales.dtype == MOIRE_E8M0 ? fused_ : deferred_)[1] = columnwise;
}

void QuantizedOutput::note_non_finite(const float* values, int64_t pitch, int64_t first_row,
                                      int64_t rows, int64_t first_column, int64_t columns) const {
  for (int64_t i = 0; i < rows * columns; ++i) {
    const int64_t r = i / columns, c = i % columns;
    if (std::isfinite(values[r * pitch + c])) continue;
    const int64_t at = (first_row + r) * width() + first_column + c;
    int64_t first = non_finite_.load();
    while (at < first && !non_finite_.compare_exchange_weak(first, at)) continue;
    return;
  }
}

Status QuantizedOutput::finish(const Context& context, const Context::Origin& origin,
                               const TensorView& stored, const Groups& groups, int32_t tail) const {
  if (const int64_t at = non_finite_.load(); at != kNone) {
    cpu::note_non_finite(context, origin,
                         [&] { return concat("[", at / width(), ", ", at % width(), "]"); });
  }
  if (tail == MOIRE_TAIL_ZERO) {
    ThreadPool& pool = *context.state().pool;
    const int64_t used = rows_in_use(groups);
    for (const moire_quantized& q : fused_) {
      if (is_present(q)) zero_rows_from(pool, q.data, used);
    }
    if (is_present(rowwise())) zero_rows_from(pool, rowwise().scales, used);
    if (is_present(columnwise())) zero_unowned(columnwise().scales, groups);
  }
  if (!is_deferred()) return {};
  QuantizeArgs args;
  args.source = stored;
  args.rowwise = deferred_[0];
  args.columnwise = deferred_[1];
  const moire_quantized& any = is_present(deferred_[0]) ? deferred_[0] : deferred_[1];
  args.scaling = ragged_scaling(TensorView(any.scales).type());
  args.fractional_scales = fractional_ ? 1 : 0;
  args.groups = present_groups(groups);
  args.tail = tail;
  return kQuantize.run(context.within(origin), args);
}

std::string QuantizedOutput::policy(std::string_view name) const {
  std::string text;
  if (is_fused()) text += concat(", ", name, " quantised ", names(fused_), " in the epilogue");
  if (!is_deferred()) return text;
  text += concat(", ", name, " quantised ", names(deferred_), " after the product (",
                 deferred_[0].scales.dtype == MOIRE_E8M0
                     ? "blocks of 32 straddle the layout's gates and ups"
                     : "blocks of 128",
                 ")");
  return text;
}

}  // namespace moire::cpu::gemm
