// An outside project: the grouped MLP in FP32 through the installed headers, against loops written
// here.
#include <moire/buffer.h>
#include <moire/grouped_mlp.h>

#include <cmath>
#include <cstdio>

namespace {

constexpr int64_t kOffsets[] = {0, 5, 5, 12};
constexpr int64_t kGroups = 3, kRows = 12, kHidden = 48, kWidth = 40;
// Sums of 48 and of 40 products in FP32, in another order: far below this, relative to values
// around 1.
constexpr double kBound = 1e-5;

void fill(moire::Tensor& tensor, int seed) {
  for (int64_t i = 0; i < tensor.view().num_elements(); ++i) {
    tensor.as<float>()[i] = std::sin(static_cast<float>(i * 7 + seed)) / 4;
  }
}

double dot(const float* a, const float* b, int64_t size) {
  double sum = 0;
  for (int64_t i = 0; i < size; ++i) sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  return sum;
}

double expected(const float* x, const float* w1, const float* w2_row) {
  double sum = 0;
  for (int64_t f = 0; f < kWidth; ++f) {
    const double gate = dot(x, w1 + f * kHidden, kHidden);
    const double up = dot(x, w1 + (kWidth + f) * kHidden, kHidden);
    sum += gate / (1 + std::exp(-gate)) * up * static_cast<double>(w2_row[f]);
  }
  return sum;
}

}  // namespace

int main() {
  const auto fp32 = moire::DType::kFP32;
  moire::Tensor x(fp32, {kRows, kHidden}), y(fp32, {kRows, kHidden});
  moire::Tensor w1(fp32, {kGroups, 2 * kWidth, kHidden}), w2(fp32, {kGroups, kHidden, kWidth});
  fill(x, 1), fill(w1, 2), fill(w2, 3), fill(y, 4);

  const auto context = moire::Context::create();
  if (!context.ok()) return std::puts(context.status().message().c_str()), 1;
  moire::GroupedMlpArgs args;
  args.x = x, args.w1 = moire::Weight(w1), args.w2 = moire::Weight(w2), args.y = y;
  args.groups = moire::Groups(kOffsets, kGroups, kRows);
  size_t bytes = 0;
  moire::Status status = moire::grouped_mlp_workspace(context.value(), args, &bytes);
  const moire::Buffer scratch(bytes);
  args.workspace = scratch.workspace();
  if (status.ok()) status = moire::grouped_mlp(context.value(), args);
  if (!status.ok()) return std::puts(status.message().c_str()), 1;

  for (int64_t g = 0; g < kGroups; ++g) {
    for (int64_t row = kOffsets[g]; row < kOffsets[g + 1]; ++row) {
      for (int64_t h = 0; h < kHidden; ++h) {
        const double want =
            expected(x.as<float>() + row * kHidden, w1.as<float>() + g * 2 * kWidth * kHidden,
                     w2.as<float>() + (g * kHidden + h) * kWidth);
        const double got = static_cast<double>(y.as<float>()[row * kHidden + h]);
        if (!(std::fabs(got - want) <= kBound)) {
          std::printf("y[%d, %d] of group %d: got %.9g, want %.9g\n", static_cast<int>(row),
                      static_cast<int>(h), static_cast<int>(g), got, want);
          return 1;
        }
      }
    }
  }
  std::puts("the grouped MLP is right");
  return 0;
}
