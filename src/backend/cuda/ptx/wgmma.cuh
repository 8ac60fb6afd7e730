// wgmma: the warpgroup matrix multiply, BF16 or FP8 operands in shared memory, FP32 sums in
// registers. One instruction per function.
#pragma once

#include <cstdint>

namespace moire::cuda::ptx {

// Joins the four warps of consumer warpgroup `index` (0 to 14).
__device__ inline void sync_warpgroup(int index) {
  asm volatile("barrier.sync %0, 128;" ::"r"(index + 1) : "memory");
}

// Orders register accesses before the first wgmma that uses them.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most kPending groups are in flight.
template <int kPending>
__device__ inline void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Nothing that reads the sums moves to before this point: the compiler does not know that those
// who wait for products wait for them.
template <int kSums>
__device__ inline void keep_behind(float (&sums)[kSums]) {
#pragma unroll
  for (int i = 0; i < kSums; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}
// How an operand tile lies in shared memory: its contracted dimension contiguous, or the other one.
enum class Major { kK, kMN };

// The low word of a descriptor of an operand tile in shared memory with 128-byte rows and the
// 128-byte swizzle, groups of eight rows 1024 bytes apart, from `address` on; the high word is the
// same for all. Words of 32 bits spare the 64-bit sums of one instruction for the next.
// K-major: a row is one m (or n) and 64 k, of FP8 128; each step of 16, or 32, in K is 32 bytes
// further.
// MN-major: a row is one k and 64 m (or n), the next 64 of them `panel_bytes` further; each step of
// 16 in K is 2048 bytes further.
__device__ inline uint32_t operand_descriptor(uint32_t address, uint32_t panel_bytes = 16) {
  return (address & 0x3FFFF) >> 4 | panel_bytes >> 4 << 16;
}
__device__ inline uint64_t whole_descriptor(uint32_t low) {
  constexpr uint32_t kSwizzle128 = 1, kGroupBytes = 1024;
  uint64_t whole;
  asm("mov.b64 %0, {%1, %2};" : "=l"(whole) : "r"(low), "n"(kGroupBytes >> 4 | kSwizzle128 << 30));
  return whole;
}
// What a step of 16 in K adds to a descriptor.
template <Major kMajor>
inline constexpr uint32_t kDescriptorStep = kMajor == Major::kK ? 32 >> 4 : 2048 >> 4;

// An instruction's sums as asm names and takes them.
#define MOIRE_NAMES_32                                                     \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define MOIRE_NAMES_64                                                                 \
  MOIRE_NAMES_32                                                                       \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define MOIRE_NAMES_96                                                                 \
  MOIRE_NAMES_64                                                                       \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define MOIRE_NAMES_128                                                                            \
  MOIRE_NAMES_96                                                                                   \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define MOIRE_SUMS_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define MOIRE_SUMS_16(d, i) \
  MOIRE_SUMS_4(d, i), MOIRE_SUMS_4(d, i + 4), MOIRE_SUMS_4(d, i + 8), MOIRE_SUMS_4(d, i + 12)
#define MOIRE_SUMS_32(d, i) MOIRE_SUMS_16(d, i), MOIRE_SUMS_16(d, i + 16)
#define MOIRE_SUMS_64(d, i) MOIRE_SUMS_32(d, i), MOIRE_SUMS_32(d, i + 32)
#define MOIRE_SUMS_96(d, i) MOIRE_SUMS_64(d, i), MOIRE_SUMS_32(d, i + 64)
#define MOIRE_SUMS_128(d, i) MOIRE_SUMS_64(d, i), MOIRE_SUMS_64(d, i + 64)

// Of kSums sums a thread, after which come the operands and whether to accumulate.
#define MOIRE_WGMMA(kSums, instruction, kA, kB, kAccumulate, flags, ...)            \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " kAccumulate                      \
               ", 0;\n"                                                             \
               "wgmma.mma_async.sync.aligned." instruction " {" MOIRE_NAMES_##kSums \
               "}, " kA ", " kB ", p, 1, 1" flags ";\n}\n"                          \
               : MOIRE_SUMS_##kSums(d, 0)                                           \
               : __VA_ARGS__)
#define MOIRE_SHARED "l"(whole_descriptor(a)), "l"(whole_descriptor(b)), "r"(accumulate)

// d (+)= A [64, 16] * B [kN, 16]^T of BF16, both in shared memory; d is zeroed first where
// accumulate is 0.
#define MOIRE_BF16(kSums, n, kA, kB, kAccumulate, flags)                                     \
  MOIRE_WGMMA(kSums, "m64n" n "k16.f32.bf16.bf16", kA, kB, kAccumulate, flags, MOIRE_SHARED, \
              "n"(kTransposeA), "n"(kTransposeB))
template <int kN, Major kA = Major::kK, Major kB = Major::kK>
__device__ inline void wgmma_m64k16(float (&d)[kN / 2], uint32_t a, uint32_t b, int accumulate) {
  constexpr int kTransposeA = kA == Major::kMN, kTransposeB = kB == Major::kMN;
  static_assert(kN == 64 || kN == 128 || kN == 192 || kN == 256);
  if constexpr (kN == 64) MOIRE_BF16(32, "64", "%32", "%33", "%34", ", %35, %36");
  if constexpr (kN == 128) MOIRE_BF16(64, "128", "%64", "%65", "%66", ", %67, %68");
  if constexpr (kN == 192) MOIRE_BF16(96, "192", "%96", "%97", "%98", ", %99, %100");
  if constexpr (kN == 256) MOIRE_BF16(128, "256", "%128", "%129", "%130", ", %131, %132");
}
#undef MOIRE_BF16

// d += A [64, 16] * B [kN, 16]^T of BF16, B in shared memory, K-major, and A in registers: of a
// warp's 16 rows a lane has columns 2 (lane % 4) and the next of row lane / 4 in a[0] and of row
// lane / 4 + 8 in a[1], and the columns 8 behind those in a[2] and a[3].
#define MOIRE_REGISTERS(kSums, n, kA, kB, kAccumulate)                                    \
  MOIRE_WGMMA(kSums, "m64n" n "k16.f32.bf16.bf16", kA, kB, kAccumulate, ", 0", "r"(a[0]), \
              "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(whole_descriptor(b)), "r"(1))
template <int kN>
__device__ inline void wgmma_m64k16(float (&d)[kN / 2], const uint32_t (&a)[4], uint32_t b) {
  static_assert(kN == 64 || kN == 128 || kN == 192 || kN == 256);
  if constexpr (kN == 64) MOIRE_REGISTERS(32, "64", "{%32, %33, %34, %35}", "%36", "%37");
  if constexpr (kN == 128) MOIRE_REGISTERS(64, "128", "{%64, %65, %66, %67}", "%68", "%69");
  if constexpr (kN == 192) MOIRE_REGISTERS(96, "192", "{%96, %97, %98, %99}", "%100", "%101");
  if constexpr (kN == 256) MOIRE_REGISTERS(128, "256", "{%128, %129, %130, %131}", "%132", "%133");
}
#undef MOIRE_REGISTERS

// d (+)= A [64, 32] * B [kN, 32]^T of FP8, K-major, E5M2 where said, else E4M3.
#define MOIRE_FP8(a_type, b_type)                                                                \
  if constexpr (kN == 128) {                                                                     \
    MOIRE_WGMMA(64, "m64n128k32.f32." a_type "." b_type, "%64", "%65", "%66", "", MOIRE_SHARED); \
  } else {                                                                                       \
    MOIRE_WGMMA(96, "m64n192k32.f32." a_type "." b_type, "%96", "%97", "%98", "", MOIRE_SHARED); \
  }
template <int kN, bool kIsE5M2A, bool kIsE5M2B>
__device__ inline void wgmma_m64k32(float (&d)[kN / 2], uint32_t a, uint32_t b, int accumulate) {
  static_assert(kN == 128 || kN == 192);
  if constexpr (!kIsE5M2A && !kIsE5M2B) MOIRE_FP8("e4m3", "e4m3");
  if constexpr (kIsE5M2A && !kIsE5M2B) MOIRE_FP8("e5m2", "e4m3");
  if constexpr (!kIsE5M2A && kIsE5M2B) MOIRE_FP8("e4m3", "e5m2");
  if constexpr (kIsE5M2A && kIsE5M2B) MOIRE_FP8("e5m2", "e5m2");
}
#undef MOIRE_FP8
#undef MOIRE_SHARED
#undef MOIRE_WGMMA
#undef MOIRE_SUMS_4
#undef MOIRE_SUMS_16
#undef MOIRE_SUMS_32
#undef MOIRE_SUMS_64
#undef MOIRE_SUMS_96
#undef MOIRE_SUMS_128
#undef MOIRE_NAMES_32
#undef MOIRE_NAMES_64
#undef MOIRE_NAMES_96
#undef MOIRE_NAMES_128

}  // namespace moire::cuda::ptx
