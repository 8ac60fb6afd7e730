// Tensors for tests: poisoned with NaN, between guard rows, so that an element that an op forgot to
// write and a byte that it should not have written both show.
#pragma once

#include <moire/tensor.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "tests/support/random.h"

namespace moire::test {

// Every byte starts as 0xFF: NaN in each float type, -1 in each integer type. Copies are deep.
class TestTensor {
 public:
  TestTensor() = default;  // absent
  // `padding`: unused elements between one row and the next.
  TestTensor(DType dtype, std::initializer_list<int64_t> shape, int64_t padding = 0);

  operator TensorView() const { return view(); }
  operator moire_tensor() const { return view(); }
  TensorView view() const;

  // Normal values times `scale`, rounded to the dtype; of the first `rows` rows where given.
  TestTensor& randomize(Random& random, double scale = 1);
  TestTensor& randomize_rows(Random& random, int64_t rows, double scale = 1);
  TestTensor& fill(double value);
  // All 0xFF again.
  void poison();

  double get(int64_t row, int64_t column) const;
  void set(int64_t row, int64_t column, double value);
  template <class T>
  T* as() {
    return static_cast<T*>(view().data);
  }

  // Whether the guards and the padding still hold what they held at first.
  bool is_undamaged() const;

 private:
  static constexpr int64_t kGuardRows = 2;
  TensorView shape_;  // data is not set
  int64_t element_bytes_ = 0;
  std::vector<std::byte> memory_;
};

// An INT32 or INT64 tensor [values.size()].
TestTensor index_tensor(DType dtype, const std::vector<int64_t>& values);

// Scratch: 256-byte aligned, garbage inside, a guard behind.
class TestWorkspace {
 public:
  explicit TestWorkspace(size_t bytes);
  Workspace get() const { return {aligned_, bytes_}; }
  bool is_undamaged() const;

 private:
  size_t bytes_;
  std::vector<std::byte> memory_;
  std::byte* aligned_;
};

// Weights of G linear layers, packed or as a list of separate matrices, random or poisoned.
class TestWeight {
 public:
  TestWeight() = default;  // absent
  TestWeight(DType dtype, int64_t num_groups, int64_t out, int64_t in,
             int32_t layout = MOIRE_OUT_IN, bool listed = false);

  operator moire_weight() const { return view(); }
  moire_weight view() const;
  TestWeight& randomize(Random& random, double scale = 1);
  void poison();
  // Element [out, in] of one group, whatever the layout.
  double get(int64_t group, int64_t out, int64_t in) const;
  void set(int64_t group, int64_t out, int64_t in, double value);
  bool is_undamaged() const;

 private:
  TestTensor& tensor_of(int64_t group) {
    return tensors_[is_listed_ ? static_cast<size_t>(group) : 0];
  }
  int64_t row_of(int64_t group, int64_t row) const;
  moire_tensor shape_{};
  int32_t layout_ = MOIRE_OUT_IN;
  bool is_listed_ = false;
  std::vector<TestTensor> tensors_;  // one, or one per group
  mutable std::vector<const void*> list_;
};

}  // namespace moire::test
