// The operations that a problem can name, each a row: the library's calls that it makes, and what
// their fields stand for in the layer that the problem describes.
#pragma once

#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

namespace moire::tool {

// The products of a layer's two linear halves, as bits.
enum Products : uint8_t {
  kFc1 = 1,
  kFc1Dgrad = 2,
  kFc1Wgrad = 4,
  kFc2 = 8,
  kFc2Dgrad = 16,
  kFc2Wgrad = 32,
  kDgrads = kFc1Dgrad | kFc2Dgrad,
  kForward = kFc1 | kFc2,
  kBackward = kDgrads | kFc1Wgrad | kFc2Wgrad,
};

struct OpCall {
  std::string_view entry;  // of the library
  // What a field is called after where that is not its own name, and so what its data are; and the
  // size that a letter of moire/fields.h stands for where the struct does not say.
  using Name = std::pair<std::string_view, std::string_view>;
  std::vector<Name> names;
  int products = 0;
  double flops_per_row = 0;  // of what is no product, times H, N or F
  char size = 'F';

  std::string_view name_of(std::string_view field) const;
  // Whether it moves the scales of codes, which the call before it moves.
  bool is_of_scales() const { return name_of("source").ends_with(" scales"); }
};

struct Op {
  std::string_view name;
  std::string_view formula;
  std::vector<OpCall> calls;
  bool is_routing = false;  // of indices and weights, not of rows

  std::string_view entry() const { return calls[0].entry; }
  int products() const;
  bool multiplies() const { return products() != 0; }  // its operands may be quantised
  // And is measured beside a copy of as many.
  bool moves_bytes() const { return !multiplies() && !is_routing; }
  // Which has a recipe.
  bool is_layer() const { return multiplies() && !entry().starts_with("grouped_gemm"); }
  // All together: ranks.h.
  bool is_of_ranks() const { return entry().starts_with("dispatch") || entry() == "combine"; }
};

const std::vector<Op>& all_ops();
// Null if there is none.
const Op* find_op(std::string_view name);

}  // namespace moire::tool
