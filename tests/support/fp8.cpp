#include "tests/support/fp8.h"

#include <cmath>

namespace moire::test {

void randomize_codes(const TensorView& codes, Random& random, int64_t rows) {
  // The codes past these are infinity and NaN.
  const int64_t most = codes.type() == DType::kE4M3 ? 0x7E : 0x7B;
  for (int64_t i = 0; i < rows; ++i) {
    auto* const row = static_cast<uint8_t*>(codes.data) + i * codes.stride();
    for (int64_t j = 0; j < codes.columns(); ++j) {
      row[j] = static_cast<uint8_t>(random.integer(0, most) + 128 * random.integer(0, 1));
    }
  }
}

void randomize_scales(const TensorView& scales, Random& random, const Fp8& format, double size,
                      int64_t row) {
  const int largest = format.element == DType::kE4M3 ? 8 : 15;
  const int middle = std::ilogb(size) - largest + 1;
  for (int64_t j = 0; j < scales.columns(); ++j) {
    const int exponent = middle + static_cast<int>(random.integer(-2, 1));
    const int64_t at = row * scales.stride() + j;
    if (format.scales == DType::kE8M0) {
      static_cast<uint8_t*>(scales.data)[at] = static_cast<uint8_t>(127 + exponent);
    } else {
      const double fraction = 1 + static_cast<double>(random.integer(0, 999)) / 1000;
      static_cast<float*>(scales.data)[at] = static_cast<float>(std::ldexp(fraction, exponent));
    }
  }
}

TestTensor random_rowwise_scales(Random& random, const Fp8& format, int64_t capacity, int64_t rows,
                                 int64_t columns) {
  // Rows lie apart, as a device's alignment wants them.
  TestTensor scales(format.scales, {capacity, format.blocks(columns)}, 3);
  for (int64_t i = 0; i < rows; ++i) randomize_scales(scales, random, format, 1, i);
  return scales;
}

TestTensor random_columnwise_scales(Random& random, const Fp8& format, const Groups& groups,
                                    int64_t columns) {
  TestTensor scales(format.scales, {groups.capacity / format.block() + groups.num_groups, columns});
  for (int64_t g = 0; g < groups.num_groups; ++g) {
    const int64_t first = groups.offsets[g] / format.block() + g;
    const int64_t blocks = format.blocks(groups.offsets[g + 1] - groups.offsets[g]);
    for (int64_t i = 0; i < blocks; ++i) {
      randomize_scales(scales, random, format, 1, first + i);
    }
  }
  return scales;
}

TestTensor random_weight_scales(Random& random, const Fp8& format, int32_t direction,
                                int64_t num_groups, int64_t rows, int64_t columns, double size) {
  const bool tiles = format.scales == DType::kFP32;
  const int64_t r = tiles || direction == MOIRE_COLUMNWISE ? format.blocks(rows) : rows;
  const int64_t c = tiles || direction == MOIRE_ROWWISE ? format.blocks(columns) : columns;
  TestTensor scales(format.scales, {num_groups, r, c});
  for (int64_t i = 0; i < num_groups * r; ++i) randomize_scales(scales, random, format, size, i);
  return scales;
}

}  // namespace moire::test
