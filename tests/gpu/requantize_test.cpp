// requantize on the GPU beside the CPU, bit for bit, where the scales decide its way: codes under
// powers of two that lie near each other, as far apart as FP16 allows and further, at the ends of
// their range, under other numbers and under none that matter, as those of zeros.
#include <moire/quantize.h>

#include <limits>
#include <utility>
#include <vector>

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
  // Scales that are no powers of two, too, and zeros under negative ones; infinity and NaN.
  bool has_others = false, has_specials = false;

  bool is_zero_row(int64_t row) const { return row % 11 == 3; }
  uint8_t most_of(int64_t column) const {
    return kMostOfColumn[static_cast<size_t>(column / 5) % std::size(kMostOfColumn)];
  }
  uint8_t element(DType type, int64_t row, int64_t column) {
    const uint8_t first_special = type == DType::kE5M2 ? E5M2::kFirstSpecial : E4M3::kFirstSpecial;
    const auto code = static_cast<uint8_t>(random.integer(0, 255));
    if (has_specials && random.integer(0, 500) == 0) return code | first_special;
    if (is_zero_row(row)) return code & 0x80;
    const auto magnitude = static_cast<uint8_t>((code & 0x7F) % (most_of(column) + 1));
    return (code & 0x80) | (magnitude < first_special ? magnitude : 1);
  }
  // Of zeros if that is so: then any.
  uint8_t mx_scale(const Powers& powers, bool is_of_zeros) {
    if (is_of_zeros) return static_cast<uint8_t>(random.integer(0, has_specials ? 255 : 254));
    return static_cast<uint8_t>(powers.code - random.integer(0, powers.spread));
  }
  float scale(const Powers& powers, bool is_of_zeros) {
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    const float scale = e8m0_to_float(mx_scale(powers, is_of_zeros));
    const int64_t other = random.integer(0, 40);
    if (has_others && other == 0) return scale * 0.75F;
    if (has_others && is_of_zeros && other < 5) return other < 3 ? -scale : -0.0F;
    return has_specials && is_of_zeros && other == 5 ? kInfinity : scale;
  }
  void fill(const TestCopy& copy, const Powers& powers, int32_t direction) {
    const TensorView data = copy.data.view(), scales = copy.scales.view();
    for (int64_t i = 0; i < data.num_rows(); ++i) {
      auto* const row = static_cast<uint8_t*>(data.data) + i * data.stride();
      for (int64_t j = 0; j < data.columns(); ++j) row[j] = element(data.type(), i, j);
    }
    for (int64_t i = 0; i < scales.num_rows(); ++i) {
      for (int64_t j = 0; j < scales.columns(); ++j) {
        const bool is_zero = direction == MOIRE_ROWWISE ? is_zero_row(i) : most_of(j) == 0;
        const bool is_of_zeros = is_zero && random.integer(0, 1) == 0;
        const int64_t at = i * scales.stride() + j;
        if (scales.type() == DType::kE8M0) {
          static_cast<uint8_t*>(scales.data)[at] = mx_scale(powers, is_of_zeros);
        } else {
          static_cast<float*>(scales.data)[at] = scale(powers, is_of_zeros);
        }
      }
    }
  }
  // Both directions, to both element types.
  void expect_same(const Groups& groups, DType from, int32_t scaling, int64_t k,
                   const Powers& powers) {
    SCOPED_TRACE(testing::Message() << dtype_name(from) << ", scaling " << scaling << ", codes "
                                    << powers.code << " and " << powers.spread << " less, others "
                                    << has_others << ", specials " << has_specials << ", k " << k);
    const QuantizeCall call(DType::kBF16, from, scaling, groups, k);
    fill(call.rowwise, powers, MOIRE_ROWWISE);
    fill(call.columnwise, powers, MOIRE_COLUMNWISE);
    for (const DType to : {DType::kE4M3, DType::kE5M2}) {
      for (const int32_t direction : {MOIRE_ROWWISE, MOIRE_COLUMNWISE}) {
        SCOPED_TRACE(testing::Message() << dtype_name(to) << ", direction " << direction);
        TestCopy copies[2];
        bool is_finite[2];
        for (int on_gpu = 0; on_gpu < 2; ++on_gpu) {
          copies[on_gpu] = TestCopy(to, scaling, 1 - direction, groups, k);
          const Tested on = on_gpu == 0 ? Tested::finding(cpu) : Tested::alone(context());
          ASSERT_TRUE(succeeds(requantize(on, call.requantized(direction, copies[on_gpu]))));
          is_finite[on_gpu] = on.check().ok();
        }
        EXPECT_TRUE(same_bits(copies[0].data, copies[1].data)) << "codes";
        EXPECT_TRUE(same_bits(copies[0].scales, copies[1].scales)) << "scales";
        EXPECT_EQ(is_finite[0], is_finite[1]) << "what check() says";
      }
    }
  }

  Random random;
  const Context cpu = Context::create().value();
};

TEST_F(Requantize, OfAnyScalesHasTheBytesOfTheCpu) {
  const Batch batch({33, 0, 133, 64, 1, 300}, 5);
  for (const int32_t scaling : {MOIRE_SCALING_MXFP8, MOIRE_SCALING_FP8_BLOCK}) {
    for (const DType from : {DType::kE4M3, DType::kE5M2}) {
      for (const Powers& powers : kPowers) {
        for (const auto& [others, specials] :
             {std::pair(false, false), {true, false}, {false, true}}) {
          has_others = others, has_specials = specials;
          const int64_t k = random.integer(0, 2) == 0 ? 205 : 264;
          ASSERT_NO_FATAL_FAILURE(expect_same(batch.groups(), from, scaling, k, powers));
        }
      }
    }
  }
}

// Row blocks enough for spans of two tiles, some of which go by pairs and some by floats.
TEST_F(Requantize, OfSpansHasTheBytesOfTheCpu) {
  std::vector<int64_t> splits(5000, 0);
  for (int i = 0; i < 60; ++i) splits[random.integer(0, 4999)] += random.integer(1, 140);
  const Batch batch(splits, 37);
  for (const int32_t scaling : {MOIRE_SCALING_MXFP8, MOIRE_SCALING_FP8_BLOCK}) {
    for (const bool are_odd : {false, true}) {
      has_others = has_specials = are_odd;
      ASSERT_NO_FATAL_FAILURE(
          expect_same(batch.groups(), DType::kE4M3, scaling, 600, Powers{130, 16}));
    }
  }
}

}  // namespace
}  // namespace moire::test
