// Offsets that are wrong on the device, and what is expected of a call that reads them.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "tests/gpu/gpu.h"
#include "tests/support/grouped_gemm_cases.h"

namespace moire::test {

inline const std::vector<int64_t> kSplits = {5, 0, 18};
inline constexpr int64_t kTail = 2;  // capacity 25

struct Wrong {
  size_t index;
  int64_t value;
  const char* sentence;
};

inline constexpr int64_t kLargest = std::numeric_limits<int64_t>::max();
inline const Wrong kWrong[] = {
    {0, 3, "groups.offsets[0] is 3, must be 0"},
    {1, -4, "group 0 has offsets 0 to -4, must not decrease"},
    {1, std::numeric_limits<int64_t>::min(), "group 0 has offsets 0 to -9223372036854775808"},
    {2, 2, "group 1 has offsets 5 to 2, must not decrease"},
    {3, 26, "group 2 ends at row 26, past the capacity 25"},
    {3, int64_t{1} << 40, "group 2 ends at row 1099511627776, past the capacity 25"},
    {3, kLargest, "group 2 ends at row 9223372036854775807, past the capacity 25"},
};

// Runs `call` with each wrong offset, then with the right ones again. `op` is what reports; "": one
// of those that the call consists of.
inline void expect_reported(Batch& batch, const std::string& op,
                            const std::function<Status()>& call) {
  const Status right = call();
  ASSERT_TRUE(succeeds(right));
  const std::vector<int64_t> good = batch.offsets();
  for (const Wrong& wrong : kWrong) {
    batch.offsets()[wrong.index] = wrong.value;
    const std::string sentence = op.empty() ? wrong.sentence : op + ": " + wrong.sentence;
    EXPECT_TRUE(fails(call(), Code::kInvalidArgument, sentence));
    batch.offsets() = good;
    EXPECT_TRUE(succeeds(call())) << "after offsets[" << wrong.index << "] was " << wrong.value;
  }
}

class BadSplits : public Gpu {
 protected:
  // The GEMMs of both types that have kernels of their own, and of codes, decoded or not.
  template <class F>
  void for_each_type(const F& f) {
    GemmOptions options;
    for (const DType dtype : {DType::kFP32, DType::kBF16}) {
      SCOPED_TRACE(dtype_name(dtype));
      options.operands = options.output = dtype;
      f(options);
    }
    for (const DType scales : {DType::kE8M0, DType::kFP32}) {
      options.a = options.b = {DType::kE4M3, scales};
      for (const int32_t accumulation : {MOIRE_ACCUMULATE_EXACT, MOIRE_ACCUMULATE_FAST}) {
        SCOPED_TRACE(testing::Message()
                     << "E4M3, scales " << dtype_name(scales) << ", sums " << accumulation);
        options.accumulation = accumulation;
        f(options);
      }
    }
  }
  // MXFP8's operands are read by dequantize first where the products are exact, and where the
  // kernels of FP8 do not take them.
  static std::string reporting(const char* op, const GemmOptions& options) {
    return options.a.scales == DType::kE8M0 ? "" : op;
  }
  Tested alone() const { return Tested::alone(context()); }

  Batch batch{kSplits, kTail};
};

}  // namespace moire::test
