#include "baseline.h"

#include <initializer_list>
#include <map>

#include "text.h"

#if defined(MOIRE_HAS_OPENBLAS)
#include <cblas.h>

#include <cstdlib>
#endif

namespace moire::tool {

std::vector<Product> products_of(const Problem& p, int64_t element_bytes,
                                 const std::function<char*(int64_t elements)>& take) {
  const std::vector<int64_t> splits = make_splits(p);
  std::map<std::string, char*> operands;  // each is made when a pass first needs it
  std::vector<Product> products;
  // Passes of one linear layer, group by group.
  const auto add = [&](const std::string& layer, int64_t out, int64_t in,
                       std::initializer_list<Products> passes) {
    const auto at = [&](const char* name, int64_t elements, int64_t first) {
      char*& memory = operands[layer + name];
      if (memory == nullptr) memory = take(elements);
      return memory + first * element_bytes;
    };
    int64_t row = 0;
    for (int64_t g = 0; g < p.groups; ++g) {
      const int64_t rows = splits[static_cast<size_t>(g)];
      const auto x = [&](const char* name) { return at(name, p.rows * in, row * in); };
      const auto y = [&](const char* name) { return at(name, p.rows * out, row * out); };
      const auto w = [&](const char* name) { return at(name, p.groups * out * in, g * out * in); };
      for (const Products pass : passes) {
        if (rows == 0 || (p.op->products() & pass) == 0) continue;
        if ((pass & kForward) != 0) {
          products.push_back({false, true, rows, out, in, x("x"), w("w"), y("y")});
        } else if ((pass & kDgrads) != 0) {
          products.push_back({false, false, rows, in, out, y("grad_y"), w("w"), x("grad_x")});
        } else {
          products.push_back({true, false, out, in, rows, y("grad_y"), x("x"), w("grad_w")});
        }
      }
      row += rows;
    }
  };
  add("fc1 ", p.fc1_width(), p.hidden, {kFc1});
  add("fc2 ", p.columns_of_y(), p.ffn, {kFc2, kFc2Dgrad, kFc2Wgrad});
  add("fc1 ", p.fc1_width(), p.hidden, {kFc1Dgrad, kFc1Wgrad});
  return products;
}

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
