// The grouped GEMMs of both layers, each epilogue and pass, and the gradient of a bias.
#include "cases.h"
#include "reference/grouped_gemm.h"

namespace moire::tool {
namespace {

double gemm_flops(const Problem& p, int64_t n, int64_t k) {
  return 2.0 * static_cast<double>(p.rows) * static_cast<double>(n) * static_cast<double>(k);
}

Call gemm_call(const GroupedGemmArgs& args, double flops) {
  return make_call(
      args, reference::grouped_gemm,
      [](Comparison& c, const GroupedGemmArgs& a, const auto& want) {
        c.ragged("d", a.d, want, c.tail_rule());
      },
      flops);
}

using Scaled = Operands::Scaled;
using ScaledWeight = Operands::ScaledWeight;
using Kind = Operands::Kind;

// x W^T (+ bias): `a` [., in] to d [., out].
Call forward(Operands& o, const std::string& result, const Scaled& a, const ScaledWeight& w,
             const TensorView& bias, const TensorView& bias_scale) {
  const Problem& p = o.problem();
  const int64_t out = Weight(w.weight).out_features(), in = Weight(w.weight).in_features();
  auto args = args_of<GroupedGemmArgs>(o);
  args.a = a.data;
  args.row_idx = a.row_idx;
  args.a_scales = a.scales;
  args.b = w.weight;
  args.b_scales = w.scales;
  args.bias = bias;
  args.bias_scale = bias.is_present() ? bias_scale : TensorView();
  args.d = o.output(result, o.out_dtype(), {p.capacity(), out});
  return gemm_call(args, gemm_flops(p, out, in));
}

// grad W: `a` [., out] to d [., in].
Call dgrad(Operands& o, const std::string& result, const Scaled& a, const ScaledWeight& w) {
  const Problem& p = o.problem();
  const int64_t out = Weight(w.weight).out_features(), in = Weight(w.weight).in_features();
  auto args = args_of<GroupedGemmArgs>(o);
  args.a = a.data;
  args.row_idx = a.row_idx;
  args.a_scales = a.scales;
  args.b = w.weight;
  args.b_scales = w.scales;
  args.transpose_b = 1;
  args.d = o.output(result, o.out_dtype(), {p.capacity(), in});
  return gemm_call(args, gemm_flops(p, out, in));
}

// grad^T x, laid out like the weight.
Call wgrad(Operands& o, const std::string& result, const Scaled& grad, const Scaled& x) {
  const Problem& p = o.problem();
  const int64_t out = grad.data.columns(), in = x.data.columns();
  const Scaled& a = p.in_out ? x : grad;
  const Scaled& b = p.in_out ? grad : x;
  auto args = args_of<GroupedGemmWgradArgs>(o);
  args.a = a.data;
  args.a_row_idx = a.row_idx;
  args.a_scales = a.scales;
  args.b = b.data;
  args.b_row_idx = b.row_idx;
  args.b_scales = b.scales;
  args.d = o.weight_gradient(result, out, in);
  return make_call<GroupedGemmWgradArgs>(
      args,
      [result](const GroupedGemmWgradArgs& a_) {
        return [a_, result, want = reference::grouped_gemm_wgrad(a_)](Comparison& c) {
          c.weights(result, a_.d, want);
        };
      },
      gemm_flops(p, out, in));
}

Call fc1_glu(Operands& o) {
  const Problem& p = o.problem();
  auto args = args_of<GroupedGemmGluArgs>(o);
  const Scaled x =
      o.ragged_operand("x", Kind::kActivation, p.a_format(), p.hidden, MOIRE_ROWWISE, true);
  const ScaledWeight w1 = o.weight_operand("w1", 2 * p.ffn, p.hidden, true);
  args.a = x.data;
  args.row_idx = x.row_idx;
  args.a_scales = x.scales;
  args.b = w1.weight;
  args.b_scales = w1.scales;
  args.bias = o.bias("b1", 2 * p.ffn);
  args.probs = o.probs();
  args.z = o.output("z", p.dtype, {p.capacity(), 2 * p.ffn});
  args.act = o.output("act", p.dtype, {p.capacity(), p.ffn});
  args.act_rowwise = o.quantized_output("act_rowwise", Kind::kActivation, p.ffn, MOIRE_ROWWISE);
  args.act_columnwise =
      o.quantized_output("act_columnwise", Kind::kActivation, p.ffn, MOIRE_COLUMNWISE);
  return make_call(
      args, reference::grouped_gemm_glu,
      [](Comparison& c, const GroupedGemmGluArgs& a, const auto& want) {
        c.ragged("z", a.z, want.z, Comparison::TailRule::kUntouched);
        c.ragged("act", a.act, want.act, c.tail_rule());
        c.copies("act", a, a.act, {}, a.act_rowwise, a.act_columnwise, c.tail_rule());
      },
      gemm_flops(p, 2 * p.ffn, p.hidden));
}

Call fc2_dgrad_glu(Operands& o) {
  const Problem& p = o.problem();
  auto args = args_of<GroupedGemmGluBackwardArgs>(o);
  const Scaled grad_y =
      o.ragged_operand("grad_y", Kind::kGradient, p.a_format(), p.hidden, MOIRE_ROWWISE, true);
  const ScaledWeight w2 = o.weight_operand("w2", p.hidden, p.ffn, false);
  args.grad_y = grad_y.data;
  args.row_idx = grad_y.row_idx;
  args.grad_y_scales = grad_y.scales;
  args.w2 = w2.weight;
  args.w2_scales = w2.scales;
  args.z = o.ragged("z", p.dtype, 2 * p.ffn);
  args.probs = o.probs();
  args.grad_z = o.output("grad_z", p.dtype, {p.capacity(), 2 * p.ffn});
  args.act = o.output("act", p.dtype, {p.capacity(), p.ffn});
  args.grad_z_rowwise =
      o.quantized_output("grad_z_rowwise", Kind::kGradient, 2 * p.ffn, MOIRE_ROWWISE);
  args.grad_z_columnwise =
      o.quantized_output("grad_z_columnwise", Kind::kGradient, 2 * p.ffn, MOIRE_COLUMNWISE);
  args.act_columnwise =
      o.quantized_output("act_columnwise", Kind::kActivation, p.ffn, MOIRE_COLUMNWISE);
  if (p.probs) args.grad_probs = o.output("grad_probs", DType::kFP32, {p.capacity()});
  if (p.bias) {
    args.grad_bias = o.accumulator("grad_b1", o.wgrad_dtype(), {p.groups, 2 * p.ffn}, p.beta == 1);
  }
  return make_call(
      args, reference::grouped_gemm_glu_backward,
      [](Comparison& c, const GroupedGemmGluBackwardArgs& a, const auto& want) {
        c.ragged("grad_z", a.grad_z, want.grad_z, c.tail_rule());
        c.ragged("act", a.act, want.act, c.tail_rule());
        c.copies("grad_z", a, a.grad_z, {}, a.grad_z_rowwise, a.grad_z_columnwise, c.tail_rule());
        c.copies("act", a, a.act, {}, {}, a.act_columnwise, c.tail_rule());
        c.ragged("grad_probs", a.grad_probs, want.grad_probs, c.tail_rule());
        c.per_group("grad_b1", a.grad_bias, want.grad_bias);
      },
      gemm_flops(p, p.hidden, p.ffn));
}

Call bias_gradient(Operands& o) {
  const Problem& p = o.problem();
  auto args = args_of<BiasBackwardArgs>(o);
  args.grad_y = o.gathered("grad_y", p.hidden);
  args.row_idx = o.row_idx();
  args.scale = o.probs();
  args.bias = o.input("b2", p.dtype, {p.groups, p.hidden}, 0.5);
  // Groups that overwrite never read their sums, so normal numbers there prove as much as NaN.
  args.grad_bias = o.accumulator("grad_b2", o.wgrad_dtype(), {p.groups, p.hidden}, p.beta != 0);
  args.grad_scale = o.row_accumulator("grad_scale", args.beta_scale == 1);
  return make_call(
      args, reference::bias_backward,
      [](Comparison& c, const BiasBackwardArgs& a, const auto& want) {
        c.per_group("grad_b2", a.grad_bias, want.grad_bias);
        c.ragged("grad_scale", a.grad_scale, want.grad_scale, c.tail_rule());
      },
      4.0 * static_cast<double>(p.rows) * static_cast<double>(p.hidden));
}

Call gemm_call_of(Operands& o) {
  const Problem& p = o.problem();
  const int64_t two_f = 2 * p.ffn;
  const auto rows = [&](const char* name, Kind kind, int64_t columns, bool gathers = false) {
    return o.ragged_operand(name, kind, p.a_format(), columns, MOIRE_ROWWISE, gathers);
  };
  const auto columns = [&](const char* name, Kind kind, int64_t width, bool gathers = false) {
    const Format format = kind == Kind::kGradient ? p.a_format() : p.b_format();
    return o.ragged_operand(name, kind, format, width, MOIRE_COLUMNWISE, gathers);
  };
  switch (p.op) {
    case Op::kFc1:
      return forward(o, "z", rows("x", Kind::kActivation, p.hidden, true),
                     o.weight_operand("w1", two_f, p.hidden, true), o.bias("b1", two_f), {});
    case Op::kFc1Dgrad:
      return dgrad(o, "grad_x", rows("grad_z", Kind::kGradient, two_f),
                   o.weight_operand("w1", two_f, p.hidden, false));
    case Op::kFc1Wgrad:
      return wgrad(o, "grad_w1", columns("grad_z", Kind::kGradient, two_f),
                   columns("x", Kind::kActivation, p.hidden, true));
    case Op::kFc2:
      return forward(o, "y", rows("act", Kind::kActivation, p.ffn),
                     o.weight_operand("w2", p.hidden, p.ffn, true), o.bias("b2", p.hidden),
                     o.probs());
    case Op::kFc2Dgrad:
      return dgrad(o, "grad_act", rows("grad_y", Kind::kGradient, p.hidden, true),
                   o.weight_operand("w2", p.hidden, p.ffn, false));
    case Op::kFc2Wgrad:
      return wgrad(o, "grad_w2", columns("grad_y", Kind::kGradient, p.hidden, true),
                   columns("act", Kind::kActivation, p.ffn));
    case Op::kFc1Glu:
      return fc1_glu(o);
    case Op::kFc2DgradGlu:
      return fc2_dgrad_glu(o);
    default:
      return bias_gradient(o);
  }
}

}  // namespace

Case make_gemm_case(Operands& operands) { return {{gemm_call_of(operands)}}; }

}  // namespace moire::tool
