// Element types, tensor views and the argument structs' common base.
#pragma once

#include <moire/status.h>

#include <cstdint>
#include <initializer_list>
#include <string>

namespace moire {

enum class DType : int32_t {
  kNone = MOIRE_NONE,
  kFP32 = MOIRE_FP32,
  kBF16 = MOIRE_BF16,
  kFP16 = MOIRE_FP16,
  kE4M3 = MOIRE_E4M3,
  kE5M2 = MOIRE_E5M2,
  kE8M0 = MOIRE_E8M0,
  kUint8 = MOIRE_UINT8,
  kInt32 = MOIRE_INT32,
  kInt64 = MOIRE_INT64,
  kFP64 = MOIRE_FP64,
};

// Bytes of one element; 0 for kNone and for values that are no dtype.
MOIRE_API int64_t dtype_size(DType dtype);
// "bf16", "int64", ...; "dtype 42" for values that are no dtype.
MOIRE_API std::string dtype_name(DType dtype);

// A view of memory that somebody else owns: rank 1 to 3, last dimension contiguous, rows row_stride
// apart. A default-constructed view is absent, which is how optional operands are left out.
struct TensorView : moire_tensor {
  TensorView() : moire_tensor{} {}
  TensorView(const moire_tensor& t) : moire_tensor(t) {}
  TensorView(void* data_, DType dtype_, std::initializer_list<int64_t> shape_,
             int64_t row_stride_ = 0)
      : moire_tensor{data_, static_cast<int32_t>(dtype_), 0, {}, row_stride_} {
    for (const int64_t size : shape_) {
      if (rank == 3) break;
      shape[rank++] = size;
    }
  }

  bool is_present() const { return rank != 0; }
  DType type() const { return static_cast<DType>(dtype); }
  int64_t dim(int axis) const { return shape[axis < 0 ? rank + axis : axis]; }
  // 0 for a rank that there is not, so that a struct from C can be described before it is refused.
  int64_t columns() const { return rank < 1 || rank > 3 ? 0 : shape[rank - 1]; }
  // Product of all dimensions but the last; of sizes that no op takes, modulo 2^64.
  int64_t num_rows() const {
    uint64_t n = rank == 0 ? 0 : 1;
    for (int32_t i = 0; i + 1 < rank && i < 3; ++i) n *= static_cast<uint64_t>(shape[i]);
    return static_cast<int64_t>(n);
  }
  int64_t num_elements() const {
    return static_cast<int64_t>(static_cast<uint64_t>(num_rows()) *
                                static_cast<uint64_t>(columns()));
  }
  // Of its elements, without what lies between rows.
  int64_t num_bytes() const { return num_elements() * dtype_size(type()); }
  // Elements from one row to the next.
  int64_t stride() const { return row_stride != 0 ? row_stride : columns(); }
  bool is_contiguous() const { return num_rows() <= 1 || stride() == columns(); }
  // Entries, rows or matrices [first, first + count), by the first dimension.
  MOIRE_API TensorView slice(int64_t first, int64_t count) const;
};
static_assert(sizeof(TensorView) == sizeof(moire_tensor));

// "bf16 [4, 32]", with the row stride where it is not the last dimension; "absent".
MOIRE_API std::string to_string(const TensorView& tensor);

using Workspace = moire_workspace;

// An argument struct of moire.h, zeroed, with struct_size set. It adds nothing, so that what the
// user fills is what the backend gets: `GroupedGemmArgs args; args.a = x; ...`.
template <class C>
struct Args : C {
  Args() : C{} { this->struct_size = sizeof(C); }
};

// The weights of G linear layers: packed, or a host list of G separately allocated matrices.
struct Weight : moire_weight {
  Weight() : moire_weight{} {}
  Weight(const moire_weight& w) : moire_weight(w) {}
  explicit Weight(const TensorView& packed, int32_t weight_layout = MOIRE_OUT_IN)
      : moire_weight{packed, nullptr, weight_layout} {}
  // `shape_only` has the dtype, the shape [G, ., .] and data = null.
  Weight(const TensorView& shape_only, const void* const* pointers,
         int32_t weight_layout = MOIRE_OUT_IN)
      : moire_weight{shape_only, pointers, weight_layout} {}

  bool is_present() const { return tensor.rank != 0; }
  int64_t out_features() const { return tensor.shape[layout == MOIRE_OUT_IN ? 1 : 2]; }
  int64_t in_features() const { return tensor.shape[layout == MOIRE_OUT_IN ? 2 : 1]; }
  // The matrix of one group, [shape[1], shape[2]].
  MOIRE_API TensorView matrix(int64_t group) const;
};
static_assert(sizeof(Weight) == sizeof(moire_weight));

// Whether an operand of a struct is there.
inline bool is_present(const moire_tensor& t) { return t.rank != 0; }
inline bool is_present(const moire_weight& w) { return w.tensor.rank != 0; }
inline bool is_present(const moire_quantized& q) { return q.data.rank != 0; }
inline bool is_present(const moire_prepared_weight& p) { return is_present(p.memory); }
// Whether a call does without groups, where it may.
inline bool is_absent(const moire_groups& g) {
  return g.offsets == nullptr && g.num_groups == 0 && g.capacity == 0;
}

}  // namespace moire
