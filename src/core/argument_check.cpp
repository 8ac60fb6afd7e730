#include "core/argument_check.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/glu_layout.h"
#include "core/sizes.h"

namespace moire {
namespace {

// Parts of messages.
struct AnyOf {
  std::span<const DType> dtypes;
};
std::string to_text(const AnyOf& any) {
  const std::span<const DType> dtypes = any.dtypes;
  std::string out;
  for (size_t i = 0; i < dtypes.size(); ++i) {
    if (i != 0) out += i + 1 == dtypes.size() ? " or " : ", ";
    out += dtype_name(dtypes[i]);
  }
  return out;
}

struct Sizes {
  std::span<const NamedSize> shape;
};
std::string to_text(const Sizes& expected) {
  const std::span<const NamedSize> shape = expected.shape;
  std::string names = "[", sizes = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    names += concat(i == 0 ? "" : ", ", shape[i].name);
    sizes += concat(i == 0 ? "" : ", ", shape[i].size);
  }
  return concat(names, "] = ", sizes, "]");
}

// An index outside its range, and where it is.
struct Misfit {
  int64_t row, column, value;
};

template <class Index>
std::optional<Misfit> first_outside(const TensorView& t, int64_t count, int64_t lowest,
                                    int64_t limit) {
  constexpr int64_t kBlock = 256;  // looked at without an early exit, so that it is vectorised
  const int64_t columns = t.columns();
  for (int64_t row = 0; row * columns < count; ++row) {
    const Index* values = static_cast<const Index*>(t.data) + row * t.stride();
    const int64_t n = std::min(columns, count - row * columns);
    for (int64_t begin = 0; begin < n; begin += kBlock) {
      const int64_t end = std::min(n, begin + kBlock);
      bool outside = false;
      for (int64_t i = begin; i < end; ++i) outside |= values[i] < lowest || values[i] >= limit;
      for (int64_t i = begin; outside && i < end; ++i) {
        if (values[i] < lowest || values[i] >= limit) return Misfit{row, i, values[i]};
      }
    }
  }
  return std::nullopt;
}

}  // namespace

Status check_workspace_size(std::string_view op, size_t bytes) {
  if (bytes < static_cast<size_t>(kTooLarge)) return {};
  return {Code::kInvalidArgument,
          concat(op, ": the size in bytes of the workspace that it needs exceeds 63 bits")};
}

void ArgumentCheck::fail(Code code, const std::string& message) {
  status_ = Status(code, concat(op_, ": ", message));
}

bool ArgumentCheck::layout_of(std::string_view name, const TensorView& t,
                              std::span<const DType> dtypes, bool may_be_null) {
  bool known = false;
  for (const DType dtype : dtypes) known = known || dtype == t.type();
  if (!require(known, name, " is ", t, ", needs ", AnyOf{dtypes})) return false;
  for (int32_t i = 0; i < t.rank; ++i) {
    if (!require(t.shape[i] >= 0, name, " is ", t, ": sizes must not be negative")) {
      return false;
    }
  }
  if (!require(t.row_stride == 0 || t.row_stride >= t.columns(), name, " is ", t, ": rows of ",
               t.columns(), " elements overlap")) {
    return false;
  }
  // Of a tensor without elements too, so that no product of some of its sizes overflows.
  int64_t bytes = product(std::max<int64_t>(t.stride(), 1), dtype_size(t.type()));
  for (int32_t i = 0; i + 1 < t.rank; ++i) {
    bytes = product(bytes, std::max<int64_t>(t.shape[i], 1));
  }
  if (!require(bytes <= kMostBytes, name, " is ", t, ": its size in bytes exceeds 2^56")) {
    return false;
  }
  if (purpose_ == Purpose::kSizeWorkspace || may_be_null) return ok();
  if (!require(t.data != nullptr || t.num_elements() == 0, name, " is ", t,
               " but its data pointer is null")) {
    return false;
  }
  return require(
      reinterpret_cast<uintptr_t>(t.data) % static_cast<uintptr_t>(dtype_size(t.type())) == 0, name,
      " is ", t, " but its data pointer is not aligned to its ", dtype_size(t.type()),
      "-byte elements");
}

bool ArgumentCheck::ranked(std::string_view name, const TensorView& t,
                           std::span<const DType> dtypes, int rank) {
  if (!require(t.is_present(), name, " is absent, needs ", AnyOf{dtypes}, " of rank ", rank)) {
    return false;
  }
  if (!require(t.rank == rank, name, " has rank ", t.rank, ", needs rank ", rank)) return false;
  return layout_of(name, t, dtypes, false);
}

bool ArgumentCheck::tensor(std::string_view name, const TensorView& t,
                           std::span<const DType> dtypes, std::initializer_list<NamedSize> shape) {
  const std::span<const NamedSize> wanted(shape.begin(), shape.size());
  if (!require(t.is_present(), name, " is absent, needs ", AnyOf{dtypes}, " ", Sizes{wanted})) {
    return false;
  }
  bool equal = t.rank == static_cast<int32_t>(wanted.size());
  for (size_t i = 0; equal && i < wanted.size(); ++i) equal = t.shape[i] == wanted[i].size;
  if (!require(equal, name, " is ", t, ", needs ", Sizes{wanted})) return false;
  return layout_of(name, t, dtypes, false);
}

bool ArgumentCheck::weight(std::string_view name, const Weight& w, std::span<const DType> dtypes,
                           NamedSize num_groups, NamedSize out, NamedSize in) {
  if (!require(w.layout == MOIRE_OUT_IN || w.layout == MOIRE_IN_OUT, name, ".layout is ", w.layout,
               ", must be 0 to 1")) {
    return false;
  }
  const TensorView t = w.tensor;
  const NamedSize wanted[] = {num_groups, w.layout == MOIRE_OUT_IN ? out : in,
                              w.layout == MOIRE_OUT_IN ? in : out};
  if (!require(t.is_present(), name, " is absent, needs ", AnyOf{dtypes}, " ", Sizes{wanted})) {
    return false;
  }
  const bool equal = t.rank == 3 && t.shape[0] == wanted[0].size && t.shape[1] == wanted[1].size &&
                     t.shape[2] == wanted[2].size;
  if (!require(equal, name, " is ", t, ", needs ", Sizes{wanted})) return false;
  const bool listed = w.list != nullptr;
  if (!require(reinterpret_cast<uintptr_t>(w.list) % alignof(void*) == 0, name,
               ".list is not aligned to its ", sizeof(void*), "-byte pointers")) {
    return false;
  }
  if (!require(!listed || t.data == nullptr, name, " has both packed data and a list"))
    return false;
  if (!layout_of(name, t, dtypes, listed)) return false;
  if (!listed || purpose_ == Purpose::kSizeWorkspace || t.num_elements() == 0) return ok();
  for (int64_t g = 0; g < t.shape[0]; ++g) {
    const auto address = reinterpret_cast<uintptr_t>(w.list[g]);
    if (!require(address != 0, name, "[", g, "] of the list is null")) return false;
    if (!require(address % static_cast<uintptr_t>(dtype_size(t.type())) == 0, name, "[", g,
                 "] of the list is not aligned to its ", dtype_size(t.type()), "-byte elements")) {
      return false;
    }
  }
  return ok();
}

bool ArgumentCheck::groups(const Groups& g) {
  require(g.num_groups >= 0, "groups.num_groups is ", g.num_groups, ", must not be negative");
  require(g.capacity >= 0, "groups.capacity is ", g.capacity, ", must not be negative");
  require(g.num_groups <= kMostBytes, "groups.num_groups is ", g.num_groups,
          ", must be at most 2^56");
  require(g.capacity <= kMostBytes, "groups.capacity is ", g.capacity, ", must be at most 2^56");
  if (!ok() || purpose_ == Purpose::kSizeWorkspace || g.num_groups == 0) return ok();
  if (!require(g.offsets != nullptr, "groups.offsets is null but there are ", g.num_groups,
               " groups")) {
    return false;
  }
  if (!require(reinterpret_cast<uintptr_t>(g.offsets) % alignof(int64_t) == 0,
               "groups.offsets is not aligned to its 8-byte elements")) {
    return false;
  }
  if (!reads_values_) return true;
  if (!require(g.offsets[0] == 0, "groups.offsets[0] is ", g.offsets[0], ", must be 0"))
    return false;
  for (int64_t i = 0; i < g.num_groups; ++i) {
    if (g.offsets[i + 1] < g.offsets[i]) {
      return require(false, "group ", i, " has offsets ", g.offsets[i], " to ", g.offsets[i + 1],
                     ", must not decrease");
    }
    if (g.offsets[i + 1] > g.capacity) {
      return require(false, "group ", i, " ends at row ", g.offsets[i + 1], ", past the capacity ",
                     g.capacity);
    }
  }
  return true;
}

bool ArgumentCheck::ragged(std::string_view name, const TensorView& t,
                           std::string_view row_idx_name, const TensorView& row_idx,
                           const Groups& groups, NamedSize columns, std::span<const DType> dtypes) {
  if (!row_idx.is_present()) {
    return tensor(name, t, dtypes, {{"capacity", groups.capacity}, columns});
  }
  if (!ranked(name, t, dtypes, 2)) return false;
  if (!require(t.shape[1] == columns.size, name, " is ", t, ", needs [T, ", columns.name, "] with ",
               columns.name, " = ", columns.size)) {
    return false;
  }
  if (!tensor(row_idx_name, row_idx, kIndexTypes, {{"capacity", groups.capacity}})) return false;
  const int64_t gathered = product(groups.capacity, columns.size, dtype_size(t.type()));
  if (!require(gathered <= kMostBytes, name, " is ", t, ", gathered to ", groups.capacity,
               " rows: its size in bytes exceeds 2^56")) {
    return false;
  }
  if (!reads_values_ || groups.num_groups == 0) return ok();
  return indices(row_idx_name, row_idx, groups.offsets[groups.num_groups], 0, t.shape[0]);
}

bool ArgumentCheck::gated(const moire_activation& activation, const moire_glu_layout& layout,
                          int64_t f) {
  enumerator("activation.kind", activation.kind, 3);
  enumerator("layout.order", layout.order, 2);
  if (activation.kind == MOIRE_CLAMPED_SWIGLU) {
    require(activation.limit > 0, "activation.limit is ", activation.limit,
            ", must be positive (GPT-OSS uses 7)");
    require(activation.alpha > 0, "activation.alpha is ", activation.alpha,
            ", must be positive (GPT-OSS uses 1.702)");
    require(std::isfinite(activation.offset), "activation.offset is ", activation.offset,
            ", must be finite");
  }
  return require(is_valid_glu_layout(layout, f), "layout.block is ", layout.block,
                 ", must divide F = ", f, " (0: F)");
}

bool ArgumentCheck::same_dtype(std::string_view a_name, const TensorView& a,
                               std::string_view b_name, const TensorView& b) {
  if (!a.is_present() || !b.is_present()) return ok();
  return require(a.dtype == b.dtype, a_name, " is ", a, " but ", b_name, " is ", b,
                 ": the dtypes must be equal");
}

bool ArgumentCheck::enumerator(std::string_view name, int32_t value, int32_t count) {
  return require(value >= 0 && value < count, name, " is ", value, ", must be 0 to ", count - 1);
}

bool ArgumentCheck::beta(std::string_view name, int32_t beta, const uint8_t* per_group,
                         const Groups& groups) {
  enumerator(name, beta, 2);
  if (per_group == nullptr || !ok() || !reads_values()) return ok();
  for (int64_t g = 0; ok() && g < groups.num_groups; ++g) {
    require(per_group[g] <= 1, name, "_per_group[", g, "] is ", per_group[g], ", must be 0 or 1");
  }
  return ok();
}

bool ArgumentCheck::indices(std::string_view name, const TensorView& t, int64_t count,
                            int64_t lowest, int64_t limit) {
  if (!ok() || !reads_values_ || !t.is_present()) return ok();
  const std::optional<Misfit> misfit = t.type() == DType::kInt32
                                           ? first_outside<int32_t>(t, count, lowest, limit)
                                           : first_outside<int64_t>(t, count, lowest, limit);
  if (!misfit.has_value()) return ok();
  const std::string row = t.rank == 1 ? "" : concat(misfit->row, ", ");
  return require(false, name, "[", row, misfit->column, "] is ", misfit->value, ", must be ",
                 lowest, " to ", limit - 1);
}

bool ArgumentCheck::workspace(const Workspace& given, size_t needed) {
  if (!ok() || needed == 0) return ok();
  if (given.data == nullptr || given.bytes < needed) {
    fail(Code::kOutOfMemory, concat("the workspace has ", given.data == nullptr ? 0 : given.bytes,
                                    " bytes, needs ", needed));
    return false;
  }
  return require(reinterpret_cast<uintptr_t>(given.data) % 256 == 0,
                 "the workspace is not 256-byte aligned");
}

}  // namespace moire
