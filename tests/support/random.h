// Random: fresh random inputs whose seed every failure names. A run draws one seed; each test mixes
// its own name into it, so a failing test can be repeated alone.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <random>

namespace moire::test {

class Random {
 public:
  // The seed is MOIRE_TEST_SEED where that is set. While this object lives, every failure prints
  // it.
  Random();

  double normal() { return normal_(engine_); }
  // One of low ... high.
  int64_t integer(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(engine_);
  }
  std::mt19937_64& engine() { return engine_; }

 private:
  std::mt19937_64 engine_;
  std::normal_distribution<double> normal_;
  testing::ScopedTrace trace_;
};

}  // namespace moire::test
