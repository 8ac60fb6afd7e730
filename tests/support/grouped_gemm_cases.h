// One call of each grouped GEMM with random operands, poisoned outputs and everything optional, to
// be run and compared with the reference.
#pragma once

#include <moire/grouped_gemm.h>

#include <ostream>
#include <string>
#include <vector>

#include "tests/support/fp8.h"
#include "tests/support/outputs.h"
#include "tests/support/ragged.h"
#include "tests/support/tensors.h"

namespace moire::test {

// What may vary besides the groups.
struct GemmOptions {
  DType operands = DType::kFP32;  // of activations, weights and bias
  DType output = DType::kFP32;
  int32_t layout = MOIRE_OUT_IN;
  bool listed = false;
  DType row_idx = DType::kNone;  // gathered rows, with this index type
  bool extras = true;            // bias, scale, probs, z: what a call may leave out
  int64_t padding = 0;           // unused elements behind each row
  GluLayout glu = {};
  Activation activation = {};
  int32_t beta = 0;
  int32_t tail = MOIRE_TAIL_ZERO;
  Fp8 a, b;  // the operands, instead of `operands`; b is the weight where there is one
  int32_t accumulation = MOIRE_ACCUMULATE_EXACT;

  int64_t halves() const { return glu.order == MOIRE_UNGATED ? 1 : 2; }  // of z, to one of act
};

inline std::ostream& operator<<(std::ostream& out, const GemmOptions& o) {
  return out << dtype_name(o.operands) << " to " << dtype_name(o.output) << ", layout " << o.layout
             << (o.listed ? ", listed" : "") << (o.row_idx != DType::kNone ? ", gathered" : "")
             << (o.extras ? ", extras" : "") << ", padding " << o.padding << ", block "
             << o.glu.block << ", order " << o.glu.order << ", activation " << o.activation.kind
             << ", beta " << o.beta << ", tail " << o.tail << ", a " << o.a << ", b " << o.b
             << ", accumulation " << o.accumulation;
}

// A ragged operand: [capacity, columns] whose tail is NaN, or gathered from more rows than are
// used. FP8 ones have their blocks along `direction`; columnwise ones are never gathered.
struct RaggedInput {
  RaggedInput() = default;
  RaggedInput(Random& random, const Batch& batch, int64_t columns, const GemmOptions& o,
              const Fp8& fp8, int32_t direction);
  TestTensor rows, row_idx, scales;
};

// What every case has; `Case` says its args() and whether they are undamaged.
template <class Case>
struct Runs {
  Status run(const Tested& context) const { return test::run(context, self().args()); }
  // Against the reference.
  void check(const Tested& context) const {
    SCOPED_TRACE(testing::Message() << self().options << self().variant());
    expect_right(context, self().args());
    EXPECT_TRUE(self().is_undamaged());
  }
  void expect_same(const Case& other) const {
    EXPECT_TRUE(same_outputs(self().args(), other.args())) << self().options << self().variant();
  }
  const char* variant() const { return ""; }

 private:
  const Case& self() const { return static_cast<const Case&>(*this); }
};

// forward and dgrad
struct GemmCase : Runs<GemmCase> {
  GemmCase(Random& random, const Batch& batch, int64_t n, int64_t k, bool transpose_b,
           const GemmOptions& o);
  GroupedGemmArgs args() const;
  bool is_undamaged() const { return d.is_undamaged(); }
  const char* variant() const { return transpose_b ? ", transposed" : ""; }

  const Batch& batch;
  GemmOptions options;
  bool transpose_b;
  RaggedInput a;
  TestTensor b_scales;  // filled while b is made
  TestWeight b;
  TestTensor bias, bias_scale, d;
};

struct GemmGluCase : Runs<GemmGluCase> {
  GemmGluCase(Random& random, const Batch& batch, int64_t f, int64_t k, const GemmOptions& o);
  GroupedGemmGluArgs args() const;
  bool is_undamaged() const { return z.is_undamaged() && act.is_undamaged(); }

  const Batch& batch;
  GemmOptions options;
  RaggedInput a;
  TestTensor b_scales;  // filled while b is made
  TestWeight b;
  TestTensor bias, probs, z, act;
};

struct GemmGluBackwardCase : Runs<GemmGluBackwardCase> {
  GemmGluBackwardCase(Random& random, const Batch& batch, int64_t f, int64_t k,
                      const GemmOptions& o);
  GroupedGemmGluBackwardArgs args() const;
  bool is_undamaged() const {
    return grad_z.is_undamaged() && act.is_undamaged() && grad_probs.is_undamaged() &&
           grad_bias.is_undamaged();
  }

  const Batch& batch;
  GemmOptions options;
  RaggedInput grad_y;
  TestTensor w2_scales;
  TestWeight w2;
  TestTensor z, probs, grad_z, act, grad_probs, grad_bias;
};

struct WgradCase : Runs<WgradCase> {
  WgradCase(Random& random, const Batch& batch, int64_t m, int64_t n, const GemmOptions& o);
  GroupedGemmWgradArgs args() const;
  bool is_undamaged() const { return d.is_undamaged(); }

  const Batch& batch;
  GemmOptions options;
  RaggedInput a, b;
  TestWeight d;
  std::vector<uint8_t> beta_per_group;  // empty = not used
};

// One call of each op, with everything optional, large enough for many tiles and several K blocks.
struct EveryGemm {
  EveryGemm(Random& random, const Batch& batch, const GemmOptions& o);
  void run(const Tested& context) const;
  void expect_same(const EveryGemm& other) const;

  GemmCase forward, dgrad;
  GemmGluCase glu;
  GemmGluBackwardCase glu_backward;
  WgradCase wgrad;
};

}  // namespace moire::test
