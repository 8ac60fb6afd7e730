#include "baseline.h"

#include <algorithm>

#include "random.h"
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

void OpenBlasBaseline::run() const {
  for (const Product& p : products_) {
    cblas_sgemm(CblasRowMajor, p.transpose_a ? CblasTrans : CblasNoTrans,
                p.transpose_b ? CblasTrans : CblasNoTrans, static_cast<blasint>(p.m),
                static_cast<blasint>(p.n), static_cast<blasint>(p.k), 1.0F, p.a,
                static_cast<blasint>(p.a_stride), p.b, static_cast<blasint>(p.b_stride), 0.0F, p.c,
                static_cast<blasint>(p.n));
  }
}
#else
std::string openblas_name() { return ""; }
void set_openblas_threads(int) {}
void OpenBlasBaseline::run() const {}
#endif

float* OpenBlasBaseline::normal(float*& data, int64_t elements) {
  if (data != nullptr) return data;
  constexpr int64_t kPeriod = 65521;
  data = static_cast<float*>(memory_.take("baseline", elements * 4));
  bytes_ += elements * 4;
  Random random(static_cast<uint64_t>(bytes_));
  for (int64_t i = 0; i < elements; ++i) {
    data[i] = i < kPeriod ? static_cast<float>(random.normal()) : data[i - kPeriod];
  }
  return data;
}

// Weights are [G, out, in], rows are in expert order: the layout that suits BLAS best.
void OpenBlasBaseline::add_pass(const Problem& problem, Pass pass, Layer& layer) {
  const int64_t out = layer.out, in = layer.in;
  const int64_t x_size = problem.rows * in, y_size = problem.rows * out;
  const int64_t w_size = problem.groups * out * in;
  const std::vector<int64_t> splits = make_splits(problem);
  int64_t row = 0;
  for (size_t g = 0; g < splits.size(); ++g) {
    const int64_t rows = splits[g], x_at = row * in, y_at = row * out;
    const int64_t w_at = static_cast<int64_t>(g) * out * in;
    row += rows;
    if (rows == 0) continue;
    switch (pass) {
      case Pass::kForward:
        products_.push_back({false, true, rows, out, in, normal(layer.x, x_size) + x_at, in,
                             normal(layer.w, w_size) + w_at, in, normal(layer.y, y_size) + y_at});
        break;
      case Pass::kDgrad:
        products_.push_back({false, false, rows, in, out, normal(layer.grad_y, y_size) + y_at, out,
                             normal(layer.w, w_size) + w_at, in,
                             normal(layer.grad_x, x_size) + x_at});
        break;
      case Pass::kWgrad:
        products_.push_back({true, false, out, in, rows, normal(layer.grad_y, y_size) + y_at, out,
                             normal(layer.x, x_size) + x_at, in,
                             normal(layer.grad_w, w_size) + w_at});
        break;
    }
  }
}

std::unique_ptr<OpenBlasBaseline> OpenBlasBaseline::create(const Problem& problem) {
  if (openblas_name().empty()) return nullptr;
  std::unique_ptr<OpenBlasBaseline> baseline(new OpenBlasBaseline());
  Layer fc1{2 * problem.ffn, problem.hidden};
  Layer fc2{problem.hidden, problem.ffn};
  const Op op = problem.op;
  const bool trains = op == Op::kMlp;
  const bool is_linear = op == Op::kLinear;
  const bool is_layer = trains || op == Op::kMlpForward;
  const auto add = [&](bool wanted, Pass pass, Layer& layer) {
    if (wanted) baseline->add_pass(problem, pass, layer);
  };
  add(is_layer || is_linear || op == Op::kFc1 || op == Op::kFc1Glu, Pass::kForward, fc1);
  add(is_layer || op == Op::kFc2, Pass::kForward, fc2);
  add(trains || op == Op::kFc2Dgrad || op == Op::kFc2DgradGlu, Pass::kDgrad, fc2);
  add(trains || is_linear || op == Op::kFc1Dgrad, Pass::kDgrad, fc1);
  add(trains || op == Op::kFc2Wgrad, Pass::kWgrad, fc2);
  add(trains || is_linear || op == Op::kFc1Wgrad, Pass::kWgrad, fc1);
  if (baseline->products_.empty()) return nullptr;
  return baseline;
}

}  // namespace moire::tool
