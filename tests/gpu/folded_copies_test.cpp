// Copies as FP8 tensor cores read them: MXFP8 that the quantiser has folded, to the byte what
// core/fp8.h makes of the CPU's copies, and the scales of rows turned over, with which a product
// has the bits that it has with scales as they are.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "core/fp8.h"
#include "tests/gpu/gpu.h"
#include "tests/gpu/quantize_call.h"
#include "tests/support/expect.h"
#include "tests/support/grouped_gemm_cases.h"
#include "tests/support/ragged.h"
#include "tests/support/tested.h"

namespace moire::test {
namespace {

uint8_t byte_at(const TestTensor& t, int64_t i, int64_t j) {
  const TensorView view = t.view();
  return static_cast<const uint8_t*>(view.data)[i * view.stride() + j];
}
uint32_t bits_at(const TestTensor& t, int64_t i, int64_t j) {
  const TensorView view = t.view();
  uint32_t bits;
  std::memcpy(&bits, static_cast<const char*>(view.data) + 4 * (i * view.stride() + j), 4);
  return bits;
}

// Memory for the scales of rows, turned over.
TestTensor turned_scales(const Groups& groups, int64_t k) {
  return {DType::kFP32, {ceil_div(k, 128), transposed_rows(groups.capacity, groups.num_groups)}};
}

class GpuFolds : public Gpu {
 protected:
  // A call whose copies are those of the CPU's MXFP8.
  QuantizeCall on_cpu(Random& random, DType dtype, DType element, const Groups& groups, int64_t k) {
    QuantizeCall call(dtype, element, MOIRE_SCALING_MXFP8, groups, k);
    fill_hard(call.source, random, groups.capacity);
    EXPECT_TRUE(succeeds(quantize(Tested::finding(Context::create().value()), call.args)));
    call.args.scaling = MOIRE_SCALING_FP8_BLOCK;
    call.args.fractional_scales = kFoldedScales;
    return call;
  }
  void run_alone(const QuantizeArgs& args) {
    ASSERT_TRUE(succeeds(run(Tested::finding(Tested::alone(context())), args)));
  }

  struct Folded {
    uint8_t code = 0;
    bool is_nonzero = false;
  };
  // How many bytes of a folded copy differ, of `call`'s MXFP8: `at` and `scale_at` say where those
  // of element [i, j] are, and the scale of its block.
  template <class Format, class At, class ScaleAt>
  static int64_t differences(const QuantizeCall& call, int32_t direction, At at, ScaleAt scale_at) {
    const bool is_rowwise = direction == MOIRE_ROWWISE;
    const TestCopy& copy = is_rowwise ? call.rowwise : call.columnwise;
    const Groups groups(call.args.groups);
    const int64_t k = copy.data.view().columns();
    int64_t different = 0;
    for (int64_t g = 0; g < groups.num_groups; ++g) {
      const int64_t first = groups.offsets[g], end = groups.offsets[g + 1];
      const auto code = [&](int64_t i, int64_t j) {
        return is_rowwise ? byte_at(copy.scales, i, j / 32)
                          : byte_at(copy.scales, first / 32 + g + (i - first) / 32, j);
      };
      // The fold of `count` elements from [i, j] on, along their block.
      const auto fold = [&](int64_t i, int64_t j, int64_t count) {
        Folded folded;
        for (int64_t l = 0; l < count; ++l) {
          const int64_t row = is_rowwise ? i : i + l, column = is_rowwise ? j + l : j;
          const float element = fp8_to_float<Format>(byte_at(copy.data, row, column));
          folded.code = fold_code(folded.code, code(row, column));
          folded.is_nonzero |= element != 0 && std::isfinite(element);
        }
        return folded;
      };
      std::vector<Folded> blocks(k);
      for (int64_t i = first; i < end; ++i) {
        for (int64_t j = 0; j < k; ++j) {
          Folded& folded = blocks[is_rowwise ? j / 128 : j];
          if (is_rowwise && j % 128 == 0) folded = fold(i, j, std::min<int64_t>(128, k - j));
          if (!is_rowwise && (i - first) % 128 == 0) {
            folded = fold(i, j, std::min<int64_t>(128, end - i));
          }
          const uint8_t want =
              fold_element<Format>(byte_at(copy.data, i, j), code(i, j), folded.code);
          const float scale =
              folded.code == 0 && !folded.is_nonzero ? 1.0F : e8m0_to_float(folded.code);
          different += at(i, j) != want;
          different += scale_at(i, j, g) != bit_cast<uint32_t>(scale);
        }
      }
    }
    return different;
  }

  template <class Format>
  void expect_folded(const QuantizeCall& call) {
    const Groups groups(call.args.groups);
    const int64_t k = call.source.view().columns(), capacity = groups.capacity;
    const DType element = call.rowwise.data.view().type();
    const int64_t padded = transposed_rows(capacity, groups.num_groups);
    const auto canonical = [&](int32_t direction) {
      return TestCopy(element, MOIRE_SCALING_FP8_BLOCK, direction, groups, k);
    };
    const TestCopy rows = canonical(MOIRE_ROWWISE), columns = canonical(MOIRE_COLUMNWISE);
    const TestTensor turned = turned_scales(groups, k), transposed(element, {k, padded});
    const auto rows_differ = [&](const TestTensor& data, auto scale_at) {
      return differences<Format>(
          call, MOIRE_ROWWISE, [&](int64_t i, int64_t j) { return byte_at(data, i, j); }, scale_at);
    };
    const auto column_scale = [&](int64_t i, int64_t j, int64_t g) {
      const int64_t first = groups.offsets[g];
      return bits_at(columns.scales, first / 128 + g + (i - first) / 128, j);
    };
    QuantizeArgs args = call.args;
    args.rowwise = rows;
    args.columnwise = columns;
    ASSERT_NO_FATAL_FAILURE(run_alone(args));
    const auto scale_of_row = [&](int64_t i, int64_t j, int64_t) {
      return bits_at(rows.scales, i, j / 128);
    };
    EXPECT_EQ(rows_differ(rows.data, scale_of_row), 0);
    EXPECT_EQ(differences<Format>(
                  call, MOIRE_COLUMNWISE,
                  [&](int64_t i, int64_t j) { return byte_at(columns.data, i, j); }, column_scale),
              0);
    // Both as the tensor cores read them.
    const TestTensor again(element, {capacity, k});
    args.rowwise = Quantized(again, turned);
    args.columnwise = Quantized(transposed, columns.scales);
    ASSERT_NO_FATAL_FAILURE(run_alone(args));
    const auto turned_scale = [&](int64_t i, int64_t j, int64_t) {
      return bits_at(turned, j / 128, i);
    };
    EXPECT_EQ(rows_differ(again, turned_scale), 0);
    EXPECT_EQ(differences<Format>(
                  call, MOIRE_COLUMNWISE,
                  [&](int64_t i, int64_t j) {
                    const auto g = static_cast<int64_t>(group_of(groups, i));
                    const int64_t first = groups.offsets[g];
                    return byte_at(transposed, j, 128 * (first / 128 + g) + i - first);
                  },
                  column_scale),
              0);
    // MXFP8 itself beside the rows.
    const TestTensor rows_beside(element, {capacity, k});
    const TestCopy beside(element, MOIRE_SCALING_MXFP8, MOIRE_COLUMNWISE, groups, k);
    args.rowwise = Quantized(rows_beside, turned);
    args.columnwise = beside;
    args.tail = MOIRE_TAIL_UNTOUCHED;
    ASSERT_NO_FATAL_FAILURE(run_alone(args));
    EXPECT_EQ(rows_differ(rows_beside, turned_scale), 0);
    int64_t different = 0;
    for (int64_t g = 0; g < groups.num_groups; ++g) {
      const int64_t first = groups.offsets[g], end = groups.offsets[g + 1];
      for (int64_t i = first; i < end; ++i) {
        for (int64_t j = 0; j < k; ++j) {
          const int64_t block = first / 32 + g + (i - first) / 32;
          different += byte_at(beside.data, i, j) != byte_at(call.columnwise.data, i, j);
          different +=
              byte_at(beside.scales, block, j) != byte_at(call.columnwise.scales, block, j);
        }
      }
    }
    EXPECT_EQ(different, 0) << "MXFP8 beside rows";
    for (const TestTensor* t : {&rows.data, &rows.scales, &columns.data, &columns.scales, &again,
                                &turned, &transposed, &rows_beside, &beside.data, &beside.scales}) {
      EXPECT_TRUE(t->is_undamaged());
    }
  }

 private:
  static int64_t group_of(const Groups& groups, int64_t row) {
    int64_t g = 0;
    while (groups.offsets[g + 1] <= row) ++g;
    return g;
  }
};

TEST_F(GpuFolds, AsTheCpusCopiesAreFolded) {
  Random random;
  for (const auto& splits : std::vector<std::vector<int64_t>>{
           {1, 1, 0, 1, 127, 129, 32, 31, 33}, {300}, many_groups(), {0, 0, 64}}) {
    const Batch batch(splits, 37);
    for (const int64_t k : {8, 44, 136, 517}) {
      for (const DType dtype : {DType::kBF16, DType::kFP32, DType::kFP16}) {
        for (const DType element : {DType::kE4M3, DType::kE5M2}) {
          SCOPED_TRACE(testing::Message() << splits.size() << " groups, k " << k << ", "
                                          << dtype_name(dtype) << " to " << dtype_name(element));
          const QuantizeCall call = on_cpu(random, dtype, element, batch.groups(), k);
          element == DType::kE4M3 ? expect_folded<E4M3>(call) : expect_folded<E5M2>(call);
        }
      }
    }
  }
}

// The tail's rows are zeroed; beside MXFP8 itself they cannot be.
TEST_F(GpuFolds, WithATail) {
  Random random;
  const Batch batch({40, 90}, 60);
  const Groups& groups = batch.groups();
  const QuantizeCall call = on_cpu(random, DType::kBF16, DType::kE4M3, groups, 256);
  const TestCopy rows(DType::kE4M3, MOIRE_SCALING_FP8_BLOCK, MOIRE_ROWWISE, groups, 256);
  QuantizeArgs args = call.args;
  args.tail = MOIRE_TAIL_ZERO;
  args.rowwise = rows;
  args.columnwise = {};
  ASSERT_NO_FATAL_FAILURE(run_alone(args));
  int64_t different = 0;
  for (int64_t i = 130; i < groups.capacity; ++i) {
    for (int64_t j = 0; j < 256; ++j) different += byte_at(rows.data, i, j) != 0;
    for (int64_t j = 0; j < 2; ++j) different += bits_at(rows.scales, i, j) != 0;
  }
  EXPECT_EQ(different, 0);
  args.columnwise = call.columnwise;
  EXPECT_TRUE(fails(run(Tested::alone(context()), args), Code::kUnsupported,
                    "needs a tail that is left untouched"));
  args.scaling = MOIRE_SCALING_MXFP8;
  EXPECT_TRUE(fails(run(Tested::alone(context()), args), Code::kInvalidArgument,
                    "fractional_scales is 2 (folded)"));
}

// Whatever the splits are, nothing is written outside of the copies (StagedCall's guards).
TEST_F(GpuFolds, ByWrongSplitsInsideTheCopiesAlone) {
  Random random;
  Batch batch({5, 0, 18}, 2);
  const std::vector<int64_t> right = batch.offsets();
  QuantizeCall call(DType::kBF16, DType::kE4M3, MOIRE_SCALING_MXFP8, batch.groups(), 264);
  call.source.randomize(random);
  const int64_t rows = transposed_rows(25, 3);
  const TestTensor turned = turned_scales(batch.groups(), 264),
                   transposed(DType::kE4M3, {264, rows}), scales(DType::kFP32, {rows / 128, 264});
  call.args.scaling = MOIRE_SCALING_FP8_BLOCK;
  call.args.fractional_scales = kFoldedScales;
  call.args.rowwise = Quantized(call.rowwise.data, turned);
  call.args.tail = MOIRE_TAIL_UNTOUCHED;
  for (const moire_quantized& columnwise :
       {moire_quantized(Quantized(transposed, scales)), moire_quantized(call.columnwise)}) {
    call.args.columnwise = columnwise;
    for (const auto& [index, value] : std::vector<std::pair<size_t, int64_t>>{
             {0, 3}, {1, -4}, {2, 2}, {3, 26}, {3, int64_t{1} << 40}}) {
      batch.offsets()[index] = value;
      EXPECT_TRUE(fails(run(Tested::alone(context()), call.args), Code::kInvalidArgument, "group"));
      batch.offsets() = right;
      EXPECT_TRUE(succeeds(run(Tested::alone(context()), call.args)));
    }
  }
  for (const TestTensor& t : {call.rowwise.data, turned, transposed, scales, call.columnwise.data,
                              call.columnwise.scales}) {
    EXPECT_TRUE(t.is_undamaged());
  }
}

class TurnedScales : public Hopper {};

TEST_F(TurnedScales, GiveAProductTheSameBits) {
  Random random;
  const Batch batch({70, 0, 129, 5}, 9);
  for (const DType element : {DType::kE4M3, DType::kE5M2}) {
    GemmOptions o;
    o.a = {element, DType::kFP32};
    o.b = {DType::kE4M3, DType::kFP32};
    o.operands = o.output = DType::kBF16;
    o.accumulation = MOIRE_ACCUMULATE_FAST;
    const GemmCase c(random, batch, 208, 400, false, o);
    ASSERT_TRUE(succeeds(c.run(alone())));
    GroupedGemmArgs args = c.args();
    const TensorView scales(args.a_scales), d(args.d);
    const TestTensor turned = turned_scales(batch.groups(), 400);
    for (int64_t i = 0; i < batch.groups().capacity; ++i) {
      for (int64_t j = 0; j < scales.columns(); ++j) {
        const float scale = static_cast<const float*>(scales.data)[i * scales.stride() + j];
        static_cast<float*>(turned.view().data)[j * turned.view().stride() + i] = scale;
      }
    }
    const TestTensor found(DType::kBF16, {d.shape[0], d.shape[1]});
    args.a_scales = turned;
    args.d = found;
    EXPECT_EQ(policy(args).find("a_scales"), std::string::npos) << policy(args);
    ASSERT_TRUE(succeeds(run(alone(), args)));
    for (int64_t i = 0; i < 204; ++i) {
      const auto row = [&](const TensorView& t) {
        return static_cast<const char*>(t.data) + i * t.stride() * 2;
      };
      EXPECT_EQ(std::memcmp(row(found.view()), row(d), 2 * static_cast<size_t>(d.columns())), 0)
          << "row " << i;
    }
    EXPECT_TRUE(found.is_undamaged());
    // Whoever else multiplies says so, and so does a CPU.
    args.accumulation = MOIRE_ACCUMULATE_EXACT;
    EXPECT_TRUE(fails(run(alone(), args), Code::kUnsupported, "turned over"));
    EXPECT_TRUE(fails(run(Context::create().value(), args), Code::kInvalidArgument,
                      "which is turned over: needs contiguous rows, on a GPU"));
  }
}

}  // namespace
}  // namespace moire::test
