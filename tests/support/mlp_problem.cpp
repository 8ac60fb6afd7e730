#include "tests/support/mlp_problem.h"

#include <cmath>
#include <utility>

namespace moire::test {
namespace {

// Gathered rows come from a table of this many tokens.
constexpr int64_t kTokens = 6;

// FP64 problems are FP64 throughout; otherwise probs and their gradients are FP32 and weight
// gradients have their own type.
DType unless_fp64(DType dtype, DType otherwise) {
  return dtype == DType::kFP64 ? DType::kFP64 : otherwise;
}

TestTensor ragged_input(const MlpOptions& o, const Batch& batch, bool gathered, int64_t columns,
                        Random& random) {
  TestTensor t(o.dtype, {gathered ? kTokens : batch.capacity(), columns});
  return t.randomize_rows(random, gathered ? kTokens : batch.rows());
}

TestTensor row_indices(const MlpOptions& o, const Batch& batch, Random& random) {
  std::vector<int64_t> rows(static_cast<size_t>(batch.capacity()), -1);
  for (int64_t i = 0; i < batch.rows(); ++i) {
    rows[static_cast<size_t>(i)] = random.integer(0, kTokens - 1);
  }
  return index_tensor(o.index_type, rows);
}

// What forward and backward read alike, and what passes from one to the other.
template <class A>
A shared_args(const MlpProblem& m) {
  A args;
  args.x = m.x;
  args.row_idx = m.row_idx;
  args.w1 = m.w1;
  args.w2 = m.w2;
  args.b2 = m.b2;
  args.probs = m.probs;
  args.b2_scale = m.b2_scale;
  args.b2_unscaled = m.options.b2_scale == B2Scale::kNothing ? 1 : 0;
  args.groups = m.batch.groups();
  args.activation = m.options.activation;
  args.layout = m.options.layout;
  args.tail = m.options.tail;
  args.z = m.z;
  if (m.options.saves_act) args.act = m.act;
  return args;
}

template <class T>
T accumulated(T gradient, const MlpOptions& o, Random& random) {
  if (o.accumulate) gradient.randomize(random);
  return gradient;
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const MlpOptions& o) {
  out << o.ragged << " hidden " << o.hidden << " width " << o.width << " out " << o.out_features()
      << " " << dtype_name(o.dtype) << " activation " << o.activation.kind << " block "
      << o.layout.block << " order " << o.layout.order << " gradients "
      << dtype_name(o.gradient_type);
  const std::pair<bool, const char*> flags[] = {{o.in_8_bits, " in 8 bits"},
                                                {o.w1_layout == MOIRE_IN_OUT, " w1[in,out]"},
                                                {o.w2_layout == MOIRE_IN_OUT, " w2[in,out]"},
                                                {o.listed, " listed"},
                                                {o.with_b1, " b1"},
                                                {o.with_b2, " b2"},
                                                {o.with_probs, " probs"},
                                                {o.b2_scale == B2Scale::kNothing, " b2_unscaled"},
                                                {o.b2_scale == B2Scale::kOwn, " b2_scale"},
                                                {o.gathered, " gathered"},
                                                {o.gathered_grad_y, " gathered_grad_y"},
                                                {o.accumulate, " accumulate"},
                                                {o.saves_act, " saves_act"}};
  for (const auto& [is_set, name] : flags) out << (is_set ? name : "");
  return out;
}

MlpProblem::MlpProblem(const MlpOptions& o, Random& random) : options(o), batch(o.ragged) {
  const int64_t num_groups = batch.num_groups(), capacity = batch.capacity();
  const int64_t hidden = o.hidden, width = o.width, out = o.out_features();
  const int64_t fc1_width = o.fc1_width();
  const DType fp32 = unless_fp64(o.dtype, DType::kFP32);
  const DType gradient = unless_fp64(o.dtype, o.gradient_type);
  x = ragged_input(o, batch, o.gathered, hidden, random);
  if (o.gathered) row_idx = row_indices(o, batch, random);
  grad_y = ragged_input(o, batch, o.gathered_grad_y, out, random);
  w1 = TestWeight(o.dtype, num_groups, fc1_width, hidden, o.w1_layout, o.listed);
  w1.randomize(random, 1 / std::sqrt(static_cast<double>(hidden)));
  w2 = TestWeight(o.dtype, num_groups, out, width, o.w2_layout, o.listed);
  w2.randomize(random, 1 / std::sqrt(static_cast<double>(width)));
  if (o.with_b1) b1 = TestTensor(o.dtype, {num_groups, fc1_width}).randomize(random);
  if (o.with_b2) b2 = TestTensor(o.dtype, {num_groups, out}).randomize(random);
  if (o.with_probs) probs = TestTensor(fp32, {capacity}).randomize_rows(random, batch.rows());
  if (with_own_b2_scale()) {
    b2_scale = TestTensor(fp32, {capacity}).randomize_rows(random, batch.rows());
  }
  const DType between = o.in_8_bits ? DType::kBF16 : o.dtype;
  z = TestTensor(between, {capacity, fc1_width});
  act = TestTensor(between, {capacity, width});
  y = TestTensor(o.dtype, {capacity, out});
  grad_z = z;
  grad_x = TestTensor(o.dtype, {capacity, hidden});
  grad_probs = grad_b2_scale = TestTensor(fp32, {capacity});
  grad_w1 = accumulated(TestWeight(gradient, num_groups, fc1_width, hidden, o.w1_layout, o.listed),
                        o, random);
  grad_w2 =
      accumulated(TestWeight(gradient, num_groups, out, width, o.w2_layout, o.listed), o, random);
  grad_b1 = accumulated(TestTensor(gradient, {num_groups, fc1_width}), o, random);
  grad_b2 = accumulated(TestTensor(gradient, {num_groups, out}), o, random);
}

GroupedMlpArgs MlpProblem::forward() const {
  auto args = shared_args<GroupedMlpArgs>(*this);
  args.b1 = b1;
  args.y = y;
  return args;
}

GroupedMlpBackwardArgs MlpProblem::backward(const MlpNeeds& needs) const {
  auto args = shared_args<GroupedMlpBackwardArgs>(*this);
  args.gathered_grad_y = options.gathered_grad_y ? 1 : 0;
  args.act_is_saved = options.saves_act ? 1 : 0;
  args.grad_y = grad_y;
  if (needs.x) args.grad_x = grad_x;
  if (needs.w1) args.grad_w1 = grad_w1;
  if (needs.w2) args.grad_w2 = grad_w2;
  if (needs.b1 && options.with_b1) args.grad_b1 = grad_b1;
  if (needs.b2 && options.with_b2) args.grad_b2 = grad_b2;
  if (needs.probs && options.with_probs) args.grad_probs = grad_probs;
  if (needs.b2_scale && with_own_b2_scale()) args.grad_b2_scale = grad_b2_scale;
  args.beta_w1 = args.beta_w2 = args.beta_bias = options.accumulate ? 1 : 0;
  return args;
}

const TestTensor& MlpProblem::factor_of_b2() const {
  static const TestTensor none;
  if (!options.with_b2 || options.b2_scale == B2Scale::kNothing) return none;
  return options.b2_scale == B2Scale::kOwn ? b2_scale : probs;
}

bool MlpProblem::is_undamaged() const {
  for (const TestTensor* t : {&x, &row_idx, &b1, &b2, &probs, &b2_scale, &grad_y, &z, &act, &y,
                              &grad_z, &grad_x, &grad_b1, &grad_b2, &grad_probs, &grad_b2_scale}) {
    if (!t->is_undamaged()) return false;
  }
  return w1.is_undamaged() && w2.is_undamaged() && grad_w1.is_undamaged() && grad_w2.is_undamaged();
}

}  // namespace moire::test
