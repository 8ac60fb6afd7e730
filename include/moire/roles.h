// What a call does with the memory that a field of its struct names, and where that memory is: the
// words of moire/fields.h.
#pragma once

#include <moire/tensor.h>

#include <cstdint>
#include <limits>

namespace moire {

enum class Role : uint8_t {
  kUnused,  // this call does not look at it, whatever it is
  kIn,
  kOut,
  kInOut,    // an output that the call reads first, to add to it
  kScratch,  // a workspace: read and written, nothing kept
};

constexpr bool is_read(Role role) { return role == Role::kIn || role == Role::kInOut; }
constexpr bool is_written(Role role) { return role >= Role::kOut; }

// The bytes from a view's first element to its last: none of a view that is wrong, and as many as
// there can be where they are too many for 63 bits.
inline int64_t span_bytes(const TensorView& t) {
  if (t.rank < 1 || t.rank > 3 || t.data == nullptr || t.columns() <= 0) return 0;
  int64_t rows = 1, bytes = 0;
  bool overflows = false;
  for (int32_t i = 0; i + 1 < t.rank; ++i) {
    if (t.shape[i] <= 0) return 0;
    overflows = overflows || __builtin_mul_overflow(rows, t.shape[i], &rows);
  }
  overflows = overflows || __builtin_mul_overflow(rows - 1, t.stride(), &bytes) ||
              __builtin_add_overflow(bytes, t.columns(), &bytes) ||
              __builtin_mul_overflow(bytes, dtype_size(t.type()), &bytes);
  return overflows ? std::numeric_limits<int64_t>::max() : bytes;
}

// The memory of a weight: f(g, data, bytes) of each matrix of a list, g = -1 of packed ones; of
// none that has no elements.
void for_each_matrix(const moire_weight& w, auto&& f) {
  const TensorView t(w.tensor);
  if (w.list == nullptr) return f(int64_t{-1}, t.data, span_bytes(t));
  const int64_t bytes = t.shape[1] * t.shape[2] * dtype_size(t.type());
  for (int64_t g = 0; bytes > 0 && g < t.shape[0]; ++g) f(g, const_cast<void*>(w.list[g]), bytes);
}

// For visitors that have no use for values or, where they say `using MemoryVisitor::field`, for
// memory that is no operand.
struct MemoryVisitor {
  void value(const char*, const auto&, int = 0) {}
  void field(const char*, const uint8_t*, Role, int64_t) {}
  void field(const char*, const moire_groups&) {}
  void field(const char*, const moire_workspace&) {}
};

}  // namespace moire
