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

// What the gate and the linear half become before they are multiplied, and whether the gradient
// passes.
struct Clamped {
  double gate, up;
  bool gate_passes, up_passes;
};

Clamped clamp(const moire_activation& activation, double a, double b) {
  if (activation.kind != MOIRE_CLAMPED_SWIGLU) return {a, b, true, true};
  const auto limit = static_cast<double>(activation.limit);
  const double gate = a > limit ? limit : a;  // NaN stays NaN
  const double up = b > limit ? limit : b < -limit ? -limit : b;
  return {gate, up + static_cast<double>(activation.offset), !(a > limit), !(std::abs(b) > limit)};
}

double glu_value(const moire_activation& activation, double a, double b) {
  const Clamped c = clamp(activation, a, b);
  return c.gate * sigmoid(sigmoid_argument(activation, c.gate).value) * c.up;
}

}  // namespace

GluColumns glu_columns(const moire_glu_layout& layout, int64_t num_columns, int64_t j) {
  const int64_t block = layout.block == 0 ? num_columns : layout.block;
  const int64_t first = j / block * 2 * block + j % block;  // blocks come in pairs
  const int64_t second = first + block;
  return layout.order == MOIRE_GATE_FIRST ? GluColumns{first, second} : GluColumns{second, first};
}

Number glu(const moire_activation& activation, Number gate, Number up, double prob) {
  const double value = glu_value(activation, gate.value, up.value) * prob;
  const double flushed = kSmallestNormal * (1 + std::abs(gate.value)) * (1 + std::abs(up.value));
  Number act{value, std::isfinite(value)
                        ? kActivationUlps * spacing(DType::kFP32, value) + flushed * std::abs(prob)
                        : 0};
  if (gate.bound == 0 && up.bound == 0) return act;
  double change = 0;  // the farthest that an uncertain z can move it
  for (const double a : {gate.value - gate.bound, gate.value, gate.value + gate.bound}) {
    for (const double b : {up.value - up.bound, up.value, up.value + up.bound}) {
      change = std::max(change, std::abs(glu_value(activation, a, b) * prob - value));
    }
  }
  act.bound += change;
  return act;
}

GluGradient glu_gradient(const moire_activation& activation, double gate, double up, double prob) {
  const Clamped c = clamp(activation, gate, up);
  const SigmoidArgument s = sigmoid_argument(activation, c.gate);
  const double sigma = sigmoid(s.value);
  // d/dg of g * sigma(s(g)) * up, and of it by up.
  const double by_gate = sigma + c.gate * sigma * (1 - sigma) * s.slope;
  const double by_up = c.gate * sigma;
  // The two terms of by_gate may cancel, so its error is relative to their sizes.
  const double relative = kActivationUlps * 0x1p-23;
  const double size = sigma * (1 + std::abs(c.gate * s.slope));
  const double flushed = kSmallestNormal * (1 + std::abs(c.gate)) * (1 + std::abs(s.slope));
  GluGradient gradient;
  if (c.gate_passes) {
    gradient.gate = {by_gate * c.up * prob, (relative * size + flushed) * std::abs(c.up * prob)};
  }
  if (c.up_passes) {
    gradient.up = {by_up * prob, (relative * std::abs(by_up) + flushed) * std::abs(prob)};
  }
  return gradient;
}

Matrix glu(const Matrix& z, const std::vector<double>& probs, const moire_activation& activation,
           const moire_glu_layout& layout) {
  Matrix act(z.rows, z.columns / 2);
  for (int64_t i = 0; i < act.rows; ++i) {
    for (int64_t j = 0; j < act.columns; ++j) {
      const GluColumns at = glu_columns(layout, act.columns, j);
      act.at(i, j) =
          glu(activation, z.at(i, at.gate), z.at(i, at.up), probs[static_cast<size_t>(i)]);
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
    Dot grad_prob;
    for (int64_t j = 0; j < grad_act.columns; ++j) {
      const GluColumns at = glu_columns(layout, grad_act.columns, j);
      const Number gate = z.at(i, at.gate), up = z.at(i, at.up);
      const GluGradient gradient =
          glu_gradient(activation, gate.value, up.value, probs[static_cast<size_t>(i)]);
      out.grad_z.at(i, at.gate) = times(grad_act.at(i, j), gradient.gate);
      out.grad_z.at(i, at.up) = times(grad_act.at(i, j), gradient.up);
      grad_prob.add(grad_act.at(i, j), glu(activation, gate, up, 1));
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
