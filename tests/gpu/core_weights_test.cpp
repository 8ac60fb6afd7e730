// Weights prepared for FP8 tensor cores: to the byte what core/fp8.h makes of the CPU's copies, as
// they lie and turned over, folded where they are MXFP8.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <tuple>
#include <vector>

#include "core/device_state.h"
#include "core/fp8.h"
#include "core/prepared_weight.h"
#include "tests/gpu/gpu.h"
#include "tests/mlp/prepared_weight.h"
#include "tests/ops/quantize_support.h"

namespace moire::test {
namespace {

constexpr int64_t kSide = 128;

uint8_t byte_at(const TensorView& t, int64_t g, int64_t i, int64_t j) {
  return static_cast<const uint8_t*>(t.data)[(g * t.shape[1] + i) * t.stride() + j];
}
uint32_t bits_at(const TensorView& t, int64_t g, int64_t i, int64_t j) {
  uint32_t bits;
  const auto* p = static_cast<const char*>(t.data);
  std::memcpy(&bits, p + 4 * ((g * t.shape[1] + i) * t.stride() + j), 4);
  return bits;
}

// The CPU's copy of a weight in one direction, of tiles the only one.
TestCopy quantized_on_cpu(const RecipeCase& c, const moire_weight& w, int32_t direction) {
  const TensorView shape(w.tensor);
  const int64_t* const s = shape.shape;
  TestCopy copy(DType::kE4M3, c.weight_scaling(), direction, s[0], s[1], s[2]);
  QuantizeWeightArgs args;
  args.source = w;
  args.scaling = c.weight_scaling();
  args.fractional_scales = c.fractional_scales;
  (direction == MOIRE_ROWWISE ? args.rowwise : args.columnwise) = copy;
  EXPECT_TRUE(succeeds(quantize_weight(Tested::finding(Context::create().value()), args)));
  return copy;
}

// How many bytes of `made` are not those of this copy, of which tensor cores read tiles, turned
// over perhaps.
int64_t differences(const RecipeCase& c, const TestCopy& copy, int32_t direction,
                    const moire_quantized& made, bool turns) {
  const TensorView codes = copy.data.view(), scales = copy.scales.view();
  const TensorView got(made.data), got_scales(made.scales);
  const bool is_rowwise = direction == MOIRE_ROWWISE;
  int64_t different = 0;
  for (int64_t g = 0; g < codes.shape[0]; ++g) {
    for (int64_t i0 = 0; i0 < codes.shape[1]; i0 += kSide) {
      for (int64_t j0 = 0; j0 < codes.shape[2]; j0 += kSide) {
        const int64_t i1 = std::min(i0 + kSide, codes.shape[1]);
        const int64_t j1 = std::min(j0 + kSide, codes.shape[2]);
        const auto code_of = [&](int64_t i, int64_t j) {
          return is_rowwise ? byte_at(scales, g, i, j / 32) : byte_at(scales, g, i / 32, j);
        };
        uint8_t folded = 0;
        bool is_nonzero = false;
        for (int64_t i = i0; i < i1 && !c.is_block(); ++i) {
          for (int64_t j = j0; j < j1; ++j) {
            const float element = fp8_to_float<E4M3>(byte_at(codes, g, i, j));
            folded = fold_code(folded, code_of(i, j));
            is_nonzero |= element != 0 && std::isfinite(element);
          }
        }
        const uint32_t scale =
            c.is_block()
                ? bits_at(scales, g, i0 / kSide, j0 / kSide)
                : bit_cast<uint32_t>(folded == 0 && !is_nonzero ? 1.0F : e8m0_to_float(folded));
        const int64_t row = i0 / kSide, column = j0 / kSide;
        different += bits_at(got_scales, g, turns ? column : row, turns ? row : column) != scale;
        for (int64_t i = i0; i < i1; ++i) {
          for (int64_t j = j0; j < j1; ++j) {
            uint8_t want = byte_at(codes, g, i, j);
            if (!c.is_block()) want = fold_element<E4M3>(want, code_of(i, j), folded);
            different += byte_at(got, g, turns ? j : i, turns ? i : j) != want;
          }
        }
      }
    }
  }
  return different;
}

// Values of every size in rows and in columns, zeros among them, and subnormals; a tile of zeros
// and one of nothing but the least numbers; infinities, and a block of 32 that is NaN both ways.
void fill_hard(TestWeight& w, Random& random, bool is_finite) {
  const TensorView shape(w.view().tensor);
  const int64_t rows = shape.shape[1], columns = shape.shape[2];
  const int most = shape.type() == DType::kFP16 ? 10 : 20;
  const auto draw = [&](int64_t kind) {
    if (kind == 0) return 0.0;
    if (kind == 1) return std::ldexp(random.normal(), static_cast<int>(random.integer(-40, most)));
    return std::ldexp(random.normal(), kind == 2 ? -130 : 0);
  };
  std::vector<int64_t> kinds(static_cast<size_t>(columns));
  for (int64_t& kind : kinds) kind = random.integer(0, 9);
  for (int64_t g = 0; g < shape.shape[0]; ++g) {
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t of_row = random.integer(0, 9);
      for (int64_t j = 0; j < columns; ++j) {
        w.set(g, i, j, draw(std::min(of_row, kinds[static_cast<size_t>(j)])));
        if (!is_finite && of_row == 3 && j % 61 == 7) {
          w.set(g, i, j, std::numeric_limits<double>::infinity() * static_cast<double>(i % 2));
        }
      }
    }
  }
  const auto fill = [&](int64_t g, int64_t i0, int64_t j0, int64_t side, const auto& value) {
    for (int64_t i = i0; i < i0 + side; ++i) {
      for (int64_t j = j0; j < j0 + side; ++j) w.set(g, i, j, value());
    }
  };
  fill(0, 0, 0, kSide, [] { return 0.0; });
  fill(0, kSide, kSide, kSide, [&] { return std::ldexp(random.normal(), -135); });
  if (!is_finite) {
    fill(1, 32, 64, 32, [] { return std::numeric_limits<double>::quiet_NaN(); });
  }
}

class GpuCoreWeights : public Gpu {
 protected:
  void expect_bytes(const RecipeCase& c, const moire_weight& w, bool forward_only) {
    PrepareWeightArgs args = prepare_args(c, w);
    args.forward_only = forward_only ? 1 : 0;
    const Prepared prepared = prepare(args, Tested::finding(Tested::alone(context())));
    ASSERT_EQ(prepared.weight.form, static_cast<int32_t>(WeightForm::kCores));
    const WeightCopies made = copies_of(prepared.weight);
    EXPECT_EQ(is_present(made.rowwise) && is_present(made.columnwise), !forward_only);
    const TestCopy rows = quantized_on_cpu(c, w, MOIRE_ROWWISE);
    if (is_present(made.rowwise)) {
      EXPECT_EQ(differences(c, rows, MOIRE_ROWWISE, made.rowwise, false), 0) << "as it lies";
    }
    if (!is_present(made.columnwise)) return;
    const int32_t direction = c.is_block() ? MOIRE_ROWWISE : MOIRE_COLUMNWISE;
    const TestCopy columns = c.is_block() ? rows : quantized_on_cpu(c, w, MOIRE_COLUMNWISE);
    EXPECT_EQ(differences(c, columns, direction, made.columnwise, true), 0) << "turned over";
  }
};

TEST_F(GpuCoreWeights, HaveTheBytesOfTheCpusCopies) {
  if (context().state().compute_capability != 90) GTEST_SKIP() << "form of Hopper alone";
  Random random;
  for (const RecipeCase& c : recipes()) {
    if (c.recipe == MOIRE_RECIPE_MXFP8 || c.gradient_dtype != 0) continue;
    for (const auto& [groups, n, k] : std::vector<std::tuple<int64_t, int64_t, int64_t>>{
             {1, 128, 128}, {2, 16, 16}, {3, 272, 144}, {2, 144, 400}, {1, 32, 1040}}) {
      for (const DType dtype : {DType::kBF16, DType::kFP16, DType::kFP32}) {
        for (const bool listed : {false, true}) {
          for (const int32_t layout : {MOIRE_OUT_IN, MOIRE_IN_OUT}) {
            SCOPED_TRACE(testing::Message()
                         << c << ": " << groups << " of " << n << " x " << k << ", "
                         << dtype_name(dtype) << ", listed " << listed << ", layout " << layout);
            TestWeight w(dtype, groups, layout == MOIRE_OUT_IN ? n : k,
                         layout == MOIRE_OUT_IN ? k : n, layout, listed);
            w.randomize(random);
            ASSERT_NO_FATAL_FAILURE(expect_bytes(c, w, listed));
            if (HasFailure()) return;
          }
        }
      }
    }
  }
}

TEST_F(GpuCoreWeights, HaveThemOfAdversarialTiles) {
  if (context().state().compute_capability != 90) GTEST_SKIP() << "form of Hopper alone";
  Random random;
  for (const RecipeCase& c : recipes()) {
    if (c.recipe == MOIRE_RECIPE_MXFP8 || c.gradient_dtype != 0) continue;
    for (const DType dtype : {DType::kBF16, DType::kFP16, DType::kFP32}) {
      for (const bool is_finite : {true, false}) {
        SCOPED_TRACE(testing::Message() << c << ", " << dtype_name(dtype) << ", " << is_finite);
        TestWeight w(dtype, 2, 304, 288);
        fill_hard(w, random, is_finite);
        ASSERT_NO_FATAL_FAILURE(expect_bytes(c, w, false));
      }
    }
  }
}

// Rows that are read by vectors with a stride, or element by element: with an odd stride, and where
// one matrix of a list does not begin at 16 bytes.
TEST_F(GpuCoreWeights, HaveThemWhereverRowsLie) {
  if (context().state().compute_capability != 90) GTEST_SKIP() << "form of Hopper alone";
  Random random;
  for (const RecipeCase& c : {RecipeCase{MOIRE_RECIPE_MXFP8_FAST}, {MOIRE_RECIPE_FP8_BLOCK}}) {
    for (const DType dtype : {DType::kBF16, DType::kFP16, DType::kFP32}) {
      SCOPED_TRACE(testing::Message() << c << ", " << dtype_name(dtype));
      for (const int64_t padding : {8, 3}) {
        const TestTensor packed = TestTensor(dtype, {3, 144, 272}, padding).randomize(random);
        ASSERT_NO_FATAL_FAILURE(expect_bytes(c, Weight(packed), false));
      }
      const TestWeight listed =
          TestWeight(dtype, 3, 144, 272, MOIRE_OUT_IN, true).randomize(random);
      const moire_weight all = listed;
      std::vector<const void*> matrices(all.list, all.list + 3);
      matrices[1] = static_cast<const char*>(matrices[1]) + dtype_size(dtype);
      ASSERT_NO_FATAL_FAILURE(
          expect_bytes(c, Weight(TensorView(all.tensor), matrices.data()), false));
    }
  }
}

TEST_F(GpuCoreWeights, OfMoreMatricesThanALaunchTakes) {
  if (context().state().compute_capability != 90) GTEST_SKIP() << "form of Hopper alone";
  Random random;
  for (const RecipeCase& c : {RecipeCase{MOIRE_RECIPE_MXFP8_FAST}, {MOIRE_RECIPE_FP8_BLOCK}}) {
    for (const bool listed : {false, true}) {
      TestWeight w(DType::kBF16, 1030, 32, 48, MOIRE_OUT_IN, listed);
      w.randomize(random);
      ASSERT_NO_FATAL_FAILURE(expect_bytes(c, w, false));
    }
  }
}

}  // namespace
}  // namespace moire::test
