// The one lane that acts for its warp, and register budgets. One instruction per function.
#pragma once

#include <cstdint>

namespace moire::cuda::ptx {

// True in one lane of a warp that is whole. The compiler knows that only one is behind it: TMA's
// operands need no loop over lanes that might differ.
__device__ inline bool elect_one() {
  uint32_t is_elected;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.b32 %0, 1, 0, p;\n"
      "}"
      : "=r"(is_elected));
  return is_elected != 0;
}

// Gives registers back, or takes them; every warp of a warpgroup must execute it.
template <int kRegisters>
__device__ inline void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace moire::cuda::ptx
