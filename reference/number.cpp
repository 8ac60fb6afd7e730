#include "reference/number.h"

#include <algorithm>
#include <limits>

#include "reference/float_format.h"

namespace moire::reference {

double spacing(DType dtype, double value) {
  const FloatFormat f = float_format(dtype);
  const int exponent = value == 0 ? f.min_exponent : std::ilogb(value);
  return std::ldexp(1.0, std::max(exponent, f.min_exponent) - f.mantissa_bits);
}

double round_to(DType dtype, double value) {
  if (dtype == DType::kFP64 || value == 0 || !std::isfinite(value)) return value;
  const FloatFormat f = float_format(dtype);
  const double unit = spacing(dtype, value);
  const double rounded = std::nearbyint(value / unit) * unit;  // both exact: unit is a power of 2
  const double largest = std::ldexp(2.0 - std::ldexp(1.0, -f.mantissa_bits), f.max_exponent);
  if (std::abs(rounded) <= largest) return rounded;
  return std::copysign(std::numeric_limits<double>::infinity(), value);
}

Number round_to(DType dtype, Number number) {
  const double middle = round_to(dtype, number.value);
  const double low = round_to(dtype, number.value - number.bound);
  const double high = round_to(dtype, number.value + number.bound);
  return {middle, low == high ? 0 : std::max(middle - low, high - middle), 0,
          least_exponent(dtype)};
}

bool accepts(DType dtype, Number want, double got) {
  if (std::isnan(want.value)) return std::isnan(got);
  if (std::isinf(want.value)) return got == want.value;
  return round_to(dtype, want.value - want.bound) <= got &&
         got <= round_to(dtype, want.value + want.bound);
}

namespace {

// Below the largest exponent of what is added, and of what a sum keeps.
constexpr int kFractionBits = 13;

double whole(double value, double unit) { return std::trunc(value / unit) * unit; }

// The exponent that the bits of an element state.
int stated_exponent(double element, int least) { return std::max(std::ilogb(element), least); }

}  // namespace

void TensorCoreSum::add(const Number& a, const Number& b) {
  const double x = a.value / a.scale, y = b.value / b.scale;
  if (x * y != 0 && std::isfinite(x * y)) {
    terms_[num_terms_++] = {
        x * y, stated_exponent(x, a.least_exponent) + stated_exponent(y, b.least_exponent)};
  }
  scale_ = double{a.scale} * double{b.scale};
  ++products_;
  if (products_ % 32 == 0) add_up();
  if (products_ % 128 == 0) promote();
}

void TensorCoreSum::add_up() {
  if (num_terms_ == 0) return;
  int largest = sum_ == 0 ? terms_[0].exponent : std::ilogb(sum_);
  for (int64_t i = 0; i < num_terms_; ++i) largest = std::max(largest, terms_[i].exponent);
  const double unit = std::ldexp(1.0, largest - kFractionBits);
  sum_ = whole(sum_, unit);
  for (int64_t i = 0; i < num_terms_; ++i) sum_ += whole(terms_[i].value, unit);
  lost_ += static_cast<double>(num_terms_ + 1) * unit;
  num_terms_ = 0;
  if (sum_ == 0) return;
  const double last = std::ldexp(1.0, std::ilogb(sum_) - kFractionBits);
  sum_ = whole(sum_, last);
  lost_ += last;
}

void TensorCoreSum::promote() {
  value_ += sum_ * scale_;
  magnitude_ += std::abs(sum_ * scale_);
  cut_ += lost_ * scale_;
  sum_ = lost_ = 0;
  ++promotions_;
}

Number Dot::emulated(const Number& exact) {
  emulated_.finish();
  const double value = emulated_.value() + plain_;
  const double bound =
      dot_tolerance(emulated_.promotions() + 1, emulated_.magnitude() + std::abs(plain_)) +
      static_cast<double>(emulated_.promotions()) * 0x1p-148;
  // The model is within what it cuts off, or this is nothing that an implementation may have.
  const bool is_near = std::abs(value - exact.value) <= exact.bound + emulated_.cut();
  return {is_near ? value : std::numeric_limits<double>::quiet_NaN(), bound};
}

}  // namespace moire::reference
