#include "tests/support/grouped_gemm_cases.h"

namespace moire::test {
namespace {

// Keeps sums of k products near one, so that activations are in their interesting range.
double scale_for(int64_t k) {
  return 1.0 / std::sqrt(static_cast<double>(std::max<int64_t>(k, 1)));
}

TestTensor random_tensor(Random& random, bool present, DType dtype,
                         std::initializer_list<int64_t> shape) {
  if (!present) return {};
  TestTensor t(dtype, shape);
  t.randomize(random);
  return t;
}

// [capacity], the tail NaN.
TestTensor random_rows(Random& random, bool present, const Batch& batch) {
  if (!present) return {};
  TestTensor t(DType::kFP32, {batch.capacity()});
  for (int64_t i = 0; i < batch.rows(); ++i) t.set(0, i, random.normal());
  return t;
}

// Random weights whose products contract over `in` (or over `out`), and their scales.
TestWeight random_weight(Random& random, const GemmOptions& o, int64_t num_groups, int64_t out,
                         int64_t in, bool over_in, TestTensor* scales) {
  TestWeight w(o.b.is_present() ? o.b.element : o.operands, num_groups, out, in, o.layout,
               o.listed && !o.b.is_present());
  const double size = scale_for(over_in ? in : out);
  if (!o.b.is_present()) {
    w.randomize(random, size);
    return w;
  }
  const TensorView codes = w.view().tensor;
  const bool k_is_last = (o.layout == MOIRE_OUT_IN) == over_in;
  randomize_codes(codes, random, codes.num_rows());
  *scales = random_weight_scales(random, o.b, k_is_last ? MOIRE_ROWWISE : MOIRE_COLUMNWISE,
                                 num_groups, codes.shape[1], codes.shape[2], size);
  return w;
}

}  // namespace

RaggedInput::RaggedInput(Random& random, const Batch& batch, int64_t columns, const GemmOptions& o,
                         const Fp8& fp8, int32_t direction) {
  const bool columnwise = fp8.is_present() && direction == MOIRE_COLUMNWISE;
  const bool gathered = o.row_idx != DType::kNone && !columnwise;
  const int64_t sources = gathered ? batch.rows() / 2 + 3 : batch.capacity();
  const int64_t used = gathered ? sources : batch.rows();
  rows = TestTensor(fp8.is_present() ? fp8.element : o.operands, {sources, columns}, o.padding);
  if (fp8.is_present()) {
    randomize_codes(rows, random, used);
    scales = columnwise ? random_columnwise_scales(random, fp8, batch.groups(), columns)
                        : random_rowwise_scales(random, fp8, sources, used, columns);
  } else {
    rows.randomize_rows(random, used);
  }
  if (!gathered) return;
  std::vector<int64_t> indices(static_cast<size_t>(batch.capacity()), -7);
  for (int64_t i = 0; i < batch.rows(); ++i) {
    indices[static_cast<size_t>(i)] = random.integer(0, sources - 1);
  }
  row_idx = index_tensor(o.row_idx, indices);
}

GemmCase::GemmCase(Random& random, const Batch& batch_, int64_t n, int64_t k, bool transpose_b_,
                   const GemmOptions& o)
    : batch(batch_),
      options(o),
      transpose_b(transpose_b_),
      a(random, batch, k, o, o.a, MOIRE_ROWWISE),
      b(random_weight(random, o, batch.num_groups(), transpose_b ? k : n, transpose_b ? n : k,
                      !transpose_b, &b_scales)),
      bias(random_tensor(random, o.extras, o.operands, {batch.num_groups(), n})),
      bias_scale(random_rows(random, o.extras, batch)),
      d(o.output, {batch.capacity(), n}, o.padding) {}

GroupedGemmArgs GemmCase::args() const {
  GroupedGemmArgs args;
  args.a = a.rows;
  args.a_scales = a.scales;
  args.accumulation = options.accumulation;
  args.row_idx = a.row_idx;
  args.b = b;
  args.b_scales = b_scales;
  args.transpose_b = transpose_b ? 1 : 0;
  args.bias = bias;
  args.bias_scale = bias_scale;
  args.d = d;
  args.groups = batch.groups();
  args.tail = options.tail;
  return args;
}

GemmGluCase::GemmGluCase(Random& random, const Batch& batch_, int64_t f, int64_t k,
                         const GemmOptions& o)
    : batch(batch_),
      options(o),
      a(random, batch, k, o, o.a, MOIRE_ROWWISE),
      b(random_weight(random, o, batch.num_groups(), o.halves() * f, k, true, &b_scales)),
      bias(random_tensor(random, o.extras, o.operands, {batch.num_groups(), o.halves() * f})),
      probs(random_rows(random, o.extras, batch)),
      act(o.output, {batch.capacity(), f}, o.padding) {
  if (o.extras) z = TestTensor(o.output, {batch.capacity(), o.halves() * f}, o.padding);
}

GroupedGemmGluArgs GemmGluCase::args() const {
  GroupedGemmGluArgs args;
  args.a = a.rows;
  args.a_scales = a.scales;
  args.accumulation = options.accumulation;
  args.row_idx = a.row_idx;
  args.b = b;
  args.b_scales = b_scales;
  args.bias = bias;
  args.probs = probs;
  args.z = z;
  args.act = act;
  args.groups = batch.groups();
  args.activation = options.activation;
  args.layout = options.glu;
  args.tail = options.tail;
  return args;
}

GemmGluBackwardCase::GemmGluBackwardCase(Random& random, const Batch& batch_, int64_t f, int64_t k,
                                         const GemmOptions& o)
    : batch(batch_),
      options(o),
      grad_y(random, batch, k, o, o.a, MOIRE_ROWWISE),
      w2(random_weight(random, o, batch.num_groups(), k, f, false, &w2_scales)),
      z(o.output, {batch.capacity(), o.halves() * f}, o.padding),
      probs(random_rows(random, o.extras, batch)),
      grad_z(o.output, {batch.capacity(), o.halves() * f}, o.padding) {
  z.randomize_rows(random, batch.rows());
  if (!o.extras) return;
  act = TestTensor(o.output, {batch.capacity(), f}, o.padding);
  grad_probs = TestTensor(DType::kFP32, {batch.capacity()});
  grad_bias = TestTensor(DType::kFP32, {batch.num_groups(), o.halves() * f}, o.padding);
  if (o.beta != 0) grad_bias.randomize(random);
}

GroupedGemmGluBackwardArgs GemmGluBackwardCase::args() const {
  GroupedGemmGluBackwardArgs args;
  args.grad_y = grad_y.rows;
  args.grad_y_scales = grad_y.scales;
  args.w2_scales = w2_scales;
  args.accumulation = options.accumulation;
  args.row_idx = grad_y.row_idx;
  args.w2 = w2;
  args.z = z;
  args.probs = probs;
  args.grad_z = grad_z;
  args.act = act;
  args.grad_probs = grad_probs;
  args.grad_bias = grad_bias;
  args.beta = options.beta;
  args.groups = batch.groups();
  args.activation = options.activation;
  args.layout = options.glu;
  args.tail = options.tail;
  return args;
}

WgradCase::WgradCase(Random& random, const Batch& batch_, int64_t m, int64_t n,
                     const GemmOptions& o)
    : batch(batch_),
      options(o),
      a(random, batch, m, o, o.a, MOIRE_COLUMNWISE),
      b(random, batch, n, o, o.b, MOIRE_COLUMNWISE),
      d(o.output, batch.num_groups(), m, n, MOIRE_OUT_IN, o.listed) {
  if (o.beta != 0) d.randomize(random);
}

GroupedGemmWgradArgs WgradCase::args() const {
  GroupedGemmWgradArgs args;
  args.a = a.rows;
  args.a_scales = a.scales;
  args.accumulation = options.accumulation;
  args.a_row_idx = a.row_idx;
  args.b = b.rows;
  args.b_scales = b.scales;
  args.b_row_idx = b.row_idx;
  args.d = d;
  args.beta = options.beta;
  args.beta_per_group = beta_per_group.empty() ? nullptr : beta_per_group.data();
  args.groups = batch.groups();
  return args;
}

EveryGemm::EveryGemm(Random& random, const Batch& batch, const GemmOptions& o)
    : forward(random, batch, 200, 530, false, o),
      dgrad(random, batch, 530, 200, true, o),
      glu(random, batch, 150, 300, o),
      glu_backward(random, batch, 150, 300, o),
      wgrad(random, batch, 400, 100, o) {}

void EveryGemm::run(const Tested& context) const {
  ASSERT_TRUE(succeeds(forward.run(context)));
  ASSERT_TRUE(succeeds(dgrad.run(context)));
  ASSERT_TRUE(succeeds(glu.run(context)));
  ASSERT_TRUE(succeeds(glu_backward.run(context)));
  ASSERT_TRUE(succeeds(wgrad.run(context)));
}

void EveryGemm::expect_same(const EveryGemm& other) const {
  forward.expect_same(other.forward);
  dgrad.expect_same(other.dgrad);
  glu.expect_same(other.glu);
  glu_backward.expect_same(other.glu_backward);
  wgrad.expect_same(other.wgrad);
}

}  // namespace moire::test
