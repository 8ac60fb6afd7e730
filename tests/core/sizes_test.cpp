// Sums and products of sizes stop at kTooLarge.
#include "core/sizes.h"

#include <gtest/gtest.h>

#include "core/arena.h"
#include "core/divide.h"

namespace moire {
namespace {

TEST(Sizes, AddAndMultiplyAsFarAsTheyFit) {
  EXPECT_EQ(sum(kTooLarge - 3, 3), kTooLarge);
  EXPECT_EQ(sum(kTooLarge - 3, 2), kTooLarge - 1);
  EXPECT_EQ(sum(kTooLarge, kTooLarge), kTooLarge);
  EXPECT_EQ(product(int64_t{1} << 31, int64_t{1} << 31), int64_t{1} << 62);
  EXPECT_EQ(product(int64_t{1} << 32, int64_t{1} << 31), kTooLarge);
  EXPECT_EQ(product(kTooLarge, 0), 0);
  EXPECT_EQ(product(0, kTooLarge), 0);
  EXPECT_EQ(product(kMostBytes, kMostBytes, 3), kTooLarge);
  EXPECT_EQ(ceil_div(kTooLarge, 2), (kTooLarge >> 1) + 1);
  EXPECT_EQ(ceil_div(0, 5), 0);
  EXPECT_EQ(ceil_div(10, 5), 2);
  EXPECT_EQ(ceil_div(11, 5), 3);
}

TEST(Arena, StaysPastTheLargestSize) {
  Arena measuring;
  EXPECT_EQ(measuring.take(DType::kFP32, kMostBytes, kMostBytes).data, nullptr);
  measuring.take(1000);
  EXPECT_EQ(measuring.used(), static_cast<size_t>(kTooLarge));
}

TEST(Arena, HasNothingPastTheEndOfItsWorkspace) {
  alignas(256) char memory[1024];
  Arena arena({memory, sizeof(memory)});
  EXPECT_EQ(arena.take(300), memory);
  EXPECT_EQ(arena.take(512), memory + 512);
  EXPECT_EQ(arena.rest().bytes, 0U);
  EXPECT_EQ(arena.take(1), nullptr);
  EXPECT_EQ(arena.take(kTooLarge), nullptr);
  EXPECT_EQ(arena.rest().data, nullptr);
  EXPECT_EQ(arena.used(), static_cast<size_t>(kTooLarge));
}

}  // namespace
}  // namespace moire
