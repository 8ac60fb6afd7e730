// grouped_linear forward and backward against the reference.
#include <moire/grouped_mlp.h>

#include <cmath>
#include <functional>
#include <utility>

#include "reference/grouped_mlp.h"
#include "tests/support/outputs.h"
#include "tests/support/ragged.h"
#include "tests/support/tensors.h"

namespace moire::test {
namespace {

constexpr DType kStorageTypes[] = {DType::kFP32, DType::kBF16, DType::kFP16};
constexpr int64_t kTokens = 9;

struct LinearOptions {
  RaggedCase ragged{"Default", {3, 0, 5}, 1};
  int64_t in = 20;
  int64_t out = 13;
  DType dtype = DType::kFP32;
  DType out_type = DType::kFP32;  // of y
  DType gradient_type = DType::kFP32;
  int32_t layout = MOIRE_OUT_IN;
  bool listed = false;
  bool with_bias = true;
  bool with_scale = true;
  bool gathered = false;
  bool accumulate = false;
  int32_t tail = MOIRE_TAIL_ZERO;
};

struct LinearProblem {
  LinearProblem(const LinearOptions& o, Random& random) : options(o), batch(o.ragged) {
    const int64_t num_groups = batch.num_groups(), capacity = batch.capacity();
    const int64_t rows = o.gathered ? kTokens : capacity;
    const int64_t used = o.gathered ? kTokens : batch.rows();
    x = TestTensor(o.dtype, {rows, o.in}, 3).randomize_rows(random, used);
    grad_y = TestTensor(o.dtype, {rows, o.out}).randomize_rows(random, used);
    if (o.gathered) {
      std::vector<int64_t> idx(static_cast<size_t>(capacity), -1);
      for (int64_t i = 0; i < batch.rows(); ++i) {
        idx[static_cast<size_t>(i)] = random.integer(0, kTokens - 1);
      }
      row_idx = index_tensor(DType::kInt32, idx);
    }
    w = TestWeight(o.dtype, num_groups, o.out, o.in, o.layout, o.listed);
    w.randomize(random, 1 / std::sqrt(static_cast<double>(o.in)));
    if (o.with_bias) bias = TestTensor(o.dtype, {num_groups, o.out}).randomize(random);
    if (o.with_scale) {
      scale = TestTensor(DType::kFP32, {capacity}).randomize_rows(random, batch.rows());
    }
    y = TestTensor(o.out_type, {capacity, o.out}, 1);
    grad_x = TestTensor(o.dtype, {capacity, o.in});
    grad_w = TestWeight(o.gradient_type, num_groups, o.out, o.in, o.layout, o.listed);
    grad_bias = TestTensor(o.gradient_type, {num_groups, o.out});
    grad_scale = TestTensor(DType::kFP32, {capacity});
    if (o.accumulate) {
      grad_w.randomize(random);
      grad_bias.randomize(random);
    }
  }
  GroupedLinearArgs forward() const {
    GroupedLinearArgs args;
    args.x = x;
    args.row_idx = row_idx;
    args.w = w;
    args.bias = bias;
    if (options.with_bias) args.scale = scale;  // it scales the bias
    args.y = y;
    args.groups = batch.groups();
    args.tail = options.tail;
    return args;
  }
  GroupedLinearBackwardArgs backward() const {
    GroupedLinearBackwardArgs args;
    args.x = x;
    args.row_idx = row_idx;
    args.gathered_grad_y = options.gathered ? 1 : 0;
    args.w = w;
    args.bias = bias;
    args.scale = scale;
    args.grad_y = grad_y;
    args.grad_x = grad_x;
    args.grad_w = grad_w;
    args.grad_bias = grad_bias;
    if (options.with_bias) args.grad_scale = grad_scale;
    args.beta = options.accumulate ? 1 : 0;
    args.groups = batch.groups();
    args.tail = options.tail;
    return args;
  }
  bool is_undamaged() const {
    for (const TestTensor* t : {&x, &grad_y, &y, &grad_x, &grad_bias, &grad_scale}) {
      if (!t->is_undamaged()) return false;
    }
    return w.is_undamaged() && grad_w.is_undamaged();
  }

  LinearOptions options;
  Batch batch;
  TestTensor x, row_idx, bias, scale, grad_y, y, grad_x, grad_bias, grad_scale;
  TestWeight w, grad_w;
};

void expect_linear_is_right(const LinearOptions& options, Random& random) {
  SCOPED_TRACE(testing::Message() << options.ragged << " " << dtype_name(options.dtype));
  const LinearProblem p(options, random);
  expect_right(tested(), p.forward());
  expect_right(tested(), p.backward());
  EXPECT_TRUE(p.is_undamaged());
}

class GroupedLinearRagged : public testing::TestWithParam<RaggedCase> {};

TEST_P(GroupedLinearRagged, MatchesTheReferenceInEveryStorageType) {
  Random random;
  for (const DType dtype : kStorageTypes) {
    for (const bool gathered : {false, true}) {
      LinearOptions options;
      options.ragged = GetParam();
      options.dtype = dtype;
      options.gathered = gathered;
      options.tail = gathered ? MOIRE_TAIL_UNTOUCHED : MOIRE_TAIL_ZERO;
      expect_linear_is_right(options, random);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Table, GroupedLinearRagged, testing::ValuesIn(ragged_table()), case_name);

TEST(GroupedLinear, TakesEveryCombinationOfLayoutListBiasScaleAndBeta) {
  Random random;
  for (int bits = 0; bits < 32; ++bits) {
    for (const DType dtype : kStorageTypes) {
      LinearOptions options;
      options.dtype = dtype;
      options.layout = (bits & 1) != 0 ? MOIRE_IN_OUT : MOIRE_OUT_IN;
      options.listed = (bits & 2) != 0;
      options.with_bias = (bits & 4) != 0;
      options.with_scale = (bits & 8) != 0;
      options.accumulate = (bits & 16) != 0;
      expect_linear_is_right(options, random);
    }
  }
}

TEST(GroupedLinear, WritesEveryOutputTypeFromEveryStorageType) {
  Random random;
  for (const DType dtype : kStorageTypes) {
    for (const DType out_type : kStorageTypes) {
      LinearOptions options;
      options.dtype = dtype;
      options.out_type = options.gradient_type = out_type;
      expect_linear_is_right(options, random);
    }
  }
}

TEST(GroupedLinear, MatchesTheReferenceForShapesThatBreakTiles) {
  Random random;
  const std::pair<int64_t, int64_t> shapes[] = {{1, 1}, {176, 96}, {2880, 5}, {5, 1408}, {67, 129}};
  for (const auto& [in, out] : shapes) {
    for (const DType dtype : kStorageTypes) {
      LinearOptions options;
      options.in = in;
      options.out = out;
      options.dtype = dtype;
      expect_linear_is_right(options, random);
    }
  }
}

TEST(GroupedLinear, RefusesBadInputWithASentence) {
  Random random;
  const LinearProblem p({}, random);
  const LinearProblem before = p;
  using A = GroupedLinearArgs;
  const std::pair<std::function<void(A&)>, const char*> forwards[] = {
      {[](A& a) { a.x = {}; }, "x is absent, needs fp32, bf16 or fp16 [capacity, in] = [9, 20]"},
      {[](A& a) { a.x.shape[1] = 19; }, "x is fp32 [9, 19]"},
      {[](A& a) { a.w = {}; }, "w is absent, needs"},
      {[](A& a) { a.w.tensor.shape[0] = 2; }, "w is fp32 [2, 13, 20], needs [G, out, in] = [3, 13"},
      {[](A& a) { a.x.dtype = MOIRE_E5M2; }, "x is e5m2"},
      {[](A& a) { a.bias.shape[1] = 12; }, "bias is fp32 [3, 12], needs [G, out] = [3, 13]"},
      {[](A& a) { a.bias = {}; }, "scale is present but bias is absent"},
      {[](A& a) { a.scale.dtype = MOIRE_BF16; }, "scale is bf16 [9], needs fp32"},
      {[](A& a) { a.y.shape[0] = 8; }, "y is fp32 [8, 13] with row stride 14, needs [capacity"},
      {[](A& a) { a.y.data = a.x.data; }, "y and x overlap"},
      {[](A& a) { a.recipe = 4; }, "recipe is 4, must be 0 to 3"},
      {[](A& a) { a.tail = -1; }, "tail is -1, must be 0 to 1"},
  };
  for (const auto& [spoil, message] : forwards) {
    A args = p.forward();
    const TestWorkspace workspace(1 << 16);
    args.workspace = workspace.get();
    spoil(args);
    const Status status = grouped_linear(cpu(), args);
    EXPECT_TRUE(fails(status, Code::kInvalidArgument, message));
    EXPECT_EQ(status.message().rfind("grouped_linear: ", 0), 0U) << status.message();
  }
  using B = GroupedLinearBackwardArgs;
  const std::pair<std::function<void(B&)>, const char*> backwards[] = {
      {[](B& b) { b.grad_y = {}; }, "grad_y is absent, needs"},
      {[](B& b) { b.x = {}; }, "x is absent, needs"},
      {[](B& b) { b.w = {}; }, "w is absent, needs"},
      {[](B& b) { b.grad_x.shape[0] = 8; }, "grad_x is fp32 [8, 20], needs [capacity, in] = [9"},
      {[](B& b) { b.grad_w.tensor.shape[1] = 12; }, "grad_w is fp32 [3, 12, 20], needs [G, out"},
      {[](B& b) { b.grad_w.tensor.shape[2] = 19; }, "grad_w is fp32 [3, 13, 19], needs [G, out"},
      {[](B& b) { b.grad_w.tensor.shape[2] = 19, b.grad_x = {}, b.w = {}; },
       "grad_w is fp32 [3, 13, 19], needs [G, out, in] = [3, 13, 20]"},
      {[](B& b) { b.w.tensor.shape[2] = 19; }, "w is fp32 [3, 13, 19], needs"},
      {[](B& b) { b.x.shape[1] = 19; }, "x is fp32 [9, 19]"},
      {[](B& b) { b.grad_x.shape[1] = 19; }, "grad_x is fp32 [9, 19], needs"},
      {[](B& b) { b.grad_bias.shape[0] = 1; }, "grad_bias is fp32 [1, 13], needs [G, out]"},
      {[](B& b) { b.bias = {}; }, "bias is absent, needs"},
      {[](B& b) { b.grad_scale.dtype = MOIRE_FP16; }, "grad_scale is fp16 [9], needs fp32"},
      {[](B& b) { b.gathered_grad_y = 1; }, "gathered_grad_y is 1 but row_idx is absent"},
      {[](B& b) { b.grad_x.data = b.grad_y.data; }, "grad_x and grad_y overlap"},
      {[](B& b) { b.beta = 2; }, "beta is 2, must be 0 to 1"},
      {[](B& b) { b.recipe = -1; }, "recipe is -1, must be 0"},
  };
  for (const auto& [spoil, message] : backwards) {
    B args = p.backward();
    const TestWorkspace workspace(1 << 16);
    args.workspace = workspace.get();
    spoil(args);
    const Status status = grouped_linear_backward(cpu(), args);
    EXPECT_TRUE(fails(status, Code::kInvalidArgument, message));
    EXPECT_EQ(status.message().rfind("grouped_linear_backward: ", 0), 0U) << status.message();
  }
  EXPECT_TRUE(same_outputs(p.forward(), before.forward()));
  EXPECT_TRUE(same_outputs(p.backward(), before.backward()));
}

}  // namespace
}  // namespace moire::test
