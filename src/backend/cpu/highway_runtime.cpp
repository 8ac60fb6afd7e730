// What Highway's headers leave to its library: which targets this processor runs, where the choice
// among them is kept, and the end of a failed assertion. Written here, so that moire needs only
// headers of Highway, of any version since 1.0.1, and no libhwy where it runs.
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "backend/cpu/simd_targets.h"
// Highway's headers come after simd_targets.h.
#include <hwy/targets.h>
#if HWY_ARCH_X86
#include <cpuid.h>
#endif

namespace hwy {
namespace {

#if HWY_ARCH_X86

// What HWY_TARGET_STR_AVX2 and _AVX3 let the compiler use, by the registers in which cpuid says it.
constexpr uint32_t kAvx2Leaf1Ecx = bit_SSE3 | bit_PCLMUL | bit_SSSE3 | bit_FMA | bit_SSE4_1 |
                                   bit_SSE4_2 | bit_AES | bit_OSXSAVE | bit_AVX | bit_F16C;
constexpr uint32_t kAvx2Leaf7Ebx = bit_BMI | bit_AVX2 | bit_BMI2;
constexpr uint32_t kAvx2ExtendedEcx = bit_LZCNT;
constexpr uint32_t kAvx3Leaf7Ebx =
    bit_AVX512F | bit_AVX512DQ | bit_AVX512CD | bit_AVX512BW | bit_AVX512VL;
// The registers that the operating system has to keep: SSE and AVX; opmask and ZMM.
constexpr uint32_t kAvx2State = 0x06, kAvx3State = 0xe6;

bool has_all(uint32_t found, uint32_t needed) { return (found & needed) == needed; }

uint32_t kept_by_system() {
  uint32_t low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

int64_t targets_of_processor() {
  uint32_t a, b, c, d, leaf7_ebx, extended_ecx;
  if (__get_cpuid_count(7, 0, &a, &leaf7_ebx, &c, &d) == 0) return 0;
  if (__get_cpuid(0x80000001, &a, &b, &extended_ecx, &d) == 0) return 0;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0 || !has_all(c, kAvx2Leaf1Ecx)) return 0;
  const uint32_t kept = kept_by_system();  // OSXSAVE: the instruction is there
  if (!has_all(leaf7_ebx, kAvx2Leaf7Ebx) || !has_all(extended_ecx, kAvx2ExtendedEcx) ||
      !has_all(kept, kAvx2State)) {
    return 0;
  }
  return has_all(leaf7_ebx, kAvx3Leaf7Ebx) && has_all(kept, kAvx3State) ? HWY_AVX2 | HWY_AVX3
                                                                        : HWY_AVX2;
}

#else

int64_t targets_of_processor() { return 0; }

#endif

}  // namespace

// What the compiler was told to take for granted is always among them.
int64_t SupportedTargets() {
  static const int64_t targets =
      targets_of_processor() | HWY_ENABLED_BASELINE | HWY_EMU128 | HWY_SCALAR;
  return targets;
}

ChosenTarget& GetChosenTarget() {
  static ChosenTarget chosen;
  return chosen;
}

void Abort(const char* file, int line, const char* format, ...) {
  std::fprintf(stderr, "%s:%d: ", file, line);
  va_list args;
  va_start(args, format);
  std::vfprintf(stderr, format, args);
  va_end(args);
  std::abort();
}

}  // namespace hwy
