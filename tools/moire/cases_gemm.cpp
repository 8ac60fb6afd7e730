// The grouped GEMMs of both layers, each epilogue and pass, and the gradient of a bias.
#include <moire/grouped_gemm.h>

#include "cases.h"
#include "reference/grouped_gemm.h"

namespace moire::tool {
namespace {

double gemm_flops(const Problem& p, int64_t n, int64_t k) {
  return 2.0 * static_cast<double>(p.rows) * static_cast<double>(n) * static_cast<double>(k);
}

Call gemm_call(const GroupedGemmArgs& args, double flops) {
  return make_call<GroupedGemmArgs>(
      "grouped_gemm", args, grouped_gemm, grouped_gemm_workspace,
      [](const GroupedGemmArgs& a) {
        return [a, want = reference::grouped_gemm(a)](Comparison& c) {
          c.ragged("d", a.d, want, c.tail_rule());
        };
      },
      flops);
}

// x W^T (+ bias): `a` [., in] to d [., out].
Call forward(Operands& o, const std::string& result, const TensorView& a, const TensorView& row_idx,
             const moire_weight& w, const TensorView& bias, const TensorView& bias_scale) {
  const Problem& p = o.problem();
  const int64_t out = Weight(w).out_features(), in = Weight(w).in_features();
  GroupedGemmArgs args;
  args.a = a;
  args.row_idx = row_idx;
  args.b = w;
  args.bias = bias;
  args.bias_scale = bias.is_present() ? bias_scale : TensorView();
  args.d = o.output(result, o.out_dtype(), {p.capacity(), out});
  args.groups = o.groups();
  args.tail = p.keep_tail ? MOIRE_TAIL_UNTOUCHED : MOIRE_TAIL_ZERO;
  return gemm_call(args, gemm_flops(p, out, in));
}

// grad W: `a` [., out] to d [., in].
Call dgrad(Operands& o, const std::string& result, const TensorView& a, const TensorView& row_idx,
           const moire_weight& w) {
  const Problem& p = o.problem();
  const int64_t out = Weight(w).out_features(), in = Weight(w).in_features();
  GroupedGemmArgs args;
  args.a = a;
  args.row_idx = row_idx;
  args.b = w;
  args.transpose_b = 1;
  args.d = o.output(result, o.out_dtype(), {p.capacity(), in});
  args.groups = o.groups();
  args.tail = p.keep_tail ? MOIRE_TAIL_UNTOUCHED : MOIRE_TAIL_ZERO;
  return gemm_call(args, gemm_flops(p, out, in));
}

struct Ragged {
  TensorView tensor;
  TensorView row_idx;
};

// grad^T x, laid out like the weight.
Call wgrad(Operands& o, const std::string& result, const Ragged& grad, const Ragged& x) {
  const Problem& p = o.problem();
  const int64_t out = grad.tensor.columns(), in = x.tensor.columns();
  const Ragged& a = p.in_out ? x : grad;
  const Ragged& b = p.in_out ? grad : x;
  GroupedGemmWgradArgs args;
  args.a = a.tensor;
  args.a_row_idx = a.row_idx;
  args.b = b.tensor;
  args.b_row_idx = b.row_idx;
  args.d = o.weight_gradient(result, out, in);
  args.beta = p.beta == 1 ? 1 : 0;
  args.beta_per_group = o.beta_per_group();
  args.groups = o.groups();
  return make_call<GroupedGemmWgradArgs>(
      "grouped_gemm_wgrad", args, grouped_gemm_wgrad, grouped_gemm_wgrad_workspace,
      [result](const GroupedGemmWgradArgs& a_) {
        return [a_, result, want = reference::grouped_gemm_wgrad(a_)](Comparison& c) {
          c.weights(result, a_.d, want);
        };
      },
      gemm_flops(p, out, in));
}

Call fc1_glu(Operands& o) {
  const Problem& p = o.problem();
  GroupedGemmGluArgs args;
  args.a = o.gathered("x", p.hidden);
  args.row_idx = o.row_idx();
  args.b = o.weight("w1", 2 * p.ffn, p.hidden);
  args.bias = o.bias("b1", 2 * p.ffn);
  args.probs = o.probs();
  args.z = o.output("z", p.dtype, {p.capacity(), 2 * p.ffn});
  args.act = o.output("act", p.dtype, {p.capacity(), p.ffn});
  args.groups = o.groups();
  args.activation = p.activation;
  args.layout = p.layout;
  args.tail = p.keep_tail ? MOIRE_TAIL_UNTOUCHED : MOIRE_TAIL_ZERO;
  return make_call<GroupedGemmGluArgs>(
      "grouped_gemm_glu", args, grouped_gemm_glu, grouped_gemm_glu_workspace,
      [](const GroupedGemmGluArgs& a) {
        return [a, want = reference::grouped_gemm_glu(a)](Comparison& c) {
          c.ragged("z", a.z, want.z, Comparison::TailRule::kUntouched);
          c.ragged("act", a.act, want.act, c.tail_rule());
        };
      },
      gemm_flops(p, 2 * p.ffn, p.hidden));
}

Call fc2_dgrad_glu(Operands& o) {
  const Problem& p = o.problem();
  GroupedGemmGluBackwardArgs args;
  args.grad_y = o.gathered("grad_y", p.hidden);
  args.row_idx = o.row_idx();
  args.w2 = o.weight("w2", p.hidden, p.ffn);
  args.z = o.ragged("z", p.dtype, 2 * p.ffn);
  args.probs = o.probs();
  args.grad_z = o.output("grad_z", p.dtype, {p.capacity(), 2 * p.ffn});
  args.act = o.output("act", p.dtype, {p.capacity(), p.ffn});
  if (p.probs) args.grad_probs = o.output("grad_probs", DType::kFP32, {p.capacity()});
  if (p.bias) {
    args.grad_bias = o.accumulator("grad_b1", o.wgrad_dtype(), {p.groups, 2 * p.ffn}, p.beta == 1);
  }
  args.beta = p.beta == 1 ? 1 : 0;
  args.groups = o.groups();
  args.activation = p.activation;
  args.layout = p.layout;
  args.tail = p.keep_tail ? MOIRE_TAIL_UNTOUCHED : MOIRE_TAIL_ZERO;
  return make_call<GroupedGemmGluBackwardArgs>(
      "grouped_gemm_glu_backward", args, grouped_gemm_glu_backward,
      grouped_gemm_glu_backward_workspace,
      [](const GroupedGemmGluBackwardArgs& a) {
        return [a, want = reference::grouped_gemm_glu_backward(a)](Comparison& c) {
          c.ragged("grad_z", a.grad_z, want.grad_z, c.tail_rule());
          c.ragged("act", a.act, want.act, c.tail_rule());
          if (a.grad_probs.rank != 0) {
            c.ragged("grad_probs", a.grad_probs, want.grad_probs, c.tail_rule());
          }
          if (a.grad_bias.rank != 0) c.per_group("grad_b1", a.grad_bias, want.grad_bias);
        };
      },
      gemm_flops(p, p.hidden, p.ffn));
}

Call bias_gradient(Operands& o) {
  const Problem& p = o.problem();
  BiasBackwardArgs args;
  args.grad_y = o.gathered("grad_y", p.hidden);
  args.row_idx = o.row_idx();
  args.scale = o.probs();
  args.bias = o.input("b2", p.dtype, {p.groups, p.hidden}, 0.5);
  args.beta_per_group = o.beta_per_group();
  // Groups that overwrite never read their sums, so normal numbers there prove as much as NaN.
  args.grad_bias = o.accumulator("grad_b2", o.wgrad_dtype(), {p.groups, p.hidden}, p.beta != 0);
  args.beta = args.beta_scale = p.beta == 1 ? 1 : 0;
  args.grad_scale = o.row_accumulator("grad_scale", args.beta_scale == 1);
  args.groups = o.groups();
  args.tail = p.keep_tail ? MOIRE_TAIL_UNTOUCHED : MOIRE_TAIL_ZERO;
  return make_call<BiasBackwardArgs>(
      "bias_backward", args, bias_backward, bias_backward_workspace,
      [](const BiasBackwardArgs& a) {
        return [a, want = reference::bias_backward(a)](Comparison& c) {
          c.per_group("grad_b2", a.grad_bias, want.grad_bias);
          c.ragged("grad_scale", a.grad_scale, want.grad_scale, c.tail_rule());
        };
      },
      4.0 * static_cast<double>(p.rows) * static_cast<double>(p.hidden));
}

Call gemm_call_of(Operands& o) {
  const Problem& p = o.problem();
  const int64_t two_f = 2 * p.ffn;
  switch (p.op) {
    case Op::kFc1:
      return forward(o, "z", o.gathered("x", p.hidden), o.row_idx(),
                     o.weight("w1", two_f, p.hidden), o.bias("b1", two_f), {});
    case Op::kFc1Dgrad:
      return dgrad(o, "grad_x", o.ragged("grad_z", p.dtype, two_f), {},
                   o.weight("w1", two_f, p.hidden));
    case Op::kFc1Wgrad:
      return wgrad(o, "grad_w1", {o.ragged("grad_z", p.dtype, two_f), {}},
                   {o.gathered("x", p.hidden), o.row_idx()});
    case Op::kFc2:
      return forward(o, "y", o.ragged("act", p.dtype, p.ffn), {}, o.weight("w2", p.hidden, p.ffn),
                     o.bias("b2", p.hidden), o.probs());
    case Op::kFc2Dgrad:
      return dgrad(o, "grad_act", o.gathered("grad_y", p.hidden), o.row_idx(),
                   o.weight("w2", p.hidden, p.ffn));
    case Op::kFc2Wgrad:
      return wgrad(o, "grad_w2", {o.gathered("grad_y", p.hidden), o.row_idx()},
                   {o.ragged("act", p.dtype, p.ffn), {}});
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
