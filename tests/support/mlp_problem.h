// A grouped MLP with all its inputs and outputs, from a few options: what the tests of the whole
// layer, and those of the reference, run.
#pragma once

#include <moire/grouped_mlp.h>

#include <vector>

#include "tests/support/ragged.h"
#include "tests/support/tensors.h"

namespace moire::test {

// What scales b2.
enum class B2Scale : uint8_t { kProbs, kNothing, kOwn };

struct MlpOptions {
  // N, the columns of y.
  int64_t out_features() const { return out != 0 ? out : hidden; }

  RaggedCase ragged{"Default", {3, 0, 5, 2}, 1};
  int64_t hidden = 12;
  int64_t out = 0;             // N, where it is not `hidden`
  int64_t width = 8;           // F
  DType dtype = DType::kFP32;  // FP64 is for the reference alone
  bool in_8_bits = false;      // for an 8-bit recipe: z, act and grad_z are BF16
  Activation activation = Activation::swiglu();
  GluLayout layout = GluLayout::halves();
  int32_t w1_layout = MOIRE_OUT_IN;
  int32_t w2_layout = MOIRE_OUT_IN;
  bool listed = false;
  bool with_b1 = true;
  bool with_b2 = true;
  bool with_probs = true;
  B2Scale b2_scale = B2Scale::kProbs;
  bool gathered = false;         // x is [T, H] with row_idx
  bool gathered_grad_y = false;  // so is grad_y; needs `gathered`
  DType index_type = DType::kInt64;
  DType gradient_type = DType::kFP32;  // of weights and biases
  bool accumulate = false;             // beta = 1 for all of them
  bool saves_act = false;              // SavePolicy: the forward keeps act for the backward
  int32_t tail = MOIRE_TAIL_ZERO;

  int64_t fc1_width() const { return layout.order == MOIRE_UNGATED ? width : 2 * width; }
};

// One line, for failures.
std::ostream& operator<<(std::ostream& out, const MlpOptions& options);

// Which gradients a backward computes.
struct MlpNeeds {
  bool x = true, w1 = true, b1 = true, w2 = true, b2 = true, probs = true, b2_scale = true;
};

// Outputs start poisoned; accumulated gradients start with random values.
struct MlpProblem {
  MlpProblem(const MlpOptions& options, Random& random);

  // Views of the members below; biases, probs and gradients only where the options have them.
  GroupedMlpArgs forward() const;
  // Reads `z`, and `act` if it is saved, as a forward left them.
  GroupedMlpBackwardArgs backward(const MlpNeeds& needs = {}) const;
  bool with_own_b2_scale() const { return options.with_b2 && options.b2_scale == B2Scale::kOwn; }
  // What a linear layer would have to scale b2 by.
  const TestTensor& factor_of_b2() const;
  // No guard row, no padding and no workspace was harmed.
  bool is_undamaged() const;

  MlpOptions options;
  Batch batch;
  TestTensor x, row_idx, b1, b2, probs, b2_scale, grad_y;  // absent where the options say so
  TestWeight w1, w2;
  TestTensor z, act, y;
  TestTensor grad_z, grad_x, grad_b1, grad_b2, grad_probs, grad_b2_scale;
  TestWeight grad_w1, grad_w2;
};

}  // namespace moire::test
