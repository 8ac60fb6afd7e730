// The grouped GEMMs of the CPU against the reference: groups, shapes, dtypes, orientations, lists,
// gathered rows, layouts, tails.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <iterator>

#include "tests/support/grouped_gemm_cases.h"

namespace moire::test {
namespace {

constexpr DType kDTypes[] = {DType::kFP32, DType::kBF16, DType::kFP16};

void check_every_product(Random& random, const Batch& batch, int64_t n, int64_t k,
                         const GemmOptions& o, const Tested& context) {
  GemmCase(random, batch, n, k, false, o).check(context);
  GemmCase(random, batch, n, k, true, o).check(context);
  GemmGluCase(random, batch, n, k, o).check(context);
  GemmGluBackwardCase(random, batch, n, k, o).check(context);
  WgradCase(random, batch, n, k, o).check(context);
}

class GroupedGemmOnRaggedCases : public testing::TestWithParam<RaggedCase> {};
INSTANTIATE_TEST_SUITE_P(Table, GroupedGemmOnRaggedCases, testing::ValuesIn(ragged_table()),
                         case_name);

TEST_P(GroupedGemmOnRaggedCases, EqualTheReference) {
  Random random;
  const Tested context = tested();
  const Batch batch(GetParam());
  const bool many = batch.num_groups() > 100;
  const int64_t n = many ? 7 : 41, k = many ? 9 : 300;
  for (const int32_t layout : {MOIRE_OUT_IN, MOIRE_IN_OUT}) {
    GemmOptions o;
    o.layout = layout;
    o.operands = o.output = DType::kBF16;
    o.tail = layout;
    GemmCase(random, batch, n, k, false, o).check(context);
    GemmCase(random, batch, n, k, true, o).check(context);
    GemmGluCase(random, batch, n, k, o).check(context);
    o.beta = layout;
    GemmGluBackwardCase(random, batch, n, k, o).check(context);
    o.output = DType::kFP32;
    WgradCase(random, batch, n, k / 4, o).check(context);
  }
}

// Every combination of storage types, orientation, list and gathering on one small batch.
TEST(GroupedGemm, TakesEveryDTypeOrientationListAndGather) {
  Random random;
  const Tested context = tested(2);
  const Batch batch({5, 0, 18}, 2);
  for (const DType operands : kDTypes) {
    for (const DType output : kDTypes) {
      for (const int variant : {0, 1, 2, 3}) {
        GemmOptions o;
        o.operands = operands;
        o.output = output;
        o.layout = variant % 2;
        o.listed = variant >= 2;
        o.row_idx = variant == 0 ? DType::kNone : variant == 1 ? DType::kInt32 : DType::kInt64;
        o.extras = variant != 2;
        o.padding = variant;
        o.beta = variant / 2;
        o.tail = variant % 2;
        check_every_product(random, batch, 37, 70, o, context);
      }
    }
  }
}

// Of more matrices than a GPU is given addresses of at once.
TEST(GroupedGemm, TakesListsOf500Matrices) {
  Random random;
  const Tested context = tested(2);
  std::vector<int64_t> splits(500);
  for (int64_t& rows : splits) rows = random.integer(0, 3);
  const Batch batch(splits, 2);
  for (const int32_t layout : {MOIRE_OUT_IN, MOIRE_IN_OUT}) {
    GemmOptions o;
    o.operands = o.output = DType::kBF16;
    o.layout = o.beta = layout;
    o.listed = true;
    check_every_product(random, batch, 8, 16, o, context);
  }
}

TEST(GroupedGemm, TakesEveryGluLayoutAndActivation) {
  Random random;
  const Tested context = tested(2);
  const Batch batch({3, 21}, 1);
  constexpr int64_t kF = 96;
  for (const int32_t layout : {MOIRE_OUT_IN, MOIRE_IN_OUT}) {
    for (const int64_t block : {0, 1, 8, 32, 48}) {
      for (const int32_t order : {MOIRE_GATE_FIRST, MOIRE_UP_FIRST}) {
        GemmOptions o;
        o.operands = o.output = DType::kBF16;
        o.layout = layout;
        o.glu = GluLayout::interleaved(block, order);
        o.activation = block == 1   ? Activation::clamped_swiglu(1.0F)
                       : block == 8 ? Activation::geglu_tanh()
                                    : Activation::swiglu();
        GemmGluCase(random, batch, kF, 40, o).check(context);
        GemmGluBackwardCase(random, batch, kF, 40, o).check(context);
      }
    }
  }
}

// Sizes at and around vectors, micro-tiles, chunks, K blocks and tiles, and those of real models.
TEST(GroupedGemm, TakesShapesThatBreakTiles) {
  Random random;
  const Tested context = tested(2);
  const Batch batch({2, 17}, 1);
  struct Shape {
    int64_t n, k;
  };
  const Shape shapes[] = {{1, 1},     {5, 255},   {6, 256},   {7, 257},   {8, 512},
                          {16, 513},  {17, 96},   {63, 31},   {64, 32},   {65, 33},
                          {96, 176},  {97, 768},  {176, 96},  {768, 176}, {961, 65},
                          {1408, 96}, {96, 1408}, {2880, 64}, {64, 2880}};
  for (const Shape& s : shapes) {
    for (const int32_t layout : {MOIRE_OUT_IN, MOIRE_IN_OUT}) {
      GemmOptions o;
      o.layout = layout;
      GemmCase(random, batch, s.n, s.k, false, o).check(context);
      GemmGluCase(random, batch, s.n, s.k, o).check(context);
      GemmGluBackwardCase(random, batch, s.n, s.k, o).check(context);
    }
    WgradCase(random, batch, s.n, s.k, GemmOptions()).check(context);
  }
}

// Rows of 200 bytes that lie 208 apart, as TMA needs them: so must their copies in expert order.
TEST(GroupedGemm, GathersRowsThatOnlyTheirStrideAligns) {
  Random random;
  const Tested context = tested(2);
  const Batch batch({5, 0, 150}, 2);
  GemmOptions o;
  o.operands = DType::kBF16;
  o.row_idx = DType::kInt32;
  o.padding = 4;
  WgradCase(random, batch, 100, 100, o).check(context);
  GemmCase dgrad(random, batch, 64, 100, true, o);
  dgrad.d = TestTensor(DType::kBF16, {batch.capacity(), 64});
  dgrad.check(context);
}

// BF16 with every size a multiple of 8, which is what tensor cores are fed with.
TEST_P(GroupedGemmOnRaggedCases, EqualTheReferenceWhereRowsAreAligned) {
  Random random;
  const Tested context = tested();
  const Batch batch(GetParam());
  const bool many = batch.num_groups() > 100;
  const int64_t n = many ? 8 : 136, k = many ? 16 : 200;
  for (const int32_t layout : {MOIRE_OUT_IN, MOIRE_IN_OUT}) {
    GemmOptions o;
    o.layout = layout;
    o.operands = o.output = DType::kBF16;
    o.extras = layout == MOIRE_OUT_IN;
    GemmCase(random, batch, n, k, false, o).check(context);
    GemmCase(random, batch, n, k, true, o).check(context);
    GemmGluCase(random, batch, n, k, o).check(context);
    GemmGluBackwardCase(random, batch, n, k, o).check(context);
    for (const DType output : {DType::kBF16, DType::kFP32}) {
      o.output = output;
      o.beta = layout;
      WgradCase(random, batch, n, k, o).check(context);
    }
  }
}

// Sums of 2^-126 and more, or of 2^-140, beside old values that are subnormal, -0, infinite or no
// number: whoever adds them, nothing becomes 0.
void expect_added_as_floats(float unit) {
  constexpr float kLeast = 0x1p-126F, kOne = 0x1p-149F, kInfinity = INFINITY;
  constexpr float kOld[] = {
      0,           -0.0F,     kOne,        -3 * kOne, kLeast - kOne,    1, -kLeast, -kLeast + kOne,
      -2 * kLeast, kInfinity, -5 * kLeast, NAN,       2 * kLeast - kOne};
  Random random;
  const Batch batch({5, 0, 18}, 2);
  const int64_t m = 136, n = 392;
  GemmOptions o;
  o.operands = DType::kBF16;
  o.output = DType::kFP32;
  o.beta = 1;
  o.extras = false;
  WgradCase c(random, batch, m, n, o);
  const auto a = [unit](int64_t i) { return static_cast<float>(i % 5 - 2) * unit; };
  const auto old = [&](int64_t i, int64_t j) { return kOld[(3 * i + j) % std::size(kOld)]; };
  const Groups groups(c.args().groups);
  for (int64_t g = 0; g < groups.num_groups; ++g) {
    const int64_t first = groups.offsets[g];
    for (int64_t row = first; row < groups.offsets[g + 1]; ++row) {
      for (int64_t i = 0; i < m; ++i) c.a.rows.set(row, i, row == first ? a(i) : 0);
      for (int64_t j = 0; j < n; ++j) c.b.rows.set(row, j, 0x1p-63);
    }
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < n; ++j) c.d.set(g, i, j, double{old(i, j)});
    }
  }
  ASSERT_TRUE(succeeds(c.run(tested(2))));
  int64_t different = 0;
  for (int64_t g = 0; g < groups.num_groups; ++g) {
    const bool is_empty = groups.offsets[g] == groups.offsets[g + 1];
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        const float want = is_empty ? old(i, j) : old(i, j) + a(i) * 0x1p-63F;
        const auto got = static_cast<float>(c.d.get(g, i, j));
        const bool is_same = std::bit_cast<uint32_t>(got) == std::bit_cast<uint32_t>(want);
        different += !is_same && !(std::isnan(got) && std::isnan(want));
      }
    }
  }
  EXPECT_EQ(different, 0);
  EXPECT_TRUE(c.is_undamaged());
}
TEST(GroupedGemm, AddsToFp32GradientsAsFp32Numbers) {
  expect_added_as_floats(0x1p-63F);
  expect_added_as_floats(0x1p-77F);
}

// The widths of real models, and those at and around the tiles of tensor cores.
TEST(GroupedGemm, TakesAlignedShapesAndGluBlocks) {
  Random random;
  const Tested context = tested();
  const Batch batch({130, 0, 66}, 3);
  struct Shape {
    int64_t n, k;
  };
  const Shape shapes[] = {{8, 8},    {64, 64},  {120, 72}, {128, 128}, {136, 64}, {256, 64},
                          {264, 56}, {768, 40}, {1408, 8}, {2880, 8},  {16, 2880}};
  for (const Shape& s : shapes) {
    for (const int64_t block : {int64_t{0}, int64_t{1}, int64_t{8}, int64_t{32}, s.n}) {
      if (block > 1 && s.n % block != 0) continue;
      GemmOptions o;
      o.operands = o.output = DType::kBF16;
      o.glu = GluLayout::interleaved(block);
      o.extras = block != 1;
      GemmGluCase(random, batch, s.n, s.k, o).check(context);
      GemmGluBackwardCase(random, batch, s.n, s.k, o).check(context);
      if (block != 0) continue;
      GemmCase(random, batch, s.n, s.k, false, o).check(context);
      o.beta = 1;
      o.output = DType::kFP32;
      WgradCase(random, batch, s.n, s.k, o).check(context);
    }
  }
}

TEST(GroupedGemm, OfNoProductsIsTheBias) {
  Random random;
  const Batch batch({2, 3});
  for (const int32_t layout : {MOIRE_OUT_IN, MOIRE_IN_OUT}) {
    GemmOptions o;
    o.layout = layout;
    GemmCase(random, batch, 19, 0, false, o).check(tested(2));
    GemmGluCase(random, batch, 19, 0, o).check(tested(2));
  }
}

TEST(GroupedGemm, TakesOutputsWithoutColumns) {
  Random random;
  const Batch batch({2, 3});
  GemmOptions o;
  GemmCase(random, batch, 0, 8, false, o).check(tested(2));
  GemmGluCase(random, batch, 0, 8, o).check(tested(2));
  WgradCase(random, batch, 0, 8, o).check(tested(2));
}

TEST(GroupedGemm, SumsManyRowsOfOneGroupOverSeveralKBlocksAndTiles) {
  Random random;
  const Tested context = tested(2);
  const Batch batch({530, 1});
  for (const int32_t layout : {MOIRE_OUT_IN, MOIRE_IN_OUT}) {
    GemmOptions o;
    o.layout = layout;
    GemmCase(random, batch, 70, 64, false, o).check(context);
    GemmGluBackwardCase(random, batch, 70, 64, o).check(context);
    o.beta = layout;
    WgradCase(random, batch, 100, 50, o).check(context);
  }
}

TEST(GroupedGemmWgrad, HonoursBetaOfEachGroup) {
  Random random;
  const Batch batch({4, 0, 0, 9});
  GemmOptions o;
  o.beta = 1;
  for (const DType output : kDTypes) {
    o.output = output;
    WgradCase c(random, batch, 13, 20, o);
    c.beta_per_group = {0, 1, 0, 1};
    c.check(tested(2));
  }
}

TEST(GroupedGemmWgrad, LeavesAnEmptyGroupsNegativeZeroWhenAccumulating) {
  Random random;
  const Batch batch({0, 2});
  GemmOptions o;
  o.beta = 1;
  WgradCase c(random, batch, 3, 4, o);
  c.d.set(0, 1, 2, -0.0);
  ASSERT_TRUE(succeeds(c.run(tested(1))));
  EXPECT_TRUE(std::signbit(c.d.get(0, 1, 2)));
}

TEST(GroupedGemm, KeepsANonFiniteGroupToItself) {
  Random random;
  const Batch batch({8, 8});
  GemmCase clean(random, batch, 32, 48, false, GemmOptions());
  GemmCase dirty = clean;
  dirty.a.rows.set(0, 3, std::nan(""));
  dirty.b.set(0, 5, 7, HUGE_VAL);
  const Tested context = tested(2);
  ASSERT_TRUE(succeeds(clean.run(context)));
  ASSERT_TRUE(succeeds(dirty.run(context)));
  for (int64_t row = 8; row < 16; ++row) {
    for (int64_t j = 0; j < 32; ++j) ASSERT_EQ(dirty.d.get(row, j), clean.d.get(row, j));
  }
}

}  // namespace
}  // namespace moire::test
