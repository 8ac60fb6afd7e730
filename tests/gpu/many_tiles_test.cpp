// More tiles than the GPU has blocks, so that each block works on several, one behind the other.
#include <cmath>
#include <vector>

#include "tests/gpu/gpu.h"
#include "tests/support/expect.h"
#include "tests/support/tensors.h"
#include "tests/support/tested.h"

namespace moire::test {
namespace {

class ManyTiles : public Gpu {};

// Gradients of 256 rows: a tile of 192 is followed by one of 64, in which some warpgroups have
// nothing to multiply. Those keep the pace of the others while warps of theirs may still be adding
// up the tile before.
TEST_F(ManyTiles, OfWeightGradientsWhoseHeightLeavesWarpgroupsIdle) {
  constexpr int64_t kGroups = 96, kRows = 448, kM = 256, kN = 512, kBefore = 2;
  TestTensor a(DType::kBF16, {kGroups * kRows, kM}), b(DType::kBF16, {kGroups * kRows, kN});
  a.fill(1), b.fill(1);
  std::vector<int64_t> offsets;
  for (int64_t g = 0; g <= kGroups; ++g) offsets.push_back(g * kRows);
  for (const DType dtype : {DType::kBF16, DType::kFP32}) {
    TestTensor d(dtype, {kGroups, kM, kN});
    d.fill(kBefore);
    GroupedGemmWgradArgs args;
    args.a = a, args.b = b, args.d = Weight(d);
    args.groups = Groups(offsets.data(), kGroups, kGroups * kRows);
    args.beta = 1;
    ASSERT_TRUE(succeeds(
        run(Tested::alone(context()), args, grouped_gemm_wgrad, grouped_gemm_wgrad_workspace)));
    int64_t wrong = 0;
    for (int64_t row = 0; row < kGroups * kM; ++row) {
      for (int64_t n = 0; n < kN; ++n) wrong += d.get(row, n) != kBefore + kRows;
    }
    EXPECT_EQ(wrong, 0) << dtype_name(dtype);
  }
}

// Rows of many groups whose values tell the group and the row, so that a result that ended up in
// another tile, or was overwritten by one, shows. F leaves half a tile of columns at the end.
struct Marked {
  static constexpr int64_t kGroups = 40, kRows = 300, kHidden = 64, kWidth = 192;
  static constexpr int64_t kInUse = kGroups * kRows;

  explicit Marked(int64_t tail)
      : capacity(kInUse + tail),
        z(DType::kBF16, {capacity, 2 * kWidth}),
        act(DType::kBF16, {capacity, kWidth}),
        probs(DType::kFP32, {capacity}) {
    for (int64_t g = 0; g <= kGroups; ++g) offsets.push_back(g * kRows);
    for (int64_t row = 0; row < capacity; ++row) {
      probs.as<float>()[row] = static_cast<float>(prob(row));
    }
  }
  Groups groups() const { return Groups(offsets.data(), kGroups, capacity); }

  static double gate(int64_t row) { return 1.0 + static_cast<double>(row / kRows % 8); }
  static double prob(int64_t row) { return 1.0 + static_cast<double>(row % 4); }
  static double silu(double x) { return x / (1 + std::exp(-x)); }
  // silu(gate) * 1 * prob, to a unit in the last place of BF16.
  static bool is_act(double found, int64_t row) {
    const double wanted = silu(gate(row)) * prob(row);
    return std::abs(found - wanted) <= wanted * 0x1p-7;
  }

  int64_t capacity;
  std::vector<int64_t> offsets;
  TestTensor z, act, probs;
};

TEST_F(ManyTiles, OfFc1WhoseActivationIsLeftToTheNextTile) {
  Marked m(0);
  TestTensor x(DType::kBF16, {m.capacity, Marked::kHidden});
  x.fill(1);
  TestTensor w1(DType::kBF16, {Marked::kGroups, 2 * Marked::kWidth, Marked::kHidden});
  for (int64_t row = 0; row < Marked::kGroups * 2 * Marked::kWidth; ++row) {
    const int64_t group = row / (2 * Marked::kWidth);
    const bool is_gate = row % (2 * Marked::kWidth) < Marked::kWidth;
    const double z = is_gate ? Marked::gate(group * Marked::kRows) : 1.0;
    for (int64_t k = 0; k < Marked::kHidden; ++k) w1.set(row, k, z / Marked::kHidden);
  }
  GroupedGemmGluArgs args;
  args.a = x, args.b = Weight(w1), args.probs = m.probs, args.z = m.z, args.act = m.act;
  args.groups = m.groups();
  ASSERT_TRUE(
      succeeds(run(Tested::alone(context()), args, grouped_gemm_glu, grouped_gemm_glu_workspace)));
  int64_t wrong = 0;
  for (int64_t row = 0; row < Marked::kInUse; ++row) {
    for (int64_t f = 0; f < Marked::kWidth; ++f) {
      wrong += m.z.get(row, f) != Marked::gate(row) || m.z.get(row, Marked::kWidth + f) != 1;
      wrong += !Marked::is_act(m.act.get(row, f), row);
    }
  }
  EXPECT_EQ(wrong, 0);
}

// Tiles of the tail have no products: they come right behind those of the last groups.
TEST_F(ManyTiles, OfTheGluBackwardInFrontOfALongTail) {
  Marked m(40000);
  TestTensor grad_y(DType::kBF16, {m.capacity, Marked::kHidden});
  grad_y.fill(1);
  TestTensor w2(DType::kBF16, {Marked::kGroups, Marked::kHidden, Marked::kWidth});
  w2.fill(1.0 / Marked::kHidden);  // grad_act is 1
  m.z.fill(1);
  for (int64_t row = 0; row < Marked::kInUse; ++row) {
    for (int64_t f = 0; f < Marked::kWidth; ++f) m.z.set(row, f, Marked::gate(row));
  }
  TestTensor grad_z(DType::kBF16, {m.capacity, 2 * Marked::kWidth});
  GroupedGemmGluBackwardArgs args;
  args.grad_y = grad_y, args.w2 = Weight(w2), args.z = m.z, args.probs = m.probs;
  args.grad_z = grad_z, args.act = m.act;
  args.groups = m.groups();
  args.tail = MOIRE_TAIL_ZERO;
  ASSERT_TRUE(succeeds(run(Tested::alone(context()), args, grouped_gemm_glu_backward,
                           grouped_gemm_glu_backward_workspace)));
  int64_t wrong = 0, not_zero = 0;
  for (int64_t row = 0; row < m.capacity; ++row) {
    for (int64_t f = 0; f < Marked::kWidth; ++f) {
      const double act = m.act.get(row, f), grad_up = grad_z.get(row, Marked::kWidth + f);
      if (row < Marked::kInUse) {  // with grad_act = up = 1, grad_up is act
        wrong += !Marked::is_act(act, row) || !Marked::is_act(grad_up, row);
      } else {
        not_zero += act != 0 || grad_up != 0;
      }
    }
  }
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(not_zero, 0);
}

}  // namespace
}  // namespace moire::test
