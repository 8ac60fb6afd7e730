// dequantize on the CPU: rows of FP8 decoded with their scales and rounded to the target's type.
#include "backend/cpu/quantize.h"
#include "backend/cpu/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/dequantize.cpp"
#include <hwy/foreach_target.h>
// The inline headers come after foreach_target.h.
#include <hwy/cache_control.h>

#include "backend/cpu/fp8-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moire::cpu::HWY_NAMESPACE {
namespace {

// n floats to memory, past the cache where dst is a cache line's start.
template <class Target>
void store_row(const float* values, int64_t n, bool bypasses_cache, typename Target::Element* dst) {
  const FloatTag d;
  const hn::Rebind<typename Target::Element, FloatTag> to;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  if (bypasses_cache && sizeof(typename Target::Element) * hn::MaxLanes(to) >= 16) {
    for (; i + lanes <= n; i += lanes) {
      hn::Stream(Target::Encode(d, hn::LoadU(d, values + i)), to, dst + i);
    }
  }
  EncodeRun<Target>(values + i, static_cast<size_t>(n - i), dst + i);
}

void dequantize_strip(const DequantizeStrip& q) {
  constexpr int64_t kRows = 4, kColumns = 4 * kPieceColumns, kLine = 64;
  const Strip& s = q.strip;
  alignas(64) float values[kRows * kColumns];
  with_format(q.dtype, [&](auto format) HWY_ATTR {
    using Target = decltype(format);
    auto* const target = static_cast<typename Target::Element*>(q.target);
    for (int64_t r = 0; r < s.num_rows; r += kRows) {
      const int64_t rows = std::min(kRows, s.num_rows - r);
      for (int64_t c = s.first; c < s.end; c += kColumns) {
        const int64_t n = std::min(kColumns, s.end - c);
        DecodePiece(s.source, r, rows, c, n, values);
        for (int64_t i = 0; i < rows; ++i) {
          // No prefetcher knows where a strip's next rows are.
          const int64_t next = std::min(r + i + kRows, s.num_rows - 1);
          const auto* const ahead = static_cast<const uint8_t*>(s.source.rows[next]) + c;
          for (int64_t j = 0; j < n; j += kLine) hwy::Prefetch(ahead + j);
          store_row<Target>(values + i * n, n, q.bypasses_cache, target + (r + i) * q.stride + c);
        }
      }
    }
  });
  if (q.bypasses_cache) hwy::FlushStream();
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
                   if (block.first == block.end) return;
                   DequantizeStrip q;
                   fill_quantized(args.source, args.scaling, args.direction, index, block,
                                  q.strip.source);
                   q.strip.num_rows = block.end - block.first;
                   q.strip.first = first;
                   q.strip.end = end;
                   q.target = row_bytes_of(target, block.first);
                   q.dtype = target.type();
                   q.stride = target.stride();
                   q.bypasses_cache = bypasses_cache(target);
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
