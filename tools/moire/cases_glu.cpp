// The gated activation, its gradient, and the conversion between layouts.
#include <cstring>

#include "cases.h"
#include "reference/glu.h"
#include "text.h"

namespace moire::tool {
namespace {

constexpr double kForwardFlops = 8;    // per activation: exp counted as 4, and 4 products and sums
constexpr double kBackwardFlops = 16;  // exp once, and about three times the rest

double elements(const Problem& p) {
  return static_cast<double>(p.rows) * static_cast<double>(p.ffn);
}

Call forward(Operands& o) {
  const Problem& p = o.problem();
  auto args = args_of<GluArgs>(o);
  args.z = o.ragged("z", p.dtype, 2 * p.ffn);
  args.probs = o.probs();
  args.act = o.output("act", p.dtype, {p.capacity(), p.ffn});
  return make_call(
      args, reference::glu,
      [](Comparison& c, const GluArgs& a, const auto& want) {
        c.ragged("act", a.act, want, c.tail_rule());
      },
      kForwardFlops * elements(p));
}

Call backward(Operands& o) {
  const Problem& p = o.problem();
  auto args = args_of<GluBackwardArgs>(o);
  args.z = o.ragged("z", p.dtype, 2 * p.ffn);
  args.probs = o.probs();
  args.grad_act = o.ragged("grad_act", p.dtype, p.ffn);
  args.grad_z = o.output("grad_z", p.dtype, {p.capacity(), 2 * p.ffn});
  args.act = o.output("act", p.dtype, {p.capacity(), p.ffn});
  if (p.probs) args.grad_probs = o.output("grad_probs", DType::kFP32, {p.capacity()});
  return make_call(
      args, reference::glu_backward,
      [](Comparison& c, const GluBackwardArgs& a, const auto& want) {
        c.ragged("grad_z", a.grad_z, want.grad_z, c.tail_rule());
        c.ragged("act", a.act, want.act, c.tail_rule());
        c.ragged("grad_probs", a.grad_probs, want.grad_probs, c.tail_rule());
      },
      kBackwardFlops * elements(p));
}

// The whole packed W1, from two halves to the problem's layout.
Call conversion(Operands& o) {
  const Problem& p = o.problem();
  auto args = args_of<ConvertGluArgs>(o);
  args.source = o.input("w1", p.dtype, {p.groups, 2 * p.ffn, p.hidden});
  args.target = o.output("converted", p.dtype, {p.groups, 2 * p.ffn, p.hidden});
  args.dim = 1;
  args.to = p.layout;
  return make_call(args, reference::convert_glu,
                   [](Comparison& c, const ConvertGluArgs& a, const auto& want) {
                     const auto* got = static_cast<const std::byte*>(a.target.data);
                     size_t i = 0;
                     while (i < want.size() && got[i] == want[i]) ++i;
                     c.finding("converted", i == want.size() ? "" : text("first at byte ", i));
                   });
}

}  // namespace

Case make_glu_case(Operands& operands) {
  switch (operands.problem().op) {
    case Op::kGlu:
      return {{forward(operands)}};
    case Op::kGluBackward:
      return {{backward(operands)}};
    default:
      return {{conversion(operands)}};
  }
}

}  // namespace moire::tool
