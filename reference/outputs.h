// Outputs: a visitor of moire/fields.h that compares each field that a call wrote with the
// reference's result of its name, and its tail with what the call's `tail` asks for.
#pragma once

#include <moire/fields.h>
#include <moire/groups.h>
#include <moire/ops.h>
#include <moire/quantize.h>
#include <moire/routing.h>

#include <functional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "reference/comparison.h"
#include "reference/glu.h"
#include "reference/grouped_gemm.h"
#include "reference/grouped_mlp.h"
#include "reference/quantize.h"
#include "reference/routing.h"

namespace moire::reference {

// What the reference says of a call, by its struct; of layers whose products read what is stored.
#define MOIRE_TRUTH(op) \
  inline auto truth(const Args<moire_##op##_args>& args) { return reference::op(args); }
MOIRE_FOR_EACH_DEFINED_OP(MOIRE_TRUTH, MOIRE_TRUTH)
MOIRE_FOR_EACH_LAYER(MOIRE_TRUTH, MOIRE_TRUTH)
#undef MOIRE_TRUTH

bool all_passed(const std::vector<OutputErrors>& outputs);
// Outputs that were found wrong may be right by another judge.
void or_else(std::vector<OutputErrors>& outputs,
             const std::function<std::vector<OutputErrors>()>& judge);

// The members of the reference's results, which are called like the fields that hold them. An
// output of another name is found wrong.
// clang-format off
#define MOIRE_FOR_EACH_RESULT(f)                                       \
  f(z) f(act) f(y) f(rows) f(probs) f(topk_weights)                    \
  f(rowwise) f(columnwise) f(offsets) f(gather_idx) f(scatter_idx)     \
  f(grad_z) f(grad_x) f(grad_w) f(grad_w1) f(grad_w2)                  \
  f(grad_bias) f(grad_b1) f(grad_b2) f(grad_probs) f(grad_scale)       \
  f(grad_b2_scale)                                                     \
  f(grad_rows) f(grad_weights)
// clang-format on

template <class A, class Want>
class OutputVisitor : public MemoryVisitor {
 public:
  OutputVisitor(std::vector<OutputErrors>& outputs, const A& args, const Want& want)
      : outputs_(outputs), args_(args), want_(want) {}

  void field(const char* name, const moire_tensor& t, Role role, const char* sizes) {
    if (std::string_view(name).ends_with("row_idx")) row_idx_ = t;
    if (role == Role::kUnused || !is_present(t)) return;
    sources_.emplace_back(name, t);
    if (!is_written(role)) return;
    RowRule rule;
    if (sizes[0] == 'C' && t.rank < 3) rule = rule_of(name);
    const bool is_known = with_result(name, [&](const auto& want) { add(name, t, want, rule); });
    if (!is_known) add_unknown(name);
  }
  void field(const char* name, const moire_weight& w, Role role, const char*) {
    if (!is_written(role) || !is_present(w)) return;
    if (!with_result(name, [&](const auto& want) { add(name, w, want, {}); })) add_unknown(name);
  }
  // Copies that are no result of their own are those of their source, as it is now.
  void field(const char* name, const moire_quantized& q, Role role, const char*) {
    if (!is_written(role) || !is_present(q)) return;
    bool is_result = false;
    with_result(name, [&](const auto& want) {
      if constexpr (requires { want.scales; }) {
        is_result = true;
        bytes(name, q, want);
      }
    });
    if constexpr (requires { args_.fractional_scales, args_.groups; }) {
      if (!is_result) bytes_of_source(name, q);
    }
  }
  void field(const char*, const uint8_t*, Role, int64_t) {}
  void field(const char*, const moire_offsets_output* outputs, Role, int64_t) {
    if constexpr (requires { add("", outputs->offsets, want_[0], {}); }) {
      for (size_t i = 0; i < want_.size(); ++i) {
        add("output " + std::to_string(i), outputs[i].offsets, want_[i], {});
      }
    }
  }
  void field(const char*, const moire_groups&) {}
  void field(const char*, const moire_workspace&) {}

 private:
  void add(const std::string& name, const auto& got, const auto& want, const RowRule& rule) {
    if constexpr (requires { compare(got, want, rule); }) {
      outputs_.push_back(compare(got, want, rule));
      outputs_.back().name = name;
    }
  }
  void add_unknown(const std::string& name) {
    outputs_.push_back({.name = name, .elements = 1, .mismatches = 1});
    outputs_.back().first_mismatch = "the reference has no result of this name";
  }
  // f(the result of this field), which is all of them where there is but one; whether there is one.
  bool with_result(std::string_view name, auto&& f) {
    bool is_one_of_many = false, is_known = false;
#define MOIRE_RESULT(field)                                                                     \
  if constexpr (requires { requires std::is_class_v<decltype(std::declval<Want>().field)>; }) { \
    is_one_of_many = true;                                                                      \
    if (name == #field) is_known = true, f(want_.field);                                        \
  }
    MOIRE_FOR_EACH_RESULT(MOIRE_RESULT)
#undef MOIRE_RESULT
    if (!is_one_of_many) f(want_);
    return is_known || !is_one_of_many;
  }
  void bytes(const std::string& name, const moire_quantized& q, const QuantizedBytes& want) {
    add(name + ".data", q.data, want.data, rule_of(name));
    add(name + ".scales", q.scales, want.scales, rule_of(name));
  }
  void bytes_of_source(const std::string& name, const moire_quantized& q) {
    const bool is_rowwise = name.ends_with("_rowwise");
    const std::string source = name.substr(0, name.rfind('_'));
    QuantizeArgs quantize;
    for (const auto& [key, tensor] : sources_) {
      if (key == source) quantize.source = tensor;
    }
    if (source == "x") quantize.row_idx = row_idx_;
    (is_rowwise ? quantize.rowwise : quantize.columnwise) = q;
    quantize.scaling = q.scales.dtype == MOIRE_E8M0 ? MOIRE_SCALING_MXFP8 : MOIRE_SCALING_FP8_BLOCK;
    quantize.fractional_scales = args_.fractional_scales;
    quantize.groups = args_.groups;
    const QuantizeResults want = reference::quantize(quantize);
    bytes(name, q, is_rowwise ? want.rowwise : want.columnwise);
  }
  // What is kept for the backward has a tail that is nobody's; what passes between a layer's
  // products is scratch.
  RowRule rule_of(std::string_view name) const {
    RowRule rule{tail_of(name)};
    if constexpr (requires { args_.groups; }) rule.groups = args_.groups;
    return rule;
  }
  TailRule tail_of(std::string_view name) const {
    if constexpr (requires { args_.tail; }) {
      const bool is_forward = requires { args_.act_rowwise; }
      || requires { args_.y; };
      const bool is_layer = requires { args_.recipe; };
      const bool is_scratch = name == "act" || name == "grad_z";
      if (is_layer && is_scratch) return TailRule::kAnything;
      if (is_forward && (name == "z" || (is_layer && name != "y"))) return TailRule::kUntouched;
      return args_.tail == MOIRE_TAIL_UNTOUCHED ? TailRule::kUntouched : TailRule::kZero;
    }
    return TailRule::kZero;
  }

  std::vector<OutputErrors>& outputs_;
  const A& args_;
  const Want& want_;
  TensorView row_idx_;
  std::vector<std::pair<std::string_view, TensorView>> sources_;
};

// Outputs that are absent were not asked for.
template <class A, class Want>
std::vector<OutputErrors> compare_outputs(const A& args, const Want& want) {
  std::vector<OutputErrors> outputs;
  visit_fields(args, OutputVisitor<A, Want>(outputs, args, want));
  return outputs;
}
// The choice first, in which scores within their bounds may change places, then its weights.
std::vector<OutputErrors> compare_outputs(const RouterArgs& args, const RouterResults& want);

}  // namespace moire::reference
