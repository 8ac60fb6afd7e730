// Validation and dispatch of convert_glu, interleave_glu and deinterleave_glu.
#include <moire/glu.h>

#include "core/sizes.h"
#include "ops/dispatch.h"

namespace moire {
namespace {

constexpr DType kStorageTypes[] = {DType::kFP32,  DType::kBF16, DType::kFP16,  DType::kE4M3,
                                   DType::kE5M2,  DType::kE8M0, DType::kUint8, DType::kInt32,
                                   DType::kInt64, DType::kFP64};

// Rank, dtype, pointers, and that source and target are twins.
void check_tensors(ArgumentCheck& check, const TensorView& source, const TensorView& target) {
  check.require(source.rank >= 1 && source.rank <= 3, "source has rank ", source.rank,
                ", needs rank 1 to 3");
  if (!check.ok() || !check.ranked("source", source, kStorageTypes, source.rank)) return;
  if (!check.ranked("target", target, kStorageTypes, source.rank)) return;
  bool equal = true;
  for (int32_t i = 0; i < source.rank; ++i) equal = equal && source.shape[i] == target.shape[i];
  check.require(equal, "source is ", source, " but target is ", target,
                ": the shapes must be equal");
  check.same_dtype("source", source, "target", target);
}

// That `dim` exists and its size is a multiple of 2 * block. `block` 0 stands for halves.
void check_dim(ArgumentCheck& check, const TensorView& source, int64_t dim, int64_t block) {
  check.require(dim >= 0 && dim < source.rank, "dim is ", dim, ", must be 0 to ", source.rank - 1);
  if (!check.ok()) return;
  const int64_t size = source.shape[dim];
  const bool fits = block == 0 || (block <= kMostBytes && size / 2 % block == 0);
  check.require(size % 2 == 0 && fits, "source has ", size, " along dim ", dim,
                ", needs a multiple of 2 * block = ", product(2, std::max<int64_t>(block, 1)));
}

void check_layout(ArgumentCheck& check, std::string_view name, const moire_glu_layout& layout) {
  check.enumerator(concat(name, ".order"), layout.order, 2);
  check.require(layout.block >= 0, name, ".block is ", layout.block,
                ", must be a positive integer, or 0 (halves)");
}

std::string layout_name(const moire_glu_layout& layout) {
  const std::string_view order = layout.order == MOIRE_GATE_FIRST ? "" : ", up first";
  return layout.block == 0 ? concat("halves", order) : concat("blocks of ", layout.block, order);
}

std::string problem_of(const ConvertGluArgs& args) {
  return concat(TensorView(args.source), " along dim ", args.dim, ", ", layout_name(args.from),
                " to ", layout_name(args.to));
}

void validate(ArgumentCheck& check, const ConvertGluArgs& args) {
  check_tensors(check, args.source, args.target);
  check_layout(check, "from", args.from);
  check_layout(check, "to", args.to);
  if (check.ok()) check_dim(check, args.source, args.dim, args.from.block);
  if (check.ok()) check_dim(check, args.source, args.dim, args.to.block);
}

// From halves to blocks or back: one of the layouts has the block that the caller gave.
void validate_blocks(ArgumentCheck& check, const ConvertGluArgs& args) {
  const int64_t block = args.from.block + args.to.block;
  check_tensors(check, args.source, args.target);
  check.require(block > 0, "block is ", block, ", must be a positive integer");
  if (check.ok()) check_dim(check, args.source, args.dim, block);
}

constexpr Op<ConvertGluArgs> kInterleaveGlu{"interleave_glu", validate_blocks, problem_of};
constexpr Op<ConvertGluArgs> kDeinterleaveGlu{"deinterleave_glu", validate_blocks, problem_of};

ConvertGluArgs halves(const TensorView& source, const TensorView& target, int dim) {
  ConvertGluArgs args;
  args.source = source;
  args.target = target;
  args.dim = dim;
  return args;
}

}  // namespace

MOIRE_DEFINE_OP(convert_glu)

Status interleave_glu(const Context& context, const TensorView& source, const TensorView& target,
                      int64_t block, int dim) {
  ConvertGluArgs args = halves(source, target, dim);
  args.to = GluLayout::interleaved(block);
  return kInterleaveGlu.run(context, args);
}

Status deinterleave_glu(const Context& context, const TensorView& source, const TensorView& target,
                        int64_t block, int dim) {
  ConvertGluArgs args = halves(source, target, dim);
  args.from = GluLayout::interleaved(block);
  return kDeinterleaveGlu.run(context, args);
}

}  // namespace moire
