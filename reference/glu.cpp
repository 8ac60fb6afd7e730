#include "reference/glu.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <initializer_list>

namespace moire::reference {
namespace {

// An activation may be off by this many units in the last place of FP32 (numerics.md §5), and a
// sigmoid below the smallest normal number may be flushed to zero.
constexpr double kActivationUlps = 8;
constexpr double kSmallestNormal = 0x1p-126;

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

// The argument s of the sigmoid, and ds/da.
struct SigmoidArgument {
  double value;
  double slope;
};

SigmoidArgument sigmoid_argument(const moire_activation& activation, double a) {
  switch (activation.kind) {
    case MOIRE_CLAMPED_SWIGLU: {
      const auto alpha = static_cast<double>(activation.alpha);
      return {alpha * a, alpha};
    }
    case MOIRE_GEGLU_TANH: {
      const double root = std::sqrt(2 / std::acos(-1.0));
      return {2 * root * (a + 0.044715 * a * a * a), 2 * root * (1 + 3 * 0.044715 * a * a)};
    }
    default:
      return {a, 1};
  }
}

bool is_clamped(const moire_activation& activation) {
  return activation.kind == MOIRE_CLAMPED_SWIGLU;
}

// What the gate becomes, its derivative, and what the error of that is relative to: of two terms
// that may cancel, their sizes.
struct Gate {
  double value;
  bool passes;  // a gradient
  double slope = 0;
  double slope_size = 0;
  double flushed = 0;  // where a sigmoid may be taken for zero
};

Gate gate_of(const moire_activation& activation, double a) {
  if (activation.kind == MOIRE_REGLU || activation.kind == MOIRE_REGLU2) {
    const bool is_squared = activation.kind == MOIRE_REGLU2;
    if (a <= 0) return {0, false};
    const double r = is_squared ? a * a : a, slope = is_squared ? 2 * a : std::isnan(a) ? a : 1;
    return {r, true, slope, slope};
  }
  const auto limit = static_cast<double>(activation.limit);
  const bool passes = !is_clamped(activation) || !(a > limit);
  const double g = passes ? a : limit;
  const SigmoidArgument s = sigmoid_argument(activation, g);
  const double sigma = sigmoid(s.value);
  const double flushed = kSmallestNormal * (1 + std::abs(g)) * (1 + std::abs(s.slope));
  return {g * sigma, passes, sigma + g * sigma * (1 - sigma) * s.slope,
          sigma * (1 + std::abs(g * s.slope)), flushed};
}

// What the linear half becomes, and whether its gradient passes; 1 where there is none.
struct Up {
  double value = 1;
  bool passes = false;
};

Up up_of(const moire_activation& activation, double b) {
  if (!is_clamped(activation)) return {b, true};
  const auto limit = static_cast<double>(activation.limit);
  const double clamped = b > limit ? limit : b < -limit ? -limit : b;
  return {clamped + static_cast<double>(activation.offset), !(std::abs(b) > limit)};
}

// h(gate) * l * prob for the values that l may have, its own in the middle; `up_size` is |b|.
Number product(const moire_activation& activation, Number gate, const double (&l)[3],
               double up_size, double prob) {
  const double value = gate_of(activation, gate.value).value * l[1] * prob;
  const double flushed = kSmallestNormal * (1 + std::abs(gate.value)) * (1 + up_size);
  Number act{value, std::isfinite(value)
                        ? kActivationUlps * spacing(DType::kFP32, value) + flushed * std::abs(prob)
                        : 0};
  double change = 0;  // the farthest that an uncertain z can move it
  if (gate.bound != 0 || l[0] != l[1] || l[2] != l[1]) {
    for (const double a : {gate.value - gate.bound, gate.value, gate.value + gate.bound}) {
      const double h = gate_of(activation, a).value;
      for (const double factor : l) change = std::max(change, std::abs(h * factor * prob - value));
    }
  }
  act.bound += change;
  return act;
}

Number gate_gradient(const Gate& gate, double l, double prob) {
  const double relative = kActivationUlps * 0x1p-23;
  if (!gate.passes) return {};
  return {gate.slope * l * prob, (relative * gate.slope_size + gate.flushed) * std::abs(l * prob)};
}

}  // namespace

GluColumns glu_columns(const moire_glu_layout& layout, int64_t num_columns, int64_t j) {
  if (layout.order == MOIRE_UNGATED) return {j, kNoUp};
  const int64_t block = layout.block == 0 ? num_columns : layout.block;
  const int64_t first = j / block * 2 * block + j % block;  // blocks come in pairs
  const int64_t second = first + block;
  return layout.order == MOIRE_GATE_FIRST ? GluColumns{first, second} : GluColumns{second, first};
}

Number glu(const moire_activation& activation, Number gate, Number up, double prob) {
  const auto l = [&](double b) { return up_of(activation, b).value; };
  return product(activation, gate, {l(up.value - up.bound), l(up.value), l(up.value + up.bound)},
                 std::abs(up.value), prob);
}

Number ungated(const moire_activation& activation, Number gate, double prob) {
  return product(activation, gate, {1, 1, 1}, 0, prob);
}

GluGradient glu_gradient(const moire_activation& activation, double gate, double up, double prob) {
  const Gate h = gate_of(activation, gate);
  const Up l = up_of(activation, up);
  GluGradient gradient;
  gradient.gate = gate_gradient(h, l.value, prob);
  if (l.passes) {
    const double relative = kActivationUlps * 0x1p-23;
    gradient.up = {h.value * prob, (relative * std::abs(h.value) + h.flushed) * std::abs(prob)};
  }
  return gradient;
}

Number ungated_gradient(const moire_activation& activation, double gate, double prob) {
  return gate_gradient(gate_of(activation, gate), 1, prob);
}

Matrix glu(const Matrix& z, const std::vector<double>& probs, const moire_activation& activation,
           const moire_glu_layout& layout) {
  const bool is_gated = layout.order != MOIRE_UNGATED;
  Matrix act(z.rows, is_gated ? z.columns / 2 : z.columns);
  for (int64_t i = 0; i < act.rows; ++i) {
    const double prob = probs[static_cast<size_t>(i)];
    for (int64_t j = 0; j < act.columns; ++j) {
      const GluColumns at = glu_columns(layout, act.columns, j);
      act.at(i, j) = is_gated ? glu(activation, z.at(i, at.gate), z.at(i, at.up), prob)
                              : ungated(activation, z.at(i, j), prob);
    }
  }
  return act;
}

GluBackward glu_backward(const Matrix& z, const Matrix& grad_act, const std::vector<double>& probs,
                         const moire_activation& activation, const moire_glu_layout& layout) {
  const auto times = [](const Number& a, const Number& b) {
    return Number{a.value * b.value,
                  std::abs(a.value) * b.bound + a.bound * std::abs(b.value) + a.bound * b.bound};
  };
  GluBackward out{Matrix(z.rows, z.columns), Matrix(z.rows, 1)};
  for (int64_t i = 0; i < z.rows; ++i) {
    const double prob = probs[static_cast<size_t>(i)];
    Dot grad_prob;
    for (int64_t j = 0; j < grad_act.columns; ++j) {
      const GluColumns at = glu_columns(layout, grad_act.columns, j);
      const Number grad = grad_act.at(i, j), gate = z.at(i, at.gate);
      if (at.up == kNoUp) {
        out.grad_z.at(i, j) = times(grad, ungated_gradient(activation, gate.value, prob));
        grad_prob.add(grad, ungated(activation, gate, 1));
        continue;
      }
      const Number up = z.at(i, at.up);
      const GluGradient gradient = glu_gradient(activation, gate.value, up.value, prob);
      out.grad_z.at(i, at.gate) = times(grad, gradient.gate);
      out.grad_z.at(i, at.up) = times(grad, gradient.up);
      grad_prob.add(grad, glu(activation, gate, up, 1));
    }
    out.grad_probs.at(i, 0) = grad_prob.sum();
  }
  return out;
}

Matrix glu(const moire_glu_args& args) {
  const TensorView z = args.z;
  const int64_t rows = args.groups.offsets == nullptr ? z.num_rows() : rows_in_use(args.groups);
  return glu(read_rows(z, {}, rows), read_vector(args.probs, rows, 1), args.activation,
             args.layout);
}

GluBackwardResults glu_backward(const moire_glu_backward_args& args) {
  const TensorView z_view = args.z;
  const int64_t rows =
      args.groups.offsets == nullptr ? z_view.num_rows() : rows_in_use(args.groups);
  const Matrix z = read_rows(z_view, {}, rows);
  const std::vector<double> probs = read_vector(args.probs, rows, 1);
  GluBackward gradients =
      glu_backward(z, read_rows(args.grad_act, {}, rows), probs, args.activation, args.layout);
  return {std::move(gradients.grad_z), glu(z, probs, args.activation, args.layout),
          std::move(gradients.grad_probs)};
}

std::vector<std::byte> convert_glu(const moire_convert_glu_args& args) {
  const TensorView t = args.source;
  // [outer, size, inner]: the dimension that holds the 2F, what is before it and what is after it.
  const int64_t size = t.dim(args.dim);
  int64_t inner = 1;
  for (int32_t i = args.dim + 1; i < t.rank; ++i) inner *= t.shape[i];
  std::vector<int64_t> source_of(static_cast<size_t>(size));
  for (int64_t j = 0; j < size / 2; ++j) {
    const GluColumns from = glu_columns(args.from, size / 2, j);
    const GluColumns to = glu_columns(args.to, size / 2, j);
    source_of[static_cast<size_t>(to.gate)] = from.gate;
    source_of[static_cast<size_t>(to.up)] = from.up;
  }
  int64_t element = 1;  // bytes
  switch (t.type()) {
    case DType::kFP64:
    case DType::kInt64:
      element = 8;
      break;
    case DType::kFP32:
    case DType::kInt32:
      element = 4;
      break;
    case DType::kBF16:
    case DType::kFP16:
      element = 2;
      break;
    default:
      break;
  }
  std::vector<std::byte> out(static_cast<size_t>(t.num_elements() * element));
  for (int64_t i = 0; i < t.num_elements(); ++i) {
    const int64_t row = i / inner % size, before = i / inner / size, after = i % inner;
    const int64_t from =
        (before * size + source_of[static_cast<size_t>(row)]) * inner + after;  // dense index
    const int64_t offset = from / t.columns() * t.stride() + from % t.columns();
    std::memcpy(out.data() + i * element, static_cast<const std::byte*>(t.data) + offset * element,
                static_cast<size_t>(element));
  }
  return out;
}

}  // namespace moire::reference
