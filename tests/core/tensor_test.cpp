// Views, weights and arenas: where elements lie.
#include <gtest/gtest.h>
#include <moire/buffer.h>
#include <moire/tensor.h>

#include "core/arena.h"

namespace moire {
namespace {

TEST(TensorView, DescribesItself) {
  EXPECT_EQ(to_string(TensorView()), "absent");
  EXPECT_EQ(to_string(TensorView(nullptr, DType::kBF16, {4, 32})), "bf16 [4, 32]");
  EXPECT_EQ(to_string(TensorView(nullptr, DType::kFP32, {2, 4, 32}, 40)),
            "fp32 [2, 4, 32] with row stride 40");
  TensorView t(nullptr, DType::kFP32, {2, 4});
  t.rank = 7;
  EXPECT_EQ(to_string(t), "fp32 of rank 7");
  EXPECT_EQ(t.columns(), 0);
  t.rank = -1;
  EXPECT_EQ(to_string(t), "fp32 of rank -1");
}

TEST(TensorView, IsCutAlongItsFirstDimension) {
  float memory[2 * 3 * 8] = {};
  const TensorView entries(memory, DType::kFP32, {48});
  const TensorView rows(memory, DType::kFP32, {6, 5}, 8);
  const TensorView matrices(memory, DType::kFP32, {2, 3, 5}, 8);
  EXPECT_EQ(entries.slice(7, 2).data, memory + 7);
  EXPECT_EQ(to_string(entries.slice(7, 2)), "fp32 [2]");
  EXPECT_EQ(rows.slice(4, 2).data, memory + 32);
  EXPECT_EQ(to_string(rows.slice(4, 2)), "fp32 [2, 5] with row stride 8");
  EXPECT_EQ(matrices.slice(1, 1).data, memory + 24);
  EXPECT_EQ(to_string(matrices.slice(1, 1)), "fp32 [1, 3, 5] with row stride 8");
}

TEST(Weight, FindsTheMatrixOfAGroup) {
  float memory[2 * 3 * 8] = {};
  const Weight packed(TensorView(memory, DType::kFP32, {2, 3, 5}, 8));
  EXPECT_EQ(packed.matrix(1).data, memory + 24);
  EXPECT_EQ(packed.matrix(1).stride(), 8);
  EXPECT_EQ(packed.out_features(), 3);
  EXPECT_EQ(packed.in_features(), 5);
  const void* list[] = {memory + 1, memory + 30};
  const Weight listed(TensorView(nullptr, DType::kFP32, {2, 3, 5}), list, MOIRE_IN_OUT);
  EXPECT_EQ(listed.matrix(1).data, memory + 30);
  EXPECT_EQ(listed.out_features(), 5);
}

TEST(Arena, MeasuresWhatItHandsOut) {
  Arena measure;
  EXPECT_EQ(measure.take(100), nullptr);
  EXPECT_EQ(measure.take(DType::kBF16, 10, 20).data, nullptr);
  EXPECT_EQ(measure.used(), 256U + 512U);
  Buffer memory(measure.used());
  Arena carve(memory.workspace());
  EXPECT_EQ(carve.take(100), memory.data());
  EXPECT_EQ(carve.take(DType::kBF16, 10, 20).data, static_cast<char*>(memory.data()) + 256);
}

TEST(Buffer, IsAlignedAndZeroed) {
  const Tensor t(DType::kFP32, {3, 5});
  EXPECT_EQ(reinterpret_cast<uintptr_t>(t.view().data) % 256, 0U);
  for (int i = 0; i < 15; ++i) EXPECT_EQ(t.as<float>()[i], 0);
  EXPECT_TRUE(Tensor(DType::kFP32, {0, 5}).view().is_present());
}

TEST(Tensor, SaysThatImpossibleSizesHaveNoMemory) {
  EXPECT_TRUE(Tensor(DType::kFP32, {3, 4}).ok());
  EXPECT_TRUE(Tensor(DType::kFP32, {0, 4}).ok());
  EXPECT_FALSE(Tensor(DType::kFP32, {-3, 4}).ok());
  EXPECT_FALSE(Tensor(DType::kFP32, {int64_t{1} << 31, int64_t{1} << 31, int64_t{1} << 31}).ok());
  EXPECT_FALSE(Buffer(SIZE_MAX).ok());
}

}  // namespace
}  // namespace moire
