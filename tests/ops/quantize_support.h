// Copies to be quantised into, and inputs that are hard to quantise.
#pragma once

#include <moire/quantize.h>

#include <bit>
#include <cmath>
#include <limits>

#include "core/scale_shapes.h"
#include "reference/quantize.h"
#include "tests/support/expect.h"
#include "tests/support/tensors.h"

namespace moire::test {

// Poisoned data and scales; absent by default.
struct TestCopy {
  TestCopy() = default;
  // Of a ragged [capacity, k].
  TestCopy(DType element, int32_t scaling, int32_t direction, const Groups& groups, int64_t k,
           int64_t padding = 0)
      : data(element, {groups.capacity, k}, padding) {
    const ScaleShape s = ragged_scales(scaling, direction, groups.capacity, groups.num_groups, k);
    scales = TestTensor(scale_dtype(scaling), {s.rows, s.columns}, padding);
  }
  // Of weights [num_groups, n, k].
  TestCopy(DType element, int32_t scaling, int32_t direction, int64_t num_groups, int64_t n,
           int64_t k, int64_t padding = 0)
      : data(element, {num_groups, n, k}, padding) {
    const ScaleShape s = matrix_scales(scaling, direction, n, k);
    scales = TestTensor(scale_dtype(scaling), {num_groups, s.rows, s.columns}, padding);
  }

  Quantized view() const { return {data, scales}; }
  operator moire_quantized() const { return view(); }
  bool is_present() const { return data.view().is_present(); }

  TestTensor data, scales;
};

// Scales of MXFP8 in a layout, poisoned.
inline TestTensor scales_in(int32_t layout, int32_t direction, const Groups& groups, int64_t k) {
  int64_t shape[2] = {};
  EXPECT_TRUE(succeeds(scales_shape(MOIRE_SCALING_MXFP8, direction, layout, groups.capacity, k,
                                    groups.num_groups, shape)));
  return TestTensor(DType::kE8M0, {shape[0], shape[1]});
}

// Both tensors of a copy hold the reference's bytes, and nothing around them was written.
inline testing::AssertionResult same_bytes(const TestCopy& got,
                                           const reference::QuantizedBytes& want,
                                           int32_t tail = MOIRE_TAIL_ZERO) {
  if (!got.is_present()) return testing::AssertionSuccess();
  testing::AssertionResult data = same_bytes(got.data.view(), want.data, tail);
  if (!data) return data << " (data)";
  testing::AssertionResult scales = same_bytes(got.scales.view(), want.scales, tail);
  if (!scales) return scales << " (scales)";
  if (!got.data.is_undamaged()) return testing::AssertionFailure() << "wrote around the data";
  if (!got.scales.is_undamaged()) return testing::AssertionFailure() << "wrote around the scales";
  return testing::AssertionSuccess();
}

// Normal numbers, rows and columns of wildly different size, zeros of both signs, subnormal
// numbers, infinities, NaN alone and whole runs of it.
inline double hard_value(Random& random, int64_t row, int64_t column) {
  switch ((row / 40 + column / 40) % 6) {
    case 0:
      return random.normal();
    case 1:
      return std::ldexp(random.normal(), static_cast<int>(random.integer(-160, 128)));
    case 2:
      return random.integer(0, 1) == 0 ? 0.0 : -0.0;
    case 3:
      return std::ldexp(random.normal(), -140);
    case 4:
      return std::numeric_limits<double>::quiet_NaN();
    default:
      break;
  }
  const int64_t special = random.integer(0, 30);
  if (special == 0) return std::numeric_limits<double>::infinity();
  if (special == 1) return -std::numeric_limits<double>::quiet_NaN();
  return random.normal() * 448;
}

inline void fill_hard(TestTensor& t, Random& random, int64_t rows) {
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < t.view().columns(); ++j) t.set(i, j, hard_value(random, i, j));
  }
}

// Any bits in the rows that a copy owns; the others stay poisoned, so that reading them shows.
inline void fill_row(const TensorView& t, int64_t row, Random& random) {
  const int64_t bytes = dtype_size(t.type());
  auto* const data = static_cast<uint8_t*>(t.data) + row * t.stride() * bytes;
  for (int64_t j = 0; j < t.columns(); ++j) {
    if (t.type() == DType::kFP32) {
      const double scale =
          std::ldexp(1 + std::fabs(random.normal()), static_cast<int>(random.integer(-130, 120)));
      reinterpret_cast<float*>(data)[j] = static_cast<float>(scale);
    } else {
      data[j] = static_cast<uint8_t>(random.integer(0, 255));
    }
  }
}
inline void fill_all(const TestCopy& copy, Random& random) {
  for (const TensorView& t : {copy.data.view(), copy.scales.view()}) {
    for (int64_t i = 0; i < t.num_rows(); ++i) fill_row(t, i, random);
  }
}

inline constexpr int64_t kWidths[] = {1, 7, 31, 32, 33, 96, 127, 128, 129, 300};

// One of a list.
template <class List>
auto any_of(Random& random, const List& list) {
  return list[static_cast<size_t>(random.integer(0, static_cast<int64_t>(std::size(list)) - 1))];
}

}  // namespace moire::test
