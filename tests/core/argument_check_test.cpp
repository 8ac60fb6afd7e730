// Messages say what was found and what was needed.
#include "core/argument_check.h"

#include <gtest/gtest.h>
#include <moire/glu.h>

#include <vector>

namespace moire {
namespace {

class ArgumentCheckTest : public testing::Test {
 protected:
  const Context context_ = Context::create().value();
  ArgumentCheck check_{"op", context_, ArgumentCheck::Purpose::kRun};
  ArgumentCheck sizing_{"op", context_, ArgumentCheck::Purpose::kSizeWorkspace};
  alignas(256) float memory_[64] = {};

  TensorView matrix(int64_t rows, int64_t columns) {
    return TensorView(memory_, DType::kFP32, {rows, columns});
  }
  std::string message() const { return check_.status().message(); }
};

TEST_F(ArgumentCheckTest, NamesShapeFoundAndNeeded) {
  EXPECT_FALSE(check_.tensor("d", matrix(4, 8), kFloatTypes, {{"capacity", 4}, {"n", 16}}));
  EXPECT_EQ(message(), "op: d is fp32 [4, 8], needs [capacity, n] = [4, 16]");
  EXPECT_EQ(check_.status().code(), Code::kInvalidArgument);
}

TEST_F(ArgumentCheckTest, KeepsTheFirstError) {
  check_.require(false, "first");
  check_.require(false, "second");
  EXPECT_EQ(message(), "op: first");
}

TEST_F(ArgumentCheckTest, NamesAbsentOperands) {
  check_.tensor("a", TensorView(), kFloatTypes, {{"m", 4}, {"k", 8}});
  EXPECT_EQ(message(), "op: a is absent, needs fp32, bf16 or fp16 [m, k] = [4, 8]");
}

TEST_F(ArgumentCheckTest, NamesDtypeFoundAndNeeded) {
  check_.tensor("probs", TensorView(memory_, DType::kBF16, {4}), kFP32Only, {{"capacity", 4}});
  EXPECT_EQ(message(), "op: probs is bf16 [4], needs fp32");
}

TEST_F(ArgumentCheckTest, RefusesUnknownDtype) {
  TensorView t = matrix(2, 2);
  t.dtype = 42;
  check_.tensor("a", t, kFloatTypes, {{"m", 2}, {"k", 2}});
  EXPECT_EQ(message(), "op: a is dtype 42 [2, 2], needs fp32, bf16 or fp16");
}

TEST_F(ArgumentCheckTest, RefusesNullAndMisalignedPointersButNotWhenSizing) {
  TensorView null = matrix(2, 2);
  null.data = nullptr;
  EXPECT_TRUE(sizing_.tensor("a", null, kFloatTypes, {{"m", 2}, {"k", 2}}));
  EXPECT_FALSE(check_.tensor("a", null, kFloatTypes, {{"m", 2}, {"k", 2}}));
  EXPECT_EQ(message(), "op: a is fp32 [2, 2] but its data pointer is null");

  ArgumentCheck other("op", context_, ArgumentCheck::Purpose::kRun);
  TensorView odd = matrix(2, 2);
  odd.data = reinterpret_cast<char*>(memory_) + 2;
  other.tensor("a", odd, kFloatTypes, {{"m", 2}, {"k", 2}});
  EXPECT_EQ(other.status().message(),
            "op: a is fp32 [2, 2] but its data pointer is not aligned to its 4-byte elements");
}

TEST_F(ArgumentCheckTest, AcceptsNullWhereThereIsNothing) {
  TensorView empty(nullptr, DType::kFP32, {0, 8});
  EXPECT_TRUE(check_.tensor("a", empty, kFloatTypes, {{"m", 0}, {"k", 8}}));
}

TEST_F(ArgumentCheckTest, RefusesOverlappingRowsNegativeSizesAndOverflow) {
  TensorView t = matrix(4, 8);
  t.row_stride = 7;
  check_.tensor("a", t, kFloatTypes, {{"m", 4}, {"k", 8}});
  EXPECT_EQ(message(), "op: a is fp32 [4, 8] with row stride 7: rows of 8 elements overlap");

  ArgumentCheck negative("op", context_, ArgumentCheck::Purpose::kRun);
  negative.ranked("a", matrix(-1, 8), kFloatTypes, 2);
  EXPECT_EQ(negative.status().message(), "op: a is fp32 [-1, 8]: sizes must not be negative");

  ArgumentCheck huge("op", context_, ArgumentCheck::Purpose::kRun);
  huge.ranked("a", matrix(int64_t{1} << 40, int64_t{1} << 40), kFloatTypes, 2);
  EXPECT_FALSE(huge.ok());
}

TEST_F(ArgumentCheckTest, NamesTheGroupOfABadOffset) {
  const int64_t decreasing[] = {0, 4, 2, 6};
  check_.groups(Groups(decreasing, 3, 8));
  EXPECT_EQ(message(), "op: group 1 has offsets 4 to 2, must not decrease");

  const int64_t large[] = {0, 4, 9};
  ArgumentCheck past("op", context_, ArgumentCheck::Purpose::kRun);
  past.groups(Groups(large, 2, 8));
  EXPECT_EQ(past.status().message(), "op: group 1 ends at row 9, past the capacity 8");

  const int64_t shifted[] = {1, 4};
  ArgumentCheck start("op", context_, ArgumentCheck::Purpose::kRun);
  start.groups(Groups(shifted, 1, 8));
  EXPECT_EQ(start.status().message(), "op: groups.offsets[0] is 1, must be 0");
  sizing_.groups(Groups(shifted, 1, 8));
  EXPECT_TRUE(sizing_.status().ok()) << "values are not read when sizing";
}

TEST_F(ArgumentCheckTest, RefusesMisalignedOffsetsAndLists) {
  auto* const odd = reinterpret_cast<char*>(memory_) + 4;
  check_.groups(Groups(reinterpret_cast<int64_t*>(odd), 2, 8));
  EXPECT_EQ(message(), "op: groups.offsets is not aligned to its 8-byte elements");

  ArgumentCheck list("op", context_, ArgumentCheck::Purpose::kRun);
  const Weight w(TensorView(nullptr, DType::kFP32, {1, 2, 3}), reinterpret_cast<void**>(odd));
  list.weight("w", w, kFloatTypes, {"G", 1}, {"out", 2}, {"in", 3});
  EXPECT_EQ(list.status().message(), "op: w.list is not aligned to its 8-byte pointers");

  ArgumentCheck index("op", context_, ArgumentCheck::Purpose::kRun);
  const TensorView row_idx(odd + 2, DType::kInt32, {3});
  index.ragged("x", matrix(2, 4), "row_idx", row_idx, Groups(nullptr, 0, 3), {"k", 4});
  EXPECT_NE(index.status().message().find("row_idx is int32 [3] but its data pointer is not"),
            std::string::npos);
}

TEST_F(ArgumentCheckTest, NamesPositionAndValueOfABadIndex) {
  int32_t values[] = {0, 3, -1, 7};
  const TensorView idx(values, DType::kInt32, {4});
  EXPECT_TRUE(check_.indices("row_idx", idx, 2, 0, 4)) << "only the used entries count";
  check_.indices("row_idx", idx, 4, -1, 7);
  EXPECT_EQ(message(), "op: row_idx[3] is 7, must be -1 to 6");
}

TEST_F(ArgumentCheckTest, NamesRowAndColumnOfABadIndexAndSkipsThePadding) {
  int64_t values[] = {0, 1, 99, 2, -2, 99};
  const TensorView idx(values, DType::kInt64, {2, 2}, 3);
  EXPECT_TRUE(check_.indices("topk_idx", idx, 3, 0, 3));
  check_.indices("topk_idx", idx, 4, -1, 3);
  EXPECT_EQ(message(), "op: topk_idx[1, 1] is -2, must be -1 to 2");
}

TEST_F(ArgumentCheckTest, FindsTheFirstBadIndexOfMany) {
  std::vector<int32_t> values(1000, 5);
  values[700] = values[900] = 8;
  check_.indices("row_idx", TensorView(values.data(), DType::kInt32, {1000}), 1000, 0, 8);
  EXPECT_EQ(message(), "op: row_idx[700] is 8, must be 0 to 7");
}

TEST_F(ArgumentCheckTest, ChecksWorkspaceSizeAndAlignment) {
  check_.workspace({memory_, 100}, 128);
  EXPECT_EQ(message(), "op: the workspace has 100 bytes, needs 128");
  EXPECT_EQ(check_.status().code(), Code::kOutOfMemory);
  ArgumentCheck aligned("op", context_, ArgumentCheck::Purpose::kRun);
  aligned.workspace({memory_ + 1, 200}, 128);
  EXPECT_EQ(aligned.status().message(), "op: the workspace is not 256-byte aligned");
}

TEST_F(ArgumentCheckTest, ChecksWeightsPackedAndListed) {
  float a[6], b[6];
  const void* list[] = {a, nullptr};
  const TensorView shape(nullptr, DType::kFP32, {2, 2, 3});
  check_.weight("w", Weight(shape, list), kFloatTypes, {"G", 2}, {"out", 2}, {"in", 3});
  EXPECT_EQ(message(), "op: w[1] of the list is null");
  list[1] = b;
  ArgumentCheck good("op", context_, ArgumentCheck::Purpose::kRun);
  EXPECT_TRUE(good.weight("w", Weight(shape, list), kFloatTypes, {"G", 2}, {"out", 2}, {"in", 3}));
  good.weight("w", Weight(shape, list, MOIRE_IN_OUT), kFloatTypes, {"G", 2}, {"out", 2}, {"in", 3});
  EXPECT_EQ(good.status().message(), "op: w is fp32 [2, 2, 3], needs [G, in, out] = [2, 3, 2]");
}

TEST_F(ArgumentCheckTest, ChecksActivationAndLayout) {
  check_.gated(Activation::clamped_swiglu(0), GluLayout(), 8);
  EXPECT_EQ(message(), "op: activation.limit is 0, must be positive (GPT-OSS uses 7)");
  ArgumentCheck layout("op", context_, ArgumentCheck::Purpose::kRun);
  layout.gated(Activation(), GluLayout::interleaved(3), 8);
  EXPECT_EQ(layout.status().message(), "op: layout.block is 3, must divide F = 8 (0: F)");
  ArgumentCheck ungated("op", context_, ArgumentCheck::Purpose::kRun);
  ungated.gated(Activation(), moire_glu_layout{4, MOIRE_UNGATED}, 8);
  EXPECT_EQ(ungated.status().message(),
            "op: layout.block is 4, must be 0 where layout.order is 2 (ungated)");
}

}  // namespace
}  // namespace moire
