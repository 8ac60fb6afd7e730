#include "reference/routing.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace moire::reference {
namespace {

// exp, the sum over the experts and one division, each rounded; 8 ulp for exp as for the
// activations (numerics.md §5), and the rounding of its argument. Scores below the smallest normal
// number may be flushed.
Number score(double exact, double exponent, int64_t num_experts) {
  const auto terms = num_experts + 8 + static_cast<int64_t>(std::min(1e3, std::abs(exponent)));
  return {exact, dot_tolerance(terms, exact) + 0x1p-126};
}

// Row t's scores [1, E].
Matrix scores_of(const moire_tensor& logits, int32_t kind, int64_t t) {
  const int64_t num_experts = TensorView(logits).columns();
  Matrix out(1, num_experts);
  double largest = -std::numeric_limits<double>::infinity(), sum = 0;
  for (int64_t e = 0; e < num_experts; ++e) {
    largest = std::max(largest, read_element(logits, t, e));
  }
  for (int64_t e = 0; e < num_experts; ++e) sum += std::exp(read_element(logits, t, e) - largest);
  for (int64_t e = 0; e < num_experts; ++e) {
    const double logit = read_element(logits, t, e);
    const bool is_softmax = kind == MOIRE_ROUTER_SOFTMAX;
    const double exponent = is_softmax ? logit - largest : -logit;
    const double exact = is_softmax ? std::exp(exponent) / sum : 1 / (1 + std::exp(exponent));
    out.at(0, e) = score(exact, is_softmax ? exponent : 0, num_experts);
  }
  return out;
}

// Chosen scores that sum to zero have weights of zero.
double inverse(double sum) { return sum == 0 ? 0 : 1 / sum; }

double scale_or_one(float scale) { return scale == 0 ? 1.0 : static_cast<double>(scale); }

}  // namespace

std::vector<std::vector<int64_t>> splits_to_offsets(const moire_splits_to_offsets_args& args) {
  const int64_t entries = TensorView(args.splits).columns();
  std::vector<int64_t> offsets{0};
  for (int64_t i = 0; i < entries; ++i) {
    const int64_t entry = read_index(args.splits, 0, i);
    if (args.kind == MOIRE_SPLITS) offsets.push_back(offsets.back() + entry);
    if (args.kind == MOIRE_ENDS || (args.kind == MOIRE_OFFSETS && i > 0)) offsets.push_back(entry);
  }
  std::vector<std::vector<int64_t>> out;
  for (int64_t i = 0; i < args.num_outputs; ++i) {
    const moire_offsets_output& wanted = args.outputs[i];
    out.emplace_back(offsets.begin() + (wanted.no_leading_zero != 0 ? 1 : 0), offsets.end());
    for (int64_t& offset : out.back()) offset *= wanted.multiplier == 0 ? 1 : wanted.multiplier;
  }
  return out;
}

RouterResults router(const moire_router_args& args) {
  const TensorView logits = args.logits;
  const int64_t tokens = logits.num_rows(), num_experts = logits.columns();
  const int64_t k = TensorView(args.topk_idx).columns();
  RouterResults out{Matrix(tokens, num_experts), {}, {}};
  for (int64_t t = 0; t < tokens; ++t) {
    const Matrix scores = scores_of(args.logits, args.kind, t);
    for (int64_t e = 0; e < num_experts; ++e) {
      Dot sum;
      sum.add(round_to(DType::kFP32, scores.at(0, e)));
      if (is_present(args.expert_bias)) sum.add({read_element(args.expert_bias, 0, e)});
      out.choice_scores.at(t, e) = round_to(DType::kFP32, sum.sum());
    }
    std::vector<int64_t> order(static_cast<size_t>(num_experts));
    for (int64_t e = 0; e < num_experts; ++e) order[static_cast<size_t>(e)] = e;
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
      const double x = out.choice_scores.at(t, a).value, y = out.choice_scores.at(t, b).value;
      return x > y || (std::isnan(y) && !std::isnan(x));  // NaN loses; ties stay in order
    });
    out.topk_idx.insert(out.topk_idx.end(), order.begin(), order.begin() + k);
  }
  out.topk_weights = router_weights(args, out.topk_idx);
  return out;
}

Matrix router_weights(const moire_router_args& args, const std::vector<int64_t>& topk_idx) {
  const int64_t tokens = TensorView(args.logits).num_rows();
  const int64_t k = TensorView(args.topk_idx).columns();
  Matrix out(tokens, k);
  for (int64_t t = 0; t < tokens; ++t) {
    const Matrix scores = scores_of(args.logits, args.kind, t);
    double sum = 0;
    for (int64_t j = 0; j < k; ++j) {
      out.at(t, j) = scores.at(0, topk_idx[static_cast<size_t>(t * k + j)]);
      sum += out.at(t, j).value;
    }
    for (int64_t j = 0; j < k; ++j) {
      Number& weight = out.at(t, j);
      const double factor = scale_or_one(args.scale) * (args.normalize != 0 ? inverse(sum) : 1);
      // The sum may be off by as much, relatively, as each of its terms.
      const double bound = 2 * weight.bound + dot_tolerance(k, weight.value);
      weight = {weight.value * factor, bound * std::abs(factor)};
    }
  }
  return out;
}

Matrix router_backward(const moire_router_backward_args& args) {
  const TensorView logits = args.logits, topk_idx = args.topk_idx;
  const int64_t tokens = logits.num_rows(), num_experts = logits.columns(), k = topk_idx.columns();
  const double scale = scale_or_one(args.scale);
  Matrix out(tokens, num_experts);
  for (int64_t t = 0; t < tokens; ++t) {
    const Matrix scores = scores_of(args.logits, args.kind, t);
    const auto chosen = [&](int64_t j) { return read_index(topk_idx, t, j); };
    const auto incoming = [&](int64_t j) { return read_element(args.grad_topk_weights, t, j); };
    double sum = 0, weighted = 0, weighted_size = 0;
    for (int64_t j = 0; j < k; ++j) {
      const double s = scores.at(0, chosen(j)).value;
      sum += s;
      weighted += incoming(j) * s;
      weighted_size += std::abs(incoming(j)) * s;
    }
    // weight_j = scale s_j, or scale s_j / sum.
    std::vector<double> grad_score(static_cast<size_t>(num_experts), 0), size = grad_score;
    for (int64_t j = 0; j < k; ++j) {
      const auto e = static_cast<size_t>(chosen(j));
      const bool normalize = args.normalize != 0;
      grad_score[e] += normalize ? scale * (incoming(j) - weighted * inverse(sum)) * inverse(sum)
                                 : scale * incoming(j);
      size[e] += normalize
                     ? std::abs(scale) * (std::abs(incoming(j)) + weighted_size * inverse(sum)) *
                           inverse(sum)
                     : std::abs(scale * incoming(j));
    }
    double mean = 0, mean_size = 0;  // softmax: ds_i/dl_e = s_i ([i = e] - s_e)
    for (int64_t e = 0; e < num_experts; ++e) {
      mean += scores.at(0, e).value * grad_score[static_cast<size_t>(e)];
      mean_size += scores.at(0, e).value * size[static_cast<size_t>(e)];
    }
    for (int64_t e = 0; e < num_experts; ++e) {
      const double s = scores.at(0, e).value;
      const double g = grad_score[static_cast<size_t>(e)], g_size = size[static_cast<size_t>(e)];
      const bool softmax = args.kind == MOIRE_ROUTER_SOFTMAX;
      const double value = softmax ? s * (g - mean) : s * (1 - s) * g;
      const double magnitude = softmax ? s * (g_size + mean_size) : s * g_size;
      out.at(t, e) = {value, 4 * dot_tolerance(num_experts + k + 8, magnitude)};
    }
  }
  return out;
}

PlanResults permute_plan(const moire_permute_plan_args& args) {
  const TensorView topk_idx = args.topk_idx;
  const int64_t tokens = topk_idx.num_rows(), k = topk_idx.columns();
  PlanResults out;
  out.offsets.push_back(0);
  out.gather_idx.assign(static_cast<size_t>(TensorView(args.gather_idx).columns()), -1);
  out.scatter_idx.assign(static_cast<size_t>(tokens * k), -1);
  int64_t row = 0;
  for (int64_t g = 0; g < args.num_groups; ++g) {
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t j = 0; j < k; ++j) {
        if (read_index(topk_idx, t, j) != g) continue;
        out.gather_idx[static_cast<size_t>(row)] = t;
        out.scatter_idx[static_cast<size_t>(t * k + j)] = row++;
      }
    }
    out.offsets.push_back(row);
  }
  return out;
}

PermuteResults permute(const moire_permute_args& args) {
  const int64_t rows = rows_in_use(args.groups);
  PermuteResults out;
  if (is_present(args.rows)) out.rows = read_rows(args.x, args.gather_idx, rows);
  if (is_present(args.probs)) {
    out.probs = Matrix(rows, 1);
    const TensorView scatter_idx = args.scatter_idx;
    for (int64_t t = 0; t < scatter_idx.num_rows(); ++t) {
      for (int64_t j = 0; j < scatter_idx.columns(); ++j) {
        const int64_t row = read_index(scatter_idx, t, j);
        if (row >= 0) out.probs.at(row, 0).value = read_element(args.topk_weights, t, j);
      }
    }
  }
  return out;
}

UnpermuteResults unpermute(const moire_unpermute_args& args) {
  const TensorView scatter_idx = args.scatter_idx;
  const int64_t tokens = scatter_idx.num_rows(), k = scatter_idx.columns();
  const bool has_y = is_present(args.y), has_weights = is_present(args.topk_weights);
  UnpermuteResults out;
  if (has_y) out.y = Matrix(tokens, TensorView(args.y).columns());
  if (has_weights) out.topk_weights = Matrix(tokens, k);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t h = 0; h < out.y.columns; ++h) {
      Dot dot;
      for (int64_t j = 0; j < k; ++j) {
        const int64_t row = read_index(scatter_idx, t, j);
        if (row < 0) continue;
        const double weight = is_present(args.weights) ? read_element(args.weights, t, j) : 1;
        dot.add({weight}, {read_element(args.rows, row, h)});
      }
      out.y.at(t, h) = dot.sum();
    }
    for (int64_t j = 0; has_weights && j < k; ++j) {
      const int64_t row = read_index(scatter_idx, t, j);
      if (row >= 0) out.topk_weights.at(t, j).value = read_element(args.probs, 0, row);
    }
  }
  return out;
}

UnpermuteBackwardResults unpermute_backward(const moire_unpermute_backward_args& args) {
  const TensorView scatter_idx = args.scatter_idx, grad_y = args.grad_y;
  const int64_t tokens = scatter_idx.num_rows(), k = scatter_idx.columns();
  const int64_t columns = grad_y.columns();
  const bool has_rows = is_present(args.grad_rows), has_weights = is_present(args.grad_weights);
  UnpermuteBackwardResults out;
  if (has_rows) out.grad_rows = Matrix(rows_in_use(args.groups), columns);
  if (has_weights) out.grad_weights = Matrix(tokens, k);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t j = 0; j < k; ++j) {
      const int64_t row = read_index(scatter_idx, t, j);
      if (row < 0) continue;
      const double weight = is_present(args.weights) ? read_element(args.weights, t, j) : 1;
      Dot dot;
      for (int64_t h = 0; h < columns; ++h) {
        const double incoming = read_element(grad_y, t, h);
        if (has_rows) {
          const double value = weight * incoming;
          out.grad_rows.at(row, h) = {value, spacing(DType::kFP32, value) / 2};  // one product
        }
        if (has_weights) dot.add({read_element(args.rows, row, h)}, {incoming});
      }
      if (has_weights) out.grad_weights.at(t, j) = dot.sum();
    }
  }
  return out;
}

}  // namespace moire::reference
