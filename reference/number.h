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
  // Of an element that tensor cores read: value = element * scale (of FP8; else 0), and the
  // exponent of the smallest normal element, of FP8 and FP16.
  float scale = 0;
  int least_exponent = 0;
};

// The nearest value of `dtype` (FP64, FP32, BF16 or FP16), ties to even; overflow to infinity.
double round_to(DType dtype, double value);
// Number::least_exponent of an element of `dtype`: BF16 and FP32 have none that matters.
inline int least_exponent(DType dtype) { return dtype == DType::kFP16 ? -14 : 0; }
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

// The sum of products of FP8 elements as Hopper's tensor cores have it (docs/numerics.md), with
// each 128 products scaled and added up exactly.
class TensorCoreSum {
 public:
  void add(const Number& a, const Number& b);
  // Adds what is left of 128 products; the last call.
  void finish() {
    add_up();
    promote();
  }
  double value() const { return value_; }
  double magnitude() const { return magnitude_; }  // of what is added up in FP32
  double cut() const { return cut_; }              // what can have been cut off in all
  int64_t promotions() const { return promotions_; }

 private:
  struct Term {
    double value;
    int exponent;
  };
  void add_up();
  void promote();

  Term terms_[32] = {};
  int64_t num_terms_ = 0, products_ = 0, promotions_ = 0;
  double sum_ = 0, lost_ = 0, scale_ = 1;  // of the 128, in units of elements
  double value_ = 0, magnitude_ = 0, cut_ = 0;
};

// A sum of products, accumulated in FP32 by the implementation and in double here. What the
// factors may already be off by adds to the bound. So does what the products of scaled FP8 numbers
// lose in units that know no subnormal numbers, and what is lost beside a subnormal FP16 number,
// which counts as the smallest normal one. Emulated sums are those of tensor cores, rounded where
// they are added up; they also lie where what is cut off allows them, around the exact sum.
class Dot {
 public:
  enum class Factors { kFloats, kScaled, kEmulated };
  explicit Dot(Factors factors = Factors::kFloats) : factors_(factors) {}

  void add(const Number& a, const Number& b) {
    add_term(a, b);
    if (factors_ == Factors::kEmulated) emulated_.add(a, b);
  }
  // A summand that is no product.
  void add(const Number& a) {
    add_term(a, Number{1});
    plain_ += a.value;
  }
  Number sum() {
    const double lost = static_cast<double>(terms_) * 0x1p-126 * largest_;
    const Number number{value_, inherited_ + dot_tolerance(terms_, magnitude_) +
                                    (factors_ == Factors::kFloats ? 0 : lost)};
    return factors_ == Factors::kEmulated && std::isfinite(value_) ? emulated(number) : number;
  }

 private:
  void add_term(const Number& a, const Number& b) {
    const double size_a = std::abs(a.value), size_b = std::abs(b.value);
    largest_ = std::max({largest_, size_a, size_b});
    value_ += a.value * b.value;
    magnitude_ += stated(a) * stated(b);
    inherited_ += size_a * b.bound + a.bound * size_b + a.bound * b.bound;
    ++terms_;
  }
  // |a| as tensor cores align its products.
  static double stated(const Number& a) {
    const double size = std::abs(a.value);
    if (a.scale != 0 || a.least_exponent == 0 || (size == 0 && a.bound == 0)) return size;
    return std::max(size, std::ldexp(1.0, a.least_exponent));
  }
  Number emulated(const Number& exact);

  Factors factors_;
  double value_ = 0, magnitude_ = 0, inherited_ = 0, largest_ = 0;
  double plain_ = 0;  // of the summands that are no products
  int64_t terms_ = 0;
  TensorCoreSum emulated_;
};

}  // namespace moire::reference
