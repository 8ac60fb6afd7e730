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

}  // namespace

RaggedInput::RaggedInput(Random& random, const Batch& batch, DType dtype, int64_t columns,
                         const GemmOptions& o) {
  if (o.row_idx == DType::kNone) {
    rows = TestTensor(dtype, {batch.capacity(), columns}, o.padding);
    rows.randomize_rows(random, batch.rows());
    return;
  }
  const int64_t sources = batch.rows() / 2 + 3;
  rows = TestTensor(dtype, {sources, columns}, o.padding);
  rows.randomize(random);
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
      a(random, batch, o.operands, k, o),
      b(o.operands, batch.num_groups(), transpose_b ? k : n, transpose_b ? n : k, o.layout,
        o.listed),
      bias(random_tensor(random, o.extras, o.operands, {batch.num_groups(), n})),
      bias_scale(random_rows(random, o.extras, batch)),
      d(o.output, {batch.capacity(), n}, o.padding) {
  b.randomize(random, scale_for(k));
}

GroupedGemmArgs GemmCase::args() const {
  GroupedGemmArgs args;
  args.a = a.rows;
  args.row_idx = a.row_idx;
  args.b = b;
  args.transpose_b = transpose_b ? 1 : 0;
  args.bias = bias;
  args.bias_scale = bias_scale;
  args.d = d;
  args.groups = batch.groups();
  args.tail = options.tail;
  return args;
}

Status GemmCase::run(const Context& context) {
  return test::run(context, args(), grouped_gemm, grouped_gemm_workspace);
}

GemmGluCase::GemmGluCase(Random& random, const Batch& batch_, int64_t f, int64_t k,
                         const GemmOptions& o)
    : batch(batch_),
      options(o),
      a(random, batch, o.operands, k, o),
      b(o.operands, batch.num_groups(), 2 * f, k, o.layout, o.listed),
      bias(random_tensor(random, o.extras, o.operands, {batch.num_groups(), 2 * f})),
      probs(random_rows(random, o.extras, batch)),
      act(o.output, {batch.capacity(), f}, o.padding) {
  b.randomize(random, scale_for(k));
  if (o.extras) z = TestTensor(o.output, {batch.capacity(), 2 * f}, o.padding);
}

GroupedGemmGluArgs GemmGluCase::args() const {
  GroupedGemmGluArgs args;
  args.a = a.rows;
  args.row_idx = a.row_idx;
  args.b = b;
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

Status GemmGluCase::run(const Context& context) {
  return test::run(context, args(), grouped_gemm_glu, grouped_gemm_glu_workspace);
}

GemmGluBackwardCase::GemmGluBackwardCase(Random& random, const Batch& batch_, int64_t f, int64_t k,
                                         const GemmOptions& o)
    : batch(batch_),
      options(o),
      grad_y(random, batch, o.operands, k, o),
      w2(o.operands, batch.num_groups(), k, f, o.layout, o.listed),
      z(o.output, {batch.capacity(), 2 * f}, o.padding),
      probs(random_rows(random, o.extras, batch)),
      grad_z(o.output, {batch.capacity(), 2 * f}, o.padding) {
  w2.randomize(random, scale_for(k));
  z.randomize_rows(random, batch.rows());
  if (!o.extras) return;
  act = TestTensor(o.output, {batch.capacity(), f}, o.padding);
  grad_probs = TestTensor(DType::kFP32, {batch.capacity()});
  grad_bias = TestTensor(DType::kFP32, {batch.num_groups(), 2 * f}, o.padding);
  if (o.beta != 0) grad_bias.randomize(random);
}

GroupedGemmGluBackwardArgs GemmGluBackwardCase::args() const {
  GroupedGemmGluBackwardArgs args;
  args.grad_y = grad_y.rows;
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

Status GemmGluBackwardCase::run(const Context& context) {
  return test::run(context, args(), grouped_gemm_glu_backward, grouped_gemm_glu_backward_workspace);
}

WgradCase::WgradCase(Random& random, const Batch& batch_, int64_t m, int64_t n,
                     const GemmOptions& o)
    : batch(batch_),
      options(o),
      a(random, batch, o.operands, m, o),
      b(random, batch, o.operands, n, o),
      d(o.output, batch.num_groups(), m, n, MOIRE_OUT_IN, o.listed) {
  if (o.beta != 0) d.randomize(random);
}

GroupedGemmWgradArgs WgradCase::args() const {
  GroupedGemmWgradArgs args;
  args.a = a.rows;
  args.a_row_idx = a.row_idx;
  args.b = b.rows;
  args.b_row_idx = b.row_idx;
  args.d = d;
  args.beta = options.beta;
  args.beta_per_group = beta_per_group.empty() ? nullptr : beta_per_group.data();
  args.groups = batch.groups();
  return args;
}

Status WgradCase::run(const Context& context) {
  return test::run(context, args(), grouped_gemm_wgrad, grouped_gemm_wgrad_workspace);
}

}  // namespace moire::test
