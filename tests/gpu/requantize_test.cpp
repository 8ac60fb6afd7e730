// requantize on the GPU beside the CPU, bit for bit, where the scales decide its way: codes under
// powers of two that lie near each other, as far apart as FP16 allows and further, at the ends of
// their range, under other numbers and under none that matter, as those of zeros.
#include <moire/quantize.h>

#include <bit>

#include "core/fp8.h"
#include "tests/gpu/gpu.h"
#include "tests/gpu/quantize_call.h"
#include "tests/support/ragged.h"

namespace moire::test {
namespace {

// Scales from 2^(code - spread - 127) to 2^(code - 127).
struct Powers {
  int64_t code, spread;
};
constexpr Powers kPowers[] = {{127, 0},  {127, 3},  {120, 7},  {120, 8},   {120, 9},  {130, 14},
                              {130, 15}, {130, 16}, {130, 17}, {120, 30},  {64, 0},   {63, 0},
                              {66, 15},  {190, 5},  {191, 0},  {191, 15},  {238, 20}, {254, 0},
                              {254, 90}, {1, 1},    {20, 20},  {254, 254}, {127, 120}};

// Columns whose elements are at most so large: those of a column of small ones grow by more than
// FP16's factors do.
constexpr uint8_t kMostOfColumn[] = {0x7E, 0x7E, 0x38, 0x08, 0x03, 0x01, 0};

class Requantize : public Gpu {
 protected:
  uint8_t element(DType type, int64_t row, int64_t column, bool has_nan) {
    const uint8_t first_special = type == DType::kE5M2 ? E5M2::kFirstSpecial : E4M3::kFirstSpecial;
    if (has_nan && random.integer(0, 500) == 0) return first_special;
    const auto code = static_cast<uint8_t>(random.integer(0, 255));
    if (row % 11 == 3) return code & 0x80;  // rows of zeros
    const uint8_t most = kMostOfColumn[static_cast<size_t>(column / 5) % std::size(kMostOfColumn)];
    const auto magnitude = static_cast<uint8_t>((code & 0x7F) % (most + 1));
    return (code & 0x80) | (magnitude < first_special ? magnitude : 1);
  }
  void fill(const TestCopy& copy, const Powers& powers, bool are_others) {
    const TensorView data = copy.data.view(), scales = copy.scales.view();
    for (int64_t i = 0; i < data.num_rows(); ++i) {
      auto* const row = static_cast<uint8_t*>(data.data) + i * data.stride();
      for (int64_t j = 0; j < data.columns(); ++j) row[j] = element(data.type(), i, j, are_others);
    }
    for (int64_t i = 0; i < scales.num_rows(); ++i) {
      for (int64_t j = 0; j < scales.columns(); ++j) {
        const bool is_of_any = i % 11 == 3 && random.integer(0, 1) == 0;
        int64_t code = powers.code - random.integer(0, powers.spread);
        if (is_of_any) code = random.integer(0, 254);
        const int64_t at = i * scales.stride() + j;
        if (scales.type() == DType::kE8M0) {
          static_cast<uint8_t*>(scales.data)[at] = static_cast<uint8_t>(code);
          continue;
        }
        float scale = e8m0_to_float(static_cast<uint8_t>(code));
        if (are_others && random.integer(0, 40) == 0) scale *= 0.75F;
        static_cast<float*>(scales.data)[at] = scale;
      }
    }
  }
  void expect_same(const QuantizeCall& call, const Groups& groups, int32_t direction,
                   DType element) {
    const int64_t k = TensorView(call.args.source).columns();
    TestCopy copies[2];
    for (int on_gpu = 0; on_gpu < 2; ++on_gpu) {
      copies[on_gpu] = TestCopy(element, call.args.scaling, 1 - direction, groups, k);
      const Tested on = on_gpu == 0 ? Tested::finding(cpu) : Tested::alone(context());
      ASSERT_TRUE(succeeds(requantize(on, call.requantized(direction, copies[on_gpu]))));
    }
    const TestCopy& want = copies[0];
    EXPECT_TRUE(same_bits(want.data, copies[1].data)) << "codes";
    EXPECT_TRUE(same_bits(want.scales, copies[1].scales)) << "scales";
  }

  Random random;
  const Context cpu = Context::create().value();
};

TEST_F(Requantize, OfAnyScalesHasTheBytesOfTheCpu) {
  const Batch batch({33, 0, 133, 64, 1, 300}, 5);
  const auto elements = {DType::kE4M3, DType::kE5M2};
  for (const int32_t scaling : {MOIRE_SCALING_MXFP8, MOIRE_SCALING_FP8_BLOCK}) {
    for (const DType from : elements) {
      for (const Powers& powers : kPowers) {
        const bool are_others = random.integer(0, 4) == 0;
        const int64_t k = random.integer(0, 2) == 0 ? 205 : 264;
        SCOPED_TRACE(testing::Message()
                     << dtype_name(from) << ", scaling " << scaling << ", codes " << powers.code
                     << " and " << powers.spread << " less, others " << are_others << ", k " << k);
        const QuantizeCall call(DType::kBF16, from, scaling, batch.groups(), k);
        fill(call.rowwise, powers, are_others);
        fill(call.columnwise, powers, are_others);
        for (const DType to : elements) {
          for (const int32_t direction : {MOIRE_ROWWISE, MOIRE_COLUMNWISE}) {
            ASSERT_NO_FATAL_FAILURE(expect_same(call, batch.groups(), direction, to))
                << dtype_name(to) << ", direction " << direction;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace moire::test
