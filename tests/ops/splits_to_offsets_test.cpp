// splits_to_offsets: every kind, type and output form against prefix sums, and what bad splits get.
#include <gtest/gtest.h>
#include <moire/groups.h>

#include <limits>
#include <numeric>

#include "tests/support/expect.h"
#include "tests/support/ragged.h"

namespace moire::test {
namespace {

constexpr DType kIndex[] = {DType::kInt32, DType::kInt64};

// Offsets with the leading zero.
std::vector<int64_t> offsets_of(const std::vector<int64_t>& splits) {
  std::vector<int64_t> out(splits.size() + 1);
  std::partial_sum(splits.begin(), splits.end(), out.begin() + 1);
  return out;
}

// What the caller of each kind passes.
std::vector<int64_t> as_kind(int32_t kind, const std::vector<int64_t>& splits) {
  std::vector<int64_t> offsets = offsets_of(splits);
  if (kind == MOIRE_SPLITS) return splits;
  if (kind == MOIRE_ENDS) offsets.erase(offsets.begin());
  return offsets;
}

std::vector<int64_t> wanted(const std::vector<int64_t>& splits, int64_t multiplier,
                            bool leading_zero) {
  std::vector<int64_t> out = offsets_of(splits);
  for (int64_t& x : out) x *= multiplier;
  if (!leading_zero) out.erase(out.begin());
  return out;
}

void check_every_form(const std::vector<int64_t>& splits) {
  const auto num_groups = static_cast<int64_t>(splits.size());
  for (const int threads : {1, 3}) {
    const Tested context = tested(threads);
    for (const DType in : kIndex) {
      for (const int32_t kind : {MOIRE_SPLITS, MOIRE_ENDS, MOIRE_OFFSETS}) {
        TestTensor a(DType::kInt64, {num_groups + 1}), b(DType::kInt32, {num_groups}),
            c(DType::kInt64, {num_groups}), d(DType::kInt32, {num_groups + 1});
        const OffsetsOutput outputs[] = {{a, 0, 0}, {b, 7, 1}, {c, 5'000'000'000, 1}, {d, 1, 0}};
        const TestTensor values = index_tensor(in, as_kind(kind, splits));
        SplitsToOffsetsArgs args;
        args.splits = values;
        args.kind = kind;
        args.capacity = -1;
        args.outputs = outputs;
        args.num_outputs = 4;
        ASSERT_TRUE(succeeds(run(context, args)));
        EXPECT_TRUE(same_indices(a, wanted(splits, 1, true)));
        EXPECT_TRUE(same_indices(b, wanted(splits, 7, false)));
        EXPECT_TRUE(same_indices(c, wanted(splits, 5'000'000'000, false)));
        EXPECT_TRUE(same_indices(d, wanted(splits, 1, true)));
        for (const TestTensor* t : {&a, &b, &c, &d}) EXPECT_TRUE(t->is_undamaged());
      }
    }
  }
}

TEST(SplitsToOffsets, GiveEveryFormOfEveryRaggedCase) {
  for (const RaggedCase& c : ragged_table()) {
    SCOPED_TRACE(c.name);
    check_every_form(c.splits);
  }
}

TEST(SplitsToOffsets, TakeSeventyThousandGroups) {
  Random random;
  std::vector<int64_t> splits(70'000);
  for (int64_t& x : splits) x = random.integer(0, 40);
  check_every_form(splits);
}

TEST(SplitsToOffsets, TakeNoOutputs) {
  const TestTensor splits = index_tensor(DType::kInt32, {1, 2});
  SplitsToOffsetsArgs args;
  args.splits = splits;
  args.capacity = 3;
  EXPECT_TRUE(succeeds(splits_to_offsets(tested(), args)));
}

// A call that must fail with `text` and leave both of its outputs poisoned.
void expect_refused(DType dtype, int32_t kind, const std::vector<int64_t>& values, int64_t capacity,
                    int64_t multiplier, const std::string& text) {
  const auto num_groups = static_cast<int64_t>(values.size()) - (kind == MOIRE_OFFSETS ? 1 : 0);
  const TestTensor splits = index_tensor(dtype, values);
  TestTensor wide(DType::kInt64, {num_groups + 1}), narrow(DType::kInt32, {num_groups});
  const OffsetsOutput outputs[] = {{wide, 1, 0}, {narrow, multiplier, 1}};
  SplitsToOffsetsArgs args;
  args.splits = splits;
  args.kind = kind;
  args.capacity = capacity;
  args.outputs = outputs;
  args.num_outputs = 2;
  EXPECT_TRUE(fails(splits_to_offsets(cpu(), args), Code::kInvalidArgument, text));
  EXPECT_TRUE(same_bits(wide, TestTensor(DType::kInt64, {num_groups + 1})));
  EXPECT_TRUE(same_bits(narrow, TestTensor(DType::kInt32, {num_groups})));
}

TEST(SplitsToOffsets, NameGroupAndValueOfBadSplitsAndLeaveOutputsUntouched) {
  constexpr int64_t kMax64 = std::numeric_limits<int64_t>::max();
  for (const DType dtype : kIndex) {
    expect_refused(dtype, MOIRE_SPLITS, {3, -2, 4}, -1, 1,
                   "splits_to_offsets: group 1 has -2 rows, must not be negative");
    expect_refused(dtype, MOIRE_ENDS, {3, 7, 6}, -1, 1,
                   "group 2 ends at 6, before its start 7, must");
    expect_refused(dtype, MOIRE_ENDS, {-1, 7}, -1, 1, "group 0 ends at -1, before its start 0");
    expect_refused(dtype, MOIRE_OFFSETS, {0, 5, 4}, -1, 1, "group 1 ends at 4, before its start 5");
    expect_refused(dtype, MOIRE_OFFSETS, {1, 5}, -1, 1, "offsets[0] is 1, must be 0");
    expect_refused(dtype, MOIRE_SPLITS, {3, 4, 0}, 6, 1,
                   "group 1 ends at row 7, past the capacity 6");
    expect_refused(dtype, MOIRE_OFFSETS, {0, 3, 9}, 8, 1,
                   "group 1 ends at row 9, past the capacity 8");
    expect_refused(dtype, MOIRE_SPLITS, {2'000'000'000, 100'000'000, 100'000'000}, -1, 1,
                   "outputs[1]: group 2 ends at row 2200000000, times 1 exceeds int32");
    expect_refused(dtype, MOIRE_SPLITS, {1, 20, 300}, -1, kMax64 / 200,
                   "outputs[1]: group 0 ends at row 1, times 46116860184273879 exceeds int32");
  }
  expect_refused(DType::kInt64, MOIRE_SPLITS, {5, kMax64 - 4}, -1, 1,
                 "the rows up to group 1, which has 9223372036854775803, exceed int64");
}

TEST(SplitsToOffsets, RefuseProductsPastInt64) {
  const TestTensor splits = index_tensor(DType::kInt64, {4, int64_t{1} << 40});
  TestTensor out(DType::kInt64, {3});
  const OffsetsOutput outputs[] = {{out, int64_t{1} << 30, 0}};
  SplitsToOffsetsArgs args;
  args.splits = splits;
  args.capacity = -1;
  args.outputs = outputs;
  args.num_outputs = 1;
  EXPECT_TRUE(fails(splits_to_offsets(cpu(), args), Code::kInvalidArgument,
                    "group 1 ends at row 1099511627780, times 1073741824 exceeds int64"));
  EXPECT_TRUE(same_bits(out, TestTensor(DType::kInt64, {3})));
}

class BadCall : public testing::Test {
 protected:
  BadCall() { reset(); }
  void reset() {
    outputs[0] = {out, 1, 0};
    args = {};
    args.splits = splits;
    args.capacity = -1;
    args.outputs = outputs;
    args.num_outputs = 1;
  }
  void expect_error(const std::string& text) {
    EXPECT_TRUE(fails(splits_to_offsets(cpu(), args), Code::kInvalidArgument, text));
    reset();
  }
  TestTensor splits = index_tensor(DType::kInt32, {4, 5});
  TestTensor out{DType::kInt64, {3}};
  OffsetsOutput outputs[1];
  SplitsToOffsetsArgs args;
};

TEST_F(BadCall, GetsAMessageThatSaysWhatWasFoundAndNeeded) {
  args.splits = {};
  expect_error("splits is absent, needs int32 or int64 of rank 1");
  const TestTensor floats(DType::kFP32, {2}), matrix(DType::kInt32, {2, 2});
  args.splits = floats;
  expect_error("splits is fp32 [2], needs int32 or int64");
  args.splits = matrix;
  expect_error("splits has rank 2, needs rank 1");
  args.splits.data = nullptr;
  expect_error("splits is int32 [2] but its data pointer is null");
  args.kind = 3;
  expect_error("kind is 3, must be 0 to 2");
  args.capacity = -2;
  expect_error("capacity is -2, must be a number of rows, or -1");
  args.num_outputs = -1;
  expect_error("num_outputs is -1, must be 0 to 2^30");
  args.num_outputs = std::numeric_limits<int64_t>::max();
  expect_error("num_outputs is 9223372036854775807, must be 0 to 2^30");
  args.outputs = nullptr;
  expect_error("outputs is null but num_outputs is 1");
  outputs[0].multiplier = -8;
  expect_error("outputs[0].multiplier is -8, must not be negative");
  outputs[0].no_leading_zero = 9;
  expect_error("outputs[0].no_leading_zero is 9, must be 0 to 1");
  args.outputs = reinterpret_cast<OffsetsOutput*>(reinterpret_cast<char*>(outputs) + 4);
  expect_error("outputs is not aligned to its 8-byte structs");
  outputs[0].no_leading_zero = 1;
  expect_error("outputs[0].offsets is int64 [3], needs [G] = [2]");
  args.kind = MOIRE_OFFSETS;
  expect_error("outputs[0].offsets is int64 [3], needs [G + 1] = [2]");
  const TestTensor none = index_tensor(DType::kInt32, {});
  args.kind = MOIRE_OFFSETS;
  args.splits = none;
  expect_error("splits has 0 entries, offsets need at least 1");
}

TEST_F(BadCall, MayNotOverlapItsOutputs) {
  const TestTensor aliased = index_tensor(DType::kInt64, {1, 2, 3});
  outputs[0].offsets = aliased;
  args.splits = TensorView(aliased.view().data, DType::kInt64, {2});
  expect_error("outputs[0].offsets and splits overlap");
  const OffsetsOutput both[] = {{out, 1, 0}, {out, 2, 0}};
  args.outputs = both;
  args.num_outputs = 2;
  expect_error("outputs[1].offsets and outputs[0].offsets overlap");
}

TEST_F(BadCall, NeverReadsValuesWhileExplaining) {
  const Context explaining = cpu().explaining();
  const TestTensor garbage = index_tensor(DType::kInt32, {-7, -9});
  args.splits = garbage;
  ASSERT_TRUE(succeeds(splits_to_offsets(explaining, args)));
  const Explanation steps = explaining.explanation();
  ASSERT_EQ(steps.size(), 1U);
  EXPECT_EQ(steps[0].implementation, "cpu");
  EXPECT_EQ(steps[0].bytes_read, 8);
  EXPECT_EQ(steps[0].bytes_written, 24);
}

}  // namespace
}  // namespace moire::test
