// The ops on 8 bits in CUDA graphs: what is captured once reads the splits of the moment.
#include <algorithm>
#include <functional>
#include <vector>

#include "staging/staged_call.h"
#include "tests/gpu/gpu.h"
#include "tests/gpu/quantize_call.h"
#include "tests/support/ragged.h"

namespace moire::test {
namespace {

// A call that was captured once and is replayed with other splits, a hundred times each: the bytes
// of the CPU. `prepare` makes the inputs of the splits.
class CapturedBytes : public Captures {
 protected:
  template <class A>
  void expect_every_splits(Status (*op)(const Context&, const A&), const A& args,
                           const std::vector<TestTensor*>& outputs,
                           const std::function<void()>& prepare) {
    const Context cpu = Context::create().value();
    prepare();
    staging::StagedCall staged;
    staged.add(args);
    ASSERT_TRUE(succeeds(staged.upload()));
    const A on_device = staged.on_device(args);
    ASSERT_TRUE(succeeds(op(on_stream(), on_device)));  // grants of shared memory are not captured
    ASSERT_TRUE(succeeds(on_stream().check()));
    ASSERT_NO_FATAL_FAILURE(capture([&] { return op(on_stream(), on_device); }));
    for (const auto& splits : std::vector<std::vector<int64_t>>{
             {100, 200, 300}, {640, 0, 0}, {0, 1, 0}, {33, 320, 287}, {0, 0, 0}}) {
      int64_t at = 0;
      for (size_t g = 0; g < splits.size(); ++g) batch_.offsets()[g + 1] = at += splits[g];
      prepare();
      for (TestTensor* out : outputs) out->poison();
      ASSERT_TRUE(succeeds(op(cpu, args)));
      std::vector<TestTensor> want;
      for (const TestTensor* out : outputs) want.push_back(*out);
      for (int run = 0; run < 100; ++run) {
        for (TestTensor* out : outputs) out->poison();
        ASSERT_TRUE(succeeds(staged.upload()));
        ASSERT_NO_FATAL_FAILURE(replay());
        ASSERT_TRUE(succeeds(on_stream().check()));
        ASSERT_TRUE(succeeds(staged.download()));
        for (size_t i = 0; i < outputs.size(); ++i) {
          ASSERT_TRUE(same_bits(*outputs[i], want[i])) << "output " << i << ", run " << run;
        }
      }
    }
  }
  const Groups& groups() const { return batch_.groups(); }

 private:
  Batch batch_{{100, 200, 300}, 40};
};

TEST_F(CapturedBytes, OfQuantizeAreThoseOfTheSplits) {
  Random random;
  for (const int32_t scaling : {MOIRE_SCALING_MXFP8, MOIRE_SCALING_FP8_BLOCK}) {
    QuantizeCall call(DType::kBF16, DType::kE4M3, scaling, groups(), 264);
    call.source.randomize(random);
    TestTensor sums(DType::kFP32, {3, 264});
    call.args.grad_bias = sums;
    size_t bytes[2];
    ASSERT_TRUE(succeeds(quantize_workspace(context(), call.args, &bytes[0])));
    ASSERT_TRUE(succeeds(quantize_workspace(Context::create().value(), call.args, &bytes[1])));
    const TestWorkspace workspace(std::max(bytes[0], bytes[1]));
    call.args.workspace = workspace.get();
    expect_every_splits(moire::quantize, call.args,
                        {&call.rowwise.data, &call.rowwise.scales, &call.columnwise.data,
                         &call.columnwise.scales, &sums},
                        [] {});
  }
}

TEST_F(CapturedBytes, OfGatheredRowsAndOtherElementsAreThoseOfTheSplits) {
  Random random;
  std::vector<int64_t> order(static_cast<size_t>(groups().capacity));
  for (int64_t& row : order) row = random.integer(0, groups().capacity - 1);
  const TestTensor row_idx = index_tensor(DType::kInt64, order);
  for (const int32_t scaling : {MOIRE_SCALING_MXFP8, MOIRE_SCALING_FP8_BLOCK}) {
    for (const DType element : {DType::kE4M3, DType::kE5M2}) {
      QuantizeCall call(DType::kBF16, element, scaling, groups(), 264);
      call.source.randomize(random);
      call.args.row_idx = row_idx;
      call.args.fractional_scales = scaling == MOIRE_SCALING_FP8_BLOCK ? 1 : 0;
      expect_every_splits(moire::quantize, call.args,
                          {&call.rowwise.data, &call.rowwise.scales, &call.columnwise.data,
                           &call.columnwise.scales},
                          [] {});
    }
  }
}

// Weights have no splits: what they were when the graph is replayed counts.
TEST_F(CapturedBytes, OfQuantizeWeightAreThoseOfTheWeight) {
  Random random;
  for (const int32_t scaling : {MOIRE_SCALING_MXFP8, MOIRE_SCALING_FP8_TILE}) {
    TestWeight w(DType::kBF16, 3, 200, 264, MOIRE_OUT_IN);
    TestCopy rowwise(DType::kE4M3, scaling, MOIRE_ROWWISE, 3, 200, 264), columnwise;
    QuantizeWeightArgs args;
    args.source = w;
    args.scaling = scaling;
    args.rowwise = rowwise;
    std::vector<TestTensor*> outputs = {&rowwise.data, &rowwise.scales};
    if (scaling == MOIRE_SCALING_MXFP8) {
      columnwise = TestCopy(DType::kE4M3, scaling, MOIRE_COLUMNWISE, 3, 200, 264);
      args.columnwise = columnwise;
      outputs.insert(outputs.end(), {&columnwise.data, &columnwise.scales});
    }
    expect_every_splits(moire::quantize_weight, args, outputs, [&] { w.randomize(random); });
  }
}

TEST_F(CapturedBytes, OfRequantizeAndDequantizeAreThoseOfTheSplits) {
  Random random;
  const Context cpu = Context::create().value();
  for (const int32_t scaling : {MOIRE_SCALING_MXFP8, MOIRE_SCALING_FP8_BLOCK}) {
    for (const int32_t direction : {MOIRE_ROWWISE, MOIRE_COLUMNWISE}) {
      QuantizeCall call(DType::kBF16, DType::kE4M3, scaling, groups(), 264);
      call.source.randomize(random);
      const bool from_rows = direction == MOIRE_ROWWISE;
      (from_rows ? call.args.columnwise : call.args.rowwise) = {};
      TestCopy& target = from_rows ? call.columnwise : call.rowwise;
      const auto make_source = [&] { ASSERT_TRUE(succeeds(quantize(cpu, call.args))); };
      expect_every_splits(moire::requantize, call.requantized(direction, target),
                          {&target.data, &target.scales}, make_source);
      TestTensor values(DType::kBF16, {groups().capacity, 264});
      expect_every_splits(moire::dequantize, call.dequantized(direction, values), {&values},
                          make_source);
    }
  }
}

TEST_F(CapturedBytes, OfConvertScalesAreThoseOfTheSplits) {
  Random random;
  for (const int32_t direction : {MOIRE_ROWWISE, MOIRE_COLUMNWISE}) {
    for (const int32_t layout : {MOIRE_SCALES_DENSE, MOIRE_SCALES_PADDED, MOIRE_SCALES_SWIZZLED}) {
      for (const bool is_back : {false, true}) {
        ConvertScalesArgs args;
        args.from = is_back ? layout : MOIRE_SCALES_CANONICAL;
        args.to = is_back ? MOIRE_SCALES_CANONICAL : layout;
        TestTensor source = scales_in(args.from, direction, groups(), 264);
        TestTensor target = scales_in(args.to, direction, groups(), 264);
        const TensorView bytes = source.view();
        for (int64_t i = 0; i < bytes.num_rows() * bytes.stride(); ++i) {
          source.as<uint8_t>()[i] = static_cast<uint8_t>(random.integer(0, 255));
        }
        args.source = source;
        args.target = target;
        args.direction = direction;
        args.k = 264;
        args.groups = groups();
        expect_every_splits(moire::convert_scales, args, {&target}, [] {});
      }
    }
  }
}

}  // namespace
}  // namespace moire::test
