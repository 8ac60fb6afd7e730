#include <moire/buffer.h>
#include <moire/grouped_mlp.h>

int main() {
  const moire::Context context = moire::Context::create().value();  // this machine's CPU
  const int64_t offsets[] = {0, 3, 3, 8};  // three experts get 3, 0 and 5 rows; no padding
  moire::Tensor x(moire::DType::kBF16, {8, 64}), y(moire::DType::kBF16, {8, 64});
  moire::Tensor w1(moire::DType::kBF16, {3, 2 * 128, 64}), w2(moire::DType::kBF16, {3, 64, 128});
  moire::GroupedMlpArgs args;  // y = (silu(gate) * up) w2^T, where gate and up are x w1^T
  args.x = x, args.w1 = moire::Weight(w1), args.w2 = moire::Weight(w2), args.y = y;
  args.groups = moire::Groups(offsets, 3, 8);
  size_t bytes = 0;
  moire::Status status = moire::grouped_mlp_workspace(context, args, &bytes);
  const moire::Buffer scratch(bytes);
  args.workspace = scratch.workspace();
  if (status.ok()) status = moire::grouped_mlp(context, args);
  return status.ok() ? 0 : 1;  // status.message() says what was found and what is needed
}
