// Random numbers of the fuzzer: the same on every machine for a seed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "staging/random.h"

namespace moire::fuzz {

class Random : public staging::Random {
 public:
  explicit Random(uint64_t seed) : staging::Random(seed * 0x9E3779B97F4A7C15u + 1) {}

  // One of low ... high.
  int64_t integer(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(bits() % static_cast<uint64_t>(high - low + 1));
  }
  bool percent(int64_t chance) { return integer(0, 99) < chance; }
  template <class T>
  T pick(std::initializer_list<T> values) {
    return values.begin()[integer(0, static_cast<int64_t>(values.size()) - 1)];
  }
};

}  // namespace moire::fuzz
