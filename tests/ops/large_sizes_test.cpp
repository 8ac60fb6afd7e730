// Sizes near 2^63, which no memory has: a sentence, and no arithmetic that overflows on the way to
// it (which the sanitizers of the dev preset would say).
#include <gtest/gtest.h>
#include <moire/grouped_tensor.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "tests/support/expect.h"
#include "tests/support/mlp_problem.h"

namespace moire::test {
namespace {

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
constexpr int64_t kHuge[] = {kMost, kMost - 1, kMost / 2 + 1, int64_t{1} << 57, int64_t{1} << 48};

MlpProblem small_problem() {
  Random random;
  return MlpProblem(MlpOptions(), random);
}

// Puts each large number in the place of each size: of the tensors, and of the groups.
void with_each(const std::vector<moire_tensor*>& tensors, moire_groups& groups,
               const std::function<void(const std::string&)>& call) {
  const auto with = [&](int64_t& size, const std::string& name, int64_t least = 0) {
    const int64_t before = size;
    for (const int64_t huge : kHuge) {
      if (huge < least) continue;
      size = huge;
      call(name + " = " + std::to_string(huge));
    }
    size = before;
  };
  for (size_t i = 0; i < tensors.size(); ++i) {
    moire_tensor& t = *tensors[i];
    const std::string name = "tensor " + std::to_string(i);
    for (int32_t d = 0; d < t.rank; ++d) with(t.shape[d], name + ", size " + std::to_string(d));
    with(t.row_stride, name + ", row_stride");
    if (t.rank < 2) continue;
    const moire_tensor before = t;  // all at once, of a tensor that has no elements
    for (int32_t d = 0; d < t.rank; ++d) t.shape[d] = d == 0 ? 0 : kMost;
    call(name + ", all sizes but one");
    t = before;
  }
  // Fewer than no memory can hold are believed: the offsets are there then.
  with(groups.num_groups, "num_groups", int64_t{1} << 57);
  with(groups.capacity, "capacity");
}

// A composite has every op's arithmetic in it. Rows of a matrix that is one row may lie any
// distance apart that a size in bytes can say.
template <class Args>
void expect_sentences(Args& args, const std::vector<moire_tensor*>& tensors) {
  using Entry = staging::Entry<Args>;
  const Context context = cpu(2), explaining = context.explaining();
  with_each(tensors, args.groups, [&](const std::string& what) {
    SCOPED_TRACE(what);
    size_t bytes = 7;
    const Status sized = Entry::kWorkspace(context, args, &bytes);
    EXPECT_TRUE(!sized.ok() || bytes < size_t{1} << 63);
    EXPECT_TRUE(sized.ok() || bytes == 7) << "untouched where there is no size";
    for (const Context& c : {context, explaining}) EXPECT_FALSE(Entry::kRun(c, args).ok());
  });
}

TEST(LargeSizes, OfLayersForward) {
  const MlpProblem p = small_problem();
  for (const int32_t recipe : {MOIRE_RECIPE_AS_STORED, MOIRE_RECIPE_MXFP8}) {
    GroupedMlpArgs args = p.forward();
    args.recipe = recipe;
    args.z = {};
    expect_sentences(args, {&args.x, &args.w1.tensor, &args.b1, &args.w2.tensor, &args.b2,
                            &args.probs, &args.y});
  }
}

TEST(LargeSizes, OfLayersBackward) {
  const MlpProblem p = small_problem();
  GroupedMlpBackwardArgs args = p.backward();
  expect_sentences(args, {&args.x, &args.w1.tensor, &args.w2.tensor, &args.probs, &args.z,
                          &args.grad_y, &args.grad_x, &args.grad_w1.tensor, &args.grad_b1,
                          &args.grad_w2.tensor, &args.grad_b2, &args.grad_probs});
}

// Scratch of rows of one tensor and columns of another, neither of which has elements.
TEST(LargeSizes, OfScratchThatNoTensorHas) {
  const int64_t many = int64_t{1} << 40;
  const Context context = cpu(2);
  size_t bytes = 7;
  GroupedMlpArgs mlp;
  mlp.x = TensorView(nullptr, DType::kBF16, {many, 0});
  mlp.w1 = Weight(TensorView(nullptr, DType::kBF16, {1, 2 * many, 0}));
  mlp.w2 = Weight(TensorView(nullptr, DType::kBF16, {1, 0, many}));
  mlp.y = TensorView(nullptr, DType::kBF16, {many, 0});
  mlp.groups = {nullptr, 1, many};
  EXPECT_TRUE(fails(moire::grouped_mlp_workspace(context, mlp, &bytes), Code::kInvalidArgument,
                    "act is bf16 [1099511627776, 1099511627776]: its size in bytes exceeds 2^56"));
  BiasBackwardArgs bias;
  bias.grad_y = TensorView(nullptr, DType::kBF16, {0, many});
  bias.row_idx = TensorView(nullptr, DType::kInt64, {many * 64});
  bias.grad_bias = TensorView(nullptr, DType::kBF16, {1, many});
  bias.groups = {nullptr, 1, many * 64};
  EXPECT_TRUE(fails(moire::bias_backward_workspace(context, bias, &bytes), Code::kInvalidArgument,
                    "bias_backward: the size in bytes of the workspace that it needs exceeds"));
  GroupedGemmArgs gemm;
  gemm.a = TensorView(nullptr, DType::kBF16, {0, many});
  gemm.row_idx = TensorView(nullptr, DType::kInt64, {many});
  gemm.b = Weight(TensorView(nullptr, DType::kBF16, {1, 0, many}));
  gemm.d = TensorView(nullptr, DType::kBF16, {many, 0});
  gemm.groups = {nullptr, 1, many};
  EXPECT_TRUE(fails(moire::grouped_gemm_workspace(context, gemm, &bytes), Code::kInvalidArgument,
                    "a is bf16 [0, 1099511627776], gathered to 1099511627776 rows: its size in "
                    "bytes exceeds 2^56"));
  EXPECT_EQ(bytes, 7U);
}

TEST(LargeSizes, OfBlocksOfALayout) {
  ConvertGluArgs args;
  args.source = args.target = TensorView(nullptr, DType::kFP32, {4, 0});
  args.dim = 1;
  args.to.block = kMost;
  EXPECT_TRUE(fails(moire::convert_glu(cpu(1), args), Code::kInvalidArgument,
                    "source has 0 along dim 1, needs a multiple of 2 * block = "));
  const int64_t sizes[] = {kMost, kMost};
  EXPECT_TRUE(fails(GroupedTensor::ragged({nullptr, sizes[0], sizes[1]}, 1).status(),
                    Code::kInvalidArgument, "its size in bytes exceeds 63 bits"));
}

}  // namespace
}  // namespace moire::test
