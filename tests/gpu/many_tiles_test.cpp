// More tiles than the GPU has blocks, so that each block works on several, one behind the other.
#include <cmath>
#include <string>
#include <vector>

#include "tests/gpu/gpu.h"
#include "tests/support/expect.h"
#include "tests/support/tensors.h"
#include "tests/support/tested.h"

namespace moire::test {
namespace {

class ManyTiles : public Gpu {
 protected:
  // The device without the CPU's help, and on Hopper without the portable kernels'.
  Tested fastest() const {
    ContextOptions options = context().options();
    if (has_sm90()) options.implementation = "sm90";
    return Tested::alone(context().sharing(options).value());
  }
};

// A product of rows whose values tell the row with weights whose values tell group and column, so
// that a result in another tile's place shows. Sums are exact: the first and the last eight of K
// count, the others are zero.
struct MarkedProduct {
  static constexpr int64_t kGroups = 40, kRows = 300, kEnds = 8;
  static constexpr int64_t kCapacity = (kGroups - 2) * kRows + 5000;

  MarkedProduct(int64_t columns, int64_t depth, bool transposed)
      : n(columns),
        k(depth),
        transpose_b(transposed),
        a(DType::kBF16, {kCapacity, k}),
        w(DType::kBF16, {kGroups, transposed ? k : n, transposed ? n : k}),
        d(DType::kBF16, {kCapacity, n}) {
    for (int64_t g = 0; g < kGroups; ++g) {
      offsets.push_back(offsets.back() + (is_empty(g) ? 0 : kRows));
    }
    for (int64_t row = 0; row < kCapacity; ++row) {
      for (int64_t i = 0; i < k; ++i) a.set(row, i, mark(row));
    }
    w.fill(0);
    for (int64_t g = 0; g < kGroups; ++g) {
      for (int64_t j = 0; j < n; ++j) {
        for (int64_t i = 0; i < kEnds; ++i) {
          set_weight(g, j, i);
          set_weight(g, j, k - 1 - i);
        }
      }
    }
  }

  static bool is_empty(int64_t g) { return g == 7 || g == kGroups - 1; }
  static double mark(int64_t row) { return 1.0 + static_cast<double>(row % 8); }
  static double weight(int64_t g, int64_t j) {
    return 1.0 + static_cast<double>((g + j / 16) % 16);
  }
  void set_weight(int64_t g, int64_t j, int64_t i) {
    const double value = weight(g, j) / (2 * kEnds);
    transpose_b ? w.set(g * k + i, j, value) : w.set(g * n + j, i, value);
  }
  int64_t num_wrong() const {
    int64_t wrong = 0;
    for (int64_t g = 0; g < kGroups; ++g) {
      for (int64_t row = offsets[g]; row < offsets[g + 1]; ++row) {
        for (int64_t j = 0; j < n; ++j) wrong += d.get(row, j) != mark(row) * weight(g, j);
      }
    }
    for (int64_t row = offsets.back(); row < kCapacity; ++row) {
      for (int64_t j = 0; j < n; ++j) wrong += d.get(row, j) != 0;
    }
    return wrong;
  }

  int64_t n, k;
  bool transpose_b;
  std::vector<int64_t> offsets = {0};
  TestTensor a, w, d;
};

TEST_F(ManyTiles, OfPlainProducts) {
  struct Size {
    int64_t n, k;
  };
  // On Hopper: two short sums, of one step and of many, whose warpgroups alternate; a long one.
  for (const Size size : {Size{768, 64}, Size{768, 1000}, Size{512, 2056}}) {
    for (const bool transpose_b : {false, true}) {
      SCOPED_TRACE(testing::Message()
                   << "n " << size.n << " k " << size.k << " transposed " << transpose_b);
      MarkedProduct p(size.n, size.k, transpose_b);
      GroupedGemmArgs args;
      args.a = p.a, args.b = Weight(p.w), args.d = p.d;
      args.transpose_b = transpose_b ? 1 : 0;
      args.groups = Groups(p.offsets.data(), MarkedProduct::kGroups, MarkedProduct::kCapacity);
      args.tail = MOIRE_TAIL_ZERO;
      for (int run_again = 0; run_again < 2; ++run_again) {  // the second finds the counter at 0
        p.d.poison();
        ASSERT_TRUE(succeeds(run(fastest(), args)));
        EXPECT_EQ(p.num_wrong(), 0);
      }
    }
  }
}

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
    ASSERT_TRUE(succeeds(run(fastest(), args)));
    int64_t wrong = 0;
    for (int64_t row = 0; row < kGroups * kM; ++row) {
      for (int64_t n = 0; n < kN; ++n) wrong += d.get(row, n) != kBefore + kRows;
    }
    EXPECT_EQ(wrong, 0) << dtype_name(dtype);
  }
}

// Rows of many groups whose values tell the group and the row, so that a result that ended up in
// another tile, or was overwritten by one, shows.
struct Marked {
  static constexpr int64_t kGroups = 40, kRows = 300;
  static constexpr int64_t kInUse = kGroups * kRows;

  Marked(int64_t width, int64_t tail)
      : f(width),
        capacity(kInUse + tail),
        z(DType::kBF16, {capacity, 2 * f}),
        act(DType::kBF16, {capacity, f}),
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

  int64_t f, capacity;
  std::vector<int64_t> offsets;
  TestTensor z, act, probs;
};

struct GluSizes {
  int64_t f, hidden;
};
class ManyGluTiles : public ManyTiles, public testing::WithParamInterface<GluSizes> {};

// Each of Hopper's tiles, and the last one whole or in part: 128 columns of F, or 96 in a longer
// sum; backward 128 or 192.
INSTANTIATE_TEST_SUITE_P(, ManyGluTiles,
                         testing::Values(GluSizes{128, 64}, GluSizes{192, 64}, GluSizes{448, 64},
                                         GluSizes{200, 512}, GluSizes{320, 512}),
                         [](const auto& sizes) {
                           return "F" + std::to_string(sizes.param.f) + "Hidden" +
                                  std::to_string(sizes.param.hidden);
                         });

TEST_P(ManyGluTiles, OfFc1) {
  const int64_t hidden = GetParam().hidden;
  Marked m(GetParam().f, 0);
  TestTensor x(DType::kBF16, {m.capacity, hidden});
  x.fill(1);
  TestTensor w1(DType::kBF16, {Marked::kGroups, 2 * m.f, hidden});
  for (int64_t row = 0; row < Marked::kGroups * 2 * m.f; ++row) {
    const int64_t group = row / (2 * m.f);
    const bool is_gate = row % (2 * m.f) < m.f;
    const double z = is_gate ? Marked::gate(group * Marked::kRows) : 1.0;
    for (int64_t k = 0; k < hidden; ++k) w1.set(row, k, z / static_cast<double>(hidden));
  }
  GroupedGemmGluArgs args;
  args.a = x, args.b = Weight(w1), args.probs = m.probs, args.z = m.z, args.act = m.act;
  args.groups = m.groups();
  ASSERT_TRUE(succeeds(run(fastest(), args)));
  int64_t wrong = 0;
  for (int64_t row = 0; row < Marked::kInUse; ++row) {
    for (int64_t f = 0; f < m.f; ++f) {
      wrong += m.z.get(row, f) != Marked::gate(row) || m.z.get(row, m.f + f) != 1;
      wrong += !Marked::is_act(m.act.get(row, f), row);
    }
  }
  EXPECT_EQ(wrong, 0);
}

// Tiles of the tail have no products: they come right behind those of the last groups.
TEST_P(ManyGluTiles, OfTheGluBackwardInFrontOfALongTail) {
  const int64_t hidden = GetParam().hidden;
  Marked m(GetParam().f, 40000);
  TestTensor grad_y(DType::kBF16, {m.capacity, hidden});
  grad_y.fill(1);
  TestTensor w2(DType::kBF16, {Marked::kGroups, hidden, m.f});
  w2.fill(1.0 / static_cast<double>(hidden));  // grad_act is 1
  m.z.fill(1);
  for (int64_t row = 0; row < Marked::kInUse; ++row) {
    for (int64_t f = 0; f < m.f; ++f) m.z.set(row, f, Marked::gate(row));
  }
  TestTensor grad_z(DType::kBF16, {m.capacity, 2 * m.f});
  GroupedGemmGluBackwardArgs args;
  args.grad_y = grad_y, args.w2 = Weight(w2), args.z = m.z, args.probs = m.probs;
  args.grad_z = grad_z, args.act = m.act;
  args.groups = m.groups();
  args.tail = MOIRE_TAIL_ZERO;
  ASSERT_TRUE(succeeds(run(fastest(), args)));
  int64_t wrong = 0, not_zero = 0;
  for (int64_t row = 0; row < m.capacity; ++row) {
    for (int64_t f = 0; f < m.f; ++f) {
      const double act = m.act.get(row, f), grad_up = grad_z.get(row, m.f + f);
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
