// Groups {null, 0, 0}: none at all where a call has to have groups, absent where it may do without.
#include <gtest/gtest.h>
#include <moire/grouped_tensor.h>

#include "core/resolved_groups.h"
#include "tests/support/expect.h"

namespace moire::test {
namespace {

constexpr DType kBF16 = DType::kBF16, kE4M3 = DType::kE4M3;
constexpr int64_t kWidth = 128;

// A copy [0, columns] in blocks of 128, without scales; guards show what is written past it.
struct NoRows {
  explicit NoRows(int64_t columns)
      : data(kE4M3, {0, columns}), scales(DType::kFP32, {0, columns}) {}
  operator moire_quantized() const { return {data, scales}; }
  bool is_undamaged() const { return data.is_undamaged() && scales.is_undamaged(); }
  TestTensor data, scales;
};

class NoGroups : public testing::TestWithParam<int32_t> {
 protected:
  const Tested context_ = Tested(cpu(2));
  const TestTensor rows_{kBF16, {0, kWidth}}, wide_{kBF16, {0, 2 * kWidth}};
  const TestTensor w_{kBF16, {0, kWidth, kWidth}};
  const TestTensor w1_{kBF16, {0, 2 * kWidth, kWidth}};
  const NoRows copy_{kWidth}, wide_copy_{2 * kWidth};
};

TEST_P(NoGroups, NothingIsWrittenToTheCopiesOfAnActivation) {
  GroupedGemmGluArgs args;
  args.a = rows_;
  args.b = Weight(w1_);
  args.act = rows_;
  args.act_columnwise = copy_;
  args.tail = GetParam();
  EXPECT_TRUE(succeeds(run(context_, args)));
  EXPECT_TRUE(copy_.is_undamaged());
}

TEST_P(NoGroups, NothingIsWrittenToTheCopiesOfItsGradient) {
  GroupedGemmGluBackwardArgs args;
  args.grad_y = rows_;
  args.w2 = Weight(w_);
  args.z = wide_;
  args.grad_z = wide_;
  args.grad_z_columnwise = wide_copy_;
  args.act_columnwise = copy_;
  args.tail = GetParam();
  EXPECT_TRUE(succeeds(run(context_, args)));
  EXPECT_TRUE(copy_.is_undamaged());
  EXPECT_TRUE(wide_copy_.is_undamaged());
}

TEST_P(NoGroups, NothingIsWrittenToTheCopiesOfALayer) {
  GroupedMlpBackwardArgs args;
  args.recipe = MOIRE_RECIPE_FP8_BLOCK;
  args.x = rows_;
  args.w1 = Weight(w1_);
  args.w2 = Weight(w_);
  args.z = wide_;
  args.grad_y = rows_;
  args.grad_x = rows_;
  args.grad_z_columnwise = wide_copy_;
  args.act_columnwise = copy_;
  args.tail = GetParam();
  EXPECT_TRUE(succeeds(run(context_, args)));
  EXPECT_TRUE(copy_.is_undamaged());
  EXPECT_TRUE(wide_copy_.is_undamaged());
}

INSTANTIATE_TEST_SUITE_P(Tails, NoGroups, testing::Values(MOIRE_TAIL_ZERO, MOIRE_TAIL_UNTOUCHED),
                         [](const auto& tail) { return tail.param == 0 ? "Zero" : "Untouched"; });

TEST(NoGroupsAtAll, AreNotTheAbsentGroupsOfOneMatrix) {
  GroupedTensorOptions options;
  options.columnwise = true;
  const GroupedTensor none = GroupedTensor::ragged(Groups(), 64, options).value();
  EXPECT_EQ(none.view().num_matrices(), 0);
  const TestTensor source(kBF16, {0, 64});
  EXPECT_TRUE(succeeds(quantize(cpu(1), source, none)));
  EXPECT_TRUE(is_absent({nullptr, 0, 0}));
  EXPECT_FALSE(is_absent(present_groups({nullptr, 0, 0})));
  EXPECT_FALSE(is_absent({nullptr, 0, 3}));
}

}  // namespace
}  // namespace moire::test
