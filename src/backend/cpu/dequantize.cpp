// dequantize on the CPU: rows of FP8 decoded with their scales and rounded to the target's type.
#include "backend/cpu/quantize.h"
#include "backend/cpu/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/dequantize.cpp"
#include <hwy/foreach_target.h>
// The inline headers come after foreach_target.h.
#include "backend/cpu/fp8-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moire::cpu::HWY_NAMESPACE {
namespace {

void dequantize_strip(const DequantizeStrip& q) {
  constexpr int64_t kColumns = 4 * kPieceColumns;
  const StripSource& from = q.strip.source;
  const int64_t element_bytes = dtype_size(q.dtype);
  alignas(64) float values[kColumns];
  const auto decode = from.direction == MOIRE_COLUMNWISE ? DecodeColumnwise : DecodeRowwise;
  for (int64_t r = 0; r < q.strip.num_rows; ++r) {
    char* const target = static_cast<char*>(q.target) + r * q.stride * element_bytes;
    for (int64_t c = q.strip.first; c < q.strip.end; c += kColumns) {
      const int64_t n = std::min(kColumns, q.strip.end - c);
      decode(from.rows[r], from.dtype, from.scales[r], from.scale_dtype, c, n, values);
      EncodeRow(values, static_cast<size_t>(n), q.dtype, target + c * element_bytes);
    }
  }
}

}  // namespace
}  // namespace moire::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "backend/cpu/implementations.h"
#include "core/format.h"
#include "core/resolved_groups.h"

namespace moire::cpu {
namespace {

HWY_EXPORT(dequantize_strip);

Status run(const Context& context, const DequantizeArgs& args) {
  ThreadPool& pool = *context.state().pool;
  const TensorView data(args.source.data), target(args.target);
  const ResolvedGroups groups(args.groups, data.num_rows());
  const ScaleBlocks blocks = blocks_of(data, groups.get(), args.scaling);
  for_each_strip(pool, blocks, data.columns(),
                 [&](int64_t index, const RowBlock& block, int64_t first, int64_t end) {
                   DequantizeStrip q;
                   fill_quantized(args.source, args.scaling, args.direction, index, block,
                                  q.strip.source);
                   q.strip.num_rows = block.end - block.first;
                   q.strip.first = first;
                   q.strip.end = end;
                   q.target = row_bytes_of(target, block.first);
                   q.dtype = target.type();
                   q.stride = target.stride();
                   HWY_DYNAMIC_DISPATCH(dequantize_strip)(q);
                 });
  if (args.tail == MOIRE_TAIL_ZERO && data.rank == 2) {
    zero_rows_from(pool, target, rows_in_use(groups.get()));
  }
  return {};
}

std::string policy(const DeviceState& state, const DequantizeArgs& args) {
  return strips_policy(state, args.scaling);
}

}  // namespace

const Implementation<DequantizeArgs> kDequantize = {
    "cpu", Device::kCpu, supports_everything, no_workspace, policy, run,
};

}  // namespace moire::cpu
#endif
