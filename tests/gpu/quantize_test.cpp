// The ops on 8 bits on the GPU beside the CPU, bit for bit: every BF16 input under scales of every
// size, what check() says of infinities and NaN.
#include <moire/quantize.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "core/float_formats.h"
#include "core/scale_shapes.h"
#include "staging/staged_call.h"
#include "tests/gpu/gpu.h"
#include "tests/gpu/quantize_call.h"
#include "tests/support/expect.h"
#include "tests/support/ragged.h"
#include "tests/support/tested.h"

namespace moire::test {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

testing::AssertionResult same(const TestCopy& a, const TestCopy& b) {
  for (const auto& [x, y] : {std::pair(&a.data, &b.data), std::pair(&a.scales, &b.scales)}) {
    const TensorView t = x->view();
    const auto* other = static_cast<const uint8_t*>(y->view().data);
    const auto bytes = static_cast<size_t>(t.columns() * dtype_size(t.type()));
    for (int64_t i = 0; i < t.num_rows(); ++i) {
      const int64_t at = i * t.stride() * dtype_size(t.type());
      if (std::memcmp(static_cast<const uint8_t*>(t.data) + at, other + at, bytes) != 0) {
        return testing::AssertionFailure() << "row " << i << " of " << t.num_rows() << " differs";
      }
    }
  }
  return testing::AssertionSuccess();
}

class GpuQuantize : public Gpu {
 protected:
  // The copies on the CPU and on the GPU.
  void expect_same_bytes(const QuantizeCall& call, const Groups& groups) {
    const int64_t k = TensorView(call.args.source).columns();
    const DType element = call.rowwise.data.view().type();
    QuantizeArgs args = call.args;
    const int32_t scaling = args.scaling;
    TestCopy found[2][2];
    for (int on_gpu = 0; on_gpu < 2; ++on_gpu) {
      for (const int32_t direction : {MOIRE_ROWWISE, MOIRE_COLUMNWISE}) {
        found[on_gpu][direction] = TestCopy(element, scaling, direction, groups, k);
      }
      args.rowwise = found[on_gpu][0];
      args.columnwise = found[on_gpu][1];
      const Context cpu = Context::create().value();
      const Tested on = on_gpu == 0 ? Tested::finding(cpu) : Tested::alone(context());
      ASSERT_TRUE(succeeds(quantize(on, args)));
    }
    EXPECT_TRUE(same(found[0][0], found[1][0])) << "rowwise";
    EXPECT_TRUE(same(found[0][1], found[1][1])) << "columnwise";
    if (scaling == MOIRE_SCALING_FP8_BLOCK) expect_same_transposed(call, found[0][1], groups);
    if (element != DType::kE4M3 || scaling != MOIRE_SCALING_MXFP8) return;
    for (const int32_t direction : {MOIRE_ROWWISE, MOIRE_COLUMNWISE}) {
      expect_same_values(call, found[0][direction], direction);
    }
  }

  // What becomes of a copy, on the CPU and on the GPU.
  void expect_same_of_copies(const QuantizeCall& call, const Groups& groups) {
    const TensorView source(call.args.source);
    const int32_t scaling = call.args.scaling;
    const Context cpu = Context::create().value();
    ASSERT_TRUE(succeeds(quantize(cpu, call.args)));
    for (const int32_t direction : {MOIRE_ROWWISE, MOIRE_COLUMNWISE}) {
      const bool from_rows = direction == MOIRE_ROWWISE;
      TestCopy copies[2];
      TestTensor values[2], scales[MOIRE_SCALES_SWIZZLED + 1][2];
      for (int on_gpu = 0; on_gpu < 2; ++on_gpu) {
        const Tested on = on_gpu == 0 ? Tested(cpu) : Tested::alone(context());
        copies[on_gpu] =
            TestCopy(DType::kE4M3, scaling, from_rows ? MOIRE_COLUMNWISE : MOIRE_ROWWISE, groups,
                     source.columns());
        ASSERT_TRUE(succeeds(requantize(on, call.requantized(direction, copies[on_gpu]))));
        values[on_gpu] = TestTensor(DType::kBF16, {groups.capacity, source.columns()});
        ASSERT_TRUE(succeeds(dequantize(on, call.dequantized(direction, values[on_gpu]))));
        if (scaling != MOIRE_SCALING_MXFP8) continue;
        for (const int32_t layout :
             {MOIRE_SCALES_DENSE, MOIRE_SCALES_PADDED, MOIRE_SCALES_SWIZZLED}) {
          TestTensor& target = scales[layout][on_gpu];
          target = scales_in(layout, direction, groups, source.columns());
          ConvertScalesArgs convert;
          convert.source = (from_rows ? call.rowwise : call.columnwise).scales;
          convert.target = target;
          convert.to = layout;
          convert.direction = direction;
          convert.k = source.columns();
          convert.groups = groups;
          ASSERT_TRUE(succeeds(convert_scales(on, convert)));
        }
      }
      EXPECT_TRUE(same(copies[0], copies[1])) << "requantized, direction " << direction;
      EXPECT_TRUE(same_bits(values[0], values[1])) << "dequantized, direction " << direction;
      if (scaling != MOIRE_SCALING_MXFP8) continue;
      for (int32_t layout = MOIRE_SCALES_DENSE; layout <= MOIRE_SCALES_SWIZZLED; ++layout) {
        EXPECT_TRUE(same_bits(scales[layout][0], scales[layout][1]))
            << "scales, direction " << direction << ", layout " << layout;
      }
    }
  }

  // What the GPU transposes, where this is the CPU's columnwise copy.
  void expect_same_transposed(const QuantizeCall& call, const TestCopy& copy,
                              const Groups& groups) {
    const TensorView codes = copy.data.view(), scales = copy.scales.view();
    const int64_t k = codes.columns(), rows = transposed_rows(groups.capacity, groups.num_groups);
    const TestTensor transposed(codes.type(), {k, rows});
    const TestTensor found_scales(DType::kFP32, {scales.shape[0], scales.shape[1]});
    QuantizeArgs args = call.args;
    args.columnwise = Quantized(transposed, found_scales);
    ASSERT_TRUE(succeeds(quantize(Tested::alone(context()), args)));
    EXPECT_TRUE(transposed.is_undamaged());
    const auto code = [](const TensorView& t, int64_t i, int64_t j) {
      return static_cast<const uint8_t*>(t.data)[i * t.stride() + j];
    };
    int64_t different = 0;
    for (int64_t g = 0; g < groups.num_groups; ++g) {
      const int64_t first = groups.offsets[g], end = groups.offsets[g + 1];
      const int64_t block = first / 128 + g;
      for (int64_t j = 0; j < k; ++j) {
        for (int64_t i = 0; i < round_up(end - first, 128); ++i) {
          const uint8_t want = first + i < end ? code(codes, first + i, j) : 0;
          different += code(transposed, j, 128 * block + i) != want;
        }
        for (int64_t b = block; b < block + ceil_div(end - first, 128); ++b) {
          different += found_scales.get(b, j) != copy.scales.get(b, j);
        }
      }
    }
    EXPECT_EQ(different, 0) << "transposed";
  }

  // What the GPU makes as values, where this is the CPU's copy.
  void expect_same_values(const QuantizeCall& call, const TestCopy& copy, int32_t direction) {
    const TensorView like = copy.data.view();
    const auto memory = [&] { return TestTensor(DType::kBF16, {like.shape[0], like.shape[1]}); };
    const TestTensor values = memory(), decoded = memory();
    QuantizeArgs args = call.args;
    args.rowwise = args.columnwise = {};
    (direction == MOIRE_ROWWISE ? args.rowwise : args.columnwise) = Quantized(values, {});
    ASSERT_TRUE(succeeds(quantize(Tested::alone(context()), args)));
    DequantizeArgs decode;
    decode.source = copy;
    decode.scaling = MOIRE_SCALING_MXFP8;
    decode.direction = direction;
    decode.target = decoded;
    decode.groups = args.groups;
    decode.tail = args.tail;
    ASSERT_TRUE(succeeds(dequantize(Tested::finding(Context::create().value()), decode)));
    EXPECT_TRUE(same_bits(values, decoded)) << "values, direction " << direction;
  }
};

// Rows of 32 elements: 31 of the 65,536 and one that sets the scale, where it is the largest.
TEST_F(GpuQuantize, EveryBF16InputHasTheBytesOfTheCpu) {
  constexpr int64_t kPerRow = 31, kRows = 65536 / kPerRow + 1;
  const Batch batch({kRows});
  for (const DType element : {DType::kE4M3, DType::kE5M2}) {
    for (const int32_t scaling : {MOIRE_SCALING_MXFP8, MOIRE_SCALING_FP8_BLOCK}) {
      for (int exponent = -133; exponent <= 127; exponent += 4) {
        QuantizeCall call(DType::kBF16, element, scaling, batch.groups(), kPerRow + 1);
        auto* bits = call.source.as<uint16_t>();
        const int64_t stride = call.source.view().stride();
        for (int64_t i = 0; i < kRows; ++i) {
          call.source.set(i, kPerRow, std::ldexp(1.75, exponent));
          for (int64_t j = 0; j < kPerRow; ++j) {
            bits[i * stride + j] = static_cast<uint16_t>(std::min<int64_t>(65535, i * kPerRow + j));
          }
        }
        SCOPED_TRACE(testing::Message()
                     << dtype_name(element) << ", scaling " << scaling << ", 2^" << exponent);
        ASSERT_NO_FATAL_FAILURE(expect_same_bytes(call, batch.groups()));
        if (HasFailure()) return;
      }
    }
  }
}

// The same of a weight's tiles, in whose last column lies what sets the scale.
TEST_F(GpuQuantize, EveryBF16InputOfATileHasTheBytesOfTheCpu) {
  constexpr int64_t kPerRow = 127, kRows = 65536 / kPerRow + 1;
  const Context cpu = Context::create().value();
  for (const DType element : {DType::kE4M3, DType::kE5M2}) {
    for (int exponent = -133; exponent <= 127; exponent += 4) {
      TestWeight w(DType::kBF16, 1, kRows, kPerRow + 1, MOIRE_OUT_IN);
      for (int64_t i = 0; i < 65536; ++i) {
        const auto bits = static_cast<uint16_t>(i);
        const bool is_larger = std::abs(bf16_to_float(bits)) > std::ldexp(1.75, exponent);
        w.set(0, i / kPerRow, i % kPerRow, is_larger ? 0 : bf16_to_float(bits));
      }
      for (int64_t row = 0; row < kRows; ++row) w.set(0, row, kPerRow, std::ldexp(1.75, exponent));
      TestCopy copies[2];
      for (int on_gpu = 0; on_gpu < 2; ++on_gpu) {
        copies[on_gpu] =
            TestCopy(element, MOIRE_SCALING_FP8_TILE, MOIRE_ROWWISE, 1, kRows, kPerRow + 1);
        QuantizeWeightArgs args;
        args.source = w;
        args.scaling = MOIRE_SCALING_FP8_TILE;
        args.rowwise = copies[on_gpu];
        const Tested on = on_gpu == 0 ? Tested::finding(cpu) : Tested::alone(context());
        ASSERT_TRUE(succeeds(quantize_weight(on, args)));
      }
      EXPECT_TRUE(same(copies[0], copies[1])) << dtype_name(element) << ", 2^" << exponent;
    }
  }
}

TEST_F(GpuQuantize, AdversarialBlocksHaveTheBytesOfTheCpu) {
  Random random;
  for (const auto& splits : std::vector<std::vector<int64_t>>{
           {1, 1, 0, 1, 127, 129, 32, 31, 33}, {700}, many_groups(), {0, 0, 64}}) {
    const Batch batch(splits, 37);
    for (const DType dtype : {DType::kBF16, DType::kFP16, DType::kFP32}) {
      for (const int32_t scaling : {MOIRE_SCALING_MXFP8, MOIRE_SCALING_FP8_BLOCK}) {
        for (const auto& [k, element] :
             {std::pair(520, DType::kE4M3), {333, DType::kE4M3}, {333, DType::kE5M2}}) {
          for (const int32_t fractional : {0, 1}) {
            if (fractional == 1 && scaling == MOIRE_SCALING_MXFP8) continue;
            QuantizeCall call(dtype, element, scaling, batch.groups(), k);
            fill_hard(call.source, random, batch.groups().capacity);
            call.args.fractional_scales = fractional;
            ASSERT_NO_FATAL_FAILURE(expect_same_bytes(call, batch.groups()));
          }
        }
      }
    }
  }
}

TEST_F(GpuQuantize, ListedWeightsHaveTheBytesOfTheCpu) {
  Random random;
  const Context cpu = Context::create().value();
  for (const int32_t scaling :
       {MOIRE_SCALING_MXFP8, MOIRE_SCALING_FP8_BLOCK, MOIRE_SCALING_FP8_TILE}) {
    for (const int64_t num_groups : {3, 300, 2100}) {
      for (const int64_t k : {64, 133}) {
        const int64_t n = num_groups == 3 ? 300 : 33;
        const DType dtype = k == 64 ? DType::kBF16 : DType::kFP32;
        TestWeight w(dtype, num_groups, n, k, MOIRE_OUT_IN, true);
        w.randomize(random);
        SCOPED_TRACE(testing::Message()
                     << "scaling " << scaling << ", " << num_groups << " of " << n << " x " << k);
        for (const bool is_alone : {true, false}) {  // row-wise copies alone, or both
          TestCopy rowwise[2], columnwise[2];
          for (int on_gpu = 0; on_gpu < 2; ++on_gpu) {
            const auto copy = [&](int32_t direction) {
              return TestCopy(DType::kE4M3, scaling, direction, num_groups, n, k);
            };
            rowwise[on_gpu] = copy(MOIRE_ROWWISE);
            columnwise[on_gpu] = rowwise[on_gpu];
            QuantizeWeightArgs args;
            args.source = w;
            args.scaling = scaling;
            args.rowwise = rowwise[on_gpu];
            if (!is_alone && scaling != MOIRE_SCALING_FP8_TILE) {
              columnwise[on_gpu] = copy(MOIRE_COLUMNWISE);
              args.columnwise = columnwise[on_gpu];
            }
            const Tested on = on_gpu == 0 ? Tested(cpu) : Tested::alone(context());
            ASSERT_TRUE(succeeds(quantize_weight(on, args)));
          }
          EXPECT_TRUE(same(rowwise[0], rowwise[1])) << "rowwise";
          EXPECT_TRUE(same(columnwise[0], columnwise[1])) << "columnwise";
        }
      }
    }
  }
}

TEST_F(GpuQuantize, FindingsOfAListNameTheMatrix) {
  Random random;
  // Of one launch, of the second of two, and of both.
  for (const auto& [first, num_groups] : {std::pair(0, 300), {7, 300}, {1050, 1100}, {9, 1100}}) {
    TestWeight w(DType::kBF16, num_groups, 40, 64, MOIRE_OUT_IN, true);
    w.randomize(random);
    for (const int64_t g : {first, first + 1, num_groups - 1}) {
      w.set(g, g == first ? 39 : 0, 5, kNaN);
    }
    const TestCopy copy(DType::kE4M3, MOIRE_SCALING_MXFP8, MOIRE_ROWWISE, num_groups, 40, 64);
    QuantizeWeightArgs args;
    args.source = w;
    args.scaling = MOIRE_SCALING_MXFP8;
    args.rowwise = copy;
    staging::StagedCall staged;
    staged.add(args);
    ASSERT_TRUE(succeeds(staged.upload()));
    ASSERT_TRUE(succeeds(quantize_weight(context(), staged.on_device(args))));
    const std::string element = "source[" + std::to_string(first) + ", 39, 5]";
    EXPECT_TRUE(fails(context().check(), Code::kInvalidArgument, "quantize_weight: " + element));
  }
}

TEST_F(GpuQuantize, FindingsNameTheFirstElementAndFailNoCall) {
  Random random;
  const Batch batch({40, 0, 110, 300}, 50);
  for (const int32_t scaling : {MOIRE_SCALING_MXFP8, MOIRE_SCALING_FP8_BLOCK}) {
    for (const auto& [has_rows, is_transposed] :
         {std::pair(true, false), {false, false}, {true, true}, {false, true}}) {
      if (is_transposed && scaling == MOIRE_SCALING_MXFP8) continue;
      const Groups& groups = batch.groups();
      QuantizeCall call(DType::kBF16, DType::kE4M3, scaling, groups, 648);
      call.source.randomize(random);
      const TestTensor transposed(DType::kE4M3,
                                  {648, transposed_rows(groups.capacity, groups.num_groups)});
      if (!has_rows) call.args.rowwise = {};
      if (is_transposed) call.args.columnwise = Quantized(transposed, call.columnwise.scales);
      for (const auto& [row, column] : {std::pair(101, 637), {101, 638}, {140, 2}, {430, 0}}) {
        call.source.set(row, column, kNaN);
      }
      call.source.set(470, 0, kNaN);  // in the tail
      staging::StagedCall staged;
      staged.add(call.args);
      ASSERT_TRUE(succeeds(staged.upload()));
      const QuantizeArgs args = staged.on_device(call.args);
      ASSERT_TRUE(succeeds(quantize(context(), args)));
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      ASSERT_TRUE(succeeds(quantize(context(), args))) << "a finding is no error";
      EXPECT_TRUE(fails(context().check(), Code::kInvalidArgument,
                        "quantize: source[101, 637] is infinite or NaN: infinities were "
                        "saturated, NaN kept, in their own blocks"));
      EXPECT_TRUE(succeeds(context().check())) << "it was said once";
    }
  }
}

TEST_F(GpuQuantize, ManyFindingsNameTheFirst) {
  const Batch batch({5000});
  QuantizeCall call(DType::kFP32, DType::kE5M2, MOIRE_SCALING_MXFP8, batch.groups(), 1024);
  for (int64_t i = 0; i < 5000; ++i) {
    for (int64_t j = 0; j < 1024; ++j) call.source.set(i, j, i < 3 ? 1.0 : kNaN);
  }
  staging::StagedCall staged;
  staged.add(call.args);
  ASSERT_TRUE(succeeds(staged.upload()));
  const QuantizeArgs args = staged.on_device(call.args);
  for (int i = 0; i < 20; ++i) {
    ASSERT_TRUE(succeeds(quantize(context(), args)));
    EXPECT_TRUE(fails(context().check(), Code::kInvalidArgument, "quantize: source[3, 0] is"));
  }
}

// Rows that are read by vectors: the sums leave the same kernel, and are added by a second launch.
class SumsABias : public GpuQuantize, public testing::WithParamInterface<DType> {};
INSTANTIATE_TEST_SUITE_P(GpuQuantize, SumsABias,
                         testing::Values(DType::kBF16, DType::kFP16, DType::kFP32));

TEST_P(SumsABias, InTheReadOfItsTiles) {
  Random random;
  for (const auto& splits : std::vector<std::vector<int64_t>>{
           {1, 1, 0, 1, 127, 129, 32, 31, 33}, {700}, many_groups(), {0, 0, 64}}) {
    const Batch batch(splits, 37);
    const Groups& groups = batch.groups();
    const auto rows = transposed_rows(groups.capacity, groups.num_groups);
    for (const int32_t scaling : {MOIRE_SCALING_MXFP8, MOIRE_SCALING_FP8_BLOCK}) {
      for (const int64_t k : {8, 136, 520}) {
        QuantizeCall call(GetParam(), DType::kE4M3, scaling, groups, k);
        fill_hard(call.source, random, groups.capacity);
        const TestTensor transposed(DType::kE4M3, {k, rows}),
            values(DType::kBF16, {groups.capacity, k});
        TestTensor want(DType::kFP32, {groups.num_groups, k});
        want.randomize(random);
        const bool is_mx = scaling == MOIRE_SCALING_MXFP8;
        const moire_quantized third =
            is_mx ? Quantized(values, {}) : Quantized(transposed, call.columnwise.scales);
        const std::pair<moire_quantized, moire_quantized> copies[] = {
            {call.rowwise, {}},
            {{}, call.columnwise},
            {call.rowwise, call.columnwise},
            {{}, third},
            {call.rowwise, third}};
        const TestTensor sums = want;
        BiasBackwardArgs bias;
        bias.grad_y = call.source;
        bias.grad_bias = want;
        bias.beta = 1;
        bias.groups = groups;
        ASSERT_TRUE(succeeds(run(Tested::alone(context()), bias)));
        // Folded ones first: what is there in the end is compared to the CPU's.
        for (const int32_t fold : {kFoldedScales, int32_t{0}}) {
          if (is_mx && fold != 0) continue;
          for (const auto& [rowwise, columnwise] : copies) {
            TestTensor found = sums;
            QuantizeArgs args = call.args;
            args.fractional_scales = fold;
            args.rowwise = rowwise;
            args.columnwise = columnwise;
            args.grad_bias = found;
            args.beta = 1;
            const Context explaining = context().explaining();
            ASSERT_TRUE(succeeds(run(explaining, args)));
            EXPECT_EQ(explaining.explanation()[0].launches, 2);
            ASSERT_TRUE(succeeds(run(Tested::finding(Tested::alone(context())), args)));
            EXPECT_TRUE(same_bits(found, want))
                << "scaling " << scaling << ", k " << k << ", fold " << fold;
            EXPECT_TRUE(found.is_undamaged() && transposed.is_undamaged() && values.is_undamaged());
          }
        }
        ASSERT_NO_FATAL_FAILURE(expect_same_bytes(call, groups));
      }
    }
  }
}

// A row that is alone is read by vectors whatever the stride, and nothing at its other multiples.
TEST_F(GpuQuantize, OneRowOfAnyStrideHasTheBytesOfTheCpu) {
  Random random;
  const Batch batch({1});
  const Groups& groups = batch.groups();
  constexpr int64_t kK = 520;
  for (const DType dtype : {DType::kBF16, DType::kFP32}) {
    QuantizeCall call(dtype, DType::kE4M3, MOIRE_SCALING_FP8_BLOCK, groups, kK);
    call.source.randomize(random);
    const TestTensor want(DType::kE4M3, {kK, transposed_rows(groups.capacity, 1)});
    const TestTensor found(DType::kE4M3, {kK, transposed_rows(groups.capacity, 1)});
    const TestTensor sums(DType::kFP32, {1, kK});
    QuantizeArgs args = call.args;
    args.columnwise = Quantized(want, call.columnwise.scales);
    args.grad_bias = sums;
    ASSERT_TRUE(succeeds(run(Tested::alone(context()), args)));
    args.source.row_stride = kK + 1;
    args.columnwise = Quantized(found, call.columnwise.scales);
    ASSERT_TRUE(succeeds(run(Tested::alone(context()), args)));
    EXPECT_TRUE(same_bits(found, want));
    call.args.source.row_stride = kK + 1;
    ASSERT_NO_FATAL_FAILURE(expect_same_bytes(call, groups));
  }
}

// Enough row blocks for spans of four tiles, two short ones at once among them, and for the single
// tiles that come last.
TEST_F(GpuQuantize, SpansOfTilesHaveTheBytesOfTheCpu) {
  Random random;
  std::vector<int64_t> splits(1200, 0);
  for (const int64_t rows : {1, 63, 64, 65, 127, 128, 129, 200, 300}) {
    for (const int first : {0, 500, 1150}) splits[random.integer(first, first + 49)] += rows;
  }
  const Batch batch(splits, 37);
  for (const auto& [element, fractional] :
       {std::pair(DType::kE4M3, 0), {DType::kE4M3, 1}, {DType::kE5M2, 0}}) {
    for (const int64_t k : {1096, 1100}) {
      QuantizeCall call(DType::kBF16, element, MOIRE_SCALING_FP8_BLOCK, batch.groups(), k);
      fill_hard(call.source, random, batch.groups().capacity);
      call.args.fractional_scales = fractional;
      ASSERT_NO_FATAL_FAILURE(expect_same_bytes(call, batch.groups()));
    }
  }
}

// As many groups as the ops are made for; most are empty.
TEST_F(GpuQuantize, SixtyFiveThousandGroupsHaveTheBytesOfTheCpu) {
  Random random;
  std::vector<int64_t> splits(65536, 0);
  for (int i = 0; i < 500; ++i) splits[random.integer(0, 65535)] += random.integer(1, 3);
  splits[65535] = 70;
  const Batch batch(splits, 5);
  for (const int32_t scaling : {MOIRE_SCALING_MXFP8, MOIRE_SCALING_FP8_BLOCK}) {
    QuantizeCall call(DType::kBF16, DType::kE4M3, scaling, batch.groups(), 40);
    call.source.randomize(random);
    ASSERT_NO_FATAL_FAILURE(expect_same_bytes(call, batch.groups()));
    expect_same_of_copies(call, batch.groups());
    QuantizeCall other(DType::kBF16, DType::kE5M2, scaling, batch.groups(), 40);
    other.source.randomize(random);
    other.args.fractional_scales = scaling == MOIRE_SCALING_FP8_BLOCK ? 1 : 0;
    ASSERT_NO_FATAL_FAILURE(expect_same_bytes(other, batch.groups()));
  }
}

}  // namespace
}  // namespace moire::test
