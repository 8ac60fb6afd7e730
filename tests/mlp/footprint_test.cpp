// Overlaps are found before the first step of a composite runs, listed weights included.
#include <gtest/gtest.h>
#include <moire/buffer.h>
#include <moire/grouped_mlp.h>

namespace moire {
namespace {

// A backward of a grouped linear layer, 2 groups, in = 4, out = 3, whose weight gradient is a list.
class ListedGradient : public testing::Test {
 protected:
  ListedGradient() {
    args_.x = x_.view();
    args_.w = Weight(w_.view());
    args_.grad_y = grad_y_.view();
    args_.grad_x = grad_x_.view();
    args_.grad_w = Weight(TensorView(nullptr, DType::kFP32, {2, 3, 4}), list_);
    args_.groups = Groups(offsets_, 2, 5);
    for (int i = 0; i < 20; ++i) grad_x_.as<float>()[i] = 777;
  }

  // The message; whatever it is, grad_x must not have been written.
  std::string refusal() {
    args_.workspace = scratch_.workspace();
    const Status status = grouped_linear_backward(context_, args_);
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    for (int i = 0; i < 20; ++i) EXPECT_EQ(grad_x_.as<float>()[i], 777) << i;
    return status.message();
  }

  const Context context_ = Context::create().value();
  const int64_t offsets_[3] = {0, 2, 5};
  const Tensor x_{DType::kFP32, {5, 4}}, w_{DType::kFP32, {2, 3, 4}}, grad_y_{DType::kFP32, {5, 3}},
      grad_x_{DType::kFP32, {5, 4}}, first_{DType::kFP32, {3, 4}}, second_{DType::kFP32, {3, 4}};
  const void* list_[2] = {first_.view().data, second_.view().data};
  const Buffer scratch_{size_t{16} << 20};
  GroupedLinearBackwardArgs args_;
};

TEST_F(ListedGradient, MayNotLieInAnotherOutput) {
  list_[1] = grad_x_.view().data;
  EXPECT_NE(refusal().find("overlap"), std::string::npos);
}

TEST_F(ListedGradient, MayNotLieInTheWeights) {
  list_[0] = w_.as<float>() + 12;
  EXPECT_EQ(
      refusal(),
      "grouped_linear_backward: grad_w[0] and w overlap in their address ranges, must be apart");
}

TEST_F(ListedGradient, MayNotHaveAMatrixTwice) {
  list_[1] = list_[0];
  EXPECT_NE(refusal().find("grad_w["), std::string::npos);
}

TEST_F(ListedGradient, IsRefusedForABadBetaOfOneGroup) {
  const uint8_t beta[] = {0, 7};
  args_.beta_per_group = beta;
  EXPECT_EQ(refusal(), "grouped_linear_backward: beta_per_group[1] is 7, must be 0 or 1");
}

TEST_F(ListedGradient, IsComputedWhereAllLiesApart) {
  args_.workspace = scratch_.workspace();
  const Status status = grouped_linear_backward(context_, args_);
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(grad_x_.as<float>()[0], 0);
}

}  // namespace
}  // namespace moire
