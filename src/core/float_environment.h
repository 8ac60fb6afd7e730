// While it lives, this thread rounds to nearest and keeps subnormal numbers
// (torch.set_flush_denormal and -ffast-math programs clear them); the caller's mode comes back
// afterwards.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace moire {

class FloatEnvironment {
 public:
#if defined(__x86_64__)
  FloatEnvironment() : saved_(_mm_getcsr()) {
    constexpr uint32_t kFlushToZero = 0x8000, kDenormalsAreZero = 0x0040, kRounding = 0x6000;
    _mm_setcsr(static_cast<uint32_t>(saved_) & ~(kFlushToZero | kDenormalsAreZero | kRounding));
  }
  ~FloatEnvironment() { _mm_setcsr(static_cast<uint32_t>(saved_)); }
#elif defined(__aarch64__)
  FloatEnvironment() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    constexpr uint64_t kFlushToZero = 1U << 24, kRounding = 3U << 22;
    asm volatile("msr fpcr, %0" ::"r"(saved_ & ~(kFlushToZero | kRounding)));
  }
  ~FloatEnvironment() { asm volatile("msr fpcr, %0" ::"r"(saved_)); }
#endif
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;

 private:
  [[maybe_unused]] uint64_t saved_;
};

}  // namespace moire
