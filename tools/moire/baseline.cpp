#include "baseline.h"

#include "text.h"

#if defined(MOIRE_HAS_OPENBLAS)
#include <cblas.h>

#include <cstdlib>
#endif

namespace moire::tool {

#if defined(MOIRE_HAS_OPENBLAS)
namespace {

// OpenBLAS reads its environment once, in a constructor of its own, so this must come before all of
// those (but after the C library's start, which resets the environment: .preinit_array would be too
// early).
void prepare_openblas() {
  // Its idle threads spin for 2^28 cycles by default, into the next variant's turn. 2^20 cycles
  // (0.3 ms) still cover the gaps between the groups of one turn.
  setenv("OPENBLAS_THREAD_TIMEOUT", "20", 0);
#if defined(__x86_64__)
  // It goes by the processor's model number, and takes its kernels of 2004 on a model that is newer
  // than itself: a baseline that anybody beats. All models with AVX-512, or with AVX2, have the
  // same FP32 kernels.
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512bw")) {
    setenv("OPENBLAS_CORETYPE", "SKYLAKEX", 0);
  } else if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    setenv("OPENBLAS_CORETYPE", "HASWELL", 0);
  }
#endif
}
[[gnu::section(".init_array.00001"),
  gnu::used]] void (*const before_constructors)() = prepare_openblas;

}  // namespace

std::string openblas_name() {
  std::string config = openblas_get_config();
  config.resize(config.find(' ', config.find(' ') + 1));
  return text(config, " (", openblas_get_corename(), ")");
}

void set_openblas_threads(int num_threads) { openblas_set_num_threads(num_threads); }

void openblas_multiply(const Product& p) {
  const auto int_of = [](int64_t size) { return static_cast<blasint>(size); };
  cblas_sgemm(CblasRowMajor, p.transpose_a ? CblasTrans : CblasNoTrans,
              p.transpose_b ? CblasTrans : CblasNoTrans, int_of(p.m), int_of(p.n), int_of(p.k),
              1.0F, static_cast<const float*>(p.a), int_of(p.columns_a()),
              static_cast<const float*>(p.b), int_of(p.columns_b()), 0.0F, static_cast<float*>(p.c),
              int_of(p.n));
}
#else
std::string openblas_name() { return ""; }
void set_openblas_threads(int) {}
void openblas_multiply(const Product&) {}
#endif

}  // namespace moire::tool
