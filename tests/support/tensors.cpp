#include "tests/support/tensors.h"

#include <algorithm>
#include <cstring>

#include "reference/tensor.h"

namespace moire::test {
namespace {

constexpr std::byte kPoison{0xFF};
constexpr size_t kWorkspaceAlignment = 256;

bool all_poison(const std::byte* begin, int64_t bytes) {
  return std::all_of(begin, begin + bytes, [](std::byte b) { return b == kPoison; });
}

}  // namespace

TestTensor::TestTensor(DType dtype, std::initializer_list<int64_t> shape, int64_t padding)
    : shape_(nullptr, dtype, shape), element_bytes_(dtype_size(dtype)) {
  shape_.row_stride = padding == 0 ? 0 : shape_.columns() + padding;
  const int64_t rows = shape_.num_rows() + 2 * kGuardRows;
  memory_.assign(static_cast<size_t>(rows * shape_.stride() * element_bytes_), kPoison);
}

TensorView TestTensor::view() const {
  TensorView v = shape_;
  if (v.is_present()) {
    v.data = const_cast<std::byte*>(memory_.data()) + kGuardRows * v.stride() * element_bytes_;
  }
  return v;
}

TestTensor& TestTensor::randomize(Random& random, double scale) {
  return randomize_rows(random, shape_.rank == 1 ? shape_.columns() : shape_.num_rows(), scale);
}

TestTensor& TestTensor::randomize_rows(Random& random, int64_t rows, double scale) {
  if (shape_.rank == 1) {  // a vector over rows
    for (int64_t i = 0; i < rows; ++i) set(0, i, random.normal() * scale);
    return *this;
  }
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < shape_.columns(); ++j) set(i, j, random.normal() * scale);
  }
  return *this;
}

TestTensor& TestTensor::fill(double value) {
  for (int64_t i = 0; i < shape_.num_rows(); ++i) {
    for (int64_t j = 0; j < shape_.columns(); ++j) set(i, j, value);
  }
  return *this;
}

void TestTensor::poison() { std::fill(memory_.begin(), memory_.end(), kPoison); }

double TestTensor::get(int64_t row, int64_t column) const {
  return reference::read_element(view(), row, column);
}

void TestTensor::set(int64_t row, int64_t column, double value) {
  reference::write_element(view(), row, column, value);
}

bool TestTensor::is_undamaged() const {
  const int64_t row_bytes = shape_.stride() * element_bytes_;
  const int64_t used_bytes = shape_.columns() * element_bytes_;
  const int64_t rows = shape_.num_rows();
  for (int64_t i = 0; i < rows + 2 * kGuardRows; ++i) {
    const bool is_guard = !shape_.is_present() || i < kGuardRows || i >= kGuardRows + rows;
    const int64_t begin = is_guard ? 0 : used_bytes;
    if (!all_poison(memory_.data() + i * row_bytes + begin, row_bytes - begin)) return false;
  }
  return true;
}

TestTensor index_tensor(DType dtype, const std::vector<int64_t>& values) {
  TestTensor t(dtype, {static_cast<int64_t>(values.size())});
  for (size_t i = 0; i < values.size(); ++i) {
    if (dtype == DType::kInt32) t.as<int32_t>()[i] = static_cast<int32_t>(values[i]);
    if (dtype == DType::kInt64) t.as<int64_t>()[i] = values[i];
  }
  return t;
}

TestWorkspace::TestWorkspace(size_t bytes)
    : bytes_(bytes), memory_(bytes + 3 * kWorkspaceAlignment, kPoison) {
  const auto address = reinterpret_cast<uintptr_t>(memory_.data());
  aligned_ = memory_.data() + (kWorkspaceAlignment - address % kWorkspaceAlignment);
}

bool TestWorkspace::is_undamaged() const {
  const auto before = aligned_ - memory_.data();
  const auto after = static_cast<int64_t>(memory_.size() - bytes_) - before;
  return all_poison(memory_.data(), before) && all_poison(aligned_ + bytes_, after);
}

TestWeight::TestWeight(DType dtype, int64_t num_groups, int64_t out, int64_t in, int32_t layout,
                       bool listed)
    : layout_(layout), is_listed_(listed) {
  const int64_t rows = layout == MOIRE_OUT_IN ? out : in;
  const int64_t columns = layout == MOIRE_OUT_IN ? in : out;
  shape_ = TensorView(nullptr, dtype, {num_groups, rows, columns});
  if (listed) {
    tensors_.assign(static_cast<size_t>(num_groups), TestTensor(dtype, {rows, columns}));
  } else {
    tensors_.assign(1, TestTensor(dtype, {num_groups, rows, columns}));
  }
}

moire_weight TestWeight::view() const {
  moire_weight w{shape_, nullptr, layout_};
  if (!is_present(shape_)) return w;
  if (!is_listed_) {
    w.tensor = tensors_[0];
    return w;
  }
  list_.clear();
  for (const TestTensor& t : tensors_) list_.push_back(t.view().data);
  list_.push_back(nullptr);  // so that the list of no groups is no null pointer
  w.list = list_.data();
  return w;
}

TestWeight& TestWeight::randomize(Random& random, double scale) {
  for (TestTensor& t : tensors_) t.randomize(random, scale);
  return *this;
}

void TestWeight::poison() {
  for (TestTensor& t : tensors_) t.poison();
}

int64_t TestWeight::row_of(int64_t group, int64_t row) const {
  return is_listed_ ? row : group * shape_.shape[1] + row;
}

double TestWeight::get(int64_t group, int64_t out, int64_t in) const {
  const bool out_in = layout_ == MOIRE_OUT_IN;
  const TestTensor& t = tensors_[is_listed_ ? static_cast<size_t>(group) : 0];
  return t.get(row_of(group, out_in ? out : in), out_in ? in : out);
}

void TestWeight::set(int64_t group, int64_t out, int64_t in, double value) {
  const bool out_in = layout_ == MOIRE_OUT_IN;
  tensor_of(group).set(row_of(group, out_in ? out : in), out_in ? in : out, value);
}

bool TestWeight::is_undamaged() const {
  return std::all_of(tensors_.begin(), tensors_.end(),
                     [](const TestTensor& t) { return t.is_undamaged(); });
}

}  // namespace moire::test
