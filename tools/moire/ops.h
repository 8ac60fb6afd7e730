// The operations that a problem can name: each op of the library, named by its place in the MLP.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

namespace moire::tool {

enum class Op {
  kMlp,
  kMlpForward,
  kLinear,
  kFc1,
  kFc1Glu,
  kFc1Dgrad,
  kFc1Wgrad,
  kFc2,
  kFc2Dgrad,
  kFc2DgradGlu,
  kFc2Wgrad,
  kBiasBackward,
  kGlu,
  kGluBackward,
  kConvertGlu,
  kQuantize,
  kQuantizeWeight,
  kDequantize,
  kRequantize,
  kConvertScales,
  kRouter,
  kRouterBackward,
  kPermutePlan,
  kPermute,
  kUnpermute,
  kUnpermuteBackward,
  kSplitsToOffsets,
};

struct OpInfo {
  Op op;
  std::string_view name;
  std::string_view entry;  // the library's entry point
  std::string_view formula;
};

const std::vector<OpInfo>& all_ops();
const OpInfo& info_of(Op op);
// A whole layer, which has a recipe.
// Whether it has products, whose operands may be quantised.
inline bool multiplies(const OpInfo& info) { return info.entry.starts_with("grouped_"); }
inline bool is_layer(Op op) { return op == Op::kMlp || op == Op::kMlpForward || op == Op::kLinear; }
std::optional<Op> find_op(std::string_view name);

}  // namespace moire::tool
