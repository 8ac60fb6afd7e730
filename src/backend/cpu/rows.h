// Small tools of the ops that move rows: index types, row addresses, tasks, tails.
#pragma once

#include <moire/groups.h>
#include <moire/tensor.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "core/divide.h"
#include "core/resolved_groups.h"
#include "core/thread_pool.h"

namespace moire::cpu {

// Calls f.template operator()<int32_t>() or <int64_t>: `[&]<class Index>() { ... }`.
template <class F>
decltype(auto) with_index_type(DType dtype, F&& f) {
  if (dtype == DType::kInt32) return std::forward<F>(f).template operator()<int32_t>();
  return std::forward<F>(f).template operator()<int64_t>();
}

// Row `row` of a tensor of Ts, and of any tensor.
template <class T>
T* row_of(const TensorView& t, int64_t row) {
  return static_cast<T*>(t.data) + row * t.stride();
}
inline char* row_bytes_of(const TensorView& t, int64_t row) {
  return static_cast<char*>(t.data) + row * t.stride() * dtype_size(t.type());
}
inline int64_t bytes_per_row(const TensorView& t) { return t.columns() * dtype_size(t.type()); }

// Row i of a matrix that may be gathered.
inline int64_t source_row(const TensorView& row_idx, int64_t row) {
  if (!row_idx.is_present()) return row;
  return row_idx.type() == DType::kInt32 ? static_cast<const int32_t*>(row_idx.data)[row]
                                         : static_cast<const int64_t*>(row_idx.data)[row];
}

// The probability of a row; 1 where there are none.
inline float prob_of(const TensorView& probs, int64_t row) {
  return probs.is_present() ? static_cast<const float*>(probs.data)[row] : 1.0F;
}

// From this size of an output on, stores may bypass the cache.
inline constexpr int64_t kBypassBytes = 8 << 20;

// How many items of so many bytes make a task worth waking a thread for, and small enough to share.
inline int64_t items_per_task(int64_t bytes_per_item) {
  constexpr int64_t kBytesPerTask = 128 * 1024;
  return std::max<int64_t>(1, kBytesPerTask / std::max<int64_t>(1, bytes_per_item));
}

// Calls fn(begin, end) on consecutive ranges that cover [0, count).
template <class F>
void for_ranges(ThreadPool& pool, int64_t count, int64_t per_task, F&& fn) {
  pool.parallel_for(ceil_div(count, per_task), [&](int64_t task, int) {
    fn(task * per_task, std::min(count, (task + 1) * per_task));
  });
}

// Exact zeros in rows `first` and after, or in elements of a vector.
inline void zero_rows_from(ThreadPool& pool, const TensorView& t, int64_t first) {
  if (t.rank == 1) {
    const TensorView column(t.data, t.type(), {t.shape[0], 1});
    return zero_rows_from(pool, column, first);
  }
  const int64_t bytes = bytes_per_row(t);
  if (bytes == 0) return;
  for_ranges(pool, t.num_rows() - first, items_per_task(bytes), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      std::memset(row_bytes_of(t, first + i), 0, static_cast<size_t>(bytes));
    }
  });
}

}  // namespace moire::cpu
