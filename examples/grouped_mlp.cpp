// The README's C++ example: one grouped MLP, forward, on the CPU.
#include <moire/buffer.h>
#include <moire/grouped_mlp.h>

#include <cstdio>

int main() {
  const moire::Context context = moire::Context::create().value();  // this machine's CPU, all cores
  const int64_t offsets[] = {0, 3, 3, 8};  // three experts get 3, 0 and 5 rows; no padding
  const auto bf16 = moire::DType::kBF16;
  moire::Tensor x(bf16, {8, 64}), y(bf16, {8, 64});  // fill x and the weights here
  moire::Tensor w1(bf16, {3, 2 * 128, 64}), w2(bf16, {3, 64, 128});

  moire::GroupedMlpArgs args;  // y = (silu(gate) * up) w2^T, gate and up = x w1^T
  args.x = x, args.w1 = moire::Weight(w1), args.w2 = moire::Weight(w2), args.y = y;
  args.groups = moire::Groups(offsets, 3, 8);
  size_t bytes = 0;
  moire::Status status = moire::grouped_mlp_workspace(context, args, &bytes);
  const moire::Buffer scratch(bytes);
  args.workspace = scratch.workspace();
  if (status.ok()) status = moire::grouped_mlp(context, args);
  std::puts(status.ok() ? "done" : status.message().c_str());
  return status.ok() ? 0 : 1;
}
