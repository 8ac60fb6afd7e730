#include "core/argument_check.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>

#include "core/status_macros.h"

namespace moire {

std::string to_text(std::span<const DType> dtypes) {
  std::string out;
  for (size_t i = 0; i < dtypes.size(); ++i) {
    if (i != 0) out += i + 1 == dtypes.size() ? " or " : ", ";
    out += dtype_name(dtypes[i]);
  }
  return out;
}
std::string to_text(std::span<const NamedSize> shape) {
  std::string names = "[", sizes = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    names += concat(i == 0 ? "" : ", ", shape[i].name);
    sizes += concat(i == 0 ? "" : ", ", shape[i].size);
  }
  return concat(names, "] = ", sizes, "]");
}

namespace {

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

bool is_aligned(const void* data, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(bytes) == 0;
}

}  // namespace

Status check_workspace_size(std::string_view op, size_t bytes) {
  if (bytes < static_cast<size_t>(kTooLarge)) return {};
  return invalid(op, "the size in bytes of the workspace that it needs exceeds 63 bits");
}

Status give_workspace_size(std::string_view op, size_t needed, size_t* bytes) {
  if (bytes == nullptr) return invalid(concat(op, "_workspace"), "bytes is null, needs an address");
  MOIRE_RETURN_IF_ERROR(check_workspace_size(op, needed));
  *bytes = needed;
  return {};
}

void ArgumentCheck::fail(Code code, const std::string& message) {
  status_ = Status(code, concat(op_, ": ", message));
}

bool ArgumentCheck::layout_of(std::string_view name, const TensorView& t,
                              std::span<const DType> dtypes, bool may_be_null) {
  const bool is_known = std::find(dtypes.begin(), dtypes.end(), t.type()) != dtypes.end();
  if (!require(is_known, name, " is ", t, ", needs ", dtypes)) return false;
  for (int32_t i = 0; i < t.rank; ++i) {
    require(t.shape[i] >= 0, name, " is ", t, ": sizes must not be negative");
  }
  require(t.row_stride == 0 || t.row_stride >= t.columns(), name, " is ", t, ": rows of ",
          t.columns(), " elements overlap");
  // Of a tensor without elements too, so that no product of some of its sizes overflows.
  const int64_t element = dtype_size(t.type());
  int64_t bytes = product(std::max<int64_t>(t.stride(), 1), element);
  for (int32_t i = 0; i + 1 < t.rank; ++i) {
    bytes = product(bytes, std::max<int64_t>(t.shape[i], 1));
  }
  require(bytes <= kMostBytes, name, " is ", t, ": its size in bytes exceeds 2^56");
  if (purpose_ == Purpose::kSizeWorkspace || may_be_null) return ok();
  require(t.data != nullptr || t.num_elements() == 0, name, " is ", t,
          " but its data pointer is null");
  return require(is_aligned(t.data, element), name, " is ", t,
                 " but its data pointer is not aligned to its ", element, "-byte elements");
}

bool ArgumentCheck::ranked(std::string_view name, const TensorView& t,
                           std::span<const DType> dtypes, int rank) {
  require(t.is_present(), name, " is absent, needs ", dtypes, " of rank ", rank);
  return require(t.rank == rank, name, " has rank ", t.rank, ", needs rank ", rank) &&
         layout_of(name, t, dtypes, false);
}

bool ArgumentCheck::shape(std::string_view name, const TensorView& t, std::span<const DType> dtypes,
                          std::span<const NamedSize> wanted) {
  require(t.is_present(), name, " is absent, needs ", dtypes, " ", wanted);
  const auto equals = [](const NamedSize& size, int64_t found) { return size.size == found; };
  const bool equal = t.rank == static_cast<int32_t>(wanted.size()) &&
                     std::equal(wanted.begin(), wanted.end(), t.shape, equals);
  return require(equal, name, " is ", t, ", needs ", wanted);
}

bool ArgumentCheck::tensor(std::string_view name, const TensorView& t,
                           std::span<const DType> dtypes, std::initializer_list<NamedSize> wanted) {
  return shape(name, t, dtypes, {wanted.begin(), wanted.size()}) &&
         layout_of(name, t, dtypes, false);
}

bool ArgumentCheck::weight(std::string_view name, const Weight& w, std::span<const DType> dtypes,
                           NamedSize num_groups, NamedSize out, NamedSize in) {
  const bool out_in = w.layout == MOIRE_OUT_IN, listed = w.list != nullptr;
  const TensorView t = w.tensor;
  const NamedSize wanted[] = {num_groups, out_in ? out : in, out_in ? in : out};
  require(out_in || w.layout == MOIRE_IN_OUT, name, ".layout is ", w.layout, ", must be 0 to 1");
  shape(name, t, dtypes, wanted);
  require(is_aligned(w.list, alignof(void*)), name, ".list is not aligned to its ", sizeof(void*),
          "-byte pointers");
  require(!listed || t.data == nullptr, name, " has both packed data and a list");
  require(!listed || t.is_contiguous(), name, " is a list of matrices with row stride ", t.stride(),
          ", needs contiguous ones");
  if (!ok() || !layout_of(name, t, dtypes, listed)) return false;
  if (!listed || purpose_ == Purpose::kSizeWorkspace || t.num_elements() == 0) return true;
  const int64_t element = dtype_size(t.type());
  for (int64_t g = 0; g < t.shape[0]; ++g) {
    require(w.list[g] != nullptr, name, "[", g, "] of the list is null");
    require(is_aligned(w.list[g], element), name, "[", g, "] of the list is not aligned to its ",
            element, "-byte elements");
  }
  return ok();
}

void ArgumentCheck::groups(const Groups& g) {
  require(g.num_groups >= 0, "groups.num_groups is ", g.num_groups, ", must not be negative");
  require(g.capacity >= 0, "groups.capacity is ", g.capacity, ", must not be negative");
  require(g.num_groups <= kMostGroups, "groups.num_groups is ", g.num_groups,
          ", must be at most 2^30");
  require(g.capacity <= kMostBytes, "groups.capacity is ", g.capacity, ", must be at most 2^56");
  if (!ok() || purpose_ == Purpose::kSizeWorkspace || g.num_groups == 0) return;
  require(g.offsets != nullptr, "groups.offsets is null but there are ", g.num_groups, " groups");
  require(is_aligned(g.offsets, alignof(int64_t)),
          "groups.offsets is not aligned to its 8-byte elements");
  if (!reads_values()) return;
  require(g.offsets[0] == 0, "groups.offsets[0] is ", g.offsets[0], ", must be 0");
  for (int64_t i = 0; i < g.num_groups; ++i) {
    const int64_t begin = g.offsets[i], end = g.offsets[i + 1];
    require(begin <= end, "group ", i, " has offsets ", begin, " to ", end, ", must not decrease");
    require(end <= g.capacity, "group ", i, " ends at row ", end, ", past the capacity ",
            g.capacity);
  }
}

bool ArgumentCheck::ragged(std::string_view name, const TensorView& t,
                           std::string_view row_idx_name, const TensorView& row_idx,
                           const Groups& groups, NamedSize columns, std::span<const DType> dtypes) {
  if (!row_idx.is_present()) {
    return tensor(name, t, dtypes, {{"capacity", groups.capacity}, columns});
  }
  if (!ranked(name, t, dtypes, 2)) return false;
  require(t.shape[1] == columns.size, name, " is ", t, ", needs [T, ", columns.name, "] with ",
          columns.name, " = ", columns.size);
  if (!tensor(row_idx_name, row_idx, kIndexTypes, {{"capacity", groups.capacity}})) return false;
  const int64_t gathered = product(groups.capacity, columns.size, dtype_size(t.type()));
  require(gathered <= kMostBytes, name, " is ", t, ", gathered to ", groups.capacity,
          " rows: its size in bytes exceeds 2^56");
  return indices(row_idx_name, row_idx, rows_in_use(groups), 0, t.shape[0]);
}

bool ArgumentCheck::gated(const moire_activation& activation, const moire_glu_layout& layout,
                          int64_t f) {
  enumerator("activation.kind", activation.kind, 5);
  enumerator("layout.order", layout.order, 3);
  if (activation.kind == MOIRE_CLAMPED_SWIGLU) {
    require(activation.limit > 0, "activation.limit is ", activation.limit,
            ", must be positive (GPT-OSS uses 7)");
    require(activation.alpha > 0 && std::isfinite(activation.alpha), "activation.alpha is ",
            activation.alpha, ", must be positive and finite (GPT-OSS uses 1.702)");
    require(std::isfinite(activation.offset), "activation.offset is ", activation.offset,
            ", must be finite");
  }
  require(is_gated(layout) || layout.block == 0, "layout.block is ", layout.block,
          ", must be 0 where layout.order is 2 (ungated)");
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

void ArgumentCheck::betas(std::string_view name, const uint8_t* per_group, int64_t num_groups) {
  if (per_group == nullptr || !reads_values()) return;
  for (int64_t g = 0; g < num_groups; ++g) {
    require(per_group[g] <= 1, name, "[", g, "] is ", per_group[g], ", must be 0 or 1");
  }
}

bool ArgumentCheck::indices(std::string_view name, const TensorView& t, int64_t count,
                            int64_t lowest, int64_t limit) {
  if (!reads_values() || !t.is_present()) return ok();
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
  return require(is_aligned(given.data, 256), "the workspace is not 256-byte aligned");
}

}  // namespace moire
