#include "backend/cpu/simd.h"

#include "backend/cpu/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/simd.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace moire::cpu::HWY_NAMESPACE {
namespace {
int64_t compiled_target() { return HWY_TARGET; }
}  // namespace
}  // namespace moire::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace moire::cpu {

HWY_EXPORT(compiled_target);

std::string simd_target() {
  const int64_t target = HWY_DYNAMIC_DISPATCH(compiled_target)();
  return target == HWY_AVX3 ? "AVX-512" : hwy::TargetName(target);  // Highway's own name is AVX3
}

bool has_fused_multiply_add() {
  return (HWY_DYNAMIC_DISPATCH(compiled_target)() & (HWY_EMU128 | HWY_SCALAR)) == 0;
}

}  // namespace moire::cpu
#endif
