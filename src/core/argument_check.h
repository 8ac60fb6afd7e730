// ArgumentCheck: the one way ops validate. The first error wins; every message says the call, what
// was found, what was needed.
#pragma once

#include <moire/context.h>
#include <moire/groups.h>
#include <moire/tensor.h>

#include <initializer_list>
#include <span>
#include <string>
#include <string_view>

#include "core/format.h"
#include "core/glu_layout.h"
#include "core/resolved_groups.h"
#include "core/sizes.h"

namespace moire {

// A named dimension: {"k", 64} reads as "k = 64" in messages.
struct NamedSize {
  std::string_view name;
  int64_t size;
};

// Parts of messages: "fp32, bf16 or fp16", "[k, n] = [64, 32]".
std::string to_text(std::span<const DType> dtypes);
std::string to_text(std::span<const NamedSize> shape);

inline constexpr DType kFloatTypes[] = {DType::kFP32, DType::kBF16, DType::kFP16};
inline constexpr DType kFP32Only[] = {DType::kFP32};
inline constexpr DType kBF16Only[] = {DType::kBF16};
inline constexpr DType kIndexTypes[] = {DType::kInt32, DType::kInt64};
inline constexpr DType kInt64Only[] = {DType::kInt64};
inline constexpr DType kBytesOnly[] = {DType::kUint8};

// Of z, and of FC1: gate and up, or gates alone.
inline NamedSize z_columns(const moire_glu_layout& layout, int64_t f) {
  return is_gated(layout) ? NamedSize{"2F", product(2, f)} : NamedSize{"F", f};
}

// The sizes that groups give to ragged tensors, and to what each group has one of.
struct GroupSizes {
  NamedSize capacity, num_groups;
};
inline GroupSizes sizes_of(const moire_groups& groups) {
  return {{"capacity", groups.capacity}, {"G", groups.num_groups}};
}

// A tensor as messages call it.
struct NamedTensor {
  std::string_view name;
  TensorView tensor;
};

// "[4, 32]", of a rank that there is.
std::string shape_text(const TensorView& tensor);

// That a call's scratch has a size at all (core/sizes.h), and gives it to an address that is there.
Status check_workspace_size(std::string_view op, size_t bytes);
Status give_workspace_size(std::string_view op, size_t needed, size_t* bytes);

class ArgumentCheck {
 public:
  // Sizing a workspace looks at shapes only; pointers are looked at when running.
  enum class Purpose { kRun, kSizeWorkspace };

  // Values of offsets and indices are read on a CPU context that really runs: an explaining one may
  // be given outputs of steps that did not run, and a device's own kernels check theirs.
  explicit ArgumentCheck(std::string_view op) : op_(op) {}
  ArgumentCheck(std::string_view op, const Context& context, Purpose purpose)
      : op_(op),
        context_(&context),
        purpose_(purpose),
        reads_values_(purpose == Purpose::kRun && context.device() == Device::kCpu &&
                      !context.is_explaining()) {}

  bool ok() const { return status_.ok(); }
  // Whether offsets and indices may be read now: see above, and what was checked so far is sound.
  bool reads_values() const { return ok() && reads_values_; }
  // Rows before the tail; 0 where they may not be read.
  int64_t rows_in_use(const Groups& g) const { return reads_values() ? moire::rows_in_use(g) : 0; }
  Status status() const { return status_; }
  const Context& context() const { return *context_; }  // where one was given

  // Records "op: parts..." with kInvalidArgument unless `condition` holds.
  template <class... Parts>
  bool require(bool condition, const Parts&... parts) {
    if (!condition && ok()) fail(Code::kInvalidArgument, concat(parts...));
    return ok();
  }
  // Present, of one of these dtypes, of exactly this shape; a sound row stride; a non-null, aligned
  // pointer unless it is empty.
  bool tensor(std::string_view name, const TensorView& t, std::span<const DType> dtypes,
              std::initializer_list<NamedSize> shape);
  // The same, but absent is fine.
  bool optional_tensor(std::string_view name, const TensorView& t, std::span<const DType> dtypes,
                       std::initializer_list<NamedSize> shape) {
    return t.is_present() ? tensor(name, t, dtypes, shape) : ok();
  }
  // Present, of this rank and one of these dtypes, sizes not negative; pointer as above.
  bool ranked(std::string_view name, const TensorView& t, std::span<const DType> dtypes, int rank);
  // Packed or listed weights [num_groups, out, in] (or [num_groups, in, out], as the layout says).
  bool weight(std::string_view name, const Weight& w, std::span<const DType> dtypes,
              NamedSize num_groups, NamedSize out, NamedSize in);
  // Sizes are sound and, when running on a CPU, so is every offset.
  void groups(const Groups& g);
  // A ragged operand: [capacity, columns] or, where row_idx is present, any number of source rows
  // [T, columns] and row_idx [capacity] with each used entry in 0 ... T - 1.
  bool ragged(std::string_view name, const TensorView& t, std::string_view row_idx_name,
              const TensorView& row_idx, const Groups& groups, NamedSize columns,
              std::span<const DType> dtypes = kFloatTypes);
  // The activation's kind and parameters, and a layout whose block divides F, or is ungated.
  bool gated(const moire_activation& activation, const moire_glu_layout& layout, int64_t f);
  bool same_dtype(std::string_view a_name, const TensorView& a, std::string_view b_name,
                  const TensorView& b);
  // `value` is one of 0 ... count - 1.
  bool enumerator(std::string_view name, int32_t value, int32_t count);
  // Which groups' gradients are accumulated: null, or 0 or 1 for each; read when running on a CPU.
  void betas(std::string_view name, const uint8_t* per_group, int64_t num_groups);
  // Each of the first `count` indices, in row-major order, is in [lowest, limit); runs when running
  // on a CPU. `lowest` = -1 admits "dropped".
  bool indices(std::string_view name, const TensorView& t, int64_t count, int64_t lowest,
               int64_t limit);
  bool workspace(const Workspace& workspace, size_t needed);

 private:
  void fail(Code code, const std::string& message);
  bool shape(std::string_view name, const TensorView& t, std::span<const DType> dtypes,
             std::span<const NamedSize> wanted);
  bool layout_of(std::string_view name, const TensorView& t, std::span<const DType> dtypes,
                 bool may_be_null);

  std::string_view op_;
  const Context* context_ = nullptr;
  Purpose purpose_ = Purpose::kSizeWorkspace;
  bool reads_values_ = false;
  Status status_;
};

}  // namespace moire
