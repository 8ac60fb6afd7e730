// Problem: one line of text that names a case completely, for check, bench, explain and the tests.
//
//   name=small op=mlp groups=8 hidden=256 ffn=512 rows=64 topk=2 dtype=bf16 splits=zipf:1 seed=7
//
// A field is key=value, in any order; what is left out has its default (problem_fields.cpp is the
// one table of keys, meanings and defaults). to_line() prints a problem so that parsing it gives
// the same problem, data included.
#pragma once

#include <moire/glu.h>
#include <moire/tensor.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "ops.h"
#include "text.h"

namespace moire::tool {

// Bad usage or a bad problem: one sentence for stderr, exit code 2.
struct UsageError : std::runtime_error {
  template <class... Parts>
  explicit UsageError(const Parts&... parts) : std::runtime_error(text(parts...)) {}
};

// How rows are shared out over groups.
struct Splits {
  enum class Kind { kUniform, kZipf, kRagged, kOneHot, kList };
  Kind kind = Kind::kUniform;
  double exponent = 1.0;      // kZipf
  int64_t group = 0;          // kOneHot
  std::vector<int64_t> list;  // kList
};

// Which copies an FP8 op makes; of one that reads a copy, which it is.
enum class Directions { kRowwise, kColumnwise, kBoth };

struct Format {
  DType dtype = DType::kFP32;
  int32_t recipe = MOIRE_RECIPE_AS_STORED;  // what operands of products are, where not `dtype`

  bool is_quantized() const { return recipe != MOIRE_RECIPE_AS_STORED; }
  bool is_mx() const { return is_quantized() && recipe != MOIRE_RECIPE_FP8_BLOCK; }
  bool operator==(const Format&) const = default;
};

enum class B2Scale : uint8_t { kProbs, kNone, kOwn };

// Its own format is that of `dtype`.
struct Problem : Format {
  std::string where = "problem";  // its line stands, as errors name it: "problems/cpu.txt:3"
  std::string name;
  const Op* op = find_op("mlp");
  int64_t groups = 0;
  int64_t hidden = 0;
  int64_t ffn = 0;
  int64_t out_hidden = 0;  // of y; 0: hidden
  int64_t rows = 0;        // over all groups
  int64_t topk = 1;
  int64_t dropped = 0;  // choices that go to no expert
  int64_t tail = 0;     // rows of the capacity past the last group
  Splits splits;
  std::optional<Format> b;   // of a single product's second operand, where it has its own
  DType x = DType::kNone;    // of an FP8 layer's x, weights, biases, y and dx; kNone: dtype
  DType out = DType::kNone;  // kNone: dtype, and fp32 for weight gradients
  Activation activation;
  GluLayout layout;
  bool bias = false;
  B2Scale b2_scale = B2Scale::kProbs;
  bool probs = true;
  bool gather = false;
  bool in_out = false;        // weights are [G, in, out]
  bool listed = false;        // weights are a list of G matrices
  bool sigmoid = false;       // router: scores are sigmoids, not a softmax
  bool normalize = true;      // router: weights of a token sum to 1
  bool save_act = false;      // mlp: the forward keeps act for the backward
  bool x_columnwise = false;  // layers in FP8: the forward keeps this copy of x, and of act
  bool act_columnwise = false;
  bool prepared = false;  // layers in FP8: weights are prepared ones
  bool keep_tail = false;
  int beta = 0;                           // 0 overwrite, 1 accumulate, 2 by turns
  int32_t scaling = MOIRE_SCALING_MXFP8;  // FP8 ops
  DType element = DType::kE4M3;
  Directions directions = Directions::kRowwise;
  bool emulated = false;    // mxfp8_fast, fp8_block: summed as Hopper's tensor cores do
  bool fractional = false;  // scales of fp8_block and fp8_tile need not be powers of two
  int32_t scale_layout = MOIRE_SCALES_SWIZZLED;  // convert_scales
  int64_t ranks = 1;
  int64_t room = 0;    // tokens that a rank has room for of each; 0: all
  bool drops = false;  // those that exceed it
  uint64_t seed = 1;

  bool is(std::string_view op_name) const { return op->name == op_name; }
  int64_t columns_of_y() const { return out_hidden == 0 ? hidden : out_hidden; }
  DType stored() const { return x == DType::kNone ? dtype : x; }
  const Format& b_format() const { return b ? *b : *this; }
  bool is_gated() const { return layout.order != MOIRE_UNGATED; }
  int64_t fc1_width() const { return is_gated() ? 2 * ffn : ffn; }
  int64_t capacity() const { return rows + tail; }
  int64_t tokens() const { return (rows + dropped) / topk; }
};

// The first field that makes no sense beside the others.
struct Mistake {
  std::string_view key;
  std::string found, needed;
};
std::optional<Mistake> find_mistake(const Problem& problem);
// The problem, or its mistake as a UsageError: asked of what will run, --set, --ops and --dtype
// included.
Problem sensible(Problem problem);

// Its fields, not yet beside one another. UsageError names where the line stands, the field, what
// was found and what was needed.
Problem parse_problem(const std::string& line, const std::string& where = "problem");
// Every line of a text that is not empty and not a comment ('#').
std::vector<Problem> parse_problems(std::string_view text, const std::string& file);
// The fields that differ from their defaults, and always the sizes, dtype, splits and seed.
std::string to_line(const Problem& problem);

// Rows of each group; the same for the same problem on every machine.
std::vector<int64_t> make_splits(const Problem& problem);

}  // namespace moire::tool
