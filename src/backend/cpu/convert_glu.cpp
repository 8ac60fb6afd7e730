// convert_glu on the CPU, one pass in the order of the columns of F, so that the interleaved side
// is walked from start to end and the other as two streams (walking the target alone made the way
// back to halves half as fast: reading every second row defeats the prefetcher). Long runs are
// copied; short ones (a row's own columns) are interleaved in vectors where one side alternates
// unit by unit, and copied with a constant size otherwise. Large targets are written past the
// cache.
#include "backend/cpu/convert_glu.h"

#include "backend/cpu/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/convert_glu.cpp"
#include <hwy/foreach_target.h>
// Highway's own header comes after foreach_target.h.
#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cstring>

HWY_BEFORE_NAMESPACE();
namespace moire::cpu::HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

void copy_run(const CopyRun& run) {
  const hn::ScalableTag<uint8_t> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  if (!run.bypass_cache || run.bytes < 4 * lanes) {
    std::memcpy(run.target, run.source, static_cast<size_t>(run.bytes));
    return;
  }
  const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(run.target));
  int64_t i = -address & (lanes - 1);
  std::memcpy(run.target, run.source, static_cast<size_t>(i));
  const auto* from = reinterpret_cast<const uint8_t*>(run.source);
  auto* to = reinterpret_cast<uint8_t*>(run.target);
  for (; i + lanes <= run.bytes; i += lanes) hn::Stream(hn::LoadU(d, from + i), d, to + i);
  std::memcpy(to + i, from + i, static_cast<size_t>(run.bytes - i));
}

// A unit lies at any address: two 1-byte elements are one uint16_t.
template <class T>
HWY_INLINE void copy_unit(const T* from, T* to) {
  std::memcpy(to, from, sizeof(T));
}

// Alternating units of both halves from two runs, and back, n of each.
template <class T>
void interleave(const T* first, const T* second, int64_t n, T* pairs) {
  const hn::ScalableTag<T> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    hn::StoreInterleaved2(hn::LoadU(d, first + i), hn::LoadU(d, second + i), d, pairs + 2 * i);
  }
  for (; i < n; ++i) {
    copy_unit(first + i, pairs + 2 * i);
    copy_unit(second + i, pairs + 2 * i + 1);
  }
}
template <class T>
void deinterleave(const T* pairs, int64_t n, T* first, T* second) {
  const hn::ScalableTag<T> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    auto even = hn::Zero(d), odd = hn::Zero(d);
    hn::LoadInterleaved2(d, pairs + 2 * i, even, odd);
    hn::StoreU(even, d, first + i);
    hn::StoreU(odd, d, second + i);
  }
  for (; i < n; ++i) {
    copy_unit(pairs + 2 * i, first + i);
    copy_unit(pairs + 2 * i + 1, second + i);
  }
}

// Units of each half that are made in the cache before they are written past it.
constexpr int64_t kStaged = 512;

template <class T>
void interleave_past_cache(const T* first, const T* second, int64_t n, T* pairs) {
  alignas(64) T staged[2 * kStaged];
  for (int64_t i = 0; i < n; i += kStaged) {
    const int64_t m = std::min(kStaged, n - i);
    interleave(first + i, second + i, m, staged);
    copy_run({reinterpret_cast<const char*>(staged), reinterpret_cast<char*>(pairs + 2 * i),
              2 * m * static_cast<int64_t>(sizeof(T)), true});
  }
}
template <class T>
void deinterleave_past_cache(const T* pairs, int64_t n, T* first, T* second) {
  alignas(64) T staged[2][kStaged];
  for (int64_t i = 0; i < n; i += kStaged) {
    const int64_t m = std::min(kStaged, n - i), bytes = m * static_cast<int64_t>(sizeof(T));
    deinterleave(pairs + 2 * i, m, staged[0], staged[1]);
    copy_run({reinterpret_cast<const char*>(staged[0]), reinterpret_cast<char*>(first + i), bytes,
              true});
    copy_run({reinterpret_cast<const char*>(staged[1]), reinterpret_cast<char*>(second + i), bytes,
              true});
  }
}

// One side alternates unit by unit; the other is cut into its runs.
template <class T>
void alternate(const SmallUnits& m) {
  const bool swapped = m.from.gate_first != m.to.gate_first;
  const auto* source = reinterpret_cast<const T*>(m.source);
  auto* target = reinterpret_cast<T*>(m.target);
  const bool to_pairs = m.to.block == 1;
  const ResolvedGluLayout& runs = to_pairs ? m.from : m.to;
  for (int64_t j = m.first; j < m.end;) {
    const int64_t n = std::min(runs.block - j % runs.block, m.end - j);
    const int64_t first = swapped ? runs.second(j) : runs.first(j);
    const int64_t second = swapped ? runs.first(j) : runs.second(j);
    if (to_pairs) {
      (m.bypass_cache ? interleave_past_cache<T> : interleave<T>)(source + first, source + second,
                                                                  n, target + 2 * j);
    } else {
      (m.bypass_cache ? deinterleave_past_cache<T>
                      : deinterleave<T>)(source + 2 * j, n, target + first, target + second);
    }
    j += n;
  }
}

// Any layouts, unit by unit, each moved by `move(from, to)`.
template <class MoveUnit>
HWY_INLINE void move_units(const SmallUnits& m, int64_t bytes, MoveUnit&& move) {
  const bool swapped = m.from.gate_first != m.to.gate_first;
  const int64_t from_block = m.from.block * bytes, to_block = m.to.block * bytes;
  const char* source = m.source + m.from.first(m.first) * bytes;
  char* target = m.target + m.to.first(m.first) * bytes;
  int64_t from_left = m.from.block - m.first % m.from.block;
  int64_t to_left = m.to.block - m.first % m.to.block;
  const int64_t first = swapped ? to_block : 0, second = swapped ? 0 : to_block;
  for (int64_t j = m.first; j < m.end; ++j) {
    move(source, target + first);
    move(source + from_block, target + second);
    source += bytes;
    target += bytes;
    if (--from_left == 0) from_left = m.from.block, source += from_block;
    if (--to_left == 0) to_left = m.to.block, target += to_block;
  }
}

// Units of a size known when compiling.
template <size_t kBytes>
void move_fixed_units(const SmallUnits& m) {
  move_units(m, kBytes, [](const char* from, char* to) { std::memcpy(to, from, kBytes); });
}

// Units of whole 16-byte vectors; past the cache where the target is aligned for it.
template <size_t kBytes>
void move_vectors(const SmallUnits& m) {
  const hn::CappedTag<uint8_t, 16> d;
  const bool aligned = reinterpret_cast<uintptr_t>(m.target) % 16 == 0;
  if (!m.bypass_cache || !aligned || hn::Lanes(d) != 16) return move_fixed_units<kBytes>(m);
  move_units(m, kBytes, [d](const char* from, char* to) HWY_ATTR {
    for (size_t i = 0; i < kBytes; i += 16) {
      hn::Stream(hn::LoadU(d, reinterpret_cast<const uint8_t*>(from) + i), d,
                 reinterpret_cast<uint8_t*>(to) + i);
    }
  });
}

template <class T>
void move_elements(const SmallUnits& m) {
  const bool alternates = m.from.block == 1 || m.to.block == 1;
  const bool both = m.from.block == 1 && m.to.block == 1;
  if (alternates && !both) return alternate<T>(m);
  move_fixed_units<sizeof(T)>(m);
}

void move_small_units(const SmallUnits& m) {
  switch (m.unit_bytes) {
    case 1:
      return move_elements<uint8_t>(m);
    case 2:
      return move_elements<uint16_t>(m);
    case 4:
      return move_elements<uint32_t>(m);
    case 8:
      return move_elements<uint64_t>(m);
    case 16:
      return move_vectors<16>(m);
    case 32:
      return move_vectors<32>(m);
    case 64:
      return move_vectors<64>(m);
    default:
      return move_units(m, m.unit_bytes, [&m](const char* from, char* to) {
        std::memcpy(to, from, static_cast<size_t>(m.unit_bytes));
      });
  }
}

}  // namespace
}  // namespace moire::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <numeric>

#include "backend/cpu/implementations.h"
#include "backend/cpu/rows.h"
#include "core/format.h"

namespace moire::cpu {
namespace {

HWY_EXPORT(copy_run);
HWY_EXPORT(move_small_units);

// Runs below this are moved by move_small_units.
constexpr int64_t kShortRun = 128;
// Bytes that a task moves, about.
constexpr int64_t kTaskBytes = 256 << 10;

// The tensor as [outer, 2F positions, rows, row_bytes]; strides in bytes.
struct Move {
  int64_t outer, f, rows, row_bytes;
  int64_t source_outer, source_step, source_row;
  int64_t target_outer, target_step, target_row;
  ResolvedGluLayout from, to;

  int64_t run() const { return std::gcd(from.block, to.block); }
  // Each position is one piece that follows the one before without a gap.
  bool is_packed() const {
    return rows == 1 && source_step == row_bytes && target_step == row_bytes;
  }
  bool has_short_runs() const { return is_packed() && run() * row_bytes < kShortRun; }
  bool bypasses_cache() const { return outer * 2 * f * rows * row_bytes >= kBypassBytes; }
};

Move describe(const ConvertGluArgs& args) {
  const TensorView source(args.source), target(args.target);
  const int64_t size = dtype_size(source.type());
  Move m{};
  m.f = source.shape[args.dim] / 2;
  m.from = resolve_glu_layout(args.from, m.f);
  m.to = resolve_glu_layout(args.to, m.f);
  m.source_row = source.stride() * size;
  m.target_row = target.stride() * size;
  m.rows = 1;
  if (args.dim == source.rank - 1) {
    m.outer = source.num_rows();
    m.row_bytes = m.source_step = m.target_step = size;
    m.source_outer = m.source_row;
    m.target_outer = m.target_row;
    return m;
  }
  m.outer = args.dim == 0 ? 1 : source.shape[0];
  if (source.rank - args.dim == 3) m.rows = source.shape[1];
  m.row_bytes = source.columns() * size;
  m.source_step = m.rows * m.source_row;
  m.target_step = m.rows * m.target_row;
  m.source_outer = 2 * m.f * m.source_step;
  m.target_outer = 2 * m.f * m.target_step;
  if (m.source_row == m.row_bytes && m.target_row == m.row_bytes) {
    m.row_bytes *= m.rows;
    m.rows = 1;
  }
  return m;
}

// n positions, from one run of the source to one of the target.
void copy_positions(const Move& m, const char* source, char* target, int64_t n, bool bypass) {
  const bool packed = m.is_packed();
  const int64_t pieces = packed ? 1 : n * m.rows;
  const int64_t bytes = packed ? n * m.row_bytes : m.row_bytes;
  for (int64_t i = 0; i < pieces; ++i) {
    HWY_DYNAMIC_DISPATCH(copy_run)
    ({source + i * m.source_row, target + i * m.target_row, bytes, bypass});
  }
}

// Columns first ... end - 1 of F, both halves, one run after the other.
void copy_columns(const Move& m, const char* source, char* target, int64_t first, int64_t end) {
  const bool bypass = m.bypasses_cache();
  for (int64_t j = first; j < end;) {
    const int64_t n =
        std::min({m.to.block - j % m.to.block, m.from.block - j % m.from.block, end - j});
    copy_positions(m, source + m.from.gate(j) * m.source_step,
                   target + m.to.gate(j) * m.target_step, n, bypass);
    copy_positions(m, source + m.from.up(j) * m.source_step, target + m.to.up(j) * m.target_step, n,
                   bypass);
    j += n;
  }
  if (bypass) hwy::FlushStream();
}

void run_long(const Context& context, const ConvertGluArgs& args, const Move& m) {
  const int64_t column_bytes = std::max<int64_t>(1, 2 * m.rows * m.row_bytes);
  const int64_t per_task = std::clamp<int64_t>(kTaskBytes / column_bytes, 1, m.f);
  const int64_t tasks = (m.f + per_task - 1) / per_task;
  context.state().pool->parallel_for(m.outer * tasks, [&](int64_t task, int) {
    const int64_t outer = task / tasks, first = task % tasks * per_task;
    copy_columns(m, static_cast<const char*>(args.source.data) + outer * m.source_outer,
                 static_cast<char*>(args.target.data) + outer * m.target_outer, first,
                 std::min(m.f, first + per_task));
  });
}

// A layout whose blocks are counted in units of `unit` positions.
ResolvedGluLayout in_units(const ResolvedGluLayout& layout, int64_t unit) {
  return {layout.f / unit, layout.block / unit, layout.gate_first};
}

void run_short(const Context& context, const ConvertGluArgs& args, const Move& m) {
  const int64_t unit = m.run(), units = m.f / unit, unit_bytes = unit * m.row_bytes;
  const ResolvedGluLayout from = in_units(m.from, unit), to = in_units(m.to, unit);
  // A task is a part of a long row, or several short rows.
  const int64_t units_per_task = std::min(units, kTaskBytes / (2 * unit_bytes));
  const int64_t parts = (units + units_per_task - 1) / units_per_task;
  const int64_t rows_per_task =
      parts > 1 ? 1 : std::max<int64_t>(1, kTaskBytes / (2 * units * unit_bytes));
  const bool bypass = m.bypasses_cache();
  const int64_t row_tasks = (m.outer + rows_per_task - 1) / rows_per_task;
  context.state().pool->parallel_for(row_tasks * parts, [&](int64_t task, int) {
    const int64_t first = task % parts * units_per_task;
    const int64_t begin = task / parts * rows_per_task;
    for (int64_t row = begin; row < std::min(m.outer, begin + rows_per_task); ++row) {
      HWY_DYNAMIC_DISPATCH(move_small_units)
      ({static_cast<const char*>(args.source.data) + row * m.source_outer,
        static_cast<char*>(args.target.data) + row * m.target_outer, from, to, first,
        std::min(units, first + units_per_task), unit_bytes, bypass});
    }
    if (bypass) hwy::FlushStream();
  });
}

Status run(const Context& context, const ConvertGluArgs& args) {
  if (TensorView(args.source).num_elements() == 0) return {};
  const Move m = describe(args);
  if (m.has_short_runs()) {
    run_short(context, args, m);
  } else {
    run_long(context, args, m);
  }
  return {};
}

std::string policy(const DeviceState& state, const ConvertGluArgs& args) {
  const Move m = describe(args);
  const bool is_short = m.has_short_runs();
  return concat(is_short ? "units of " : "runs of ",
                m.run() * (m.is_packed() ? m.row_bytes : m.rows * m.row_bytes), " bytes",
                !is_short && m.bypasses_cache() ? " past the cache, " : ", ", state.simd, ", ",
                state.num_threads, " threads");
}

}  // namespace

const Implementation<ConvertGluArgs> kConvertGlu = {
    "cpu", Device::kCpu, supports_everything, no_workspace, policy, run,
};

}  // namespace moire::cpu
#endif
