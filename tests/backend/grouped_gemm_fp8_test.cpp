// The grouped GEMMs of FP8 operands: against the reference, and bit for bit against the same call
// on the decoded operands, where what is summed are products of decoded values.
#include <gtest/gtest.h>

#include <cstring>

#include "backend/cpu/simd_targets.h"
#include "reference/scaled.h"
#include "tests/backend/each_target.h"
#include "tests/support/grouped_gemm_cases.h"

namespace moire::test {
namespace {

constexpr Fp8 kNotQuantised{};
constexpr Fp8 kMx4{DType::kE4M3, DType::kE8M0};
constexpr Fp8 kMx5{DType::kE5M2, DType::kE8M0};
constexpr Fp8 kBlock4{DType::kE4M3, DType::kFP32};
constexpr Fp8 kBlock5{DType::kE5M2, DType::kFP32};

// What each operand may be, at least one of the two FP8.
struct Formats {
  Fp8 a, b;
  DType operands = DType::kBF16;  // of the one that is not
};
constexpr Formats kFormats[] = {
    {kMx4, kMx4},
    {kMx5, kMx4},
    {kBlock4, kBlock4},
    {kBlock5, kBlock4},
    {kMx4, kBlock4},
    {kBlock4, kMx5},
    {kMx4, kNotQuantised},
    {kNotQuantised, kMx4, DType::kFP32},
    {kBlock5, kNotQuantised, DType::kFP16},
};

GemmOptions options(const Formats& f, int32_t layout, DType output = DType::kFP32) {
  GemmOptions o;
  o.a = f.a;
  o.b = f.b;
  o.operands = f.operands;
  o.output = output;
  o.layout = layout;
  return o;
}

// The type of decoded operands on which the same call sums the same products in the same order
// (docs/numerics.md); kNone: there is none.
DType decoded_type(const Tested& device, const GemmOptions& o) {
  if (device.device() == Device::kCpu) return DType::kFP32;
  if (o.a.scales == DType::kFP32 && o.b.scales == DType::kFP32) return DType::kNone;
  const auto is_bf16 = [&](const Fp8& f) {
    return f.is_present() ? f.scales == DType::kE8M0 : o.operands == DType::kBF16;
  };
  return is_bf16(o.a) && is_bf16(o.b) ? DType::kBF16 : DType::kFP32;
}

// [rows in use, k] of decoded values as a tensor of `capacity` rows, the tail NaN.
TestTensor decoded_rows(DType type, const reference::Matrix& m, int64_t capacity) {
  TestTensor t(type, {capacity, m.columns});
  for (int64_t i = 0; i < m.rows; ++i) {
    for (int64_t j = 0; j < m.columns; ++j) t.set(i, j, m.at(i, j).value);
  }
  return t;
}

// Products contract over `in`, or over `out`.
TestWeight decoded_weight(DType type, const TestWeight& w, const TestTensor& scales, bool over_in) {
  const moire_weight from = w;
  const int64_t* shape = from.tensor.shape;
  const bool out_in = from.layout == MOIRE_OUT_IN;
  const int64_t out = out_in ? shape[1] : shape[2], in = out_in ? shape[2] : shape[1];
  TestWeight decoded(type, shape[0], out, in, from.layout);
  const int32_t direction = out_in == over_in ? MOIRE_ROWWISE : MOIRE_COLUMNWISE;
  for (int64_t g = 0; g < shape[0]; ++g) {
    const reference::Matrix m = reference::read_weight(w, scales, direction, g);
    for (int64_t i = 0; i < out; ++i) {
      for (int64_t j = 0; j < in; ++j) decoded.set(g, i, j, m.at(i, j).value);
    }
  }
  return decoded;
}

RaggedInput decoded_rowwise(DType type, const RaggedInput& in, const Batch& batch) {
  RaggedInput out;
  out.rows =
      decoded_rows(type, reference::read_rowwise(in.rows, in.scales, in.row_idx, batch.rows()),
                   batch.capacity());
  return out;
}

RaggedInput decoded_columnwise(DType type, const RaggedInput& in, const Batch& batch) {
  RaggedInput out;
  out.rows =
      decoded_rows(type, reference::read_columnwise(in.rows, in.scales, in.row_idx, batch.groups()),
                   batch.capacity());
  return out;
}

// The same case with both operands decoded beforehand.
GemmCase decoded(DType type, const GemmCase& c) {
  GemmCase d = c;
  d.a = decoded_rowwise(type, c.a, c.batch);
  d.b = decoded_weight(type, c.b, c.b_scales, !c.transpose_b);
  d.b_scales = {};
  return d;
}

GemmGluCase decoded(DType type, const GemmGluCase& c) {
  GemmGluCase d = c;
  d.a = decoded_rowwise(type, c.a, c.batch);
  d.b = decoded_weight(type, c.b, c.b_scales, true);
  d.b_scales = {};
  return d;
}

GemmGluBackwardCase decoded(DType type, const GemmGluBackwardCase& c) {
  GemmGluBackwardCase d = c;
  d.grad_y = decoded_rowwise(type, c.grad_y, c.batch);
  d.w2 = decoded_weight(type, c.w2, c.w2_scales, false);
  d.w2_scales = {};
  return d;
}

WgradCase decoded(DType type, const WgradCase& c) {
  WgradCase d = c;
  d.a = decoded_columnwise(type, c.a, c.batch);
  d.b = decoded_columnwise(type, c.b, c.batch);
  return d;
}

template <class Case>
void check(const Case& c, const Tested& context) {
  on_one_device(context, [&](const Tested& device) {
    const Case coded = c;
    ASSERT_NO_FATAL_FAILURE(coded.check(device));
    const DType type = decoded_type(device, c.options);
    if (type == DType::kNone) return;
    const Case same = decoded(type, c);
    ASSERT_TRUE(succeeds(same.run(device)));
    coded.expect_same(same);
  });
}

class Fp8GemmOnRaggedCases : public testing::TestWithParam<RaggedCase> {};
INSTANTIATE_TEST_SUITE_P(Table, Fp8GemmOnRaggedCases, testing::ValuesIn(ragged_table()), case_name);

TEST_P(Fp8GemmOnRaggedCases, EqualTheReferenceAndTheDecodedCall) {
  Random random;
  const Tested context = tested(2);
  const Batch batch(GetParam());
  const bool many = batch.num_groups() > 100;
  const int64_t n = many ? 7 : 41, k = many ? 9 : 300;
  for (const Formats& formats : {kFormats[0], kFormats[3]}) {
    for (const int32_t layout : {MOIRE_OUT_IN, MOIRE_IN_OUT}) {
      GemmOptions o = options(formats, layout);
      o.tail = layout;
      check(GemmCase(random, batch, n, k, false, o), context);
      check(GemmCase(random, batch, n, k, true, o), context);
      check(GemmGluCase(random, batch, n, k, o), context);
      check(GemmGluBackwardCase(random, batch, n, k, o), context);
      o.beta = layout;
      check(WgradCase(random, batch, n, k / 4, o), context);
    }
  }
}

// Every format beside every other, in every pass and orientation, gathered or not.
TEST(Fp8Gemm, TakesEveryFormat) {
  Random random;
  const Tested context = tested(2);
  const Batch batch({5, 0, 150}, 2);
  for (const Formats& formats : kFormats) {
    for (const int variant : {0, 1, 2, 3}) {
      GemmOptions o = options(formats, variant % 2, variant < 2 ? DType::kFP32 : DType::kBF16);
      o.row_idx = variant == 0 ? DType::kNone : variant == 1 ? DType::kInt32 : DType::kInt64;
      o.extras = variant != 2;
      o.padding = 3 * variant;
      check(GemmCase(random, batch, 37, 290, false, o), context);
      check(GemmCase(random, batch, 37, 290, true, o), context);
      check(GemmGluCase(random, batch, 37, 290, o), context);
      check(GemmGluBackwardCase(random, batch, 37, 290, o), context);
      check(WgradCase(random, batch, 37, 140, o), context);
    }
  }
}

TEST(Fp8Gemm, TakesEveryGluLayout) {
  Random random;
  const Tested context = tested(2);
  const Batch batch({3, 40}, 1);
  for (const Formats& formats : {kFormats[0], kFormats[2], kFormats[4]}) {
    for (const int32_t layout : {MOIRE_OUT_IN, MOIRE_IN_OUT}) {
      for (const int64_t block : {0, 1, 6, 8, 32, 96}) {
        for (const int32_t order : {MOIRE_GATE_FIRST, MOIRE_UP_FIRST, MOIRE_UNGATED}) {
          if (order == MOIRE_UNGATED && block != 0) continue;
          GemmOptions o = options(formats, layout, DType::kBF16);
          o.glu = GluLayout::interleaved(block, order);
          check(GemmGluCase(random, batch, 192, 40, o), context);
          check(GemmGluBackwardCase(random, batch, 192, 40, o), context);
        }
      }
    }
  }
}

TEST(Fp8Gemm, TakesShapesThatBreakTilesAndBlocks) {
  Random random;
  const Tested context = tested(2);
  const Batch batch({2, 17}, 1);
  struct Shape {
    int64_t n, k;
  };
  const Shape shapes[] = {{1, 1},    {5, 31},   {6, 32},   {7, 33},   {16, 127}, {17, 128},
                          {63, 129}, {64, 255}, {65, 257}, {97, 513}, {961, 65}, {300, 0}};
  for (const Shape& s : shapes) {
    for (const int32_t layout : {MOIRE_OUT_IN, MOIRE_IN_OUT}) {
      for (const Formats& formats : {kFormats[0], kFormats[2]}) {
        const GemmOptions o = options(formats, layout);
        check(GemmCase(random, batch, s.n, s.k, false, o), context);
        check(GemmGluCase(random, batch, s.n, s.k, o), context);
        check(GemmGluBackwardCase(random, batch, s.n, s.k, o), context);
        check(WgradCase(random, batch, s.n, s.k, o), context);
      }
    }
  }
}

// Rows, weights and outputs as Hopper's kernels take them.
TEST(Fp8Gemm, HasTheBitsOfDecodedOperandsWhereRowsAreAligned) {
  Random random;
  const Tested context = tested(2);
  const Batch batch({5, 0, 150}, 2);
  for (const Formats& formats : {kFormats[0], kFormats[1]}) {
    for (const bool gathered : {false, true}) {
      GemmOptions o = options(formats, MOIRE_OUT_IN, DType::kBF16);
      o.row_idx = gathered ? DType::kInt32 : DType::kNone;
      check(GemmCase(random, batch, 64, 160, false, o), context);
      check(GemmCase(random, batch, 64, 160, true, o), context);
      check(GemmGluCase(random, batch, 64, 160, o), context);
      check(GemmGluBackwardCase(random, batch, 64, 160, o), context);
      check(WgradCase(random, batch, 64, 160, o), context);
    }
  }
}

// Products with one: d is the decoded value.
TEST(Fp8Gemm, DecodesEveryCodeAtEveryScale) {
  constexpr int64_t kPairs = 256 * 256;
  const Batch batch({kPairs});
  for (const DType element : {DType::kE4M3, DType::kE5M2}) {
    TestTensor a(element, {kPairs, 1}), scales(DType::kE8M0, {kPairs, 1});
    TestTensor d(DType::kFP32, {kPairs, 1});
    for (int64_t i = 0; i < kPairs; ++i) {
      a.as<uint8_t>()[i] = static_cast<uint8_t>(i % 256);
      scales.as<uint8_t>()[i] = static_cast<uint8_t>(i / 256);
    }
    TestWeight one(DType::kFP32, 1, 1, 1);
    one.set(0, 0, 0, 1);
    GroupedGemmArgs args;
    args.a = a;
    args.a_scales = scales;
    args.b = one;
    args.d = d;
    args.groups = batch.groups();
    ASSERT_TRUE(succeeds(run(tested(2), args)));
    for (int64_t i = 0; i < kPairs; ++i) {
      const double want = reference::round_to(DType::kFP32, a.get(i, 0) * scales.get(i, 0));
      const double got = d.get(i, 0);
      ASSERT_TRUE(got == want || (std::isnan(got) && std::isnan(want)))
          << "code " << i % 256 << " at scale " << i / 256 << " is " << got << ", want " << want;
    }
  }
}

TEST(Fp8Gemm, HasTheSameBitsOnAnyThreadsAndInstructionSet) {
  Random random;
  const Batch batch({3, 0, 140, 21}, 2);
  for (const Formats& formats : {kFormats[1], kFormats[2]}) {
    for (const int32_t layout : {MOIRE_OUT_IN, MOIRE_IN_OUT}) {
      const EveryGemm fresh(random, batch, options(formats, layout));
      EveryGemm one = fresh;
      one.run(cpu(1));
      EveryGemm three = fresh;
      three.run(cpu(3));
      three.expect_same(one);
      cpu::for_each_target([&] {
        EveryGemm other = fresh;
        other.run(cpu(2));
        other.expect_same(one);
      });
    }
  }
}

TEST(Fp8Gemm, KeepsNanElementsAndNanScalesToTheirGroup) {
  Random random;
  const Tested context = tested(2);
  const Batch batch({33, 40});  // the second group's blocks start in the middle of 32 rows
  for (const Formats& formats : {kFormats[0], kFormats[2]}) {
    const GemmOptions o = options(formats, MOIRE_IN_OUT);
    GemmCase clean(random, batch, 48, 64, false, o);
    GemmCase dirty = clean;
    dirty.a.rows.as<uint8_t>()[3] = 0x7F;
    TensorView(dirty.a.scales).type() == DType::kE8M0 ? dirty.a.scales.as<uint8_t>()[5] = 0xFF
                                                      : dirty.a.scales.as<uint8_t>()[3] = 0x7F;
    WgradCase clean_w(random, batch, 20, 30, o);
    WgradCase dirty_w = clean_w;
    // Row 32 is the last of the first group.
    dirty_w.a.rows.as<uint8_t>()[20 * 32 + 4] = 0x7F;
    std::memset(dirty_w.b.scales.as<uint8_t>(), 0xFF, 4);
    for (GemmCase* c : {&clean, &dirty}) ASSERT_TRUE(succeeds(c->run(context)));
    for (WgradCase* c : {&clean_w, &dirty_w}) ASSERT_TRUE(succeeds(c->run(context)));
    EXPECT_TRUE(std::isnan(dirty.d.get(0, 0)));
    EXPECT_TRUE(std::isnan(dirty_w.d.get(0, 4, 0)));
    for (int64_t j = 0; j < 48; ++j) {
      for (int64_t i = 33; i < 73; ++i) ASSERT_EQ(dirty.d.get(i, j), clean.d.get(i, j));
    }
    for (int64_t i = 0; i < 20; ++i) {
      for (int64_t j = 0; j < 30; ++j) {
        ASSERT_EQ(dirty_w.d.get(1, i, j), clean_w.d.get(1, i, j));
        ASSERT_EQ(std::isnan(dirty_w.d.get(0, i, j)), i == 4 || j < (o.b.block() == 32 ? 4 : 1));
      }
    }
  }
}

}  // namespace
}  // namespace moire::test
