// Floats that conversions get wrong first, and how they are compared.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

namespace moire::cpu {

// Tells zeros and NaN apart.
inline uint32_t bits_of(float x) { return std::bit_cast<uint32_t>(x); }

// The middle between two neighbouring numbers of a format, and the floats on both its sides.
inline void add_middle(float low, float high, std::vector<float>& out) {
  const auto middle = static_cast<float>((static_cast<double>(low) + high) / 2);
  for (const float x : {middle, std::nextafter(middle, low), std::nextafter(middle, high)}) {
    out.push_back(x);
  }
}
inline void add_random_patterns(std::mt19937_64& random, int count, std::vector<float>& out) {
  for (int i = 0; i < count; ++i) {
    out.push_back(std::bit_cast<float>(static_cast<uint32_t>(random())));
  }
}

}  // namespace moire::cpu
