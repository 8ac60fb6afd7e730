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
#include <numeric>
#include <type_traits>
#include <utility>

HWY_BEFORE_NAMESPACE();
namespace moire::cpu::HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

void copy_run(const void* source, void* target, int64_t bytes, bool bypasses_cache) {
  const hn::ScalableTag<uint8_t> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto* const from = static_cast<const uint8_t*>(source);
  auto* const to = static_cast<uint8_t*>(target);
  int64_t i = 0;
  if (bypasses_cache && bytes >= 4 * lanes) {
    i = -static_cast<int64_t>(reinterpret_cast<uintptr_t>(to)) & (lanes - 1);
    std::memcpy(to, from, static_cast<size_t>(i));
    for (; i + lanes <= bytes; i += lanes) hn::Stream(hn::LoadU(d, from + i), d, to + i);
  }
  std::memcpy(to + i, from + i, static_cast<size_t>(bytes - i));
}

// n units of two runs to alternating pairs where Half is const, and back where Pairs is. A unit
// lies at any address: two 1-byte elements are one uint16_t.
template <class Pairs, class Half>
void alternate(Pairs* pairs, Half* first, Half* second, int64_t n) {
  using T = std::remove_const_t<Half>;
  int64_t i = 0;
  const auto go_on = [&](auto d) HWY_ATTR {
    const auto lanes = static_cast<int64_t>(hn::Lanes(d));
    for (; i + lanes <= n; i += lanes) {
      if constexpr (std::is_const_v<Half>) {
        hn::StoreInterleaved2(hn::LoadU(d, first + i), hn::LoadU(d, second + i), d, pairs + 2 * i);
      } else {
        auto even = hn::Zero(d), odd = hn::Zero(d);
        hn::LoadInterleaved2(d, pairs + 2 * i, even, odd);
        hn::StoreU(even, d, first + i);
        hn::StoreU(odd, d, second + i);
      }
    }
  };
  go_on(hn::ScalableTag<T>());
  go_on(hn::CappedTag<T, 16 / sizeof(T)>());
  go_on(hn::CappedTag<T, 1>());
}

// The same by way of the cache, before what is written goes past it.
template <class Pairs, class Half>
void alternate_past_cache(Pairs* pairs, Half* first, Half* second, int64_t n) {
  constexpr int64_t kStaged = 512;  // units of each half
  alignas(64) std::remove_const_t<Half> staged[2 * kStaged];
  for (int64_t i = 0; i < n; i += kStaged) {
    const int64_t m = std::min(kStaged, n - i), bytes = m * static_cast<int64_t>(sizeof(Half));
    if constexpr (std::is_const_v<Half>) {
      alternate(staged, first + i, second + i, m);
      copy_run(staged, pairs + 2 * i, 2 * bytes, true);
    } else {
      alternate(pairs + 2 * i, staged, staged + kStaged, m);
      copy_run(staged, first + i, bytes, true);
      copy_run(staged + kStaged, second + i, bytes, true);
    }
  }
}

// `pairs` alternates unit by unit; the other side, `halves`, is cut into the runs of its layout.
template <class Pairs, class Half>
void alternate_columns(const GluColumns& c, Pairs* pairs, Half* halves,
                       const ResolvedGluLayout& runs) {
  const bool swapped = c.from.gate_first != c.to.gate_first;
  for (int64_t j = c.first; j < c.end;) {
    const int64_t n = std::min(runs.block - j % runs.block, c.end - j);
    Half* const first = halves + (swapped ? runs.second(j) : runs.first(j));
    Half* const second = halves + (swapped ? runs.first(j) : runs.second(j));
    (c.bypasses_cache ? alternate_past_cache<Pairs, Half>
                      : alternate<Pairs, Half>)(pairs + 2 * j, first, second, n);
    j += n;
  }
}

// Calls move(from, to, n) for all runs of n positions that lie together on both sides; n is 1 where
// kBytes, a position's, are known.
template <size_t kBytes, class Move>
HWY_INLINE void for_each_run(const GluColumns& c, Move&& move) {
  constexpr auto kStep = static_cast<int64_t>(kBytes);
  const int64_t from_step = kStep != 0 ? kStep : c.source_step;
  const int64_t to_step = kStep != 0 ? kStep : c.target_step;
  const int64_t from_block = c.from.block * from_step, to_block = c.to.block * to_step;
  const bool swapped = c.from.gate_first != c.to.gate_first;
  const int64_t first = swapped ? to_block : 0, second = swapped ? 0 : to_block;
  const char* from = c.source + c.from.first(c.first) * from_step;
  char* to = c.target + c.to.first(c.first) * to_step;
  int64_t from_left = c.from.block - c.first % c.from.block;
  int64_t to_left = c.to.block - c.first % c.to.block;
  for (int64_t j = c.first, n = 1; j < c.end; j += n) {
    if constexpr (kStep == 0) n = std::min({from_left, to_left, c.end - j});
    move(from, to + first, n);
    move(from + from_block, to + second, n);
    from += n * from_step;
    to += n * to_step;
    if ((from_left -= n) == 0) from_left = c.from.block, from += from_block;
    if ((to_left -= n) == 0) to_left = c.to.block, to += to_block;
  }
}

template <size_t kBytes>
void move_units(const GluColumns& c) {
  for_each_run<kBytes>(
      c, [](const char* from, char* to, int64_t) HWY_ATTR { std::memcpy(to, from, kBytes); });
}
// Past the cache where the target is aligned for it.
template <size_t kBytes>
void move_vectors(const GluColumns& c) {
  const hn::CappedTag<uint8_t, 16> d;
  const bool is_aligned = reinterpret_cast<uintptr_t>(c.target) % 16 == 0;
  if (!c.bypasses_cache || !is_aligned || hn::Lanes(d) != 16) return move_units<kBytes>(c);
  for_each_run<kBytes>(c, [d](const char* from, char* to, int64_t) HWY_ATTR {
    for (size_t i = 0; i < kBytes; i += 16) {
      hn::Stream(hn::LoadU(d, reinterpret_cast<const uint8_t*>(from) + i), d,
                 reinterpret_cast<uint8_t*>(to) + i);
    }
  });
}
template <class T>
void move_elements(const GluColumns& c) {
  const auto* const source = reinterpret_cast<const T*>(c.source);
  auto* const target = reinterpret_cast<T*>(c.target);
  const bool both_alternate = c.from.block == c.to.block;
  if (!both_alternate && c.to.block == 1) return alternate_columns(c, target, source, c.from);
  if (!both_alternate && c.from.block == 1) return alternate_columns(c, source, target, c.to);
  move_units<sizeof(T)>(c);
}

void move_runs(const GluColumns& c) {
  for_each_run<0>(c, [&c](const char* from, char* to, int64_t n) HWY_ATTR {
    const int64_t pieces = c.is_packed ? 1 : n * c.rows;
    const int64_t bytes = c.is_packed ? n * c.row_bytes : c.row_bytes;
    for (int64_t i = 0; i < pieces; ++i) {
      copy_run(from + i * c.source_row, to + i * c.target_row, bytes, c.bypasses_cache);
    }
  });
}

void move_columns(const GluColumns& c) {
  const int64_t unit = c.are_units ? c.row_bytes : 0;
  if (unit == 1) return move_elements<uint8_t>(c);
  if (unit == 2) return move_elements<uint16_t>(c);
  if (unit == 4) return move_elements<uint32_t>(c);
  if (unit == 8) return move_elements<uint64_t>(c);
  if (unit == 16) return move_vectors<16>(c);
  if (unit == 32) return move_vectors<32>(c);
  if (unit == 64) return move_vectors<64>(c);
  move_runs(c);
}

}  // namespace
}  // namespace moire::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "backend/cpu/implementations.h"
#include "backend/cpu/rows.h"
#include "core/format.h"

namespace moire::cpu {
namespace {

HWY_EXPORT(move_columns);

// The tensor as `count` matrices of 2F positions, all columns of the first of which are `columns`.
struct Matrices {
  GluColumns columns;
  int64_t count, source_bytes, target_bytes;  // bytes from one matrix to the next
  int64_t run_bytes;
};

Matrices describe(const ConvertGluArgs& args) {
  constexpr int64_t kShortRun = 128;
  const TensorView source(args.source), target(args.target);
  const int64_t size = dtype_size(source.type()), f = source.shape[args.dim] / 2;
  Matrices m{};
  GluColumns& c = m.columns;
  c.source = static_cast<const char*>(source.data);
  c.target = static_cast<char*>(target.data);
  c.source_row = m.source_bytes = source.stride() * size;
  c.target_row = m.target_bytes = target.stride() * size;
  c.rows = 1;
  m.count = source.num_rows();
  c.row_bytes = size;
  c.is_packed = args.dim == source.rank - 1;
  if (!c.is_packed) {
    m.count = args.dim == 0 ? 1 : source.shape[0];
    if (source.rank - args.dim == 3) c.rows = source.shape[1];
    c.row_bytes = source.columns() * size;
    m.source_bytes *= 2 * f * c.rows;
    m.target_bytes *= 2 * f * c.rows;
    c.is_packed = c.source_row == c.row_bytes && c.target_row == c.row_bytes;
    if (c.is_packed) c.row_bytes *= std::exchange(c.rows, 1);
  }
  c.bypasses_cache = source.num_elements() * size >= kBypassBytes;
  const ResolvedGluLayout from = resolve_glu_layout(args.from, f);
  const ResolvedGluLayout to = resolve_glu_layout(args.to, f);
  const int64_t run = std::gcd(from.block, to.block);
  m.run_bytes = run * c.rows * c.row_bytes;
  c.are_units = c.is_packed && m.run_bytes < kShortRun;
  const int64_t unit = c.are_units ? run : 1;
  c.row_bytes *= unit;
  c.source_step = c.is_packed ? c.row_bytes : c.rows * c.source_row;
  c.target_step = c.is_packed ? c.row_bytes : c.rows * c.target_row;
  c.end = f / unit;
  c.from = {c.end, from.block / unit, from.gate_first};
  c.to = {c.end, to.block / unit, to.gate_first};
  return m;
}

// A task is a part of a matrix's columns, or several matrices.
Status run(const Context& context, const ConvertGluArgs& args) {
  if (TensorView(args.source).num_elements() == 0) return {};
  constexpr int64_t kTaskBytes = 256 << 10;  // about
  const Matrices m = describe(args);
  const GluColumns& all = m.columns;
  const int64_t column_bytes = 2 * all.rows * all.row_bytes;
  const int64_t per_task = std::clamp<int64_t>(kTaskBytes / column_bytes, 1, all.end);
  const int64_t parts = ceil_div(all.end, per_task);
  const int64_t matrices = std::max<int64_t>(1, kTaskBytes / (all.end * column_bytes));
  const int64_t tasks = ceil_div(m.count, matrices) * parts;
  context.state().pool->parallel_for(tasks, [&](int64_t task, int) {
    GluColumns c = all;
    c.first = task % parts * per_task;
    c.end = std::min(all.end, c.first + per_task);
    const int64_t begin = task / parts * matrices;
    for (int64_t i = begin; i < std::min(m.count, begin + matrices); ++i) {
      c.source = all.source + i * m.source_bytes;
      c.target = all.target + i * m.target_bytes;
      HWY_DYNAMIC_DISPATCH(move_columns)(c);
    }
    if (c.bypasses_cache) hwy::FlushStream();
  });
  return {};
}

std::string policy(const DeviceState& state, const ConvertGluArgs& args) {
  const Matrices m = describe(args);
  return concat(m.columns.are_units ? "units of " : "runs of ", m.run_bytes, " bytes",
                m.columns.bypasses_cache ? " past the cache, " : ", ", state.simd, ", ",
                state.num_threads, " threads");
}

}  // namespace

const Implementation<ConvertGluArgs> kConvertGlu = {
    "cpu", Device::kCpu, supports_everything, no_workspace, policy, run,
};

}  // namespace moire::cpu
#endif
