// FP8 operands made of random codes and random scales, without a quantiser: whatever bytes an
// operand may hold.
#pragma once

#include <moire/groups.h>

#include <ostream>

#include "tests/support/tensors.h"

namespace moire::test {

// kNone: not quantised.
struct Fp8 {
  DType element = DType::kNone;  // E4M3 or E5M2
  DType scales = DType::kNone;   // E8M0 (blocks of 32) or FP32 (of 128)

  bool is_present() const { return element != DType::kNone; }
  int64_t block() const { return scales == DType::kE8M0 ? 32 : 128; }
  int64_t blocks(int64_t n) const { return (n + block() - 1) / block(); }
};

inline std::ostream& operator<<(std::ostream& out, const Fp8& f) {
  if (!f.is_present()) return out << "as stored";
  return out << dtype_name(f.element) << " with " << dtype_name(f.scales) << " scales";
}

// Finite codes in the first `rows` rows.
void randomize_codes(const TensorView& codes, Random& random, int64_t rows);
// Scales that bring such codes to magnitudes around `size`, in row `row`.
void randomize_scales(const TensorView& scales, Random& random, const Fp8& format, double size,
                      int64_t row);

// Scales of the first `rows` rows of [capacity, columns] in blocks along each row.
TestTensor random_rowwise_scales(Random& random, const Fp8& format, int64_t capacity, int64_t rows,
                                 int64_t columns);
// In blocks down the rows of each group; rows that no group owns stay NaN.
TestTensor random_columnwise_scales(Random& random, const Fp8& format, const Groups& groups,
                                    int64_t columns);
// Of weights [num_groups, rows, columns]; tiles where they are FP32.
TestTensor random_weight_scales(Random& random, const Fp8& format, int32_t direction,
                                int64_t num_groups, int64_t rows, int64_t columns, double size);

}  // namespace moire::test
