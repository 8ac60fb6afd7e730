// Number: an exact result, and how far from it a correct implementation may end. Every value of the
// reference is one, so a comparison needs no tolerance of its own: accepts() is the whole rule.
// The bounds are those of docs/numerics.md; nothing else in the project defines them.
#pragma once

#include <moire/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace moire::reference {

struct Number {
  double value = 0;
  double bound = 0;  // |unrounded FP32 result - value| of a correct implementation
};

// The nearest value of `dtype` (FP64, FP32, BF16 or FP16), ties to even; overflow to infinity.
double round_to(DType dtype, double value);
// Distance between neighbouring values of `dtype` at `value`.
double spacing(DType dtype, double value);

// What an implementation has after rounding: an uncertain value may fall to either side of a
// rounding boundary, but far from one it has no freedom at all and the bound becomes zero.
Number round_to(DType dtype, Number number);

// Whether a correct implementation may store `got`, of type `dtype`, where `want` is exact.
bool accepts(DType dtype, Number want, double got);

// |FP32 sum - exact sum| of `terms` products whose absolute values sum to `magnitude`, in any
// order; sums down at the smallest subnormals are rounded to multiples of 2^-149.
inline double dot_tolerance(int64_t terms, double magnitude) {
  const auto n = static_cast<double>(terms);
  return (n + 8) * 0x1p-24 * magnitude + (magnitude == 0 ? 0 : n * 0x1p-149);
}

// A sum of products, accumulated in FP32 by the implementation and in double here. What the
// factors may already be off by adds to the bound. So does what the products of scaled FP8 numbers
// lose in units that know no subnormal numbers; and, where tensor cores are emulated, what is cut
// off there: of 32 products and what they are added to, each loses less than 2^-13 of the largest
// of them, and after 128 products a new sum starts.
class Dot {
 public:
  enum class Factors { kFloats, kScaled, kEmulated };
  explicit Dot(Factors factors = Factors::kFloats) : factors_(factors) {}

  void add(const Number& a, const Number& b) {
    const double size = add_term(a, b);
    if (factors_ != Factors::kEmulated) return;
    piece_ = std::max(piece_, size);
    block_ += size;
    ++products_;
    if (products_ % 32 == 0) cut_piece();
    if (products_ % 128 == 0) block_ = 0;
  }
  // A summand that is no product.
  void add(const Number& a) { add_term(a, Number{1}); }
  Number sum() {
    cut_piece();
    const double lost = static_cast<double>(terms_) * 0x1p-126 * largest_;
    return {value_, inherited_ + cut_ + dot_tolerance(terms_, magnitude_) +
                        (factors_ == Factors::kFloats ? 0 : lost)};
  }

 private:
  double add_term(const Number& a, const Number& b) {
    const double size_a = std::abs(a.value), size_b = std::abs(b.value);
    largest_ = std::max({largest_, size_a, size_b});
    value_ += a.value * b.value;
    magnitude_ += size_a * size_b;
    inherited_ += size_a * b.bound + a.bound * size_b + a.bound * b.bound;
    ++terms_;
    return size_a * size_b;
  }
  void cut_piece() {
    if (piece_ != 0) cut_ += 33 * 0x1p-13 * std::max(piece_, block_);
    piece_ = 0;
  }

  Factors factors_;
  double value_ = 0, magnitude_ = 0, inherited_ = 0, largest_ = 0;
  double piece_ = 0, block_ = 0, cut_ = 0;  // of emulated sums: the 32 products, the 128, the loss
  int64_t terms_ = 0, products_ = 0;
};

}  // namespace moire::reference
