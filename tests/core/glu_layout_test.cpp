// GLU layouts: positions from the definition "block of the first, block of the second, repeated".
#include "core/glu_layout.h"

#include <gtest/gtest.h>
#include <moire/glu.h>

#include <vector>

namespace moire {
namespace {

static_assert(resolve_glu_layout({0, MOIRE_GATE_FIRST}, 6).up(2) == 8);
static_assert(resolve_glu_layout({1, MOIRE_UP_FIRST}, 6).up(2) == 4);
static_assert(resolve_glu_layout({2, MOIRE_GATE_FIRST}, 6).gate(3) == 5);

// Which half ('g' or 'u') and column lies at each position, by laying the blocks out one by one.
struct Place {
  char half;
  int64_t column;
};
std::vector<Place> places(int64_t f, int64_t block, bool gate_first) {
  std::vector<Place> out;
  for (int64_t start = 0; start < f; start += block) {
    for (const char half : {gate_first ? 'g' : 'u', gate_first ? 'u' : 'g'}) {
      for (int64_t j = start; j < start + block; ++j) out.push_back({half, j});
    }
  }
  return out;
}

TEST(GluLayout, PositionsFollowTheDefinition) {
  for (const int64_t f : {1, 6, 24, 96}) {
    for (int64_t block = 0; block <= f; ++block) {
      if (block != 0 && f % block != 0) continue;
      for (const bool gate_first : {true, false}) {
        const ResolvedGluLayout layout =
            resolve_glu_layout({block, gate_first ? MOIRE_GATE_FIRST : MOIRE_UP_FIRST}, f);
        const std::vector<Place> want = places(f, block == 0 ? f : block, gate_first);
        for (int64_t position = 0; position < 2 * f; ++position) {
          const Place& p = want[static_cast<size_t>(position)];
          const bool is_gate = p.half == 'g';
          ASSERT_EQ(is_gate ? layout.gate(p.column) : layout.up(p.column), position);
        }
      }
    }
  }
}

TEST(GluLayout, IsValidForDivisorsOfFAndKnownOrders) {
  EXPECT_TRUE(is_valid_glu_layout({0, MOIRE_GATE_FIRST}, 7));
  EXPECT_TRUE(is_valid_glu_layout({0, MOIRE_UP_FIRST}, 0));
  EXPECT_TRUE(is_valid_glu_layout({7, MOIRE_UP_FIRST}, 7));
  EXPECT_TRUE(is_valid_glu_layout({32, MOIRE_GATE_FIRST}, 96));
  EXPECT_FALSE(is_valid_glu_layout({14, MOIRE_GATE_FIRST}, 7));
  EXPECT_FALSE(is_valid_glu_layout({32, MOIRE_GATE_FIRST}, 80));
  EXPECT_FALSE(is_valid_glu_layout({-1, MOIRE_GATE_FIRST}, 8));
  EXPECT_TRUE(is_valid_glu_layout({0, MOIRE_UNGATED}, 7));
  EXPECT_FALSE(is_valid_glu_layout({1, MOIRE_UNGATED}, 8));
  EXPECT_FALSE(is_valid_glu_layout({1, 3}, 8));
  EXPECT_FALSE(is_valid_glu_layout({1, -1}, 8));
  EXPECT_FALSE(is_valid_glu_layout({0, MOIRE_GATE_FIRST}, -2));
}

TEST(GluLayout, WithoutAGateEveryColumnIsAGate) {
  const ResolvedGluLayout layout = resolve_glu_layout({0, MOIRE_UNGATED}, 24);
  EXPECT_EQ(layout.columns(), 24);
  for (int64_t j = 0; j < 24; ++j) EXPECT_EQ(layout.gate(j), j);
}

TEST(GluLayout, ZeroColumnsResolveToABlockThatDividesNothingByZero) {
  EXPECT_EQ(resolve_glu_layout({0, MOIRE_GATE_FIRST}, 0).block, 1);
}

}  // namespace
}  // namespace moire
