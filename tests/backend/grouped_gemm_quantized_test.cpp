// The quantised outputs of the GEMMs with an activation: byte for byte what quantize makes of the
// stored tensor, wherever they are made.
#include <gtest/gtest.h>
#include <moire/quantize.h>

#include "backend/cpu/simd_targets.h"
#include "tests/backend/each_target.h"
#include "tests/support/grouped_gemm_cases.h"

namespace moire::test {
namespace {

constexpr Fp8 kFormats[] = {{DType::kE4M3, DType::kE8M0},
                            {DType::kE5M2, DType::kE8M0},
                            {DType::kE4M3, DType::kFP32},
                            {DType::kE5M2, DType::kFP32}};

// Both copies of a ragged output, poisoned.
struct Copies {
  Copies(const Batch& batch, const Fp8& f, int64_t columns)
      : format(f),
        row_data(f.element, {batch.capacity(), columns}, 5),
        row_scales(f.scales, {batch.capacity(), f.blocks(columns)}, 3),
        column_data(f.element, {batch.capacity(), columns}),
        column_scales(f.scales, {batch.capacity() / f.block() + batch.num_groups(), columns}, 2) {}

  moire_quantized rowwise() const { return {row_data, row_scales}; }
  moire_quantized columnwise() const { return {column_data, column_scales}; }
  void expect_same(const Copies& other, bool rows = true, bool columns = true) const {
    if (rows) {
      EXPECT_TRUE(same_bits(row_data, other.row_data));
      EXPECT_TRUE(same_bits(row_scales, other.row_scales));
    }
    if (columns) {
      EXPECT_TRUE(same_bits(column_data, other.column_data));
      EXPECT_TRUE(same_bits(column_scales, other.column_scales));
    }
    EXPECT_TRUE(row_data.is_undamaged() && row_scales.is_undamaged());
    EXPECT_TRUE(column_data.is_undamaged() && column_scales.is_undamaged());
  }

  Fp8 format;
  TestTensor row_data, row_scales, column_data, column_scales;
};

// What quantize makes of a stored tensor.
Copies quantized(const Tested& context, const Batch& batch, const Fp8& format,
                 const TestTensor& stored, int32_t tail) {
  Copies copies(batch, format, stored.view().columns());
  QuantizeArgs args;
  args.source = stored;
  args.scaling = format.scales == DType::kE8M0 ? MOIRE_SCALING_MXFP8 : MOIRE_SCALING_FP8_BLOCK;
  args.rowwise = copies.rowwise();
  args.columnwise = copies.columnwise();
  args.groups = batch.groups();
  args.tail = tail;
  EXPECT_TRUE(succeeds(quantize(context, args)));
  return copies;
}

// Which outputs a call is asked for.
enum class Ask { kStoredAndCopies, kCopies, kColumnwise };
constexpr Ask kAsks[] = {Ask::kStoredAndCopies, Ask::kCopies, Ask::kColumnwise};

void check_glu(Random& random, const Tested& context, const Batch& batch, int64_t f, int64_t k,
               const GemmOptions& o, const Fp8& format) {
  on_one_device(context, [&](const Tested& device) {
    GemmGluCase c(random, batch, f, k, o);
    ASSERT_TRUE(succeeds(c.run(device)));
    const Copies want = quantized(device, batch, format, c.act, o.tail);
    for (const Ask ask : kAsks) {
      SCOPED_TRACE(testing::Message()
                   << o << ", act " << format << ", F " << f << ", ask " << static_cast<int>(ask));
      const Copies got(batch, format, f);
      TestTensor act = c.act;
      act.poison();
      GroupedGemmGluArgs args = c.args();
      args.act = act;
      if (ask != Ask::kColumnwise) args.act_rowwise = got.rowwise();
      args.act_columnwise = got.columnwise();
      if (ask != Ask::kStoredAndCopies) {
        args.act = args.z = {};
        args.storage = static_cast<int32_t>(o.output);
      }
      ASSERT_TRUE(succeeds(run(device, args)));
      got.expect_same(want, ask != Ask::kColumnwise);
      if (ask == Ask::kStoredAndCopies) {
        EXPECT_TRUE(same_bits(act, c.act));
      }
    }
  });
}

void check_glu_backward(Random& random, const Tested& context, const Batch& batch, int64_t f,
                        int64_t k, const GemmOptions& o, const Fp8& format) {
  on_one_device(context, [&](const Tested& device) {
    GemmGluBackwardCase c(random, batch, f, k, o);
    const GemmGluBackwardCase fresh = c;
    ASSERT_TRUE(succeeds(c.run(device)));
    const Copies want_grad_z = quantized(device, batch, format, c.grad_z, o.tail);
    const Copies want_act = quantized(device, batch, format, c.act, o.tail);
    for (const Ask ask : kAsks) {
      SCOPED_TRACE(testing::Message() << o << ", copies " << format << ", F " << f << ", ask "
                                      << static_cast<int>(ask));
      GemmGluBackwardCase again = fresh;
      const Copies grad_z(batch, format, o.halves() * f), act(batch, format, f);
      GroupedGemmGluBackwardArgs args = again.args();
      if (ask != Ask::kColumnwise) args.grad_z_rowwise = grad_z.rowwise();
      args.grad_z_columnwise = grad_z.columnwise();
      args.act_columnwise = act.columnwise();
      if (ask != Ask::kStoredAndCopies) args.act = args.grad_z = {};
      ASSERT_TRUE(succeeds(run(device, args)));
      grad_z.expect_same(want_grad_z, ask != Ask::kColumnwise);
      act.expect_same(want_act, false);
      if (ask == Ask::kStoredAndCopies) {
        EXPECT_TRUE(same_bits(again.grad_z, c.grad_z));
        EXPECT_TRUE(same_bits(again.act, c.act));
      }
      EXPECT_TRUE(same_bits(again.grad_probs, c.grad_probs));
      EXPECT_TRUE(same_bits(again.grad_bias, c.grad_bias));
    }
  });
}

class QuantizedOutputsOnRaggedCases : public testing::TestWithParam<RaggedCase> {};
INSTANTIATE_TEST_SUITE_P(Table, QuantizedOutputsOnRaggedCases, testing::ValuesIn(ragged_table()),
                         case_name);

TEST_P(QuantizedOutputsOnRaggedCases, AreThoseOfTheStoredTensor) {
  Random random;
  const Tested context = tested(2);
  const Batch batch(GetParam());
  const int64_t f = batch.num_groups() > 100 ? 9 : 100;
  for (const int32_t layout : {MOIRE_OUT_IN, MOIRE_IN_OUT}) {
    for (const Fp8& format : {kFormats[layout], kFormats[2]}) {
      GemmOptions o;
      o.a = o.b = kFormats[0];
      o.output = DType::kBF16;
      o.layout = layout;
      o.tail = layout;
      o.beta = layout;
      check_glu(random, context, batch, f, 40, o, format);
      check_glu_backward(random, context, batch, f, 40, o, format);
    }
  }
}

TEST(QuantizedOutputs, TakeEveryGluLayoutAndStorage) {
  Random random;
  const Tested context = tested(2);
  const Batch batch({3, 70}, 1);
  for (const int64_t f : {192, 150, 33}) {
    for (const int64_t block : {0, 1, 2, 3, 6, 32, 64, 96}) {
      if (block != 0 && f % block != 0) continue;
      for (const int32_t order : {MOIRE_GATE_FIRST, MOIRE_UP_FIRST, MOIRE_UNGATED}) {
        if (order == MOIRE_UNGATED && block != 0) continue;
        GemmOptions o;
        o.output = block == 1 ? DType::kFP32 : block == 2 ? DType::kFP16 : DType::kBF16;
        o.layout = order == MOIRE_UP_FIRST ? MOIRE_IN_OUT : MOIRE_OUT_IN;
        o.glu = GluLayout::interleaved(block, order);
        o.extras = true;
        for (const Fp8& format : kFormats) {
          check_glu(random, context, batch, f, 16, o, format);
          check_glu_backward(random, context, batch, f, 16, o, format);
        }
      }
    }
  }
}

TEST(QuantizedOutputs, KeepNanToItsElement) {
  Random random;
  const Batch batch({40, 40});
  GemmOptions o;
  GemmGluCase c(random, batch, 70, 32, o);
  c.a.rows.set(3, 0, std::nan(""));
  on_one_device(Tested::finding(tested(1)), [&](const Tested& device) {
    ASSERT_TRUE(succeeds(c.run(device)));
    const Copies want = quantized(device, batch, kFormats[0], c.act, o.tail);
    const Copies got(batch, kFormats[0], 70);
    GroupedGemmGluArgs args = c.args();
    args.act_rowwise = got.rowwise();
    args.act_columnwise = got.columnwise();
    ASSERT_TRUE(succeeds(run(device, args)));
    got.expect_same(want);
    EXPECT_TRUE(std::isnan(got.row_data.get(3, 69)));
    EXPECT_FALSE(std::isnan(got.column_data.get(4, 69)));
  });
}

TEST(QuantizedOutputs, HaveTheSameBytesOnAnyThreadsAndInstructionSet) {
  Random random;
  const Batch batch({3, 0, 300, 21}, 2);
  GemmOptions o;
  o.output = DType::kBF16;
  GemmGluBackwardCase c(random, batch, 200, 60, o);
  for (const Fp8& format : {kFormats[0], kFormats[2]}) {
    const auto call = [&](const Context& context) {
      Copies copies(batch, format, 400);
      GroupedGemmGluBackwardArgs args = c.args();
      args.grad_z = {};
      args.grad_z_rowwise = copies.rowwise();
      args.grad_z_columnwise = copies.columnwise();
      EXPECT_TRUE(succeeds(run(context, args)));
      return copies;
    };
    const Copies one = call(cpu(1));
    call(cpu(3)).expect_same(one);
    cpu::for_each_target([&] { call(cpu(2)).expect_same(one); });
  }
}

TEST(QuantizedOutputs, ExplainSaysWhereTheyAreMade) {
  Random random;
  const Batch batch({3, 70});
  const auto policy = [&](int64_t f, const Fp8& format, const GemmOptions& o) {
    GemmGluBackwardCase c(random, batch, f, 16, o);
    const Copies copies(batch, format, 2 * f);
    GroupedGemmGluBackwardArgs args = c.args();
    args.grad_z_rowwise = copies.rowwise();
    args.grad_z_columnwise = copies.columnwise();
    const Context explaining = cpu(1).explaining();
    EXPECT_TRUE(succeeds(run(explaining, args)));
    return explaining.explanation()[0].policy;
  };
  GemmOptions o;
  EXPECT_TRUE(policy(64, kFormats[0], o)
                  .ends_with(", grad_z quantised rowwise and columnwise in the epilogue"));
  EXPECT_TRUE(policy(36, kFormats[0], o)
                  .ends_with(", grad_z quantised columnwise in the epilogue, grad_z quantised "
                             "rowwise after the product (blocks of 32 straddle the layout's gates "
                             "and ups)"));
  EXPECT_TRUE(policy(64, kFormats[2], o)
                  .ends_with(", grad_z quantised rowwise and columnwise after the product (blocks "
                             "of 128)"));
}

}  // namespace
}  // namespace moire::test
